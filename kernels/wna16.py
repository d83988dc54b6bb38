"""WnA16 linear: y = x @ w.T with w in codes of 2, 3, 4 or 8 bits and one scale per group.

Shapes (M tokens, N out_features, K in_features, G groups of GROUP = K / G columns):
  x           (M, K)      fp16 | bf16 | fp32   contiguous rows, which may lie apart
  words       (N, K / C)  int32   contiguous, C codes each: 16, 16, 8, 4 for 2, 3, 4, 8 bits; code +
                                  2^(bits - 1) of column C w + i in bits i B .. (i + 1) B - 1 of
                                  word w, B = bits (with 3 bits: B = 2, its lower two bits)
  high        (N, K / C)  int16   with 3 bits: bit i of element w is the upper bit of column C w + i
  scale       (N, G)      dtype of x, any strides; stored as (G, N) the GPU reads it coalesced
  zero_point  (N, G)      int8, contiguous, or None for a symmetric weight (all zero)
  y           (M, N)      dtype of x, contiguous
Mathematics: w[n, k] = (code[n, k] - zero_point[n, k // GROUP]) * scale[n, k // GROUP], rounded to
the dtype of x; products summed in fp32 and rounded once.
Contract: GROUP % C == 0. A row of y has the same bits alone and in every batch.

How Triton does it: it computes y.T = w x.T ("swap AB"), so that the 64 weight rows, not the few
tokens of a decoding step, fill the fixed tall side of the tensor-core instruction. Code i of 32
consecutive words (16 with 2 or 3 bits) is one operand, multiplied by the same columns of x, which
are regrouped by column % C beforehand: words go from memory to tensor core without a change of
layout. A code becomes a float by writing it into the mantissa of a power of two.

The columns are cut into splits, as many as N and K ask for, never M. A few tokens are computed by
one program per split, which fill the card together, and a second kernel adds the splits in order;
many tokens by programs that go through the splits in the same order themselves.

Frantar et al., MARLIN, arXiv:2408.11743 (packing for the tensor core); Kim et al., Who Says
Elephants Can't Run, arXiv:2211.10017 (conversion by the mantissa); Hoque et al., arXiv:2402.00025
(splits along K).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from compress.artifacts import QuantizedLinear
from compress.kernels.jit import (
    FLOAT_DTYPES,
    BenchCase,
    CompileCase,
    check_rows,
    check_tensor,
    triton,
)
from compress.kernels.wna16_kernels import split_kernel, sum_splits_kernel, whole_kernel

CODES_PER_WORD: dict[int, int] = {2: 16, 3: 16, 4: 8, 8: 4}  # bits -> C


class _Tile(NamedTuple):
    block_m: int  # tokens
    block_n: int  # weight rows
    num_warps: int
    num_stages: int


# Largest number of tokens -> tile. Nothing spills on sm_80 to sm_100; tiles of 128 rows or tokens
# would need more tensor memory than sm_100 has, and so would 64 tokens with 16 codes per word,
# which Triton compiles to a kernel that does nothing. Not yet timed on a card.
_TILES: tuple[tuple[int, _Tile], ...] = (
    (16, _Tile(16, 64, 4, 4)),
    (32, _Tile(32, 64, 4, 4)),
    (1 << 30, _Tile(64, 64, 8, 3)),
)
_MAX_TOKENS = {2: 32, 3: 32, 4: 64, 8: 64}  # bits -> of a tile
_BLOCK_W = {2: 16, 3: 16, 4: 32, 8: 32}  # bits -> words of a weight row per step
_SPLIT_TOKENS = 16  # up to so many the splits have programs of their own
_PROGRAMS = 256  # that fill a card: about two for each multiprocessor
_MIN_STEPS = 4  # of a split
_MAX_SPLITS = 16
_SUM_BLOCK = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedWeight:
    """A weight as `wna16` reads it; shapes in the module docstring. `grouped_matmul` reads a stack
    of them, one per expert, in one more leading dimension."""

    words: torch.Tensor
    high: torch.Tensor | None
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    bits: int

    @property
    def in_features(self) -> int:
        return self.words.shape[-1] * CODES_PER_WORD[self.bits]


def pack_weight(
    linear: QuantizedLinear, dtype: torch.dtype, device: torch.device | str
) -> PackedWeight:
    """Repack `linear` for `wna16` with inputs of `dtype`; ValueError if its groups do not fit."""
    if linear.bits not in CODES_PER_WORD or linear.codes.dtype != torch.int8:
        raise ValueError(
            f"packed products take integer codes of 2, 3, 4 or 8 bits, got {linear.bits}"
        )
    per_word = CODES_PER_WORD[linear.bits]
    if linear.group_size % per_word:
        raise ValueError(
            f"{linear.bits}-bit products take groups of {per_word} n, got {linear.group_size}"
        )
    codes = linear.codes.to(device, torch.int32) + (1 << (linear.bits - 1))
    codes = codes.view(len(codes), codes.shape[1] // per_word, per_word)
    plane = 2 if linear.bits == 3 else linear.bits
    shifts = torch.arange(per_word, device=device, dtype=torch.int32)
    words = ((codes & ((1 << plane) - 1)) << (shifts * plane)).sum(-1, dtype=torch.int32)
    high = None
    if linear.bits == 3:
        high = ((codes >> 2) << shifts).sum(-1, dtype=torch.int32).to(torch.int16)
    zero_point = linear.zero_point
    return PackedWeight(
        words=words,
        high=high,
        scale=linear.scale.to(device, dtype).t().contiguous().t(),
        zero_point=None if zero_point is None else zero_point.to(device).contiguous(),
        bits=linear.bits,
    )


def unpack_codes(weight: PackedWeight) -> torch.Tensor:
    """Signed codes (N, K) int8 of `weight`: the inverse of `pack_weight`."""
    plane = 2 if weight.bits == 3 else weight.bits
    per_word, device = CODES_PER_WORD[weight.bits], weight.words.device
    shifts = torch.arange(per_word, device=device, dtype=torch.int32)
    codes = (weight.words.unsqueeze(-1) >> (shifts * plane)) & ((1 << plane) - 1)
    if weight.high is not None:
        codes |= ((weight.high.to(torch.int32).unsqueeze(-1) >> shifts) & 1) << 2
    return (codes - (1 << (weight.bits - 1))).to(torch.int8).flatten(1)


def stack_packed(weights: Sequence[PackedWeight]) -> PackedWeight:
    """One weight of E experts from E of the same shape, bits and symmetry."""

    def stack(tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.stack(present) if present else None

    if not weights:
        raise ValueError("weights must be of at least one expert")
    kinds = {
        (
            weight.bits,
            tuple(weight.words.shape),
            tuple(weight.scale.shape),
            weight.zero_point is None,
        )
        for weight in weights
    }
    if len(kinds) > 1:
        raise ValueError(f"weights must agree in bits, shapes and symmetry, got {sorted(kinds)}")
    return PackedWeight(
        words=torch.stack([weight.words for weight in weights]),
        high=stack([weight.high for weight in weights]),
        # (G, N) in memory, as `pack_weight` leaves it
        scale=torch.stack([weight.scale.t() for weight in weights]).transpose(1, 2),
        zero_point=stack([weight.zero_point for weight in weights]),
        bits=weights[0].bits,
    )


def expert_weight(weight: PackedWeight, expert: int) -> PackedWeight:
    """The weight of one expert, as `wna16` takes it: views of the stack."""
    return replace(
        weight,
        words=weight.words[expert],
        high=None if weight.high is None else weight.high[expert],
        scale=weight.scale[expert],
        zero_point=None if weight.zero_point is None else weight.zero_point[expert],
    )


def wna16_ref(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Oracle: `wna16` in float64, without rounding the weight."""
    codes = unpack_codes(weight).double().view(*weight.scale.shape, -1)
    if weight.zero_point is not None:
        codes = codes - weight.zero_point.double().unsqueeze(-1)
    dense = (codes * weight.scale.double().unsqueeze(-1)).flatten(1)
    return (x.double() @ dense.T).to(x.dtype)


def wna16_triton(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Triton `wna16`; shapes and contract in the module docstring, ValueError if broken."""
    num_groups = check_weight(x, weight)
    num_tokens, out_features = x.shape[0], weight.words.shape[0]
    y = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    tile = tile_for(num_tokens, weight.bits)
    group = weight.in_features // num_groups
    asymmetric = weight.zero_point is not None
    constexprs, options = variant(tile, weight.bits, group, num_groups, asymmetric=asymmetric)
    num_splits, split_words = splits_of(weight)
    per_word = CODES_PER_WORD[weight.bits]
    by_code = x.reshape(num_tokens, -1, per_word).transpose(1, 2).contiguous()  # (M, C, K / C)
    tensors = (
        by_code,
        weight.words,
        weight.words if weight.high is None else weight.high,  # not read without its constant
        weight.scale,
        weight.words if weight.zero_point is None else weight.zero_point,
    )
    grid = (triton.cdiv(num_tokens, tile.block_m), triton.cdiv(out_features, tile.block_n))
    if num_splits == 1 or num_tokens > _SPLIT_TOKENS:
        whole_kernel[grid](
            *tensors, y, num_tokens, out_features, num_groups, split_words,
            *weight.scale.stride(), ONE_SPLIT=num_splits == 1, **constexprs, **options,
        )  # fmt: skip
        return y
    shape = (num_splits, num_tokens, out_features)
    parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    split_kernel[(*grid, num_splits)](
        *tensors, parts, num_tokens, out_features, num_groups, split_words,
        *weight.scale.stride(), **constexprs, **options,
    )  # fmt: skip
    sum_splits_kernel[(triton.cdiv(y.numel(), _SUM_BLOCK),)](
        parts, y, y.numel(), num_splits, BLOCK=_SUM_BLOCK
    )
    return y


def check_weight(x: torch.Tensor, weight: PackedWeight) -> int:
    """Number of groups; ValueError that names the argument which breaks the contract."""
    if weight.bits not in CODES_PER_WORD:
        raise ValueError(f"weight.bits must be 2, 3, 4 or 8, got {weight.bits}")
    check_tensor("weight.words", weight.words, shape=(None, None), dtypes=(torch.int32,))
    out_features, in_features = weight.words.shape[0], weight.in_features
    check_tensor("x", x, shape=(None, in_features), dtypes=FLOAT_DTYPES)
    check_tensor("weight.scale", weight.scale, shape=(out_features, None), dtypes=(x.dtype,))
    num_groups = weight.scale.shape[1]
    per_word = CODES_PER_WORD[weight.bits]
    if not num_groups or in_features % (num_groups * per_word):
        raise ValueError(
            f"weight.scale has {num_groups} groups, which do not cut {in_features} columns into"
            f" {per_word} n each"
        )
    if (weight.high is None) == (weight.bits == 3):
        raise ValueError("weight.high belongs to 3 bits, and to no other width")
    contiguous = {"weight.words": weight.words}
    if weight.high is not None:
        shape = tuple(weight.words.shape)
        check_tensor("weight.high", weight.high, shape=shape, dtypes=(torch.int16,))
        contiguous["weight.high"] = weight.high
    if weight.zero_point is not None:
        shape = (out_features, num_groups)
        check_tensor("weight.zero_point", weight.zero_point, shape=shape, dtypes=(torch.int8,))
        contiguous["weight.zero_point"] = weight.zero_point
    check_rows("x", x)
    for name, tensor in contiguous.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    return num_groups


def tile_for(num_tokens: int, bits: int) -> _Tile:
    num_tokens = min(num_tokens, _MAX_TOKENS[bits])
    return next(tile for largest, tile in _TILES if num_tokens <= largest)


def splits_of(weight: PackedWeight) -> tuple[int, int]:
    """How many splits, and words of each: whole steps, the last split may have fewer."""
    out_features, num_words = weight.words.shape
    block_w = _BLOCK_W[weight.bits]
    num_steps = -(-num_words // block_w)
    num_tiles = -(-out_features // _TILES[0][1].block_n)
    wanted = min(_MAX_SPLITS, -(-_PROGRAMS // num_tiles), max(1, num_steps // _MIN_STEPS))
    steps = -(-num_steps // wanted)
    return -(-num_steps // steps), steps * block_w


def variant(
    tile: _Tile, bits: int, group: int, num_groups: int, *, asymmetric: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """Compile-time constants and launch options of one tile."""
    per_word = CODES_PER_WORD[bits]
    constexprs = {
        "BITS": bits,
        "CODES": per_word,
        "GROUP_WORDS": group // per_word,
        "HAS_ZERO": asymmetric,
        "EVEN_K": group * num_groups % (per_word * _BLOCK_W[bits]) == 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_W": _BLOCK_W[bits],
    }
    return constexprs, {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def wna16_torch(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Torch `wna16`: unpacks the whole weight on every call. Repeated calls on a CPU want
    `pack_int4_cpu` once, or a dequantized weight."""
    codes = unpack_codes(weight).view(*weight.scale.shape, -1)
    wide = codes.to(torch.int16)
    if weight.zero_point is not None:
        wide = wide - weight.zero_point.unsqueeze(-1)
    dense = wide.to(x.dtype) * weight.scale.unsqueeze(-1)
    return F.linear(x, dense.flatten(1))


def compile_cases() -> list[CompileCase]:
    """Every tile and width, whole and split; at 4 bits also every way in which groups lie."""
    types = {"x_ptr": "*bf16", "w_ptr": "*i32", "high_ptr": "*i16", "scale_ptr": "*bf16"}
    types |= {"zero_ptr": "*i8", "y_ptr": "*bf16", "part_ptr": "*fp32"}
    layouts = [(bits, 128, 32, True) for bits in CODES_PER_WORD]
    layouts += [(4, 32, 128, True), (4, 64, 9, False), (4, 4096, 1, False)]
    small, *large = [tile for _largest, tile in _TILES]
    kernels = [
        (split_kernel, "split", small, {}),
        (whole_kernel, "whole", small, {"ONE_SPLIT": True}),
    ]
    kernels += [(whole_kernel, "whole", tile, {"ONE_SPLIT": True}) for tile in large]
    kernels += [(whole_kernel, "in turn", tile, {"ONE_SPLIT": False}) for tile in large]
    cases = [
        CompileCase(
            kernel=sum_splits_kernel,
            label="sum",
            types=types,
            constexprs={"BLOCK": _SUM_BLOCK},
            divisible=("size",),
            meant=("load16",),
        )
    ]
    for kernel, name, tile, more in kernels:
        for bits, group, num_groups, asymmetric in layouts:
            if tile.block_m > _MAX_TOKENS[bits]:
                continue
            constexprs, options = variant(tile, bits, group, num_groups, asymmetric=asymmetric)
            shape = f"K={group * num_groups},group={group},{'asym' if asymmetric else 'sym'}"
            cases.append(
                CompileCase(
                    kernel=kernel,
                    label=f"{name},{bits}b,tile={tile.block_m}x{tile.block_n},{shape}",
                    types=types,
                    constexprs=constexprs | more,
                    divisible=("N", "stride_sn", "split_words"),
                    meant=("mma", "wgmma", "load16"),
                    **options,
                )
            )
    return cases


def bench_cases() -> list[BenchCase]:
    """Linears of an 8B Llama in groups of 128: decoding and prefill at 4 bits, decoding at 3, 2."""
    square, wide = (4096, 4096), (14336, 4096)  # N, K
    sizes = [(4, M, shape) for shape in (square, wide) for M in (1, 4, 16, 256, 4096)]
    sizes += [(bits, M, wide) for bits in (3, 2) for M in (1, 16)]
    return [_bench_case(bits, M, N, K) for bits, M, (N, K) in sizes]


def _bench_case(bits: int, M: int, N: int, K: int, group: int = 128) -> BenchCase:
    decoding = M <= 16
    return BenchCase(
        label=f"{bits}b,g{group},M={M},N={N},K={K}",
        make=partial(_bench_inputs, bits, M, N, K, group),
        triton=lambda x, weight, dense: wna16_triton(x, weight),
        plain=lambda x, weight, dense: F.linear(x, dense),
        exact=lambda x, weight, dense: wna16_ref(
            x.double(), replace(weight, scale=weight.scale.double())
        ),
        num_bytes=N * K * bits // 8 + 2 * (N * K // group + M * K + M * N),
        num_flops=2 * M * N * K,
        ceiling="memory" if decoding else "matrix",
        goal=0.8 if decoding else None,
    )


def _bench_inputs(
    bits: int, M: int, N: int, K: int, group: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, PackedWeight, torch.Tensor]:
    """Inputs, a packed weight, and the same weight in `dtype`."""
    half = 1 << (bits - 1)
    codes = torch.randint(-half, half, (N, K), device=device, dtype=torch.int8)
    scale = (torch.rand(N, K // group, device=device) * 0.01 + 0.001).to(dtype)
    linear = QuantizedLinear(codes=codes, scale=scale, zero_point=None, bits=bits)
    dense = (codes.view(*scale.shape, group) * scale.unsqueeze(-1)).flatten(1)
    x = torch.randn(M, K, device=device, dtype=dtype)
    return x, pack_weight(linear, dtype, device), dense
