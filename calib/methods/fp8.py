"""Float8 weights: each value cast to e4m3fn after division by a scale.

    s = absmax / 448       per output row, or per square block of `block_size` rows and columns

e4m3fn has a relative step of 1/8 to 1/16 over 15 binades above its subnormals, so the scale only
has to keep the largest weight in range; searching smaller ones gains nothing worth its time.

Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433, table 1.
"""

import torch
import torch.nn.functional as F

from compress.artifacts import QuantizedLinear
from compress.calib.methods.scales import storable
from compress.scheme import FLOAT8_MAX, WeightScheme, round_to_float8


def round_fp8(
    weight: torch.Tensor, scheme: WeightScheme, scale_dtype: torch.dtype
) -> QuantizedLinear:
    """Quantize `weight` (O, I) fp32; blocks at the edge may be partial."""
    scale = storable(_absmax(weight, scheme.block_size) / FLOAT8_MAX, scale_dtype)
    return QuantizedLinear(
        codes=round_to_float8(weight, scale, scheme.block_size),
        scale=scale,
        zero_point=None,
        bits=scheme.bits,
        block_size=scheme.block_size,
    )


def _absmax(weight: torch.Tensor, block_size: int | None) -> torch.Tensor:
    """Largest magnitude of each row (O, 1) or block (ceil(O / B), ceil(I / B))."""
    if block_size is None:
        return weight.abs().amax(1, keepdim=True)
    rows, columns = weight.shape
    padded = F.pad(weight.abs(), (0, -columns % block_size, 0, -rows % block_size))
    tall, wide = (size // block_size for size in padded.shape)
    return padded.view(tall, block_size, wide, block_size).amax((1, 3))
