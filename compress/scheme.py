"""What a Linear is quantized to, and the arithmetic between weights and codes.

A b-bit integer code is a signed q in [-2^(b-1), 2^(b-1)-1]. One scale s (and, for asymmetric
schemes, one integer zero point z) serves a group of `group_size` consecutive input columns of one
output row:

    q = clamp(round(w / s + z), qmin, qmax)          w ~ (q - z) * s

Rounding is half to even. Scales may be negative: with symmetric codes the range is one step longer
below zero, and the sign chooses which side of the weights gets it.

A float code is w / s cast to float8_e4m3fn (largest value 448, round to nearest even); one scale
serves an output row, or a square block of `block_size` rows and columns.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict

from compress.artifacts import QuantizedLinear

PER_CHANNEL = -1
FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
_BITS = range(2, 9)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightScheme:
    """Integer weights, or float8 ones. `group_size` -1 is one group per output row (per channel).

    `block_size` is for float weights only: square blocks that share a scale, instead of rows.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    type: Literal["int", "float"] = "int"
    bits: int = 4
    group_size: int = 64
    symmetric: bool = True
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in _BITS:
            raise ValueError(f"bits must be 2 to 8, got {self.bits}")
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            raise ValueError(
                f"group_size must be positive or -1 (per channel), got {self.group_size}"
            )
        if self.type == "int":
            if self.block_size is not None:
                raise ValueError("block_size is for type float; integer weights have group_size")
        elif (self.bits, self.group_size, self.symmetric) != (8, PER_CHANNEL, True):
            raise ValueError("type float needs bits 8, group_size -1 and symmetric true")
        elif self.block_size is not None and self.block_size < 1:
            raise ValueError(f"block_size must be positive, got {self.block_size}")

    @property
    def label(self) -> str:
        """Short name for tables, such as `W4 g64 sym`."""
        if self.type == "float":
            blocks = f"block {self.block_size}" if self.block_size else "channel"
            return f"WFP8 {blocks}"
        group = "channel" if self.group_size == PER_CHANNEL else f"g{self.group_size}"
        return f"W{self.bits} {group} {'sym' if self.symmetric else 'asym'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationScheme:
    """Inputs of Linears in 8 bits, symmetric.

    Dynamic: each token is scaled by its own largest value (or, with `group_size`, each group of
    that many of its channels). Static: one scale per Linear, from calibration.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    type: Literal["int", "float"] = "int"
    dynamic: bool = True
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.group_size is not None and (self.group_size < 1 or not self.dynamic):
            raise ValueError(
                "activations: group_size must be positive and needs dynamic true,"
                f" got {self.group_size}"
            )

    @property
    def granularity(self) -> str:
        """What shares a scale, in a word."""
        if not self.dynamic:
            return "static"
        return f"token g{self.group_size}" if self.group_size else "token"


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheScheme:
    """Keys and values in float8_e4m3fn, with one calibrated scale per layer or per KV head."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    strategy: Literal["tensor", "head"] = "tensor"

    @property
    def label(self) -> str:
        """Short name for tables."""
        return f"KV FP8 per {self.strategy}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScheme:
    """How one Linear is stored and computed: its weights, and its inputs (None: in float)."""

    weights: WeightScheme
    activations: ActivationScheme | None = None

    @property
    def label(self) -> str:
        """Short name for tables, such as `W4A16 g64 sym` or `W8A8 channel sym, token`."""
        bits, _, rest = self.weights.label.partition(" ")
        if self.activations is None:
            return f"{bits}A16 {rest}"
        kind = "AFP8" if self.activations.type == "float" else "A8"
        return f"{bits}{kind} {rest}, {self.activations.granularity}"


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingScheme:
    """The embedding and the head, which in small models are most of the bytes: 8 bits per row."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    bits: int = 8
    group_size: int = PER_CHANNEL
    symmetric: bool = True

    def __post_init__(self) -> None:
        _ = self.weights

    @property
    def weights(self) -> WeightScheme:
        """The scheme of the rows."""
        return WeightScheme(bits=self.bits, group_size=self.group_size, symmetric=self.symmetric)


@dataclass(frozen=True, kw_only=True, slots=True)
class Override:
    """Other weights for the Linears that `targets` name: module names or `re:` patterns."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    targets: tuple[str, ...]
    weights: WeightScheme

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError("targets must name at least one Linear or pattern")


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantScheme:
    """What is quantized in every Linear that the plan selects, and in the KV cache."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    weights: WeightScheme = WeightScheme()
    activations: ActivationScheme | None = None
    kv_cache: KVCacheScheme | None = None
    overrides: tuple[Override, ...] = ()


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


def round_to_float8(
    weight: torch.Tensor, scale: torch.Tensor, block_size: int | None
) -> torch.Tensor:
    """Codes (out, in) float8_e4m3fn of `weight` (out, in) fp32; `scale` as in QuantizedLinear."""
    scaled = weight.float() / spread_scale(scale, weight.shape, block_size)
    return scaled.clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)


def spread_scale(
    scale: torch.Tensor, shape: tuple[int, ...] | torch.Size, block_size: int | None
) -> torch.Tensor:
    """`scale` repeated to fp32 of a kind that broadcasts against a weight of `shape` (out, in)."""
    rows, columns = shape
    if block_size is not None:
        block_size = min(block_size, max(rows, columns))  # one block may be all there is
        tall = scale.float().repeat_interleave(block_size, 0)[:rows]
        return tall.repeat_interleave(block_size, 1)[:, :columns]
    return scale.float().repeat_interleave(columns // scale.shape[1], 1)


def dequantize(linear: QuantizedLinear, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weight (out, in) that `linear` stands for: (codes - zero_point) * scale, in fp32 math."""
    codes = linear.codes.float()
    if linear.block_size is not None:
        return (codes * spread_scale(linear.scale, codes.shape, linear.block_size)).to(dtype)
    grouped = codes.view(*linear.scale.shape, -1)
    if linear.zero_point is not None:
        grouped = grouped - linear.zero_point.float()[..., None]
    return (grouped * linear.scale.float()[..., None]).view_as(codes).to(dtype)
