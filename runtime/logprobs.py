"""Log-probabilities of tokens, picked out of rows of logits a few rows at a time.

R rows, V vocabulary. Rows of logits are made, normalized and reduced to what is asked of them in
chunks, so that no more than a chunk of (rows, V) is ever in memory, however many tokens there are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_LOGITS_BYTES = 64 * 2**20  # of fp32 logits at a time
_LOW_BITS = 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbs:
    """Natural log-probabilities of n consecutive tokens under the model alone, on the CPU.

    `chosen` (n,) fp32 are those of the tokens themselves; `top` (n, K) fp32 those of the K most
    likely tokens `top_ids` (n, K) int64, the largest first, the lowest id first among equals.
    """

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


def join(parts: Sequence[LogProbs], num_top: int) -> LogProbs:
    """The tokens of all parts, in order; with `num_top` columns if there is no part."""
    if not parts:
        nothing = torch.empty(0, num_top)
        return LogProbs(chosen=torch.empty(0), top_ids=nothing.long(), top=nothing)
    return LogProbs(
        chosen=torch.cat([part.chosen for part in parts]),
        top_ids=torch.cat([part.top_ids for part in parts]),
        top=torch.cat([part.top for part in parts]),
    )


def pick(log_probs: torch.Tensor, tokens: torch.Tensor, num_top: int) -> LogProbs:
    """What is reported of rows `log_probs` (R, V) fp32 whose tokens are `tokens` (R,) int64."""
    chosen = log_probs.gather(1, tokens[:, None])[:, 0]
    top, top_ids = largest(log_probs, min(num_top, log_probs.shape[1]))
    return LogProbs(chosen=chosen.cpu(), top_ids=top_ids.cpu(), top=top.cpu())


def largest(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row of `values` (R, V) fp32 and their ids, (R, k) each.

    In descending order, and among equals the lowest id first: unlike `torch.topk`, where ties go
    by chance, this does not depend on k or on the neighbours of a row. No NaN may be among them.
    """
    if k == 0:
        return values[:, :0], torch.empty(len(values), 0, dtype=torch.int64, device=values.device)
    bits = values.contiguous().view(torch.int32)
    ordered = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long()  # ordered as the floats are
    ids = torch.arange(values.shape[1], device=values.device)
    keys = (ordered << 32) | (_LOW_BITS - ids)
    top_ids = _LOW_BITS - (keys.topk(k, dim=1).values & _LOW_BITS)
    return values.gather(1, top_ids), top_ids


def chunks(num_rows: int, vocab_size: int) -> list[slice]:
    """Slices of at most so many rows of logits as may be in memory at a time."""
    size = max(_LOGITS_BYTES // (4 * vocab_size), 1)
    return [slice(start, start + size) for start in range(0, num_rows, size)]
