"""Scales and zero points of a weight matrix, found before any rounding.

Legend: O out_features, I in_features, G groups per row, W columns per group (I = G * W).

  minmax   the range of the group fills the codes: s = absmax / ((qmax - qmin) / 2) when symmetric,
           s = (max - min) / (qmax - qmin) with min <= 0 <= max when asymmetric
  search   tries smaller ranges (a grid of shrink factors) and keeps, per group, the one with the
           least sum over columns of importance * |w - w_hat|^norm, importance = mean square of the
           column's input. Symmetric with few bits: the largest weight may also land on qmin, which
           lies one step further out than qmax, by a scale of either sign (signed full range).

Scales are rounded to the dtype in which they are stored before errors are measured, so that what is
chosen is what will be read back.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict

from compress.scheme import WeightScheme, code_range, group_width

_MAX_SIGNED_BITS = 4  # of more bits one step in range is too little to pay a second search for
_MAX_STEPS, _MAX_NORM = 1000, 20  # beyond, errors of all candidates over- or underflow
_CHUNK_ELEMENTS = 1 << 17  # work of one pass fits the second-level cache


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleSearch:
    """How scales are found. `weighted` uses the inputs seen in calibration as importance.

    `signed` lets symmetric scales of few bits have either sign, see above.
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    kind: Literal["minmax", "search"] = "search"
    weighted: bool = True
    signed: bool = True
    norm: float = 2.0
    steps: int = 16
    max_shrink: float = 0.32

    def __post_init__(self) -> None:
        if not 0 <= self.max_shrink < 1:
            raise ValueError(f"max_shrink must be in [0, 1), got {self.max_shrink}")
        if not 1 <= self.steps <= _MAX_STEPS:
            raise ValueError(f"steps must be between 1 and {_MAX_STEPS}, got {self.steps}")
        if not 0 < self.norm <= _MAX_NORM:
            raise ValueError(f"norm must be positive and at most {_MAX_NORM}, got {self.norm}")

    @property
    def shrinks(self) -> list[float]:
        """Factors by which the range is multiplied, largest first."""
        count = self.steps if self.kind == "search" else 1
        return [1 - self.max_shrink * step / count for step in range(count)]


def find_scales(
    weight: torch.Tensor,
    importance: torch.Tensor,
    scheme: WeightScheme,
    search: ScaleSearch,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale (O, G) in `dtype` and zero point (O, G) int8 (None when symmetric) for `weight`.

    weight (O, I) fp32; importance (I,) fp32, not negative.
    """
    out_features, in_features = weight.shape
    width = group_width(scheme, in_features)
    num_groups = in_features // width
    if not search.weighted:
        importance = torch.ones_like(importance)
    groups = weight.view(out_features, num_groups, width)
    importance = _normalized(importance.view(num_groups, width))
    rows = max(1, _CHUNK_ELEMENTS // in_features)
    find = _symmetric if scheme.symmetric else _asymmetric
    chunks = [
        find(groups[start : start + rows], importance, scheme.bits, search, dtype)
        for start in range(0, out_features, rows)
    ]
    scale = torch.cat([scale for scale, _ in chunks])
    zeros = [zero for _, zero in chunks if zero is not None]
    return scale, torch.cat(zeros) if zeros else None


def _normalized(importance: torch.Tensor) -> torch.Tensor:
    """(G, W) with mean one per group; a group without any input counts all its columns alike."""
    mean = importance.mean(1, keepdim=True)
    return torch.where(mean > 0, importance / mean.clamp(min=1e-30), torch.ones_like(importance))


def storable(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round `scale` (any shape) to `dtype`, its magnitude at least `least_scale(dtype)`.

    Raises ValueError for a scale beyond the largest number of `dtype`.
    """
    largest = float(scale.abs().max())
    if largest > torch.finfo(dtype).max:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"a scale of {largest:.3g} does not fit {name}; store scales in bfloat16 or float32"
        )
    return torch.copysign(scale.abs().clamp(min=least_scale(dtype)), scale).to(dtype)


def least_scale(dtype: torch.dtype) -> float:
    """The smallest scale that is stored: float16, of little range, goes down to its subnormals."""
    info = torch.finfo(dtype)
    return info.tiny * info.eps if dtype == torch.float16 else info.tiny


def _symmetric(
    groups: torch.Tensor,
    importance: torch.Tensor,
    bits: int,
    search: ScaleSearch,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, None]:
    qmin, qmax = code_range(bits)
    extreme = groups.gather(2, groups.abs().argmax(2, keepdim=True)).squeeze(2)
    if search.kind == "minmax":
        return storable(extreme.abs() / ((qmax - qmin) / 2), dtype), None
    best = _Best(groups, importance, search.norm)
    if bits > _MAX_SIGNED_BITS or not search.signed:
        ends = [extreme.abs() / ((qmax - qmin) / 2)]
    else:
        ends = [extreme / qmin, extreme / -qmin]
    for shrink in search.shrinks:
        for end in ends:
            scale = storable(end * shrink, dtype)
            codes = torch.round(groups / scale.float()[..., None]).clamp_(qmin, qmax)
            best.offer(codes, scale)
    return best.scale, None


def _asymmetric(
    groups: torch.Tensor,
    importance: torch.Tensor,
    bits: int,
    search: ScaleSearch,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    qmin, qmax = code_range(bits)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    best = _Best(groups, importance, search.norm)
    for shrink in search.shrinks:
        scale = storable((high - low) * (shrink / (qmax - qmin)), dtype)
        step = scale.float()
        zero = torch.round(qmin - low * shrink / step).clamp_(qmin, qmax)
        codes = torch.round(groups / step[..., None] + zero[..., None]).clamp_(qmin, qmax)
        best.offer(codes.sub_(zero[..., None]), scale, zero.to(torch.int8))
    assert best.zero_point is not None, "at least one candidate was offered"
    return best.scale, best.zero_point


class _Best:
    """The candidate with the least weighted error so far, per group; ties keep the first."""

    def __init__(self, groups: torch.Tensor, importance: torch.Tensor, norm: float) -> None:
        self.groups, self.importance, self.norm = groups, importance, norm
        self.error = torch.full(groups.shape[:2], torch.inf, device=groups.device)
        self.scale = torch.empty(0)
        self.zero_point: torch.Tensor | None = None

    def offer(
        self, offsets: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None
    ) -> None:
        """`offsets` (O, G, W) = codes - zero_point, overwritten; `scale`, `zero_point` (O, G)."""
        difference = offsets.mul_(scale.float()[..., None]).sub_(self.groups)
        power = difference.square_() if self.norm == 2 else difference.abs_().pow_(self.norm)
        error = power.mul_(self.importance).sum(2)
        if self.scale.numel() == 0:
            self.error, self.scale, self.zero_point = error, scale, zero_point
            return
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.scale = torch.where(better, scale, self.scale)
        if zero_point is not None and self.zero_point is not None:
            self.zero_point = torch.where(better, zero_point, self.zero_point)
