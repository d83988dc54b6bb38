"""What a checkpoint says about sampling, as the parameters of this engine.

`generation_config.json` is read as transformers reads it: without `do_sample` decoding is greedy,
whatever temperature stands there. A key that would change the output and that the engine cannot
follow is not dropped in silence: it is named in `ignored`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from compress.models.checkpoint import read_json
from compress.runtime.request import SamplingParams

# Key -> the value that changes nothing.
_ALWAYS = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": None,
    "num_beams": 1,
    "penalty_alpha": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "guidance_scale": None,
    "stop_strings": None,
}
_WHEN_SAMPLING = {
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
_RENAMED = {"max_new_tokens": "max_tokens"}  # of transformers -> of SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingDefaults:
    """The parameters that a checkpoint asks for, and keys of it that the engine cannot follow."""

    params: SamplingParams
    ignored: tuple[str, ...] = ()


def sampling_defaults(path: Path) -> SamplingDefaults:
    """Read folder `path`; without a file the defaults of `SamplingParams`, which are greedy."""
    file = path / "generation_config.json"
    config = read_json(file) if file.is_file() else {}
    known = {field.name for field in fields(SamplingParams)}
    wanted: dict[str, Any] = {}
    ignored = []
    neutral = _ALWAYS | {"max_new_tokens": None}
    if config.get("do_sample"):
        neutral |= _WHEN_SAMPLING | {"temperature": None, "top_k": None, "top_p": None}
        wanted["temperature"] = 1.0
    for key, nothing in neutral.items():
        value = config.get(key)
        if value is None or value == nothing:
            continue
        name = _RENAMED.get(key, key)
        if name in known:
            wanted[name] = value
        else:
            ignored.append(f"{key}={value}")
    try:
        params = SamplingParams(**wanted)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error
    return SamplingDefaults(params=params, ignored=tuple(ignored))


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
