"""Weights and inputs of a Linear as they are after rounding, still in float.

What a transform compares its candidates with: the rounding is that of the Linear's own scheme, to
nearest, whatever method rounds the weights in the end.

Legend: O out_features, I in_features.
"""

from dataclasses import replace

import torch

from compress.artifacts import QuantizedLinear
from compress.calib.methods.fp8 import round_fp8
from compress.calib.methods.scales import ScaleSearch, find_scales
from compress.scheme import (
    FLOAT8,
    FLOAT8_MAX,
    ActivationScheme,
    WeightScheme,
    dequantize,
    round_to_codes,
)

_INT8_MAX = 127.0
_CHEAP_STEPS = 2


def cheap_search(search: ScaleSearch) -> ScaleSearch:
    """`search` with fewer steps, for comparing many candidates with each other."""
    return replace(search, steps=min(search.steps, _CHEAP_STEPS))


def round_weight(
    weight: torch.Tensor,
    importance: torch.Tensor,
    scheme: WeightScheme,
    search: ScaleSearch,
    scale_dtype: torch.dtype,
) -> torch.Tensor:
    """`weight` (O, I) fp32 as it is after rounding to nearest, fp32."""
    if scheme.type == "float":
        return dequantize(round_fp8(weight, scheme, scale_dtype))
    scale, zero = find_scales(weight, importance, scheme, search, scale_dtype)
    codes = round_to_codes(weight, scale, zero, scheme.bits)
    return dequantize(QuantizedLinear(codes=codes, scale=scale, zero_point=zero, bits=scheme.bits))


def round_inputs(x: torch.Tensor, scheme: ActivationScheme, absmax: float) -> torch.Tensor:
    """`x` (..., I) fp32 as the kernels see it after rounding to 8 bits, fp32.

    `absmax` is the largest magnitude in calibration, for static schemes.
    """
    width = scheme.group_size or x.shape[-1]
    groups = x.reshape(*x.shape[:-1], -1, width)
    limit = FLOAT8_MAX if scheme.type == "float" else _INT8_MAX
    largest = groups.abs().amax(-1, keepdim=True) if scheme.dynamic else x.new_tensor(absmax)
    step = largest.clamp(min=1e-12) / limit
    scaled = (groups / step).clamp_(-limit, limit)
    rounded = scaled.to(FLOAT8).float() if scheme.type == "float" else scaled.round_()
    return (rounded * step).view(x.shape)
