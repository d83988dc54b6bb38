"""Which tokens top_k, top_p and min_p keep, in torch: the part of `sampling.py` before the draw.

R rows, V vocabulary. Rows with a small top_k are selected together, the others one by one. Sums
run in an order that does not depend on the neighbours of a row, in float64.
"""

from typing import NamedTuple

import torch

_NARROW = 1024  # largest top_k that is selected for all rows at once
_SMALL = 4096  # candidates that are few enough to sort

Optional = torch.Tensor | None


class RowParameters(NamedTuple):
    """What both backends derive from the parameters: (R,) each. Inverse 0 is greedy."""

    inverse: torch.Tensor
    top_k: Optional
    top_p: Optional
    log_min_p: torch.Tensor


class KeptSet(NamedTuple):
    """The kept tokens of some rows, most likely first or in any order: (n, K); rows are (n,).

    `scaled` is s of the module docstring, -inf in the places of a row that keeps fewer.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    scaled: torch.Tensor


def kept_sets(logits: torch.Tensor, best: torch.Tensor, rows: RowParameters) -> list[KeptSet]:
    """The kept sets of the rows that draw: those with a small top_k together, the others alone."""
    draws = ((rows.inverse > 0) & best.isfinite()).nonzero().flatten()
    vocab, sets = logits.shape[1], []
    wide = draws
    if rows.top_k is not None and len(draws):
        top_k = rows.top_k[draws]
        is_narrow = (top_k > 0) & (top_k <= _NARROW) & (top_k < vocab)
        narrow = draws[is_narrow]
        if len(narrow):
            kept, has_room = _narrow_sets(logits, best, rows, narrow)
            sets.append(kept)
            wide = torch.cat((draws[~is_narrow], narrow[~has_room]))
    return sets + [_wide_set(logits[r], best[r], rows, r) for r in wide]


def _narrow_sets(
    logits: torch.Tensor, best: torch.Tensor, rows: RowParameters, narrow: torch.Tensor
) -> tuple[KeptSet, torch.Tensor]:
    """Kept sets of the rows in `narrow`, and which of them (bool) hold all ties with the k-th."""
    assert rows.top_k is not None
    top_k = rows.top_k[narrow].long()
    chosen = logits if len(narrow) == len(logits) else logits[narrow]
    values, tokens = chosen.topk(int(top_k.max()) + 1, dim=1)
    inverse = rows.inverse[narrow, None]
    last = values.gather(1, top_k[:, None] - 1)
    # Else there may be more ties than were selected; of impossible tokens there may.
    has_room = (values[:, -1:] < last) | last.isneginf()
    scaled = ((values - best[narrow, None]) * inverse).masked_fill_(values < last, float("-inf"))
    if rows.top_p is not None:
        mass = scaled.double().exp_().cumsum(1)  # in order, whatever the width
        enough = mass >= rows.top_p[narrow, None].double() * mass[:, -1:]
        last = values.gather(1, enough.int().argmax(1, keepdim=True))
        top_p = rows.top_p[narrow, None]
        scaled.masked_fill_((values < last) & (top_p < 1), float("-inf"))
    scaled.masked_fill_(scaled < rows.log_min_p[narrow, None], float("-inf"))
    ready = has_room.flatten()
    return KeptSet(narrow[ready], tokens[ready], scaled[ready]), ready


def _wide_set(
    row: torch.Tensor, best: torch.Tensor, rows: RowParameters, r: torch.Tensor
) -> KeptSet:
    """The kept set of row `r`, whose logits are `row` (V,)."""
    tokens = torch.arange(len(row), device=row.device)
    values = row
    if rows.top_k is not None and 0 < (top_k := int(rows.top_k[r])) < len(row):
        tokens = (row >= row.kthvalue(len(row) - top_k + 1).values).nonzero().flatten()
        values = row[tokens]
    scaled = (values - best) * rows.inverse[r]
    if rows.top_p is not None and (top_p := float(rows.top_p[r])) < 1:
        kept = values >= _nucleus(values, scaled, top_p)
        tokens, scaled = tokens[kept], scaled[kept]
    if rows.log_min_p[r] > float("-inf"):
        kept = scaled >= rows.log_min_p[r]
        tokens, scaled = tokens[kept], scaled[kept]
    return KeptSet(r[None], tokens[None], scaled[None])


def _nucleus(values: torch.Tensor, scaled: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest of the fewest largest `values` (n,) whose probability reaches `top_p`: ().

    Splits the candidates at the middle of their range until few are left, and sorts those.
    """
    weights = scaled.double().exp_()
    total, above = float(weights.sum()), 0.0
    target = top_p * total
    # All tokens of at most this weight are together less than what may be left out.
    candidates = (weights >= (1 - top_p) * total / len(values) * (1 - 1e-6)).nonzero().flatten()
    values, weights, scaled = values[candidates], weights[candidates], scaled[candidates]
    while len(values) > _SMALL:
        middle = (float(scaled.min()) + float(scaled.max())) / 2
        upper = scaled > middle
        mass = float(weights[upper].sum())
        if upper.all() or not upper.any():
            break  # equal up to rounding
        if above + mass >= target:
            keep = upper
        else:
            keep, above = ~upper, above + mass
        values, weights, scaled = values[keep], weights[keep], scaled[keep]
    ordered, order = values.sort(descending=True)
    reached = above + weights[order].cumsum(0) >= target
    # Rounding may leave even the whole below the target.
    return ordered[int(reached.int().argmax()) if bool(reached.any()) else -1]
