"""Keys and values as codes of 8 bits, with one scale per token and KV head.

Shapes (T tokens, H heads, D head_dim): x (T, H, D), codes (T, H, D), scale (T, H) fp32.
Mathematics, in fp32:
  int8           scale = max|x| / 127, code = clamp(round(x / scale), -127, 127), half to even
  float8_e4m3fn  scale = max|x| / 448, code = clamp(x / scale, -448, 448), to the nearest even
The maximum is over the D values of one token and head; a row of zeros has the smallest normal
scale. A row with a value that is not finite has a scale that is not, and any codes.

In a kernel a float8 pool is one of bytes, which every GPU can load and store. Codes become wider
floats by their bits, since conversions of integers run at a quarter of the speed or less: the bits
of a float16 or bfloat16 with the exponent of 1024 or 128 hold a small integer in their last places.
Rounding to even adds and subtracts 1.5 * 2^23: beside it lie only whole fp32 numbers.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch

from compress.kernels.activations import float8_codes
from compress.kernels.float8 import decode_float8
from compress.kernels.jit import tl, triton
from compress.scheme import FLOAT8, FLOAT8_MAX

CODE_DTYPES = (torch.int8, FLOAT8)
_INT8_MAX = 127.0
_LEAST_SCALE = torch.finfo(torch.float32).tiny

# Attention multiplies its weights by v_scale before it rounds them to the dtype of q. In float16
# the product of two small numbers would lose its last bits or vanish, hence this factor too, taken
# out of the sum again. A power of two, about half the largest code: weight * v_scale * gain is then
# at most half the largest value, so that it cannot overflow where the values themselves do not.
V_GAIN = {torch.int8: 64, FLOAT8: 256}


def quantize_heads(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of `x` (T, H, D) in `dtype`, int8 or float8_e4m3fn, and their scales (T, H)."""
    values = x.float()
    limit = _INT8_MAX if dtype == torch.int8 else FLOAT8_MAX
    scale = values.abs().amax(dim=-1).div_(limit).clamp_(min=_LEAST_SCALE)
    if dtype != torch.int8:
        return float8_codes(values, scale[..., None]), scale
    codes = torch.div(values, scale[..., None]).round_().clamp_(-_INT8_MAX, _INT8_MAX)
    return codes.nan_to_num_(0).to(torch.int8), scale


def codes_in(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`codes`, or plain values, in `dtype`: the same numbers."""
    if codes.dtype == FLOAT8:
        return decode_float8(codes, dtype)
    return codes.to(dtype)


@triton.jit
def decode_codes(codes, dtype: tl.constexpr):
    # A tile of a pool in `dtype`, exactly: itself, the values of float8 bytes, or those of int8.
    if codes.dtype == tl.uint8:
        values = _decode_float8(codes, dtype)
    elif codes.dtype == tl.int8:
        values = _decode_int8(codes, dtype)
    else:
        values = codes
    return values


@triton.jit
def _decode_int8(codes, dtype: tl.constexpr):
    # 1024 + n in float16, 128 + n in bfloat16, for the last 7 bits n; the sign bit stands for -128
    bits = codes.to(tl.int16)
    if dtype == tl.float32:
        values = codes.to(tl.float32)
    elif dtype == tl.float16:
        offset = tl.where(bits < 0, 1152.0, 1024.0).to(dtype)
        values = ((bits & 0x7F) | 0x6400).to(dtype, bitcast=True) - offset
    else:
        offset = tl.where(bits < 0, 256.0, 128.0).to(dtype)
        values = ((bits & 0x7F) | 0x4300).to(dtype, bitcast=True) - offset
    return values


@triton.jit
def _decode_float8(codes, dtype: tl.constexpr):
    # The exponent has 4 bits, biased by 7. That of bfloat16 has 8, biased by 127; that of float16
    # has 5, biased by 15. The product also makes normal numbers of the subnormal ones.
    bits = codes.to(tl.int32)
    if dtype == tl.bfloat16:
        wide = ((bits & 0x80) << 8) | ((bits & 0x7F) << 4)
        value = wide.to(tl.int16).to(tl.bfloat16, bitcast=True) * 1.329227995784916e36  # 2^120
    else:
        wide = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        value = wide.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(dtype)


@triton.jit
def encode_float8(x):
    # Bytes of the float8_e4m3fn nearest to x, fp32; beyond 448 the largest, for NaN NaN.
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448
    # From 2^-6: drop 20 bits of the fraction, half to even, and lower the exponent by 120.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below: multiples of 2^-9, which is the last place of fp32 numbers from 2^14.
    shifted = size.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, subnormal, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def quantize_rows(x, TO_INT8: tl.constexpr):
    # Codes [R, C] of x [R, C] fp32, int8 or the bytes of float8, and their scales [R].
    # As integers magnitudes have the same order, and NaN is the largest of them.
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    limit = tl.full(largest.shape, 127.0 if TO_INT8 else 448.0, tl.float32)
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), limit)
    scale = tl.maximum(scale.to(tl.int32, bitcast=True), 0x00800000)  # the smallest normal
    scale = scale.to(tl.float32, bitcast=True)
    quotient = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    if TO_INT8:
        rounded = (quotient + 12582912.0) - 12582912.0
        rounded = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
        codes = tl.where(quotient == quotient, rounded, 0.0).to(tl.int8)
    else:
        codes = encode_float8(quotient)
    return codes, scale
