"""The lists of penalized, biased and banned tokens that `ops.process_logits` reads, row by row.

A row is the choice of one token of one request, after its known tokens and some drafted ones. Only
what a row asks for is listed, and a part that no row asks for is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from compress.kernels.logits_processors import Bans, Bias, Penalties
from compress.kernels.ops import Ops
from compress.runtime.request import Request
from compress.runtime.sampling_params import SamplingParams
from compress.runtime.token_counts import TokenCounts

_NEUTRAL = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0}


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A token to choose for `request`: that after its known tokens and `num_drafts` drafted ones.

    The drafts before it count as output: it is looked at only if they are right.
    """

    request: Request
    num_drafts: int = 0

    @property
    def params(self) -> SamplingParams:
        """How the token is chosen."""
        assert self.request.params is not None
        return self.request.params

    @property
    def position(self) -> int:
        """Where in the sequence the token will stand."""
        return len(self.request.token_ids) + self.num_drafts

    @property
    def drafts(self) -> Sequence[int]:
        """The drafted tokens before it."""
        return self.request.draft_ids[: self.num_drafts]


def process_rows(
    logits: torch.Tensor, rows: Sequence[SampledRow], ops: Ops, eos_token_ids: frozenset[int]
) -> torch.Tensor:
    """`logits` (R, V) fp32 with what the requests of `rows` ask for, changed in place."""
    penalties, bias = _penalties(rows, logits.device), _bias(rows, logits.device)
    bans = _bans(rows, eos_token_ids, logits)
    if penalties is None and bias is None and bans is None:
        return logits
    return ops.process_logits(logits, penalties=penalties, bias=bias, bans=bans)


def _penalties(rows: Sequence[SampledRow], device: torch.device) -> Penalties | None:
    if not any(row.params.has_penalties for row in rows):
        return None
    listed = [_counts(row) if row.params.has_penalties else _NOTHING for row in rows]
    ids, counts, in_prompt = (
        torch.from_numpy(np.concatenate(column)).to(device) for column in zip(*listed, strict=True)
    )
    values: dict[str, torch.Tensor | None] = {}
    for name, neutral in _NEUTRAL.items():
        column = [getattr(row.params, f"{name}_penalty") for row in rows]
        is_used = any(value != neutral for value in column)
        values[name] = torch.tensor(column, dtype=torch.float32, device=device) if is_used else None
    starts = _starts([len(row_ids) for row_ids, _, _ in listed], device)
    return Penalties(
        token_ids=ids, output_counts=counts, in_prompt=in_prompt, row_starts=starts, **values
    )


_NOTHING = (np.empty(0, np.int64), np.empty(0, np.int32), np.empty(0, np.bool_))


def _counts(row: SampledRow) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    request = row.request
    if request.counts is None:
        request.counts = TokenCounts(request.prompt_ids)
    request.counts.follow(request.token_ids)
    return request.counts.with_drafts(row.drafts)


def _bias(rows: Sequence[SampledRow], device: torch.device) -> Bias | None:
    listed = [row.params.logit_bias for row in rows]
    if not any(listed):
        return None
    return Bias(
        ids=torch.tensor([i for bias in listed for i in bias], device=device),
        values=torch.tensor(
            [value for bias in listed for value in bias.values()],
            dtype=torch.float32,
            device=device,
        ),
        starts=_starts([len(bias) for bias in listed], device),
    )


def _bans(
    rows: Sequence[SampledRow], eos_token_ids: frozenset[int], logits: torch.Tensor
) -> Bans | None:
    listed = [banned_tokens(row, eos_token_ids) for row in rows]
    if not any(listed):
        return None
    vocab_size = logits.shape[1]  # a checkpoint may name an end that the model does not have
    listed = [[token for token in banned if token < vocab_size] for banned in listed]
    ids = [token for banned in listed for token in banned]
    return Bans(
        ids=torch.tensor(ids, dtype=torch.int64, device=logits.device),
        starts=_starts([len(banned) for banned in listed], logits.device),
    )


def banned_tokens(row: SampledRow, eos_token_ids: frozenset[int]) -> list[int]:
    """Tokens that must not come at `row`: ends that are too early, last tokens of bad words."""
    params, request = row.params, row.request
    banned: list[int] = []
    if row.position - len(request.prompt_ids) < params.min_tokens:
        banned += sorted(params.ending_ids(eos_token_ids))
    if params.bad_words:
        longest = max(len(word) for word in params.bad_words) - 1
        start = max(row.position - longest, 0)
        before = request.tokens_between(start, row.position)
        for word in params.bad_words:
            prefix = list(word[:-1])
            if len(prefix) <= len(before) and before[len(before) - len(prefix) :] == prefix:
                banned.append(word[-1])
    return banned


def _starts(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)
