"""Choosing the next tokens of a step: logits, log-probabilities, processors, draw.

Which token a row gets is decided in `kernels/sampling.py`, after `kernels/logits_processors.py`;
here the parameters of many requests become the tensors that these take. Rows go through in chunks,
so that the logits of a step with many rows are not in memory at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compress.kernels.ops import Ops
from compress.runtime.logprobs import LogProbs, chunks, pick
from compress.runtime.model import Decoder
from compress.runtime.processors import SampledRow, process_rows

# Name of a parameter of `ops.sample` -> the value that switches it off, dtype.
_SWITCHES: dict[str, tuple[float, torch.dtype]] = {
    "top_k": (0, torch.int32),
    "top_p": (1.0, torch.float32),
    "min_p": (0.0, torch.float32),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The token of a row, -1 if its logits are not finite, and its log-probability if wanted."""

    token: int
    logprobs: LogProbs | None = None


def choose(
    decoder: Decoder,
    hidden: torch.Tensor,
    rows: Sequence[SampledRow],
    eos_token_ids: frozenset[int] = frozenset(),
) -> list[Choice]:
    """A choice for each of `rows`, whose final hidden states are `hidden` (R, H)."""
    choices: list[Choice] = []
    for part in chunks(len(rows), decoder.config.vocab_size):
        logits = decoder.logits(hidden[part])
        choices += sample_rows(logits, rows[part], decoder.ops, eos_token_ids)
    return choices


def sample_rows(
    logits: torch.Tensor,
    rows: Sequence[SampledRow],
    ops: Ops,
    eos_token_ids: frozenset[int] = frozenset(),
) -> list[Choice]:
    """A choice for each row of `logits` (R, V) fp32, which is overwritten."""
    reported = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    # Of the model alone: made before anything is changed.
    own = logits[reported].log_softmax(dim=-1) if reported else None
    tokens = ops.sample(
        process_rows(logits, rows, ops, eos_token_ids), **_parameters(rows, logits.device)
    )
    found: list[LogProbs | None] = [None] * len(rows)
    if own is not None:
        num_tops = [rows[i].params.logprobs or 0 for i in reported]
        parts = pick(own, tokens[reported].clamp(min=0), max(num_tops))
        for place, (i, num_top) in enumerate(zip(reported, num_tops, strict=True)):
            found[i] = LogProbs(
                chosen=parts.chosen[place, None],
                top_ids=parts.top_ids[place, None, :num_top],
                top=parts.top[place, None, :num_top],
            )
    return [Choice(token, part) for token, part in zip(tokens.tolist(), found, strict=True)]


def _parameters(rows: Sequence[SampledRow], device: torch.device) -> dict[str, torch.Tensor | None]:
    """The arguments of `ops.sample`; None for what no row asks for."""

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    found: dict[str, torch.Tensor | None] = {
        "temperature": column([row.params.temperature for row in rows], torch.float32),
        "seed": column([row.params.seed or 0 for row in rows], torch.int64),
        "position": column([row.position for row in rows], torch.int64),
    }
    for name, (off, dtype) in _SWITCHES.items():
        values = [getattr(row.params, name) for row in rows]
        found[name] = column(values, dtype) if any(value != off for value in values) else None
    return found
