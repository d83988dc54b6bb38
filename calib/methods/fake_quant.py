"""The weights of a Linear as they are after rounding, still in float.

What a transform compares its candidates with: the rounding is that of the Linear's own scheme, to
nearest, whatever method rounds the weights in the end.

Legend: O out_features, I in_features.
"""

from dataclasses import replace

import torch

from compress.calib.methods.rtn import round_to_nearest
from compress.calib.methods.scales import ScaleSearch
from compress.scheme import WeightScheme, dequantize

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
    return dequantize(round_to_nearest(weight, importance, scheme, search, scale_dtype))
