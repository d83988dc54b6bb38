"""Quantize the rows of x to float8_e4m3fn, one scale per row or per group of its columns.

Shapes (T tokens, K in_features, G = K / group_size groups, 1 without groups):
  x       (T, K)  fp16 | bf16 | fp32   contiguous rows, which may lie apart
  weight  (K,)    dtype of x, or None: the norm in front, as `rms_norm` has it
  codes   (T, K)  float8_e4m3fn, contiguous
  scale   (T,)    fp32; (T, G) contiguous with groups
Mathematics: that of `activations.py`: scale = max|x| / 448, code = x / scale clamped to +-448, to
the nearest float8, half to even, in fp32. With a norm, x is what `rms_norm` returns, rounded to its
dtype.
Contract: a row depends on that row only, a group on that group only (with a norm: on its row).
Zeros have the smallest normal scale. A group with a value that is not finite has a scale that is
not; codes times scale are then NaN. A group, and with a norm a row, has at most 32768 columns,
counted in powers of two.

Triton converts to this format only from sm_89 on. The bytes are therefore made by integer
arithmetic, the same on every chip: a normal number by dropping 20 bits of the mantissa with
rounding, a subnormal one by adding 2^14, beside which fp32 numbers are 2^-9 apart, as the float8
ones are below 2^-6.

DeepSeek-AI, DeepSeek-V3, arXiv:2412.19437, section 3.3.2 (groups of 128 channels per token).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import partial
from typing import Any

import torch

from compress.kernels.activations import dynamic_scale, float8_codes
from compress.kernels.jit import (
    FLOAT_DTYPES,
    BenchCase,
    CompileCase,
    check_rows,
    check_tensor,
    tl,
    triton,
)
from compress.kernels.kv_codes import encode_float8
from compress.kernels.rms_norm import rms_norm_ref, rms_norm_torch
from compress.scheme import FLOAT8, ActivationScheme

# Largest number of values in the block of one program -> num_warps. Not yet timed on a card.
_TILES: tuple[tuple[int, int], ...] = ((1024, 4), (4096, 8), (32768, 16))
MAX_WIDTH = _TILES[-1][0]  # columns of a group, and of x with one scale per row
_VALUES_PER_PROGRAM = 2048  # of groups without a norm, which need not know their row
_LEAST_SCALE = torch.finfo(torch.float32).tiny


def quantize_float8_ref(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 0.0, *, group_size: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle: `quantize_float8` with the norm in float64."""
    return _quantize(x if weight is None else rms_norm_ref(x, weight, eps), group_size)


def _quantize(x: torch.Tensor, group_size: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    values = x.float()
    scale = dynamic_scale(values, ActivationScheme(type="float", group_size=group_size))
    codes = float8_codes(values.view(*scale.shape, -1), scale[..., None]).view(x.shape)
    return codes, scale if group_size else scale.flatten()


# fmt: off
@triton.jit
def _quantize_float8_kernel(
    x_ptr, weight_ptr, codes_ptr, scale_ptr,
    num_groups, group_size, eps, least_scale,
    stride_xt,
    HAS_NORM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
):
    # fmt: on
    # one program = BLOCK_G groups of one row; with a norm all of them
    row = tl.program_id(0).to(tl.int64)
    offs_g = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    offs_s = tl.arange(0, BLOCK_S)
    mask_g = offs_g < num_groups
    mask = mask_g[:, None] & (offs_s < group_size)[None, :]
    offs = offs_g[:, None] * group_size + offs_s[None, :]
    x = tl.load(x_ptr + row * stride_xt + offs, mask=mask, other=0.0).to(tl.float32)  # [BG, BS]
    if HAS_NORM:
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)  # [BG, BS]
        squares = tl.sum(tl.sum(x * x, axis=1), axis=0)
        normed = x * tl.rsqrt(squares / (num_groups * group_size) + eps)
        x = (normed.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    # As integers magnitudes have the same order, and NaN is the largest of them.
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # [BG]
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 448.0)
    scale = tl.where(scale < least_scale, least_scale, scale)
    tl.store(scale_ptr + row * num_groups + offs_g, scale, mask=mask_g)
    code = encode_float8(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)))
    width = num_groups * group_size
    tl.store(codes_ptr + row * width + offs, code.to(tl.uint8), mask=mask)


def quantize_float8_triton(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 0.0, *, group_size: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton `quantize_float8`; shapes and contract in the module docstring, ValueError if broken.

    `eps` belongs to the norm and is not read without one.
    """
    check_tensor("x", x, shape=(None, None), dtypes=FLOAT_DTYPES)
    check_rows("x", x)
    num_tokens, width = x.shape
    if not width or (width > MAX_WIDTH and not (weight is None and group_size)):
        raise ValueError(f"x must have 1 to {MAX_WIDTH} columns, got {width}")
    group = width if group_size is None else group_size
    if group < 1 or width % group:
        raise ValueError(f"group_size must divide the {width} columns of x, got {group_size}")
    if weight is not None:
        check_tensor("weight", weight, shape=(width,), dtypes=(x.dtype,))
        if weight.device != x.device:
            raise ValueError(f"weight must be on {x.device} as x is, got {weight.device}")
        weight = weight.contiguous()
    num_groups = width // group
    constexprs, num_warps = _variant(num_groups, group, has_norm=weight is not None)
    codes = torch.empty((num_tokens, width), dtype=FLOAT8, device=x.device)
    scale = torch.empty((num_tokens, num_groups), dtype=torch.float32, device=x.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(num_groups, constexprs["BLOCK_G"]))
        _quantize_float8_kernel[grid](
            x, x if weight is None else weight, codes.view(torch.uint8), scale,
            num_groups, group, eps, _LEAST_SCALE, x.stride(0), **constexprs, num_warps=num_warps,
        )  # fmt: skip
    return codes, scale if group_size else scale.flatten()


def _variant(num_groups: int, group: int, *, has_norm: bool) -> tuple[dict[str, Any], int]:
    """Compile-time constants and num_warps for these rows; ValueError if they are too wide."""
    block_g, block_s = triton.next_power_of_2(num_groups), triton.next_power_of_2(group)
    if not has_norm:
        block_g = min(block_g, max(_VALUES_PER_PROGRAM // block_s, 1))
    values = block_g * block_s
    if values > MAX_WIDTH:
        raise ValueError(f"x is too wide: {num_groups} groups of {group} columns")
    num_warps = next(warps for largest, warps in _TILES if values <= largest)
    return {"HAS_NORM": has_norm, "BLOCK_G": block_g, "BLOCK_S": block_s}, num_warps


def quantize_float8_torch(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 0.0, *, group_size: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch `quantize_float8`: the norm, then one operation after the other."""
    return _quantize(x if weight is None else rms_norm_torch(x, weight, eps), group_size)


def compile_cases() -> list[CompileCase]:
    """Rows as wide as the tile table allows, and groups of 128, with and without the norm."""
    types = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "codes_ptr": "*u8", "scale_ptr": "*fp32"}
    types |= {"eps": "fp32", "least_scale": "fp32"}
    cases = []
    sizes = [(1, width) for width, _ in _TILES] + [(width // 128, 128) for width, _ in _TILES]
    for num_groups, group in sizes:
        for has_norm in (False, True):
            constexprs, num_warps = _variant(num_groups, group, has_norm=has_norm)
            cases.append(
                CompileCase(
                    kernel=_quantize_float8_kernel,
                    label=f"groups={num_groups}x{group},{'norm' if has_norm else 'plain'}",
                    types=types,
                    constexprs=constexprs,
                    divisible=("group_size", "stride_xt"),
                    num_warps=num_warps,
                    meant=("load16",),
                )
            )
    return cases


def bench_cases() -> list[BenchCase]:
    """4096 tokens of hidden size 4096: per token behind a norm, and in groups of 128 without."""
    return [_bench_case(4096, 4096, None, has_norm=True), _bench_case(4096, 4096, 128)]


def _bench_case(
    num_tokens: int, width: int, group_size: int | None, *, has_norm: bool = False
) -> BenchCase:
    def make(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        x = torch.randn(num_tokens, width, device=device, dtype=dtype)
        weight = torch.rand(width, device=device, dtype=dtype) + 0.5
        return x, weight if has_norm else None, 1e-5

    num_scales = num_tokens * (width // group_size if group_size else 1)
    return BenchCase(
        label=f"T={num_tokens},K={width},group={group_size}" + ",norm" * has_norm,
        make=make,
        triton=partial(quantize_float8_triton, group_size=group_size),
        plain=partial(quantize_float8_torch, group_size=group_size),
        exact=partial(quantize_float8_ref, group_size=group_size),
        num_bytes=num_tokens * width * 3 + 4 * num_scales + 2 * width * has_norm,
        num_flops=0,
        ceiling="memory",
        goal=0.8,
    )
