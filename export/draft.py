"""Draft checkpoints: the names and the layout on disk.

A folder holds `config.json` (what a loader needs), `model.safetensors` and `draft.json` (how it was
trained, for people). Medusa, in vLLM's names:

    blocks.{i}.layers.{l}.weight  (H, H) fp32    layer l of head i, x + SiLU(W x + b)
    blocks.{i}.layers.{l}.bias    (H,) fp32
    token_map                     (Vd,) int64    draft vocabulary: ascending ids of the target;
                                                 left out if it is the target's whole vocabulary

    config.json: architectures ["MedusaModel"], num_heads, num_hidden_layers, hidden_size,
    vocab_size, truncated_vocab_size (Vd), medusa_fc_bias true, original_lm_head true, and
    target_fingerprint: the `Checkpoint.fingerprint` of the target that it was trained for.

The projection to tokens is the target's own output head and is not stored, which is what
`original_lm_head` says. vLLM expects a copy of it in the file, as `lm_heads.0.weight`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compress.export.writer import write_json, write_safetensors
from compress.models.checkpoint import open_checkpoint

MEDUSA_ARCHITECTURE = "MedusaModel"
REPORT_FILE = "draft.json"
TOKEN_MAP = "token_map"


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaDraft:
    """Medusa heads as stored: `tensors` are the blocks, `token_map` (Vd,) the draft vocabulary.

    `token_map` None is the whole vocabulary of the target.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    target_fingerprint: str
    tensors: Mapping[str, torch.Tensor]
    token_map: torch.Tensor | None


def write_medusa(folder: Path, draft: MedusaDraft, report: Mapping[str, Any]) -> None:
    """Write `draft` and the report of its training into the existing, empty `folder`."""
    tensors = dict(draft.tensors)
    if draft.token_map is not None:
        tensors[TOKEN_MAP] = draft.token_map
    write_safetensors(folder / "model.safetensors", tensors)
    write_json(folder / REPORT_FILE, report)
    config = {
        "architectures": [MEDUSA_ARCHITECTURE],
        "model_type": "medusa",
        "num_heads": draft.num_heads,
        "num_hidden_layers": draft.num_layers,
        "hidden_size": draft.hidden_size,
        "vocab_size": draft.vocab_size,
        "truncated_vocab_size": (
            draft.vocab_size if draft.token_map is None else len(draft.token_map)
        ),
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "target_fingerprint": draft.target_fingerprint,
    }
    write_json(folder / "config.json", config)


def read_medusa(folder: Path) -> MedusaDraft:
    """Read what `write_medusa` wrote.

    Raises FileNotFoundError for a missing folder or file; ValueError, naming it, for a damaged
    file, a config without a field, and a tensor that is missing, unexpected, of another shape or
    dtype, or not finite.
    """
    checkpoint = open_checkpoint(folder)
    config_file = folder / "config.json"
    sizes = {
        key: _size(config_file, checkpoint.config, key)
        for key in (
            "num_heads",
            "num_hidden_layers",
            "hidden_size",
            "vocab_size",
            "truncated_vocab_size",
        )
    }
    for switch in ("medusa_fc_bias", "original_lm_head"):
        if checkpoint.config.get(switch) is not True:
            raise ValueError(
                f"{config_file}: {switch} is {checkpoint.config.get(switch)!r} (supported: true)"
            )
    fingerprint = checkpoint.config.get("target_fingerprint")
    if not isinstance(fingerprint, str):
        raise ValueError(f"{config_file}: lacks 'target_fingerprint'")
    expected = _expected_shapes(sizes)
    _check_tensors(folder, expected, {n: t.shape for n, t in checkpoint.tensors.items()})
    tensors = {name: checkpoint.read(name) for name in expected}
    token_map = tensors.pop(TOKEN_MAP, None)
    if token_map is not None:
        _check_token_map(folder, token_map, sizes["vocab_size"])
    for name, tensor in tensors.items():
        if not (tensor.is_floating_point() and torch.isfinite(tensor).all()):
            raise ValueError(f"{folder}: {name} holds values that are not finite floats")
    return MedusaDraft(
        num_heads=sizes["num_heads"],
        num_layers=sizes["num_hidden_layers"],
        hidden_size=sizes["hidden_size"],
        vocab_size=sizes["vocab_size"],
        target_fingerprint=fingerprint,
        tensors=tensors,
        token_map=token_map,
    )


def _size(file: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{file}: {key} must be a positive integer, got {value!r}")
    return value


def _expected_shapes(sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    hidden = sizes["hidden_size"]
    expected: dict[str, tuple[int, ...]] = {}
    for head in range(sizes["num_heads"]):
        for layer in range(sizes["num_hidden_layers"]):
            expected[f"blocks.{head}.layers.{layer}.weight"] = (hidden, hidden)
            expected[f"blocks.{head}.layers.{layer}.bias"] = (hidden,)
    if sizes["truncated_vocab_size"] != sizes["vocab_size"]:
        expected[TOKEN_MAP] = (sizes["truncated_vocab_size"],)
    return expected


def _check_tensors(
    folder: Path, expected: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]
) -> None:
    for kind, names in (
        ("missing", expected.keys() - stored.keys()),
        ("unexpected", stored.keys() - expected.keys()),
    ):
        if names:
            raise ValueError(f"{folder}: {kind} tensors: {', '.join(sorted(names))}")
    for name, shape in expected.items():
        if stored[name] != shape:
            raise ValueError(f"{folder}: {name} has shape {stored[name]}, expected {shape}")


def _check_token_map(folder: Path, token_map: torch.Tensor, vocab_size: int) -> None:
    """Ascending, so without repetition, and all of them tokens of the target."""
    is_sound = (
        token_map.dtype == torch.int64
        and bool((token_map.diff() > 0).all())
        and int(token_map[0]) >= 0
        and int(token_map[-1]) < vocab_size
    )
    if not is_sound:
        raise ValueError(
            f"{folder}: {TOKEN_MAP} must hold ascending int64 token ids below {vocab_size}"
        )
