"""W8A8 linear on a CPU: int8 weights by 8-bit activations, as a product of integers.

Shapes (M tokens, N out_features, K in_features):
  x_codes   (M, K)   uint8    activation code + 128
  codes     (N, K)   int8     symmetric weight codes
  scale     (N, 1)   float    one per weight row
  y         (M, N)   fp32     still to be multiplied by the scales of the tokens
Mathematics: y[m, n] = scale[n] * sum_k (x_codes[m, k] - 128) * codes[n, k], the sum exact in int32.
Contract: `has_int8_product()`, and K at most 65536, so that the sum cannot overflow.

The product is oneDNN's, with the weight prepacked. Its input is unsigned: signed input falls to a
path some hundred times slower. Median microseconds on 2 cores of a Zen 4 (AVX512 VNNI) that others
used as well, cold weights, against `torch._int_mm` and the bfloat16 product, M = 1/4/16/64:

| K x N       | this product        | _int_mm             | bfloat16             |
|-------------|---------------------|---------------------|----------------------|
| 576 x 3072  | 352/326/409/792     | 352/463/546/905     | 630/683/888/1661     |
| 2048 x 8192 | 1418/1386/2000/5887 | 1419/4425/4581/8393 | 3387/3698/5321/12585 |

so it serves every number of rows. It is exact whatever M is: a row has the same bits alone and in a
batch. Where the CPU lacks the instruction, oneDNN saturates sums of pairs at 16 bits and the result
is wrong for large codes: `has_int8_product` therefore tries the largest ones, once.
"""

from dataclasses import dataclass
from functools import cache

import torch

from compress.artifacts import QuantizedLinear

MAX_IN_FEATURES = 65536  # 65536 * 255 * 128 < 2^31
_OFFSET = 128  # zero point of the unsigned activations


def w8a8_ref(x_codes: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Oracle: `w8a8_cpu` in float64; `x_codes` uint8 (M, K), the weight not yet packed."""
    sums = (x_codes.double() - _OFFSET) @ codes.double().T
    return (sums * scale.double().T).float()


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Cpu:
    """An int8 weight in the order of oneDNN: `packed` is private to it, `scale` (N,) fp32."""

    packed: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor  # (N,) int64, all 0


def is_int8_per_channel(linear: QuantizedLinear) -> bool:
    """Whether one scale serves each row of symmetric integer codes: what both products need."""
    return (
        linear.codes.dtype == torch.int8
        and linear.zero_point is None
        and linear.scale.shape == (linear.codes.shape[0], 1)
    )


def pack_int8_cpu(linear: QuantizedLinear) -> Int8Cpu:
    """Repack `linear` for `w8a8_cpu`; ValueError unless it is symmetric, per channel, narrow."""
    if not is_int8_per_channel(linear):
        raise ValueError("the int8 CPU kernel needs symmetric int8 codes, one scale per row")
    out_features, in_features = linear.codes.shape
    if in_features > MAX_IN_FEATURES:
        raise ValueError(f"the int8 CPU kernel takes K <= {MAX_IN_FEATURES}, got {in_features}")
    return Int8Cpu(
        packed=torch.ops.onednn.qlinear_prepack(linear.codes.contiguous(), None),
        scale=linear.scale.float().flatten(),
        zero_point=torch.zeros(out_features, dtype=torch.int64),
    )


def to_uint8(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes for `w8a8_cpu` of signed ones held in fp32, which are overwritten."""
    return codes.add_(_OFFSET).to(torch.uint8)


def w8a8_cpu(x_codes: torch.Tensor, weight: Int8Cpu) -> torch.Tensor:
    """y (M, N) fp32, see the module docstring; ValueError unless `x_codes` is uint8."""
    if x_codes.dtype != torch.uint8:
        raise ValueError(f"x_codes must be uint8 for the int8 CPU kernel, got {x_codes.dtype}")
    y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        x_codes, 1.0, _OFFSET, weight.packed, weight.scale, weight.zero_point, None,
        1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return y


@cache
def has_int8_product() -> bool:
    """Whether there is such a product, and this CPU multiplies the largest codes exactly."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return False
    extreme = torch.full((4, 64), 127, dtype=torch.int8)
    extreme[1::2] = -128
    linear = QuantizedLinear(codes=extreme, scale=torch.ones(4, 1), zero_point=None, bits=8)
    x_codes = torch.tensor([[255], [0]], dtype=torch.uint8).expand(2, 64).contiguous()
    return torch.equal(
        w8a8_cpu(x_codes, pack_int8_cpu(linear)), w8a8_ref(x_codes, extreme, linear.scale)
    )
