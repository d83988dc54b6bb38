"""Perplexity of a causal language model on a text, under a named protocol.

A perplexity means nothing without its protocol: the window, the stride, which tokens are scored and
what stands before the first of them all move the figure. One protocol is one entry of `PROTOCOLS`.

`gptq` is the protocol of the GPTQ and AWQ papers, with one point made explicit. The whole text is
tokenized once, without special tokens: no BOS anywhere, neither at the start of the text nor of a
window (the papers' scripts let the tokenizer add what it likes before the very first token). The
ids are cut into non-overlapping windows of W (stride W) and the tail is dropped. In each window the
W - 1 tokens after the first are predicted from all that precede them in that window. With
l = -log p in nats, natural logarithm, over all n (W - 1) predictions:

    perplexity = exp(mean l)                      stderr = perplexity * se(mean l)   (delta method)

Tokens of one window are not independent, so se is taken over the window means, windows as clusters:
se = std(means) / sqrt(n). With a single window it can only be std(l) / sqrt(W - 1), as though they
were, and the result says which of the two it is.

Frantar et al., "GPTQ", 2022, section 4; https://github.com/IST-DASLab/gptq, `opt_eval`.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from compress.errors import CheckFailed
from compress.evalsuite.target import EvaluationTarget
from compress.lookup import lookup
from compress.progress import Ticker

MIN_WINDOW = 3  # two predictions: one alone has no error bar


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationData:
    """A tokenized text.

    tokens         (num_tokens,) int64, without special tokens
    text_sha256    of the text in UTF-8
    tokens_sha256  of the ids as little-endian int64: differs when the tokenizer does
    """

    source: str
    tokens: torch.Tensor
    text_sha256: str
    tokens_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Perplexity:
    """`value` +- `stderr` over `tokens` predictions in `windows` windows of `window` tokens.

    `window_nll`: mean negative log-likelihood of each window, nats, for paired comparisons.
    """

    value: float
    stderr: float
    stderr_method: str
    mean_nll: float
    tokens: int
    windows: int
    window: int
    stride: int
    bos: str
    protocol: str
    protocol_version: int
    data: str
    data_tokens: int
    data_sha256: str
    tokens_sha256: str
    window_nll: tuple[float, ...]


class PerplexityProtocol(NamedTuple):
    """How a token stream becomes windows; in a window all tokens but the first are scored.

    `windows(tokens (num_tokens,), window) -> (num_windows, window)`; `stride(window)` is in tokens.
    """

    version: int
    windows: Callable[[torch.Tensor, int], torch.Tensor]
    stride: Callable[[int], int]
    bos: str


def disjoint_windows(tokens: torch.Tensor, window: int) -> torch.Tensor:
    """Cut `tokens` (num_tokens,) into (num_windows, window); the tail is dropped."""
    num_windows = tokens.numel() // window
    return tokens[: num_windows * window].view(num_windows, window)


PROTOCOLS: dict[str, PerplexityProtocol] = {
    "gptq": PerplexityProtocol(
        version=1,
        windows=disjoint_windows,
        stride=lambda window: window,
        bos="none: text tokenized once without special tokens, windows start without BOS",
    ),
}


def tokenize(text: str, tokenizer: Any, *, source: str) -> EvaluationData:
    """Tokenize the whole `text` once, without special tokens.

    `tokenizer` is a transformers tokenizer; `source` names the text in reports.
    """
    # verbose=False: the text is longer than the model's context on purpose
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    tokens = torch.tensor(ids, dtype=torch.int64)
    return EvaluationData(
        source=source,
        tokens=tokens,
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        tokens_sha256=hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest(),
    )


def select_windows(
    data: EvaluationData, *, protocol: str, window: int, limit: int | None = None
) -> torch.Tensor:
    """The windows (num_windows, window) int64 to score, at most `limit` of them.

    Raises ValueError for an unknown protocol, a window too small, a limit below 1, or a text that
    does not fill one window.
    """
    chosen = lookup(PROTOCOLS, protocol, "perplexity protocol")
    if window < MIN_WINDOW:
        raise ValueError(f"perplexity window must be at least {MIN_WINDOW} tokens, got {window}")
    if limit is not None and limit < 1:
        raise ValueError(f"perplexity window limit must be at least 1, got {limit}")
    if data.tokens.numel() < window:
        raise ValueError(
            f"evaluation text {data.source!r} has {data.tokens.numel()} tokens, "
            f"which does not fill one window of {window}: use a longer text or a smaller window"
        )
    return chosen.windows(data.tokens, window)[:limit]


def perplexity(
    target: EvaluationTarget,
    data: EvaluationData,
    *,
    protocol: str = "gptq",
    window: int = 2048,
    limit: int | None = None,
    tick: Ticker | None = None,
) -> Perplexity:
    """Score `data` window by window with `target`; `tick` is called after each.

    Raises ValueError as `select_windows` does, CheckFailed when a log-probability is not finite.
    """
    chosen = lookup(PROTOCOLS, protocol, "perplexity protocol")
    windows = select_windows(data, protocol=protocol, window=window, limit=limit)
    losses = torch.stack([_window_losses(target, row, i, tick) for i, row in enumerate(windows)])
    mean_nll = losses.mean().item()
    error, method = _standard_error(losses)
    value = losses.mean().exp().item()
    if not math.isfinite(value):
        raise CheckFailed(f"perplexity overflows: mean negative log-likelihood {mean_nll:.1f} nats")
    return Perplexity(
        value=value,
        stderr=value * error,
        stderr_method=method,
        mean_nll=mean_nll,
        tokens=losses.numel(),
        windows=losses.shape[0],
        window=window,
        stride=chosen.stride(window),
        bos=chosen.bos,
        protocol=protocol,
        protocol_version=chosen.version,
        data=data.source,
        data_tokens=data.tokens.numel(),
        data_sha256=data.text_sha256,
        tokens_sha256=data.tokens_sha256,
        window_nll=tuple(losses.mean(dim=1).tolist()),
    )


def _window_losses(
    target: EvaluationTarget, row: torch.Tensor, index: int, tick: Ticker | None
) -> torch.Tensor:
    """Negative log-likelihoods (window - 1,) fp64 of one window (window,)."""
    (log_probs,) = target.score([row.tolist()])
    assert log_probs.shape == (len(row) - 1,), f"score returned shape {tuple(log_probs.shape)}"
    losses = -log_probs.double().cpu()
    if not bool(losses.isfinite().all()):
        position = int((~losses.isfinite()).nonzero()[0]) + 1
        raise CheckFailed(f"window {index}, token {position}: the log-probability is not finite")
    if tick is not None:
        tick(note=f"perplexity of this window {losses.mean().exp().item():.2f}")
    return losses


def _standard_error(losses: torch.Tensor) -> tuple[float, str]:
    """Standard error of the mean of `losses` (num_windows, predictions), and how it was taken."""
    if len(losses) > 1:
        means = losses.mean(dim=1)
        return means.std().item() / math.sqrt(len(means)), "delta method, windows as clusters"
    spread = losses.std().item() / math.sqrt(losses.numel())
    return spread, "delta method, tokens of the only window as independent"
