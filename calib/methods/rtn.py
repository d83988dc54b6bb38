"""Round to nearest: every weight goes to the code nearest to it, with no regard to the others."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict

from compress.artifacts import QuantizedLinear
from compress.calib.collectors import InputStatistics
from compress.calib.methods.fp8 import round_fp8
from compress.calib.methods.scales import ScaleSearch, find_scales
from compress.scheme import WeightScheme, round_to_codes


@dataclass(frozen=True, kw_only=True, slots=True)
class RTN:
    """Round to nearest, with the scales of `scale`."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    kind: Literal["rtn"] = "rtn"
    scale: ScaleSearch = field(default_factory=ScaleSearch)


def round_rtn(
    weight: torch.Tensor,
    statistics: InputStatistics,
    scheme: WeightScheme,
    method: RTN,
    scale_dtype: torch.dtype,
) -> tuple[QuantizedLinear, str | None]:
    """Codes of `weight` (O, I) fp32, and None: there is nothing to fall back to."""
    linear = round_to_nearest(weight, statistics.mean_square, scheme, method.scale, scale_dtype)
    return linear, None


def round_to_nearest(
    weight: torch.Tensor,
    importance: torch.Tensor,
    scheme: WeightScheme,
    search: ScaleSearch,
    scale_dtype: torch.dtype,
) -> QuantizedLinear:
    """`weight` (O, I) fp32 by the scales of `search`, for columns of `importance` (I,) fp32."""
    if scheme.type == "float":
        return round_fp8(weight, scheme, scale_dtype)
    scale, zero = find_scales(weight, importance, scheme, search, scale_dtype)
    codes = round_to_codes(weight, scale, zero, scheme.bits)
    return QuantizedLinear(codes=codes, scale=scale, zero_point=zero, bits=scheme.bits)
