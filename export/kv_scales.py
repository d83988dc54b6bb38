"""The scales of an FP8 KV cache: one for the keys and one for the values of each layer.

Beside the Linears of an attention module (`model.layers.0.self_attn`) lie, in the names and shapes
of compressed-tensors,

    k_scale, v_scale   fp32  (1,), or (num_kv_heads, 1, 1) with one scale per KV head

and a key x is stored as x / k_scale in float8_e4m3fn, after the rotary embedding. GPTQ and AWQ
checkpoints have none. Older checkpoints call them `k_proj.output_scale` and `v_proj.output_scale`;
those are read too.
"""

import torch

from compress.export.tensors import SCALE_DTYPES
from compress.models.checkpoint import Checkpoint
from compress.scheme import KVCacheScheme

ATTENTION = "self_attn"
_LEGACY = {"k_scale": "k_proj.output_scale", "v_scale": "v_proj.output_scale"}


def kv_scale_layout(kv_cache: KVCacheScheme, num_kv_heads: int) -> dict[str, tuple[int, ...]]:
    """Local name -> shape of the two scales of one attention module."""
    shape = (num_kv_heads, 1, 1) if kv_cache.strategy == "head" else (1,)
    return dict.fromkeys(_LEGACY, shape)


def pack_kv_scales(
    k_scale: torch.Tensor, v_scale: torch.Tensor, kv_cache: KVCacheScheme
) -> dict[str, torch.Tensor]:
    """Tensors by local name from the scales of the keys and the values, (1,) or (num_kv_heads,)."""
    layout = kv_scale_layout(kv_cache, k_scale.numel())
    pair = {"k_scale": k_scale, "v_scale": v_scale}
    for name, scale in pair.items():
        if not bool((scale > 0).all() and scale.isfinite().all()):
            raise ValueError(f"{name} must be positive and finite, got {scale.tolist()}")
    return {name: pair[name].float().cpu().reshape(shape) for name, shape in layout.items()}


def read_kv_scales(
    checkpoint: Checkpoint, attention: str, kv_cache: KVCacheScheme, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (1,) or (num_kv_heads,) fp32 of the keys and values of module `attention`.

    ValueError names a scale that is missing or does not fit: a reader that took 1.0 instead would
    give a plausible worse model.
    """
    k_scale, v_scale = (
        _read(checkpoint, attention, local, shape)
        for local, shape in kv_scale_layout(kv_cache, num_kv_heads).items()
    )
    return k_scale, v_scale


def _read(
    checkpoint: Checkpoint, attention: str, local: str, shape: tuple[int, ...]
) -> torch.Tensor:
    name, legacy = f"{attention}.{local}", f"{attention}.{_LEGACY[local]}"
    if name not in checkpoint.tensors and legacy in checkpoint.tensors:
        name = legacy
    scale = checkpoint.read(name)
    if tuple(scale.shape) != shape or scale.dtype not in SCALE_DTYPES:
        raise ValueError(
            f"{checkpoint.path}: {name} must be a float of shape {shape},"
            f" got {scale.dtype} {tuple(scale.shape)}"
        )
    scale = scale.float().reshape(-1)
    if not bool((scale > 0).all() and scale.isfinite().all()):
        raise ValueError(f"{checkpoint.path}: {name} must be positive and finite")
    return scale
