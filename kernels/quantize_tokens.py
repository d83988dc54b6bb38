"""Quantize the rows of x to int8, one scale per row, optionally after an RMSNorm: one pass over x.

Shapes (T tokens, K in_features):
  x       (T, K)  fp16 | bf16 | fp32   contiguous rows, which may lie apart
  weight  (K,)    dtype of x, or None: the norm in front, as `rms_norm` has it
  codes   (T, K)  int8, contiguous
  scale   (T,)    fp32
Mathematics: that of `activations.py`: scale = max|x| / 127.5, code = clamp(round(x / scale), -128,
127), half to even, in fp32. With a norm, x is what `rms_norm` returns, rounded to its dtype.
Contract: a row depends on that row only. A row of zeros has the smallest normal scale. A row with a
value that is not finite has a scale that is not, and any codes.

Triton rounds to even by adding and subtracting 1.5 * 2^23: beside it lie only whole fp32 numbers.

Xiao et al., SmoothQuant, arXiv:2211.10438, section 3 (per-token activations).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch

from compress.kernels.activations import dynamic_scale, int8_codes
from compress.kernels.jit import FLOAT_DTYPES, CompileCase, check_rows, check_tensor, tl, triton
from compress.kernels.rms_norm import rms_norm_ref, rms_norm_torch
from compress.scheme import ActivationScheme

# Largest K -> num_warps; the block is the next power of two. Not yet timed on a card.
_TILES: tuple[tuple[int, int], ...] = ((1024, 4), (4096, 8), (32768, 16))
_PER_TOKEN = ActivationScheme(type="int", dynamic=True)


def quantize_tokens_ref(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle: `quantize_tokens` with the norm in float64."""
    return _quantize(x if weight is None else rms_norm_ref(x, weight, eps))


def _quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = x.float()
    scale = dynamic_scale(values, _PER_TOKEN)
    return int8_codes(values, scale).nan_to_num(0).to(torch.int8), scale.flatten()


# fmt: off
@triton.jit
def _quantize_tokens_kernel(
    x_ptr, weight_ptr, codes_ptr, scale_ptr,
    width, eps, least_scale,
    stride_xt,
    HAS_NORM: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # fmt: on
    # one program = one row
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_K)
    mask = offs < width
    x = tl.load(x_ptr + row * stride_xt + offs, mask=mask, other=0.0).to(tl.float32)  # [BK]
    if HAS_NORM:
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)  # [BK]
        normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
        x = (normed.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    # As integers magnitudes have the same order, and NaN is the largest of them.
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    largest = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, 127.5)
    scale = tl.where(scale < least_scale, least_scale, scale)
    tl.store(scale_ptr + row, scale)
    quotient = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    code = (quotient + 12582912.0) - 12582912.0
    code = tl.minimum(tl.maximum(code, -128.0), 127.0)
    code = tl.where(quotient == quotient, code, 0.0)
    tl.store(codes_ptr + row * width + offs, code.to(tl.int8), mask=mask)


def quantize_tokens_triton(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton `quantize_tokens`; shapes and contract in the module docstring, ValueError if broken.

    `eps` belongs to the norm and is not read without one.
    """
    check_tensor("x", x, shape=(None, None), dtypes=FLOAT_DTYPES)
    check_rows("x", x)
    num_tokens, width = x.shape
    if not 0 < width <= _TILES[-1][0]:
        raise ValueError(f"x must have 1 to {_TILES[-1][0]} columns, got {width}")
    if weight is not None:
        check_tensor("weight", weight, shape=(width,), dtypes=(x.dtype,))
        weight = weight.contiguous()
    codes = torch.empty((num_tokens, width), dtype=torch.int8, device=x.device)
    scale = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    if num_tokens:
        num_warps = next(warps for largest, warps in _TILES if width <= largest)
        least_scale = torch.finfo(torch.float32).tiny
        _quantize_tokens_kernel[(num_tokens,)](
            x, x if weight is None else weight, codes, scale, width, eps, least_scale, x.stride(0),
            HAS_NORM=weight is not None, BLOCK_K=triton.next_power_of_2(width), num_warps=num_warps,
        )  # fmt: skip
    return codes, scale


def quantize_tokens_torch(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch `quantize_tokens`: the norm, then one operation after the other."""
    return _quantize(x if weight is None else rms_norm_torch(x, weight, eps))


def compile_cases() -> list[CompileCase]:
    """Every row of the tile table at its largest K, with and without the norm."""
    types = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "codes_ptr": "*i8", "scale_ptr": "*fp32"}
    return [
        CompileCase(
            kernel=_quantize_tokens_kernel,
            label=f"K<={width},{'norm' if has_norm else 'plain'}",
            types=types | {"eps": "fp32", "least_scale": "fp32"},
            constexprs={"HAS_NORM": has_norm, "BLOCK_K": width},
            divisible=("width", "stride_xt"),
            num_warps=num_warps,
            meant=("load16",),
        )
        for width, num_warps in _TILES
        for has_norm in (False, True)
    ]
