"""How far a model has moved from its baseline: KL divergence and top-1 agreement, token by token.

Perplexity can stay where it was while the predictions change, up here and down there. Fidelity
compares the two models with each other. On the windows of a perplexity protocol, with p(. | i) what
the baseline predicts at position i and q(. | i) what the model does, over all predictions i:

    KL         D_i = sum over v of p(v | i) log(p(v | i) / q(v | i))      nats; mean, median, 99 %
    agreement  share of i with argmax p(. | i) = argmax q(. | i)          ties to the lowest id

The sum is taken in the form sum over v of p log(p / q) - p + q, which is the same for distributions
that sum to one. In fp32 they do so only nearly; the plain form takes that error whole, while here
to first order the error cancels and, rounding apart, no term is negative.

Standard errors are over windows as clusters, as for perplexity (see perplexity.py). Both models run
over a window once and their predictions are compared in slices of rows; perplexities come from the
same slices. Between models that compute in bfloat16 the rounding of the logits is part of the KL:
measure small ones in float32.

Kullback and Leibler, 1951; as a measure of quantization: Dutta et al., "Accuracy is not all you
need", 2024.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from compress.evalsuite.perplexity import (
    SLICE_ROWS,
    EvaluationData,
    Perplexity,
    check_finite,
    negative_log_likelihood,
    scored,
    select_windows,
    standard_error,
    summarize_losses,
    zip_rows,
)
from compress.evalsuite.target import EvaluationTarget
from compress.progress import Ticker


@dataclass(frozen=True, kw_only=True, slots=True)
class Fidelity:
    """KL(baseline || model) in nats per prediction, and top-1 agreement in [0, 1].

    `kl_median`, `kl_p99` and `kl_max` are over single predictions, `window_kl` is the mean of each
    window, for paired comparisons.
    """

    kl_mean: float
    kl_stderr: float
    kl_median: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    top1_stderr: float
    stderr_method: str
    tokens: int
    windows: int
    window_kl: tuple[float, ...]


class Comparison(NamedTuple):
    """What one pass over the windows says about two models."""

    model: Perplexity
    baseline: Perplexity
    fidelity: Fidelity


def compare(
    model: EvaluationTarget,
    baseline: EvaluationTarget,
    data: EvaluationData,
    *,
    protocol: str = "gptq",
    window: int = 2048,
    limit: int | None = None,
    names: tuple[str, str] = ("model", "baseline"),
    tick: Ticker | None = None,
) -> Comparison:
    """Run both over the windows of `data`; `names` are for errors, `tick` is called per window.

    Raises ValueError as `select_windows` does and for different vocabularies, CheckFailed when a
    log-probability or a KL divergence is not finite.
    """
    windows = select_windows(data, protocol=protocol, window=window, limit=limit)
    losses = torch.empty(4, len(windows), window - 1, dtype=torch.float64)
    for i, row in enumerate(windows):
        losses[:, i] = _compare_window(model, baseline, row)
        for name, values in zip(names, losses[:2, i], strict=True):
            check_finite(values, f"{name}: window {i}", "log-probability")
        check_finite(losses[2, i], f"{names[0]}: window {i}", f"KL divergence from {names[1]}")
        if tick is not None:
            tick(steps=2, note=f"KL to baseline in this window {losses[2, i].mean().item():.5f}")
    ours, theirs, divergences, agreements = losses
    return Comparison(
        model=summarize_losses(ours, data, protocol=protocol, name=names[0]),
        baseline=summarize_losses(theirs, data, protocol=protocol, name=names[1]),
        fidelity=_summarize(scored(divergences, protocol), scored(agreements, protocol)),
    )


def kl_divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats (n,) of each row of log-probabilities (n, V) fp32, in fp32."""
    p, terms = log_p.exp(), log_p - log_q
    return terms.mul_(p).sub_(p).add_(log_q.exp()).sum(dim=-1).clamp_(min=0)


def _compare_window(
    model: EvaluationTarget, baseline: EvaluationTarget, row: torch.Tensor
) -> torch.Tensor:
    """(4, window - 1) fp64 for `row` (window,): both losses, KL, and 1 where the top-1 agree."""
    slices = (target.log_probs(row.tolist(), SLICE_ROWS) for target in (model, baseline))
    parts = []
    for (log_q, next_ids), log_p in zip(zip_rows(next(slices), row), next(slices), strict=True):
        if log_q.shape != log_p.shape:
            raise ValueError(
                f"predictions over {log_q.shape[1]} and {log_p.shape[1]} tokens: "
                "a KL divergence needs one vocabulary"
            )
        parts.append(
            torch.stack(
                [
                    negative_log_likelihood(log_q, next_ids),
                    negative_log_likelihood(log_p, next_ids),
                    kl_divergence(log_p, log_q).double().cpu(),
                    (log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).double().cpu(),
                ]
            )
        )
    return torch.cat(parts, dim=1)


def _summarize(divergences: torch.Tensor, agreements: torch.Tensor) -> Fidelity:
    """Figures of KL and agreement (num_windows, window - 1) fp64 each."""
    kl_stderr, method = standard_error(divergences)
    median, p99 = np.percentile(divergences.numpy(), (50, 99))
    return Fidelity(
        kl_mean=divergences.mean().item(),
        kl_stderr=kl_stderr,
        kl_median=float(median),
        kl_p99=float(p99),
        kl_max=divergences.max().item(),
        top1_agreement=agreements.mean().item(),
        top1_stderr=standard_error(agreements)[0],
        stderr_method=method,
        tokens=divergences.numel(),
        windows=len(divergences),
        window_kl=tuple(divergences.mean(dim=1).tolist()),
    )
