"""What a checkpoint folder is: architecture, sizes, schemes, and how it was made.

Everything comes from `config.json`, the file headers and the 16 bytes of each `weight_shape`; no
weight is read. The provenance file `compress.json` is written by the tools of this project beside
the weights and never read by a loader.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from compress.export.compressed_tensors import read_scheme
from compress.export.writer import PROVENANCE_FILE, write_json
from compress.models.checkpoint import Checkpoint, open_checkpoint, read_json

PROVENANCE_KEYS = ("version", "recipe", "calibration", "source_fingerprint", "report")
_PACKED_KINDS = {
    ".weight_packed": "codes",
    ".weight_scale": "scales",
    ".weight_zero_point": "zero points",
    ".weight_shape": "shapes",
}
_SIZE_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "tie_word_embeddings",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBits:
    """Weights (elements) and the bits that store them, scales and padding included.

    `quantized` is None for a float checkpoint.
    """

    num_weights: int
    overall: float
    quantized: float | None


def inspect_checkpoint(path: Path) -> dict[str, Any]:
    """Describe the checkpoint folder `path` in plain values, ready for JSON.

    Keys: `path, architecture, sizes, dtypes, num_weights, bytes {total, by kind}, bits_per_weight
    {overall, quantized Linears}, schemes [{scheme, num_linears, linears}], provenance`. `linears`
    has block numbers replaced by `*`. Raises what `open_checkpoint` and `read_scheme` raise.
    """
    checkpoint = open_checkpoint(path)
    bits = stored_bits(checkpoint)
    config = checkpoint.config
    dtypes = {str(info.dtype).removeprefix("torch.") for info in checkpoint.tensors.values()}
    return {
        "path": str(path),
        "architecture": (config.get("architectures") or [None])[0],
        "sizes": {key: config[key] for key in _SIZE_KEYS if config.get(key) is not None},
        "dtypes": sorted(dtypes),
        "num_weights": bits.num_weights,
        "bytes": {"total": checkpoint.num_bytes, "by_kind": _bytes_by_kind(checkpoint)},
        "bits_per_weight": {"overall": bits.overall, "quantized": bits.quantized},
        "schemes": _schemes(checkpoint),
        "provenance": read_provenance(path),
    }


def stored_bits(checkpoint: Checkpoint) -> StoredBits:
    """Count the weights of `checkpoint` and the bits per weight on disk.

    A packed Linear without its `weight_shape` is damaged; its weights are not counted.
    """
    float_weights = sum(
        prod(info.shape)
        for name, info in checkpoint.tensors.items()
        if _kind(name, info.shape) not in _PACKED_KINDS.values()
    )
    shape_names = [f"{name}.weight_shape" for name in packed_names(checkpoint)]
    shapes = [checkpoint.read(name).tolist() for name in shape_names if name in checkpoint.tensors]
    packed_weights = sum(prod(shape) for shape in shapes)
    packed_bytes = sum(
        info.nbytes
        for name, info in checkpoint.tensors.items()
        if _kind(name, info.shape) in _PACKED_KINDS.values()
    )
    num_weights = float_weights + packed_weights
    return StoredBits(
        num_weights=num_weights,
        overall=8 * checkpoint.num_bytes / max(num_weights, 1),
        quantized=8 * packed_bytes / packed_weights if packed_weights else None,
    )


def packed_names(checkpoint: Checkpoint) -> list[str]:
    """Names of the Linears that are stored packed, in file order."""
    suffix = ".weight_packed"
    return [name.removesuffix(suffix) for name in checkpoint.tensors if name.endswith(suffix)]


def write_provenance(folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write how the checkpoint in `folder` was made; the values must be plain JSON.

    Keys: `version` (of this package), `recipe`, `calibration` (`source`, `sha256`, ... of the data,
    None if none was used), `source_fingerprint` (of the float checkpoint) and `report`; others may
    be added. ValueError if one is missing.
    """
    missing = [key for key in PROVENANCE_KEYS if key not in provenance]
    if missing:
        raise ValueError(f"provenance lacks {', '.join(missing)}")
    write_json(folder / PROVENANCE_FILE, provenance)


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """What `write_provenance` wrote to `folder`, None for a checkpoint of another origin."""
    file = folder / PROVENANCE_FILE
    return read_json(file) if file.is_file() else None


def _kind(name: str, shape: tuple[int, ...]) -> str:
    for suffix, kind in _PACKED_KINDS.items():
        if name.endswith(suffix):
            return kind
    if name.endswith("embed_tokens.weight"):
        return "embedding"
    if name == "lm_head.weight":
        return "head"
    return "float matrices" if len(shape) > 1 else "norms and biases"


def _bytes_by_kind(checkpoint: Checkpoint) -> dict[str, int]:
    total: dict[str, int] = {}
    for name, info in checkpoint.tensors.items():
        kind = _kind(name, info.shape)
        total[kind] = total.get(kind, 0) + info.nbytes
    return total


def _schemes(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """One row per scheme: how many Linears have it and which, block numbers replaced by `*`."""
    scheme_for = read_scheme(checkpoint.config)
    groups: dict[str, list[str]] = {}
    for name in packed_names(checkpoint):
        scheme = scheme_for(name)
        label = scheme.label if scheme else "packed, but ignored by config.json"
        groups.setdefault(label, []).append(name)
    return [
        {
            "scheme": label,
            "num_linears": len(names),
            "linears": list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)),
        }
        for label, names in groups.items()
    ]
