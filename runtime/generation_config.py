"""What a checkpoint says about sampling, read from its folder, and parameters in one line."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compress.models.checkpoint import read_json
from compress.runtime.sampling_params import EffectiveParams, SamplingParams, effective


def sampling_defaults(path: Path) -> EffectiveParams:
    """What the generation_config.json of folder `path` asks for; without one the usual defaults."""
    file = path / "generation_config.json"
    try:
        return effective(read_json(file) if file.is_file() else {}, {})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error


def describe_params(params: SamplingParams, extra: Mapping[str, Any] | None = None) -> str:
    """The parameters in effect, in one line: those that matter, and `extra` ones that are set."""
    values = asdict(params)
    usual = asdict(SamplingParams())
    sampling = ("temperature", "top_k", "top_p", "seed")
    shown = {"max_tokens": values.pop("max_tokens")}
    if not params.is_greedy:
        shown |= {name: values[name] for name in sampling}
    rest = {name: value for name, value in values.items() if name not in sampling}
    shown |= {name: value for name, value in rest.items() if value != usual[name]}
    shown |= {name: value for name, value in (extra or {}).items() if value}
    described = [f"{name} {value}" for name, value in shown.items()]
    return ", ".join(["greedy" if params.is_greedy else "sampling", *described])
