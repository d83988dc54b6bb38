"""The column loop of GPTQ: arXiv 2210.17323, algorithm 1, on transposed matrices.

Inside the loop W and U carry the paper's meaning, W transposed: column j of the paper is row j
here, so that each step touches contiguous memory. With U the upper Cholesky factor of H^-1:

    q_j = quantize(w_j)                       e_j = (w_j - dequantize(q_j)) / U_jj          (eq. 2)
    w_k -= U_jk e_j   for k > j in the block; columns past the block get E U in one product (eq. 4)

Legend: O out_features, I in_features, G groups per row, B columns of a block.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from compress.scheme import code_range

FindScales = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(slots=True)
class Grid:
    """Scales (O, G) in the stored dtype and zero points (O, G) int8 (None if symmetric).

    `find(columns (O, W), group)` gives those of one group, (O, 1), when its first column is
    reached; None keeps what is there.
    """

    scale: torch.Tensor
    zero_point: torch.Tensor | None
    bits: int
    find: FindScales | None = None

    def settle(self, group: int, columns: torch.Tensor) -> None:
        """Find the scales of `group` from its columns (O, W) as they stand."""
        if self.find is None:
            return
        scale, zero_point = self.find(columns, group)
        self.scale[:, group : group + 1] = scale
        if zero_point is not None and self.zero_point is not None:
            self.zero_point[:, group : group + 1] = zero_point

    def of_columns(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zero points of columns in `groups` (B,), both (B, O) fp32."""
        scale = self.scale.float().T[groups]
        if self.zero_point is None:
            return scale, torch.zeros_like(scale)
        return scale, self.zero_point.float().T[groups]


def solve_columns(
    weight: torch.Tensor, factor: torch.Tensor, order: torch.Tensor, grid: Grid, block_size: int
) -> torch.Tensor:
    """Codes (O, I) int8 of `weight` (O, I) fp32, its columns visited in `order` (I,).

    `factor` is U (I, I) for columns in that order. With `grid.find` each group's columns must be
    visited together.
    """
    U, W = factor, weight.T[order].contiguous()
    width = weight.shape[1] // grid.scale.shape[1]
    groups = order // width
    Q = torch.empty_like(W)
    for block in _blocks(groups, block_size, whole_groups=grid.find is not None):
        group = int(groups[block.start])
        if grid.find is not None and (block.start == 0 or groups[block.start - 1] != group):
            columns = W[block.start : block.start + width]
            in_place = torch.argsort(order[block.start : block.start + width])
            grid.settle(group, columns[in_place].T.contiguous())
        S, Z = grid.of_columns(groups[block])
        E = _solve_block(W[block], U[block, block], S, Z, Q[block], grid.bits)
        W[block.stop :].addmm_(U[block, block.stop :].T, E, alpha=-1)
    codes = torch.empty_like(Q, dtype=torch.int8)
    codes[order] = Q.to(torch.int8)
    return codes.T.contiguous()


def _blocks(groups: torch.Tensor, block_size: int, *, whole_groups: bool) -> Iterator[slice]:
    """Consecutive slices of at most `block_size` columns, within one group if `whole_groups`."""
    start, end = 0, len(groups)
    while start < end:
        stop = min(start + block_size, end)
        if whole_groups:
            others = (groups[start:stop] != groups[start]).nonzero()
            stop = start + int(others[0]) if len(others) else stop
        yield slice(start, stop)
        start = stop


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
