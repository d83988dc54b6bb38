"""What a checkpoint folder is: architecture, sizes, schemes, and how it was made.

Everything comes from `config.json`, the file headers and the 16 bytes of each `weight_shape`; no
weight is read. The provenance file `compress.json` is written by the tools of this project beside
the weights and never read by a loader. Beside how the checkpoint was made it holds the SHA-256 of
every tensor, and in `transformed_tensors` the names of those that were rescaled or rotated before
they were rounded or stored, which are therefore not the source's.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from compress.export.digests import DIGESTS_KEY, tensor_digests
from compress.export.formats import (
    CODE_TENSORS,
    PACKED_TENSORS,
    format_of,
    read_kv_cache,
    read_scheme,
)
from compress.export.patterns import is_embedding
from compress.export.writer import PROVENANCE_FILE, write_json
from compress.models.checkpoint import Checkpoint, open_checkpoint, read_json

PROVENANCE_KEYS = ("version", "recipe", "calibration", "source_fingerprint", "report")
TRANSFORMED_KEY = "transformed_tensors"
_KV_SCALES = ("k_scale", "v_scale")
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

    Keys: `path, architecture, sizes, format, kv_cache, dtypes, num_weights, bytes {total, by kind},
    bits_per_weight {overall, quantized Linears}, schemes [{scheme, num_linears, linears}],
    provenance`. `linears` has block numbers replaced by `*`; `provenance` is without the digests.
    Raises what `open_checkpoint` and `read_scheme` raise.
    """
    checkpoint = open_checkpoint(path)
    bits = stored_bits(checkpoint)
    config = checkpoint.config
    kv_cache = read_kv_cache(config)
    provenance = read_provenance(path)
    if provenance is not None:
        provenance.pop(DIGESTS_KEY, None)
    dtypes = {str(info.dtype).removeprefix("torch.") for info in checkpoint.tensors.values()}
    return {
        "path": str(path),
        "architecture": (config.get("architectures") or [None])[0],
        "sizes": {key: config[key] for key in _SIZE_KEYS if config.get(key) is not None},
        "format": format_of(config).name if config.get("quantization_config") else None,
        "kv_cache": kv_cache.label if kv_cache else None,
        "dtypes": sorted(dtypes),
        "num_weights": bits.num_weights,
        "bytes": {"total": checkpoint.num_bytes, "by_kind": _bytes_by_kind(checkpoint)},
        "bits_per_weight": {"overall": bits.overall, "quantized": bits.quantized},
        "schemes": _schemes(checkpoint),
        "provenance": provenance,
    }


def stored_bits(checkpoint: Checkpoint) -> StoredBits:
    """Count the weights of `checkpoint` and the bits per weight on disk.

    A packed Linear whose size cannot be told is damaged; its weights are not counted.
    """
    packed = packed_names(checkpoint)
    packed_weights = sum(_num_weights(checkpoint, name) for name in packed)
    packed_bytes = 0
    float_weights = 0
    names = set(packed)
    for name, info in checkpoint.tensors.items():
        if _packed_kind(name, names):
            packed_bytes += info.nbytes
        else:
            float_weights += prod(info.shape)
    num_weights = float_weights + packed_weights
    return StoredBits(
        num_weights=num_weights,
        overall=8 * checkpoint.num_bytes / max(num_weights, 1),
        quantized=8 * packed_bytes / packed_weights if packed_weights else None,
    )


def packed_names(checkpoint: Checkpoint) -> list[str]:
    """Names of the modules that are stored packed, in file order.

    They have a tensor of codes that no float module has, or a `weight` with a scale beside it.
    """
    split = (name.rpartition(".") for name in checkpoint.tensors)
    return [
        module
        for module, _, local in split
        if local in CODE_TENSORS
        or (local == "weight" and f"{module}.weight_scale" in checkpoint.tensors)
    ]


def write_provenance(folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write how the checkpoint in `folder` was made; the values must be plain JSON.

    Keys: `version` (of this package), `recipe`, `calibration` (`source`, `sha256`, ... of the data,
    None if none was used), `source_fingerprint` (of the float checkpoint) and `report`; others may
    be added, and the digests of the tensors in `folder` are. ValueError if one is missing.
    """
    missing = [key for key in PROVENANCE_KEYS if key not in provenance]
    if missing:
        raise ValueError(f"provenance lacks {', '.join(missing)}")
    digests = tensor_digests(open_checkpoint(folder))
    write_json(folder / PROVENANCE_FILE, {**provenance, DIGESTS_KEY: digests})


def read_provenance(folder: Path) -> dict[str, Any] | None:
    """What `write_provenance` wrote to `folder`, None for a checkpoint of another origin."""
    file = folder / PROVENANCE_FILE
    return read_json(file) if file.is_file() else None


def _num_weights(checkpoint: Checkpoint, name: str) -> int:
    """Weights that packed module `name` stands for, 0 if its tensors do not tell."""
    tensors = checkpoint.tensors
    if f"{name}.weight" in tensors:
        return prod(tensors[f"{name}.weight"].shape)
    if f"{name}.weight_shape" in tensors:
        return prod(checkpoint.read(f"{name}.weight_shape").tolist())
    rows = tensors.get(f"{name}.g_idx", tensors.get(f"{name}.qweight"))
    scales = tensors.get(f"{name}.scales")
    return rows.shape[0] * scales.shape[-1] if rows and scales else 0


def _packed_kind(name: str, packed: Collection[str]) -> str | None:
    """What a tensor of a packed module holds, None for other tensors and for its bias."""
    module, _, local = name.rpartition(".")
    if module not in packed:
        return None
    return "codes" if local == "weight" else PACKED_TENSORS.get(local)


def _kind(name: str, shape: tuple[int, ...], packed: Collection[str]) -> str:
    if kind := _packed_kind(name, packed):
        return kind
    module, _, local = name.rpartition(".")
    if local in _KV_SCALES:
        return "KV cache scales"
    if is_embedding(module):
        return "embedding"
    if name == "lm_head.weight":
        return "head"
    return "float matrices" if len(shape) > 1 else "norms and biases"


def _bytes_by_kind(checkpoint: Checkpoint) -> dict[str, int]:
    packed = set(packed_names(checkpoint))
    total: dict[str, int] = {}
    for name, info in checkpoint.tensors.items():
        kind = _kind(name, info.shape, packed)
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
