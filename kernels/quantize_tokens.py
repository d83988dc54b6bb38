"""Quantize the rows of x to int8, one scale per row, optionally after an RMSNorm: one pass over x.

Shapes (T tokens, K in_features):
  x         (T, K)  fp16 | bf16 | fp32   contiguous rows, which may lie apart
  weight    (K,)    dtype of x, or None: the norm in front, as `rms_norm` has it
  residual  (T, K)  dtype of x, or None: added in front of the norm, as `add_rms_norm` has it
  codes     (T, K)  int8, contiguous
  scale     (T,)    fp32
  summed    (T, K)  dtype of x, contiguous: x + residual, returned with a residual only
Mathematics: that of `activations.py`: scale = max|x| / 127.5, code = clamp(round(x / scale), -128,
127), half to even, in fp32. With a norm, x is what `rms_norm` returns, rounded to its dtype; with a
residual, what `add_rms_norm` returns. Codes, scales and sums have the bits of the two steps.
Contract: a row depends on that row only. A row of zeros has the smallest normal scale. A row with a
value that is not finite has a scale that is not, and any codes.

Triton rounds to even by adding and subtracting 1.5 * 2^23: beside it lie only whole fp32 numbers.
The norm has the bits of `rms_norm` because its registers are laid out in the same way: the tile is
`row_tile`, and codes are stored as many at a time as values of x are loaded. Left to itself the
compiler would load for stores of 16 codes, and sum squares in another order.

Xiao et al., SmoothQuant, arXiv:2211.10438, section 3 (per-token activations).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from functools import partial
from typing import Any

import torch

from compress.kernels.activations import dynamic_scale, int8_codes
from compress.kernels.jit import BenchCase, CompileCase, tl, triton
from compress.kernels.rms_norm import (
    add_rms_norm_ref,
    add_rms_norm_torch,
    aligned_rows,
    check_norm,
    normalise,
    rms_norm_ref,
    rms_norm_torch,
    row_tile,
)
from compress.scheme import ActivationScheme

_PER_TOKEN = ActivationScheme(type="int", dynamic=True)
LEAST_SCALE = torch.finfo(torch.float32).tiny


def quantize_tokens_ref(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    *,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Oracle: `quantize_tokens` with sum and norm in float64."""
    if weight is None:
        return quantize_rows(x)
    if residual is None:
        return quantize_rows(rms_norm_ref(x, weight, eps, unit_offset=unit_offset))
    y, summed = add_rms_norm_ref(x, residual, weight, eps, unit_offset=unit_offset)
    return *quantize_rows(y), summed


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of `x`, in torch."""
    values = x.float()
    scale = dynamic_scale(values, _PER_TOKEN)
    return int8_codes(values, scale).nan_to_num(0).to(torch.int8), scale.flatten()


@triton.jit
def int8_rows(x, least_scale):
    """Codes (as fp32) and scales [R, 1] of the rows `x` [R, C], fp32, zero where they end."""
    # As integers magnitudes have the same order, and NaN is the largest of them.
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1, keep_dims=True)
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 127.5)
    scale = tl.where(scale < least_scale, least_scale, scale)
    quotient = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    code = (quotient + 12582912.0) - 12582912.0
    code = tl.minimum(tl.maximum(code, -128.0), 127.0)
    return tl.where(quotient == quotient, code, 0.0), scale


# fmt: off
@triton.jit
def _quantize_tokens_kernel(
    x_ptr, residual_ptr, weight_ptr, codes_ptr, scale_ptr, summed_ptr,
    num_rows, width, eps, least_scale,
    stride_xt, stride_rt,
    HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    VECTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    # one program = ROWS rows
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offs = tl.arange(0, COLUMNS)[None, :]
    mask = (rows < num_rows) & (offs < width)
    x = tl.load(x_ptr + rows * stride_xt + offs, mask=mask, other=0.0).to(tl.float32)  # [R, C]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + rows * stride_rt + offs, mask=mask, other=0.0)
        summed = (x + residual.to(tl.float32)).to(dtype)
        tl.store(summed_ptr + rows * width + offs, summed, mask=mask)
        x = summed.to(tl.float32)
    if HAS_NORM:
        x = normalise(x, weight_ptr, offs, width, eps, dtype, UNIT_OFFSET)
    codes, scale = int8_rows(x, least_scale)
    tl.store(scale_ptr + rows, scale, mask=rows < num_rows)
    code_offs = tl.max_contiguous(rows * width + offs, [1, VECTOR])
    tl.store(codes_ptr + code_offs, codes.to(tl.int8), mask=mask)


def quantize_tokens_triton(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    *,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Triton `quantize_tokens`: (codes, scale), and with a residual (codes, scale, summed).

    Shapes and contract in the module docstring, ValueError if broken. `eps` and `unit_offset`
    belong to the norm and are not read without one.
    """
    check_norm(x, residual, weight)
    _check_residual(weight, residual)
    num_rows, width = x.shape
    codes = torch.empty((num_rows, width), dtype=torch.int8, device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    summed = None if residual is None else torch.empty_like(codes, dtype=x.dtype)
    if num_rows:
        constexprs, num_warps = _variant(
            width, x.dtype, weight is not None, residual is not None, unit_offset
        )
        x, stride_x = aligned_rows(x)
        addend, stride_r = (x, stride_x) if residual is None else aligned_rows(residual)
        _quantize_tokens_kernel[(triton.cdiv(num_rows, constexprs["ROWS"]),)](
            x, addend, x if weight is None else weight.contiguous(),
            codes, scale, x if summed is None else summed,
            num_rows, width, eps, LEAST_SCALE, stride_x, stride_r,
            **constexprs, num_warps=num_warps,
        )  # fmt: skip
    return (codes, scale) if summed is None else (codes, scale, summed)


def _check_residual(weight: torch.Tensor | None, residual: torch.Tensor | None) -> None:
    if residual is not None and weight is None:
        raise ValueError("residual needs weight: it is added in front of the norm")


def _variant(
    width: int, dtype: torch.dtype, has_norm: bool, has_residual: bool, unit_offset: bool
) -> tuple[dict[str, Any], int]:
    """Compile-time constants and num_warps for rows of `width`."""
    tile = row_tile(width)
    constexprs = {
        "HAS_NORM": has_norm,
        "HAS_RESIDUAL": has_residual,
        "UNIT_OFFSET": has_norm and unit_offset,
        "VECTOR": 16 // dtype.itemsize,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
    }
    return constexprs, tile.num_warps


def quantize_tokens_torch(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    *,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Torch `quantize_tokens`: sum and norm, then one operation after the other."""
    _check_residual(weight, residual)
    if weight is None:
        return quantize_rows(x)
    if residual is None:
        return quantize_rows(rms_norm_torch(x, weight, eps, unit_offset=unit_offset))
    y, summed = add_rms_norm_torch(x, residual, weight, eps, unit_offset=unit_offset)
    return *quantize_rows(y), summed


def compile_cases() -> list[CompileCase]:
    """Every tile of `row_tile` at its largest K: plain, with the norm, with the residual."""
    types = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "summed_ptr"), "*bf16")
    types |= {"codes_ptr": "*i8", "scale_ptr": "*fp32", "eps": "fp32", "least_scale": "fp32"}
    options = {
        "plain": (False, False, False),
        "norm": (True, False, False),
        "norm 1+w": (True, False, True),
        "add+norm": (True, True, False),
        "add+norm 1+w": (True, True, True),
    }
    cases = []
    for width in (256, 1024, 4096, 32768):
        for name, option in options.items():
            constexprs, num_warps = _variant(width, torch.bfloat16, *option)
            cases.append(
                CompileCase(
                    kernel=_quantize_tokens_kernel,
                    label=f"K<={width},{name}",
                    types=types,
                    constexprs=constexprs,
                    divisible=("width", "stride_xt", "stride_rt"),
                    num_warps=num_warps,
                    meant=("load16",),
                )
            )
    return cases


def bench_cases() -> list[BenchCase]:
    """Inputs of the products of an 8B Llama: plain, and with the residual and the norm in front."""

    def make(num_rows, width, fused, device, dtype):
        xs = [torch.randn(num_rows, width, device=device).to(dtype) for _ in range(1 + fused)]
        return (*xs, (torch.rand(width, device=device) + 0.5).to(dtype)) if fused else tuple(xs)

    def plain(x):
        scale = (x.float().abs().amax(-1) / 127.5).clamp(min=LEAST_SCALE)
        codes = (x.float() / scale[:, None]).round().clamp(-128, 127).to(torch.int8)
        return codes, scale

    def plain_fused(x, residual, weight):
        summed = x + residual
        normed = summed.float()
        normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + 1e-5)
        return *plain(normed.to(x.dtype) * weight), summed

    cases = []
    for num_rows, goal in ((16384, 0.85), (64, None)):
        shape = f"{num_rows}x4096"
        cases.append(
            BenchCase(
                label=f"quantize_tokens {shape}",
                make=partial(make, num_rows, 4096, False),
                triton=quantize_tokens_triton,
                plain=plain,
                exact=quantize_tokens_ref,
                num_bytes=(2 + 1) * num_rows * 4096,
                num_flops=4 * num_rows * 4096,
                ceiling="memory",
                goal=goal,
            )
        )
        cases.append(
            BenchCase(
                label=f"quantize_tokens add+norm {shape}",
                make=partial(make, num_rows, 4096, True),
                triton=lambda x, r, w: quantize_tokens_triton(x, w, 1e-5, r),
                plain=plain_fused,
                exact=lambda x, r, w: quantize_tokens_ref(x, w, 1e-5, r),
                num_bytes=(2 + 2 + 2 + 1) * num_rows * 4096,
                num_flops=9 * num_rows * 4096,
                ceiling="memory",
                goal=goal,
            )
        )
    return cases
