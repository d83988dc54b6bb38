"""Refinement of a rounded weight: better scales for its codes, better codes for its scales.

With D = W - W_hat and H = X^T X the layer-wise loss is tr(D H D^T). Both steps lower it, one output
row at a time, all rows at once:

  scales   for fixed codes W_hat is linear in the G scales of a row: w_hat = sum_g s_g c_g, with
           c_g the codes of group g (minus the zero point) and zeros elsewhere. The best scales
           solve the normal equations M s = b, M_gh = c_g H c_h^T, b_g = c_g H w^T, with a small
           ridge towards the present scales, which decides groups whose codes are all zero.
  codes    cyclic coordinate descent (QuantEase, Behdin et al., arXiv 2309.01885, eq. 6): column j
           goes to the code nearest to its optimum given all others, w_hat_j + (D H)_j / H_jj.
           Unlike GPTQ it can revise a code after later ones are known.

Legend: O out_features, I in_features, G groups per row, W columns per group.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from pydantic import ConfigDict

from compress.artifacts import QuantizedLinear
from compress.scheme import code_range

_MAX_ROUNDS = 100
_RIDGE = 1e-3
_BLOCK = 64  # columns between two updates of the other columns' gradients


@dataclass(frozen=True, kw_only=True, slots=True)
class Refinement:
    """`rounds` of a scale step followed by `passes` of coordinate descent over all columns."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    rounds: int = 0
    passes: int = 1

    def __post_init__(self) -> None:
        for name in ("rounds", "passes"):
            if not 0 <= getattr(self, name) <= _MAX_ROUNDS:
                given = getattr(self, name)
                raise ValueError(f"{name} must be between 0 and {_MAX_ROUNDS}, got {given}")


def refine(
    linear: QuantizedLinear, weight: torch.Tensor, hessian: torch.Tensor, refinement: Refinement
) -> QuantizedLinear:
    """Lower the loss of `linear` as an approximation of `weight` (O, I) fp32.

    `hessian` (I, I) fp32, positive definite: with its damping. Codes stay in range, zero points and
    the dtype of the scales stay.
    """
    for _ in range(refinement.rounds):
        scale = refit_scales(linear, weight, hessian)
        linear = replace(linear, scale=scale)
        linear = replace(linear, codes=descend(linear, weight, hessian, refinement.passes))
    return linear


def refit_scales(
    linear: QuantizedLinear, weight: torch.Tensor, hessian: torch.Tensor
) -> torch.Tensor:
    """Scales (O, G), in the dtype of the present ones, with the least loss for the codes.

    A row keeps its scales where the solution is not finite or leaves the range of the dtype.
    """
    rows, num_groups = linear.scale.shape
    width = linear.group_size
    C = _offsets(linear)  # (O, G, W)
    M = torch.empty(rows, num_groups, num_groups, device=weight.device)
    for g in range(num_groups):
        CH = C[:, g] @ hessian[g * width : (g + 1) * width]
        M[:, g] = (CH.view(rows, num_groups, width) * C).sum(2)
    b = ((weight @ hessian).view(rows, num_groups, width) * C).sum(2)
    ridge = _RIDGE * M.diagonal(dim1=1, dim2=2).mean(1, keepdim=True).clamp(min=1e-30)
    M += torch.diag_embed(ridge.expand(-1, num_groups))
    old = linear.scale.float()
    solution, failed = torch.linalg.solve_ex(M, b + ridge * old)
    limits = torch.finfo(linear.scale.dtype)
    magnitude = solution.abs()
    usable = (magnitude >= limits.tiny) & (magnitude <= limits.max) & (failed[:, None] == 0)
    return torch.where(usable.all(1, keepdim=True), solution, old).to(linear.scale.dtype)


def descend(
    linear: QuantizedLinear, weight: torch.Tensor, hessian: torch.Tensor, passes: int
) -> torch.Tensor:
    """Codes (O, I) int8 after `passes` of coordinate descent, columns by falling H_jj."""
    low, high = code_range(linear.bits)
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    H = hessian[order][:, order].contiguous()
    group = order // linear.group_size
    S = linear.scale.float().T[group]
    Z = torch.zeros_like(S) if linear.zero_point is None else linear.zero_point.float().T[group]
    Q = linear.codes.float().T[order] - Z  # offsets from the zero point, (I, O)
    W = weight.T[order]
    for _ in range(passes):
        R = H @ (W - Q * S)
        for start in range(0, len(Q), _BLOCK):
            block = slice(start, start + _BLOCK)
            moved = _descend_block(
                H[block, block], R[block], Q[block], S[block], Z[block], low, high
            )
            R[start + _BLOCK :].addmm_(H[start + _BLOCK :, block], moved, alpha=-1)
    codes = torch.empty_like(Q, dtype=torch.int8)
    codes[order] = (Q + Z).to(torch.int8)
    return codes.T.contiguous()


def _descend_block(
    H: torch.Tensor,
    R: torch.Tensor,
    Q: torch.Tensor,
    S: torch.Tensor,
    Z: torch.Tensor,
    low: int,
    high: int,
) -> torch.Tensor:
    """Move the offsets Q (B, O) of one block in place; returns by how much W_hat moved (B, O)."""
    moved = torch.empty_like(Q)
    inverse_diagonal = (1 / H.diagonal()).tolist()
    for j in range(len(Q)):
        best = torch.addcdiv(Q[j], R[j] * inverse_diagonal[j], S[j])
        best = best.add_(Z[j]).round_().clamp_(low, high).sub_(Z[j])
        torch.mul(best - Q[j], S[j], out=moved[j])
        Q[j] = best
        R.addr_(H[:, j], moved[j], alpha=-1)
    return moved


def _offsets(linear: QuantizedLinear) -> torch.Tensor:
    """Codes minus zero points, (O, G, W) fp32."""
    codes = linear.codes.float().view(*linear.scale.shape, linear.group_size)
    return codes if linear.zero_point is None else codes - linear.zero_point.float()[..., None]
