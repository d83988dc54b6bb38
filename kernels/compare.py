"""Whether the results of a kernel are as close to the exact ones as those of plain torch."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from compress.kernels.timing import tensors_of

# Share of the elements of an integer result that may be neighbours of the exact ones: values at the
# boundary between two codes fall either way.
_BOUNDARY_SHARE = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """How far a result and that of plain torch are from the exact one, over all output tensors.

    The errors are the largest found, divided by the largest exact value of their tensor, and None
    if that is not a number; `problem` says what is wrong, None if nothing is.
    """

    error: float | None
    plain_error: float | None
    problem: str | None


def compare(got: Any, plain: Any, exact: Any) -> Comparison:
    """Whether `got` is as close to `exact` as the same operation in plain torch.

    FlashAttention's rule: the largest error of a float tensor is at most twice that of plain torch,
    and one unit in the last place of the largest value. Of an integer tensor, the share of
    elements that differ is at most twice that of plain torch, and 2 %; those of one byte are codes
    of values, and differ by at most 1 more than twice what plain torch's differ by.
    """
    results = [list(tensors_of(value)) for value in (got, plain, exact)]
    counts = [len(tensors) for tensors in results]
    if len(set(counts)) > 1:
        problem = "{} tensors, with plain torch {}, in the exact form {}".format(*counts)
        return Comparison(error=None, plain_error=None, problem=problem)
    worst, plain_worst, problems = 0.0, 0.0, list[str]()
    for index, (ours, theirs, true) in enumerate(zip(*results, strict=True)):
        if not ours.shape == theirs.shape == true.shape:
            shapes = [tuple(x.shape) for x in (ours, theirs, true)]
            problems.append("output {} is {}, not {} or {}".format(index, *shapes))
            continue
        if not true.numel():
            continue
        error, plain_error, scale, wrong = _errors(ours, theirs, true)
        worst, plain_worst = max(worst, error / scale), max(plain_worst, plain_error / scale)
        if wrong:
            problems.append(f"output {index}: {wrong}")
    return Comparison(
        error=worst if math.isfinite(worst) else None,
        plain_error=plain_worst if math.isfinite(plain_worst) else None,
        problem="; ".join(problems) or None,
    )


def _errors(
    ours: torch.Tensor, theirs: torch.Tensor, true: torch.Tensor
) -> tuple[float, float, float, str | None]:
    """Largest error, that of plain torch, the largest finite exact value, and what is wrong."""
    exact = true.double()
    # Equal infinities differ by NaN; a NaN that should not be there counts as infinitely wrong.
    differences = [
        torch.where(x == exact, 0.0, (x - exact).abs()).nan_to_num_(math.inf, posinf=math.inf)
        for x in (ours.double(), theirs.double())
    ]
    error, plain_error = (float(difference.max()) for difference in differences)
    largest = float(exact.abs().nan_to_num_(0.0, posinf=0.0).max())
    # An infinite yardstick would allow everything.
    yardstick = plain_error if math.isfinite(plain_error) else 0.0
    problem = None
    if ours.is_floating_point():
        bound = 2 * yardstick + torch.finfo(ours.dtype).eps * largest
        if not error <= bound:
            problem = f"error {error:.3g}, at most {bound:.3g} is expected"
    else:
        share, plain_share = (float((x != 0).double().mean()) for x in differences)
        if share > 2 * plain_share + _BOUNDARY_SHARE:
            problem = f"{share:.1%} of the elements differ, with plain torch {plain_share:.1%}"
        elif ours.dtype in (torch.int8, torch.uint8) and error > 2 * yardstick + 1:
            problem = f"codes differ by {error:.0f}, with plain torch by {plain_error:.0f}"
    return error, plain_error, largest or 1.0, problem
