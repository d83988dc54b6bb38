"""Exact choice of one option per item under a limit on the total cost (multiple-choice knapsack).

    minimize  sum_i error_i(o_i)    subject to  sum_i cost_i(o_i) <= limit

Items are added one by one to the Pareto frontier of (total cost, total error): a partial choice
that costs no less and errs no less than another can never be part of the best one, so dropping it
loses nothing (Nemhauser & Ullmann, 1969). Costs are multiples of their common divisor, which bounds
the frontier: Linears of a model come in few sizes, all of them multiples of large powers of two.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Option(NamedTuple):
    """One way to do an item. `cost` is a whole number of any unit, `error` finite."""

    cost: int
    error: float


class _Step(NamedTuple):
    previous: torch.Tensor  # per point of the frontier: index of the point it extends
    option: torch.Tensor  # and the option taken


def choose_options(items: Sequence[Sequence[Option]], limit: int) -> list[int]:
    """Index of the option to take for each item: least total error within `limit`.

    Of choices with equal error the cheapest is taken. Raises ValueError if even the cheapest
    options exceed `limit`.
    """
    cheapest = sum(min(option.cost for option in options) for options in items)
    if cheapest > limit:
        raise ValueError(f"the cheapest choice costs {cheapest}, more than the limit {limit}")
    costs = torch.zeros(1, dtype=torch.int64)
    errors = torch.zeros(1, dtype=torch.float64)
    rest = cheapest
    steps: list[_Step] = []
    for options in items:
        rest -= min(option.cost for option in options)
        added = torch.tensor([option.cost for option in options], dtype=torch.int64)
        worse = torch.tensor([option.error for option in options], dtype=torch.float64)
        all_costs = (costs[:, None] + added).flatten()
        all_errors = (errors[:, None] + worse).flatten()
        kept = _frontier(all_costs, all_errors, limit - rest)
        steps.append(_Step(kept // len(options), kept % len(options)))
        costs, errors = all_costs[kept], all_errors[kept]
    return _trace(steps, int(errors.argmin()))


def _frontier(costs: torch.Tensor, errors: torch.Tensor, limit: int) -> torch.Tensor:
    """Indices, by rising cost, of the points within `limit` that no other point dominates."""
    order = torch.argsort(errors, stable=True)
    order = order[torch.argsort(costs[order], stable=True)]  # by cost, then by error
    order = order[costs[order] <= limit]
    best = errors[order].cummin(0).values
    is_first = torch.ones(len(order), dtype=torch.bool)
    is_first[1:] = errors[order][1:] < best[:-1]
    return order[is_first]


def _trace(steps: Sequence[_Step], point: int) -> list[int]:
    chosen = []
    for step in reversed(steps):
        chosen.append(int(step.option[point]))
        point = int(step.previous[point])
    return chosen[::-1]
