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

`llama.cpp` is what its `perplexity` tool measures: the same windows, 512 there by default, whose
first token is replaced by BOS if the tokenizer adds one to a text, and of which only the second
half is scored: the W - 1 - floor(W / 2) tokens that have at least half a window before them.

Tokens of one window are not independent, so se is taken over the window means, windows as clusters:
se = std(means) / sqrt(n). With a single window it can only be std(l) / sqrt(W - 1), as though they
were, and the result says which of the two it is.

Frantar et al., "GPTQ", 2022, section 4; https://github.com/IST-DASLab/gptq, `opt_eval`.
llama.cpp, tools/perplexity/perplexity.cpp, `perplexity` without `--ppl-stride`.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch

from compress.errors import CheckFailed
from compress.evalsuite.target import EvaluationTarget
from compress.lookup import lookup
from compress.progress import Ticker

MIN_WINDOW = 3  # two predictions: one alone has no error bar
SLICE_ROWS = 128  # predictions whose whole vocabularies are in memory together


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationData:
    """A tokenized text.

    tokens         (num_tokens,) int64, without special tokens
    text_sha256    of the text in UTF-8
    tokens_sha256  of the ids as little-endian int64: differs when the tokenizer does
    bos_id         what the tokenizer puts in front of a text, None if it adds nothing
    """

    source: str
    tokens: torch.Tensor
    text_sha256: str
    tokens_sha256: str
    bos_id: int | None = None


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
    """How a token stream becomes windows, and which of a window's W - 1 predictions are scored.

    `windows(tokens (num_tokens,), window) -> (num_windows, window)`; `stride(window)` is in tokens;
    the first `skipped(window)` predictions are not scored. With `begins_with_bos` the first token
    of a window is the tokenizer's BOS, if it adds one.
    """

    version: int
    windows: Callable[[torch.Tensor, int], torch.Tensor]
    stride: Callable[[int], int]
    bos: str
    skipped: Callable[[int], int] = lambda window: 0
    begins_with_bos: bool = False


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
    "llama.cpp": PerplexityProtocol(
        version=1,
        windows=disjoint_windows,
        stride=lambda window: window,
        bos="in place of the first token of every window, if the tokenizer adds one to a text",
        skipped=lambda window: window // 2,
        begins_with_bos=True,
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
        bos_id=_added_bos(tokenizer),
    )


def _added_bos(tokenizer: Any) -> int | None:
    bos = getattr(tokenizer, "bos_token_id", None)
    first = tokenizer("a")["input_ids"][:1]
    return bos if bos is not None and first == [bos] else None


def select_windows(
    data: EvaluationData, *, protocol: str, window: int, limit: int | None = None
) -> torch.Tensor:
    """The windows (num_windows, window) int64 to score, at most `limit` of them.

    Raises ValueError for an unknown protocol, a window too small, a limit below 1, or a text that
    does not fill one window.
    """
    chosen = lookup(PROTOCOLS, protocol, "perplexity protocol")
    least = next(w for w in count(MIN_WINDOW) if w - 1 - chosen.skipped(w) >= MIN_WINDOW - 1)
    if window < least:
        raise ValueError(f"perplexity window must be at least {least} tokens, got {window}")
    if limit is not None and limit < 1:
        raise ValueError(f"perplexity window limit must be at least 1, got {limit}")
    if data.tokens.numel() < window:
        raise ValueError(
            f"evaluation text {data.source!r} has {data.tokens.numel()} tokens, "
            f"which does not fill one window of {window}: use a longer text or a smaller window"
        )
    windows = chosen.windows(data.tokens, window)[:limit]
    if chosen.begins_with_bos and data.bos_id is not None:
        windows = windows.clone()
        windows[:, 0] = data.bos_id
    return windows


def scored(values: torch.Tensor, protocol: str) -> torch.Tensor:
    """The part of `values` (num_windows, window - 1), one per prediction, that is scored."""
    chosen = lookup(PROTOCOLS, protocol, "perplexity protocol")
    return values[:, chosen.skipped(values.shape[1] + 1) :]


def perplexity(
    target: EvaluationTarget,
    data: EvaluationData,
    *,
    protocol: str = "gptq",
    window: int = 2048,
    limit: int | None = None,
    name: str = "model",
    tick: Ticker | None = None,
) -> Perplexity:
    """Score `data` window by window with `target`, called `name` in errors; `tick` after each.

    Raises ValueError as `select_windows` does, CheckFailed when a log-probability is not finite.
    """
    windows = select_windows(data, protocol=protocol, window=window, limit=limit)
    losses = torch.empty(len(windows), window - 1, dtype=torch.float64)
    for i, row in enumerate(windows):
        slices = target.log_probs(row.tolist(), SLICE_ROWS)
        losses[i] = torch.cat(
            [negative_log_likelihood(log_probs, part) for log_probs, part in zip_rows(slices, row)]
        )
        check_finite(losses[i], f"{name}: window {i}", "log-probability")
        if tick is not None:
            tick(note=f"perplexity of this window {losses[i].mean().exp().item():.2f}")
    return summarize_losses(losses, data, protocol=protocol, name=name)


def zip_rows(
    slices: Iterable[torch.Tensor], row: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each slice (n, V) of the log-probabilities of window `row` (window,), with the n next tokens.

    What the rows predict is the window without its first token.
    """
    done = 1
    for log_probs in slices:
        yield log_probs, row[done : done + len(log_probs)]
        done += len(log_probs)
    assert done == len(row), f"log-probabilities of {done - 1} tokens for a window of {len(row)}"


def negative_log_likelihood(log_probs: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """-log p of `token_ids` (n,), one per row of `log_probs` (n, V): fp64 (n,) on the CPU."""
    picked = log_probs.gather(1, token_ids.to(log_probs.device)[:, None])[:, 0]
    return -picked.double().cpu()


def check_finite(values: torch.Tensor, place: str, what: str) -> None:
    """Raise CheckFailed if one of `values` (window - 1,), predictions of a window, is not finite.

    `place` and `what` say in the message which window it is and what the values are.
    """
    if not bool(values.isfinite().all()):
        position = int((~values.isfinite()).nonzero()[0]) + 1
        raise CheckFailed(f"{place}, token {position}: the {what} is not finite")


def summarize_losses(
    losses: torch.Tensor, data: EvaluationData, *, protocol: str, name: str
) -> Perplexity:
    """Perplexity from negative log-likelihoods (num_windows, window - 1) fp64 under `protocol`."""
    chosen, window = lookup(PROTOCOLS, protocol, "perplexity protocol"), losses.shape[1] + 1
    losses = scored(losses, protocol)
    mean_nll = losses.mean().item()
    error, method = standard_error(losses)
    value = losses.mean().exp().item()
    if not math.isfinite(value):
        raise CheckFailed(
            f"{name}: perplexity overflows: mean negative log-likelihood {mean_nll:.1f} nats"
        )
    return Perplexity(
        value=value,
        stderr=value * error,
        stderr_method=f"delta method, {method}",
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


def standard_error(values: torch.Tensor) -> tuple[float, str]:
    """Standard error of the mean of `values` (num_windows, predictions), and how it was taken."""
    if len(values) > 1:
        means = values.mean(dim=1)
        return means.std().item() / math.sqrt(len(means)), "windows as clusters"
    spread = values.std().item() / math.sqrt(values.numel())
    return spread, "tokens of the only window as independent"
