"""GPTQ: round column by column, and let the columns not yet rounded make up for each error.

Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers",
arXiv 2210.17323. With H = X^T X over the calibration inputs and U the upper Cholesky factor of H^-1
(the paper's step 3), for each column j, in blocks of `block_size`:

    q_j = quantize(w_j)                       e_j = (w_j - dequantize(q_j)) / U_jj          (eq. 2)
    w_k -= U_jk e_j   for k > j in the block; columns past the block get E U in one product (eq. 4)

Scales are static: found from the original weights, one set for all columns, so that columns can be
visited in any order without an index tensor at run time. `act_order` visits them by falling H_jj,
the columns that matter most first, while most others can still correct them.

Inside the loop W and U carry the paper's meaning, W transposed: column j of the paper is row j
here, so that each step touches contiguous memory.
"""

from dataclasses import dataclass, field
from math import inf
from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict

from compress.artifacts import QuantizedLinear
from compress.calib.collectors import InputStatistics
from compress.calib.methods.scales import ScaleSearch, find_scales
from compress.scheme import WeightScheme, code_range, round_to_codes

_DAMPING_STEPS = 4  # each ten times the one before; the last is far past any useful damping


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTQ:
    """`damping` is relative to the mean of the diagonal of H."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    kind: Literal["gptq"] = "gptq"
    damping: float = 0.01
    block_size: int = 64
    act_order: bool = True
    scale: ScaleSearch = field(default_factory=ScaleSearch)

    def __post_init__(self) -> None:
        if not 0 < self.damping < inf or self.block_size < 1:
            raise ValueError(
                f"damping and block_size must be positive, got {self.damping}, {self.block_size}"
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
    the weight was rounded to nearest because H has no Cholesky factor at any damping.
    """
    scale, zero = find_scales(weight, statistics.mean_square, scheme, method.scale, scale_dtype)
    hessian = statistics.second_moment
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    if not method.act_order:
        order = torch.arange(len(order), device=order.device)
    factor, damping = inverse_factor(hessian[order][:, order], method.damping)
    if factor is None:
        codes = round_to_codes(weight, scale, zero, scheme.bits)
        note: str | None = f"rtn: H is not positive definite even with damping {damping:g}"
    else:
        codes = _solve(weight, factor, order, scale, zero, scheme.bits, method.block_size)
        note = None if damping == method.damping else f"damping raised to {damping:g}"
    return QuantizedLinear(codes=codes, scale=scale, zero_point=zero, bits=scheme.bits), note


def inverse_factor(hessian: torch.Tensor, damping: float) -> tuple[torch.Tensor | None, float]:
    """U (I, I) upper triangular with U^T U = (H + damping * mean(diag H) * 1)^-1, and the damping.

    A column that never saw an input gets H_jj = mean(diag H): it is rounded to nearest, as there is
    no evidence for anything else. Damping is raised tenfold until the factor exists, and is None if
    it never does.
    """
    diagonal = hessian.diagonal()
    mean = diagonal.mean()
    identity = torch.eye(len(hessian), device=hessian.device)
    hessian = hessian + torch.diag(torch.where(diagonal == 0, mean, 0))
    for step in range(_DAMPING_STEPS):
        used = damping * 10**step
        lower, failed = torch.linalg.cholesky_ex(hessian + used * mean * identity)
        if failed or not mean > 0:
            continue
        inverse = torch.cholesky_inverse(lower)
        upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
        if not failed and bool(torch.isfinite(upper).all()):
            return upper, used
    return None, used


def _solve(
    weight: torch.Tensor,
    factor: torch.Tensor,
    order: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    bits: int,
    block_size: int,
) -> torch.Tensor:
    """Codes (O, I) int8 of `weight` (O, I), its columns visited in `order` (I,)."""
    in_features = weight.shape[1]
    U, W = factor, weight.T[order].contiguous()
    group = order // (in_features // scale.shape[1])
    S = scale.float().T[group]
    Z = torch.zeros_like(S) if zero_point is None else zero_point.float().T[group]
    Q = torch.empty_like(W)
    for start in range(0, in_features, block_size):
        stop = min(start + block_size, in_features)
        block = slice(start, stop)
        E = _solve_block(W[block], U[block, block], S[block], Z[block], Q[block], bits)
        W[stop:].addmm_(U[block, stop:].T, E, alpha=-1)
    codes = torch.empty_like(Q, dtype=torch.int8)
    codes[order] = Q.to(torch.int8)
    return codes.T.contiguous()


def _solve_block(
    W: torch.Tensor,
    U: torch.Tensor,
    S: torch.Tensor,
    Z: torch.Tensor,
    Q: torch.Tensor,
    bits: int,
) -> torch.Tensor:
    """Fill Q (B, O) with the codes of one block of columns W (B, O), in place; returns E (B, O)."""
    qmin, qmax = code_range(bits)
    E = torch.empty_like(W)
    inverse_diagonal = (1 / U.diagonal()).tolist()
    for j in range(len(W)):
        w, s, z, q = W[j], S[j], Z[j], Q[j]
        torch.div(w, s, out=q)
        q.add_(z).round_().clamp_(qmin, qmax)
        e = torch.sub(q, z, out=E[j]).mul_(s).sub_(w).mul_(-inverse_diagonal[j])
        W[j + 1 :].addr_(U[j, j + 1 :], e, alpha=-1)
    return E
