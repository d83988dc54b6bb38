"""What a Linear is quantized to, and the arithmetic between weights and codes.

A b-bit code is a signed integer q in [-2^(b-1), 2^(b-1)-1]. One scale s (and, for asymmetric
schemes, one integer zero point z) serves a group of `group_size` consecutive input columns of one
output row:

    q = clamp(round(w / s + z), qmin, qmax)          w ~ (q - z) * s

Rounding is half to even. Scales may be negative: with symmetric codes the range is one step longer
below zero, and the sign chooses which side of the weights gets it.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict

from compress.artifacts import QuantizedLinear

PER_CHANNEL = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightScheme:
    """Integer weights. `group_size` -1 is one group per output row (per channel)."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    bits: Literal[2, 3, 4, 8] = 4
    group_size: int = 64
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            raise ValueError(
                f"group_size must be positive or -1 (per channel), got {self.group_size}"
            )

    @property
    def label(self) -> str:
        """Short name for tables, such as `W4A16 g64 sym`."""
        group = "channel" if self.group_size == PER_CHANNEL else f"g{self.group_size}"
        return f"W{self.bits}A16 {group} {'sym' if self.symmetric else 'asym'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantScheme:
    """What is quantized in every Linear that the plan selects."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    weights: WeightScheme = WeightScheme()


def code_range(bits: int) -> tuple[int, int]:
    """Smallest and largest signed code of `bits` bits."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def group_width(scheme: WeightScheme, in_features: int) -> int:
    """Columns per group for a Linear with `in_features` inputs; ValueError if no whole groups."""
    width = in_features if scheme.group_size == PER_CHANNEL else scheme.group_size
    if in_features % width:
        raise ValueError(f"group_size {width} does not divide in_features {in_features}")
    return width


def round_to_codes(
    weight: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, bits: int
) -> torch.Tensor:
    """Round `weight` (out, in) fp32 to signed codes (out, in) int8.

    `scale` (out, num_groups), any float dtype, already in the dtype it is stored in; `zero_point`
    (out, num_groups) int8 or None for symmetric codes.
    """
    out_features, num_groups = scale.shape
    grouped = weight.float().view(out_features, num_groups, -1)
    codes = grouped / scale.float()[..., None]
    if zero_point is not None:
        codes += zero_point.float()[..., None]
    return codes.round_().clamp_(*code_range(bits)).to(torch.int8).view_as(weight)


def dequantize(linear: QuantizedLinear, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight (out, in) that `linear` stands for: (codes - zero_point) * scale, in fp32 math."""
    out_features, num_groups = linear.scale.shape
    codes = linear.codes.view(out_features, num_groups, -1).float()
    if linear.zero_point is not None:
        codes = codes - linear.zero_point.float()[..., None]
    return (codes * linear.scale.float()[..., None]).view(out_features, -1).to(dtype)
