"""The weights of a Linear as they are after rounding, still in float.

What a transform compares its candidates with: the rounding is that of the Linear's own scheme, to
nearest, whatever method rounds the weights in the end.

Legend: O out_features, I in_features.
"""

from dataclasses import replace

import torch

from compress.artifacts import QuantizedLinear
from compress.calib.methods.fp8 import round_fp8
from compress.calib.methods.scales import ScaleSearch, find_scales
from compress.scheme import WeightScheme, dequantize, round_to_codes

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
