"""W4A16 linear: y = x @ w.T with the weight w in 4-bit codes, one scale per group of columns.

Shapes (M tokens, N out_features, K in_features, G groups of GROUP = K / G columns):
  x           (M, K)       fp16 | bf16 | fp32   contiguous rows, which may lie apart
  w_packed    (N, K // 8)  int32   contiguous; code + 8 of column k in bits 4*(k%8) .. 4*(k%8)+3
                                   (the `weight_packed` tensor of compressed-tensors)
  scale       (N, G)       dtype of x, any strides; stored as (G, N) the GPU reads it coalesced
  zero_point  (N, G)       int8, contiguous, or None for a symmetric weight (all zero)
  y           (M, N)       dtype of x, contiguous
Mathematics: w[n, k] = (code[n, k] - zero_point[n, k // GROUP]) * scale[n, k // GROUP], rounded to
the dtype of x; products summed in fp32 and rounded once.
Contract: K % 8 == 0 and K % G == 0; on Triton GROUP % 8 == 0 too.

How Triton does it: it computes y.T = w x.T ("swap AB"), so that the 64 or more weight rows, not the
few tokens of a decoding step, fill the fixed tall side of the tensor-core instruction. Nibble i of
32 consecutive words is one operand, multiplied by the same columns of x, which are regrouped by
column % 8 beforehand: words go from memory to tensor core without a change of layout. A nibble
becomes a float by writing it into the mantissa of a power of two and subtracting that power, which
is exact and needs no integer conversion. Columns are summed in one order, whatever M is.

CPUs have their own packing and kernel, see `pack_int4_cpu` and `w4a16_cpu`.

Frantar et al., MARLIN, arXiv:2408.11743 (packing for the tensor core); Kim et al., Who Says
Elephants Can't Run, arXiv:2211.10017 (conversion by the mantissa).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from compress.artifacts import QuantizedLinear
from compress.kernels.jit import FLOAT_DTYPES, CompileCase, check_rows, check_tensor, tl, triton


class _Tile(NamedTuple):
    block_m: int  # tokens
    block_n: int  # weight rows
    num_warps: int
    num_stages: int


# Largest number of tokens -> tile. Nothing spills on sm_80 to sm_100; tiles of 128 rows or tokens
# would need more tensor memory than sm_100 has. Not yet timed on a card.
_TILES: tuple[tuple[int, _Tile], ...] = (
    (16, _Tile(16, 64, 4, 4)),
    (32, _Tile(32, 64, 4, 4)),
    (1 << 30, _Tile(64, 64, 8, 3)),
)
_BLOCK_W = 32  # words of a weight row per step: 128 bytes, 256 columns
_CPU_GROUPS = (256, 128, 64, 32)  # group sizes of torch's CPU kernel


def w4a16_ref(
    x: torch.Tensor, w_packed: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None
) -> torch.Tensor:
    """Oracle: `w4a16` in float64, without rounding the weight."""
    codes = unpack_codes(w_packed).double()
    group = codes.shape[1] // scale.shape[1]
    if zero_point is not None:
        codes = codes - zero_point.double().repeat_interleave(group, dim=1)
    weight = codes * scale.double().repeat_interleave(group, dim=1)
    return (x.double() @ weight.T).to(x.dtype)


def unpack_codes(w_packed: torch.Tensor) -> torch.Tensor:
    """Signed codes (N, K) int8 of packed words (N, K // 8) int32."""
    shifts = torch.arange(0, 32, 4, device=w_packed.device, dtype=torch.int32)
    nibbles = (w_packed.unsqueeze(-1) >> shifts) & 0xF  # (N, K // 8, 8)
    return (nibbles - 8).to(torch.int8).flatten(1)


@triton.jit
def _nibbles_to_float(nibbles, dtype: tl.constexpr):
    # int32 0..15 -> the same number in `dtype`, exactly
    if dtype == tl.float16:
        return (nibbles | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1024.0
    elif dtype == tl.bfloat16:
        return (nibbles | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True) - 128.0
    else:
        return nibbles.to(tl.float32)


# fmt: off
@triton.jit
def _w4a16_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, y_ptr,
    M, N, num_groups,
    stride_sn, stride_sg,
    GROUP_WORDS: tl.constexpr, HAS_ZERO: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):
    # fmt: on
    # one program = a (BLOCK_N, BLOCK_M) tile of y.T
    pid_m, pid_n = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = (offs_m < M)[:, None], (offs_n < N)[:, None]
    # GROUP_WORDS is known to the compiler, so that it sees how rows are aligned.
    num_words = num_groups * GROUP_WORDS
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    acc = tl.full((BLOCK_N, BLOCK_M), 0.0, dtype=tl.float32)
    for start in range(0, num_words, BLOCK_W):
        offs_w = start + tl.arange(0, BLOCK_W)
        mask_x, mask_w = mask_m, mask_n
        if not EVEN_K:
            inside = (offs_w < num_words)[None, :]
            mask_x, mask_w = mask_m & inside, mask_n & inside
        words = tl.load(w_ptr + offs_n[:, None] * num_words + offs_w[None, :], mask=mask_w, other=0)
        if GROUP_WORDS % BLOCK_W == 0:  # one scale per row serves the whole step
            group, mask_g = tl.full((1,), 0, tl.int32) + start // GROUP_WORDS, mask_n
        else:
            group, mask_g = offs_w // GROUP_WORDS, mask_w
        offs_s = offs_n[:, None] * stride_sn + group[None, :] * stride_sg
        scale = tl.load(scale_ptr + offs_s, mask=mask_g, other=0.0)  # [BN, BW] or [BN, 1]
        zero = tl.full(scale.shape, 8, dtype=tl.int32)
        if HAS_ZERO:
            offs_z = offs_n[:, None] * num_groups + group[None, :]
            zero += tl.load(zero_ptr + offs_z, mask=mask_g, other=0).to(tl.int32)
        zero = zero.to(dtype)
        for i in tl.static_range(8):
            offs_x = (offs_m[:, None] * 8 + i) * num_words + offs_w[None, :]
            x = tl.load(x_ptr + offs_x, mask=mask_x, other=0.0)  # [BM, BW], columns 8 w + i
            codes = _nibbles_to_float((words >> (4 * i)) & 0xF, dtype) - zero
            acc = tl.dot(codes * scale, tl.trans(x), acc, input_precision="ieee")
    offs_y = offs_m[None, :] * N + offs_n[:, None]
    tl.store(y_ptr + offs_y, acc.to(dtype), mask=mask_n & (offs_m < M)[None, :])


def w4a16_triton(
    x: torch.Tensor, w_packed: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None
) -> torch.Tensor:
    """Triton `w4a16`; shapes and contract in the module docstring, ValueError if broken."""
    check_tensor("x", x, shape=(None, None), dtypes=FLOAT_DTYPES)
    num_tokens, in_features = x.shape
    if in_features % 8 or not in_features:
        raise ValueError(f"x must have a positive multiple of 8 columns, got {in_features}")
    check_tensor("w_packed", w_packed, shape=(None, in_features // 8), dtypes=(torch.int32,))
    out_features = w_packed.shape[0]
    check_tensor("scale", scale, shape=(out_features, None), dtypes=(x.dtype,))
    num_groups = scale.shape[1]
    if not num_groups or in_features % num_groups or in_features // num_groups % 8:
        raise ValueError(
            f"scale has {num_groups} groups, which do not cut {in_features} columns into 8 n each"
        )
    if zero_point is not None:
        shape = (out_features, num_groups)
        check_tensor("zero_point", zero_point, shape=shape, dtypes=(torch.int8,))
        zero_point = zero_point.contiguous()
    check_rows("x", x)
    if not w_packed.is_contiguous():
        raise ValueError(f"w_packed must be contiguous, got strides {w_packed.stride()}")
    y = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    tile = next(tile for largest, tile in _TILES if num_tokens <= largest)
    group = in_features // num_groups
    constexprs, options = _variant(tile, group, num_groups, asymmetric=zero_point is not None)
    by_nibble = x.reshape(num_tokens, -1, 8).transpose(1, 2).contiguous()  # (M, 8, K // 8)
    zeros = w_packed if zero_point is None else zero_point  # not read without HAS_ZERO
    grid = (triton.cdiv(num_tokens, tile.block_m), triton.cdiv(out_features, tile.block_n))
    _w4a16_kernel[grid](
        by_nibble, w_packed, scale, zeros, y, num_tokens, out_features, num_groups,
        *scale.stride(), **constexprs, **options,
    )  # fmt: skip
    return y


def _variant(
    tile: _Tile, group: int, num_groups: int, *, asymmetric: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """Compile-time constants and launch options of one tile."""
    constexprs = {
        "GROUP_WORDS": group // 8,
        "HAS_ZERO": asymmetric,
        "EVEN_K": group * num_groups % (8 * _BLOCK_W) == 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_W": _BLOCK_W,
    }
    return constexprs, {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def w4a16_torch(
    x: torch.Tensor, w_packed: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None
) -> torch.Tensor:
    """Torch `w4a16`: unpacks the whole weight on every call. Repeated calls on a CPU want
    `pack_int4_cpu` once and `w4a16_cpu`."""
    codes = unpack_codes(w_packed).view(*scale.shape, -1)
    if zero_point is not None:
        codes = codes - zero_point.unsqueeze(-1)
    weight = codes.to(x.dtype) * scale.unsqueeze(-1)
    return F.linear(x, weight.flatten(1))


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


def compile_cases() -> list[CompileCase]:
    """Every tile with groups within a step, K not a multiple of a step, and one group per row."""
    types = {"x_ptr": "*bf16", "w_ptr": "*i32", "scale_ptr": "*bf16", "zero_ptr": "*i8"}
    cases = []
    for _largest, tile in _TILES:
        for group, num_groups, asymmetric in (
            (32, 128, True),
            (64, 9, False),
            (128, 32, True),
            (4096, 1, False),
        ):
            constexprs, options = _variant(tile, group, num_groups, asymmetric=asymmetric)
            shape = f"K={group * num_groups},group={group},{'asym' if asymmetric else 'sym'}"
            cases.append(
                CompileCase(
                    kernel=_w4a16_kernel,
                    label=f"tile={tile.block_m}x{tile.block_n},{shape}",
                    types=types | {"y_ptr": "*bf16"},
                    constexprs=constexprs,
                    divisible=("N", "stride_sn"),
                    meant=("mma", "wgmma", "load16"),
                    **options,
                )
            )
    return cases
