"""GPTQ: round column by column, and let the columns not yet rounded make up for each error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
arXiv 2210.17323. H = X^T X over the calibration inputs (eq. 3), damped, inverted and factored once
(step 3); the column loop is in columns.py. What may be chosen:

order        activation: columns by falling H_jj, those that matter most first, while most others
             can still correct them. group: groups by their largest H_jj, columns by falling H_jj
             inside each. none: as they lie. No order needs an index tensor at run time.
groups       static: all scales from the original weights. refound: those of a group when its first
             column is reached, from weights that carry the corrections so far.
asymmetry    a > 0 aims at the outputs of the float model instead of those of the float layer on
             quantized inputs: the aim of GPTAQ (Li et al., arXiv 2504.02692), which corrects inside
             the column loop, solved once in closed form instead. With X~ the inputs in the float
             model, the weights that are rounded are the (partial) least-squares answer to
             X W'^T ~ X~ W^T:     W' = W + a W ((X~ - X)^T X) (H + damping)^-1
refinement   scales and codes are improved in turns after the solve, see refine.py.
"""

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict

from compress.artifacts import QuantizedLinear
from compress.calib.collectors import InputStatistics
from compress.calib.methods.columns import Grid, solve_columns
from compress.calib.methods.refine import Refinement, refine
from compress.calib.methods.rtn import RTN, round_rtn
from compress.calib.methods.scales import ScaleSearch, find_scales
from compress.scheme import PER_CHANNEL, WeightScheme, group_width

_MAX_DAMPING = 1000.0  # times the mean of the diagonal: H has no say any more
_DAMPING_STEPS = 4  # each ten times the one before; the last is far past any useful damping


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTQ:
    """`damping` is relative to the mean of the diagonal of H."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    kind: Literal["gptq"] = "gptq"
    damping: float = 0.01
    block_size: int = 64
    order: Literal["activation", "group", "none"] = "activation"
    groups: Literal["static", "refound"] = "static"
    asymmetry: float = 0.0
    scale: ScaleSearch = field(default_factory=ScaleSearch)
    refinement: Refinement = field(default_factory=Refinement)

    def __post_init__(self) -> None:
        if not 0 < self.damping <= _MAX_DAMPING:
            raise ValueError(
                f"damping must be positive and at most {_MAX_DAMPING}, got {self.damping}"
            )
        if self.block_size < 1:
            raise ValueError(f"block_size must be positive, got {self.block_size}")
        if not 0 <= self.asymmetry <= 1:
            raise ValueError(f"asymmetry must be between 0 and 1, got {self.asymmetry}")
        if self.groups == "refound" and self.order == "activation":
            raise ValueError(
                "groups: refound needs the columns of a group to be visited together, which order:"
                " activation does not do; use order: group"
            )


def round_gptq(
    weight: torch.Tensor,
    statistics: InputStatistics,
    scheme: WeightScheme,
    method: GPTQ,
    scale_dtype: torch.dtype,
) -> tuple[QuantizedLinear, str | None]:
    """Quantize `weight` (O, I) fp32 with the second moment of its inputs.

    The second value is None, or why the result is not plain GPTQ: a larger damping was needed, or
    the weight was rounded to nearest because no token reached the Linear or H has no Cholesky
    factor at any damping.
    """
    hessian = statistics.second_moment
    order = visiting_order(hessian.diagonal(), method.order, group_width(scheme, len(hessian)))
    factor, damping = inverse_factor(hessian[order][:, order], method.damping)
    if factor is None:
        linear, _ = round_rtn(weight, statistics, scheme, RTN(scale=method.scale), scale_dtype)
        seen = f"H is not positive definite even with damping {damping:g}"
        return linear, f"rtn: {seen if statistics.num_tokens else 'no token reached it'}"
    if method.asymmetry:
        shift = _shift_to_float(weight, statistics.cross_moment, factor, order)
        weight = weight + method.asymmetry * shift
    grid = _grid(weight, statistics.mean_square, scheme, method, scale_dtype)
    codes = solve_columns(weight, factor, order, grid, method.block_size)
    linear = QuantizedLinear(
        codes=codes, scale=grid.scale, zero_point=grid.zero_point, bits=scheme.bits
    )
    if method.refinement.rounds:
        linear = refine(linear, weight, _damped(hessian, damping), method.refinement)
    return linear, None if damping == method.damping else f"damping raised to {damping:g}"


def visiting_order(diagonal: torch.Tensor, order: str, group_size: int) -> torch.Tensor:
    """Columns (I,) in the order of their visit; `diagonal` (I,) is that of H."""
    if order == "none":
        return torch.arange(len(diagonal), device=diagonal.device)
    if order == "activation":
        return torch.argsort(diagonal, descending=True, stable=True)
    grouped = diagonal.view(-1, group_size)
    groups = torch.argsort(grouped.amax(1), descending=True, stable=True)
    inside = torch.argsort(grouped[groups], dim=1, descending=True, stable=True)
    return (groups[:, None] * group_size + inside).flatten()


def inverse_factor(hessian: torch.Tensor, damping: float) -> tuple[torch.Tensor | None, float]:
    """U (I, I) upper triangular with U^T U = (H + damping * mean(diag H) * 1)^-1, and the damping.

    A column that never saw an input gets H_jj = mean(diag H): it is rounded to nearest, as there is
    no evidence for anything else. Damping is raised tenfold until the factor exists, and is None if
    it never does.
    """
    is_usable = bool(hessian.diagonal().mean() > 0)
    for step in range(_DAMPING_STEPS):
        used = damping * 10**step
        lower, failed = torch.linalg.cholesky_ex(_damped(hessian, used))
        if failed or not is_usable:
            continue
        inverse = torch.cholesky_inverse(lower)
        upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
        if not failed and bool(torch.isfinite(upper).all()):
            return upper, used
    return None, used


def _damped(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    return hessian + torch.diag(torch.where(diagonal == 0, mean, 0) + damping * mean)


def _shift_to_float(
    weight: torch.Tensor, cross_moment: torch.Tensor, factor: torch.Tensor, order: torch.Tensor
) -> torch.Tensor:
    """W C (H + damping)^-1 (O, I), C = (X~ - X)^T X (I, I), `factor` U for columns in `order`."""
    shift = torch.empty_like(weight)
    shift[:, order] = (weight @ cross_moment)[:, order] @ factor.T @ factor
    return shift


def _grid(
    weight: torch.Tensor,
    importance: torch.Tensor,
    scheme: WeightScheme,
    method: GPTQ,
    scale_dtype: torch.dtype,
) -> Grid:
    scale, zero_point = find_scales(weight, importance, scheme, method.scale, scale_dtype)
    grid = Grid(scale=scale, zero_point=zero_point, bits=scheme.bits)
    if method.groups == "refound":
        width = group_width(scheme, weight.shape[1])
        whole = replace(scheme, group_size=PER_CHANNEL)

        def find(columns: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            weights = importance[group * width : (group + 1) * width]
            return find_scales(columns, weights, whole, method.scale, scale_dtype)

        grid.find = find
    return grid
