"""W4A16 linear on a CPU: torch's int4 kernel, which is the fastest there for up to 6 rows.

Shapes (M tokens, N out_features, K in_features):
  x   (M, K)  bf16
  y   (M, N)  bf16 = x @ w.T, the weight of an `Int4Cpu`
Contract: N a multiple of 16, groups of 32 n. Other dtypes of x would be computed by a scalar loop.
"""

from dataclasses import dataclass

import torch

from compress.artifacts import QuantizedLinear

_CPU_GROUPS = (256, 128, 64, 32)  # group sizes of torch's CPU kernel


@dataclass(frozen=True, kw_only=True, slots=True)
class Int4Cpu:
    """A 4-bit weight in the order of torch's CPU kernel, which reads it as (u - 8) * s + z.

    packed          (N, K // 2)              uint8, an order private to torch
    scale_and_zero  (K // group_size, N, 2)  bf16, s and z = -zero_point * s
    """

    packed: torch.Tensor
    scale_and_zero: torch.Tensor
    group_size: int


def pack_int4_cpu(linear: QuantizedLinear) -> Int4Cpu:
    """Repack `linear` for `w4a16_cpu`. Scales are rounded to bf16; a group that the kernel does not
    know is cut into equal smaller ones.

    Raises ValueError unless bits is 4, out_features a multiple of 16 and the group of 32.
    """
    out_features = linear.scale.shape[0]
    if linear.bits != 4:
        raise ValueError(f"the int4 CPU kernel needs bits 4, got {linear.bits}")
    if out_features % 16:
        raise ValueError(f"the int4 CPU kernel needs N a multiple of 16, got {out_features}")
    group_size = next((size for size in _CPU_GROUPS if linear.group_size % size == 0), None)
    if group_size is None:
        raise ValueError(f"the int4 CPU kernel needs groups of 32 n, got {linear.group_size}")
    codes = linear.codes.to(torch.int32) + 8
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scale = linear.scale.float()
    zero = torch.zeros_like(scale)
    if linear.zero_point is not None:
        zero = -linear.zero_point.float() * scale
    pairs = torch.stack((scale, zero), dim=-1).transpose(0, 1)  # (G, N, 2)
    pairs = pairs.repeat_interleave(linear.group_size // group_size, dim=0)
    scale_and_zero = pairs.to(torch.bfloat16).contiguous()
    return Int4Cpu(packed=packed, scale_and_zero=scale_and_zero, group_size=group_size)


def w4a16_cpu(x: torch.Tensor, weight: Int4Cpu) -> torch.Tensor:
    """y (M, N) bf16 = x (M, K) bf16 @ weight.T by torch's int4 kernel, the fastest for M <= 6.

    Raises ValueError for another dtype, which that kernel computes by a scalar loop.
    """
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x must be bfloat16 for the int4 CPU kernel, got {x.dtype}")
    y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x, weight.packed, weight.group_size, weight.scale_and_zero
    )
    return y
