"""From the hidden states of a step to the next state of its requests, and to completions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from compress.runtime.beam import BeamSearch, Candidates, propose_beams
from compress.runtime.logprobs import LogProbs, join
from compress.runtime.model import Decoder
from compress.runtime.processors import SampledRow
from compress.runtime.request import Completion, Request
from compress.runtime.sampler import Choice, choose
from compress.runtime.scheduler import ScheduledRequest
from compress.runtime.scoring import append_scores
from compress.runtime.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Advance:
    """What a step says about one request: choices for its next tokens, or candidates of a beam.

    `item` computed the hidden states (n, H) `states`. There are no choices while known tokens are
    left to compute.
    """

    item: ScheduledRequest
    states: torch.Tensor
    choices: Sequence[Choice] = ()
    candidates: Candidates | None = None


def reaches_end(item: ScheduledRequest) -> bool:
    """Whether a token is chosen after this step: all known ones are computed."""
    request = item.request
    return request.params is not None and item.start + item.num_tokens >= len(request.token_ids)


def read_states(
    decoder: Decoder,
    items: Sequence[ScheduledRequest],
    hidden: Sequence[torch.Tensor],
    eos_token_ids: frozenset[int],
) -> list[Advance]:
    """Scores, choices and candidates for every item, whose states are those of `hidden`.

    A token is chosen after the last known one and after each draft. Scores go to their requests.
    """
    rows: dict[bool, list[SampledRow]] = {True: [], False: []}  # by whether they are beams
    wanted: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for item, states in zip(items, hidden, strict=True):
        request = item.request
        append_scores(decoder, item, states)
        for num_drafts in range(_num_choices(item)):
            row = SampledRow(request, num_drafts)
            rows[request.is_beam].append(row)
            wanted[request.is_beam].append(states[row.position - 1 - item.start])
    choices: list[Choice] = []
    if wanted[False]:
        choices = choose(decoder, torch.stack(wanted[False]), rows[False], eos_token_ids)
    candidates: list[Candidates] = []
    if wanted[True]:
        candidates = propose_beams(decoder, torch.stack(wanted[True]), rows[True], eos_token_ids)
    results = []
    for item, states in zip(items, hidden, strict=True):
        count = _num_choices(item)
        if item.request.is_beam:
            found = candidates.pop(0) if count else None
            results.append(Advance(item, states, candidates=found))
        else:
            results.append(Advance(item, states, choices[:count]))
            del choices[:count]
    return results


def _num_choices(item: ScheduledRequest) -> int:
    num_known = len(item.request.token_ids)
    return item.start + item.num_tokens - num_known + 1 if reaches_end(item) else 0


def accept(
    step: Advance, eos_token_ids: frozenset[int], now: float, stats: EngineStats
) -> str | None:
    """Append the chosen tokens as far as the drafts agree; why the request ends, if it does.

    The computed length is rolled back to the last position whose token is certain: the cache
    slots of refused drafts are overwritten by the next step.
    """
    request, item, choices = step.item.request, step.item, step.choices
    num_known = len(request.token_ids)
    drafts = request.draft_ids[: len(choices) - 1] if choices else []
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == choices[num_accepted].token:
        num_accepted += 1
    request.draft_ids.clear()
    request.num_computed_tokens = min(item.start + item.num_tokens, num_known + num_accepted)
    if request.params is None:
        return "length" if request.num_computed_tokens == num_known else None
    if drafts:
        stats.num_verifications += 1
        stats.drafted_tokens += len(drafts)
        stats.accepted_tokens += num_accepted
    endings = request.params.ending_ids(eos_token_ids)
    for choice in choices[: num_accepted + 1]:
        if choice.token < 0:
            place = len(request.token_ids)
            request.error = f"the logits of the token at position {place} {_NOT_FINITE}"
            return "error"
        request.token_ids.append(choice.token)
        request.token_times.append(now)
        if choice.logprobs is not None:
            request.logprobs.append(choice.logprobs)
        stats.generated_tokens += 1
        if choice.token in endings:
            return "stop"
        if request.num_remaining_tokens == 0:
            return "length"
    return None


_NOT_FINITE = "are not finite: NaN or infinity, or every token banned"


def completion_of(request: Request, reason: str, error: str | None = None) -> Completion:
    """The completion of a request that ends for `reason`."""
    params, is_score = request.params, request.params is None
    is_scored = is_score and request.hidden is None and reason == "length"
    num_top = request.num_top_of_prompt
    return Completion(
        request_id=request.request_id,
        prompt_tokens=len(request.prompt_ids),
        token_ids=request.token_ids[len(request.prompt_ids) :],
        finish_reason=reason,
        arrival_time=request.arrival_time,
        token_times=request.token_times,
        cached_tokens=min(request.num_cached_tokens or 0, len(request.prompt_ids)),
        params=params,
        logprobs=None if params is None else _joined(request.logprobs, params.logprobs),
        prompt_logprobs=(
            _joined(request.prompt_logprobs, num_top) if is_scored or not is_score else None
        ),
        error=error if request.error is None else request.error,
        index=request.index,
    )


def beam_completion(search: BeamSearch, reason: str | None, error: str | None) -> Completion:
    """The n best hypotheses of a search that is done, or that ends before for `reason`."""
    parent, params = search.parent, search.params
    found = search.finished
    if not search.is_done:
        found = sorted([search.best_running(), *found], key=lambda h: -h.score)
    elif not found:
        reason, error = "error", f"the logits of every beam {_NOT_FINITE}"
        found = [search.best_running()]
    ends = [
        Completion(
            request_id=parent.request_id,
            prompt_tokens=len(parent.prompt_ids),
            token_ids=hypothesis.token_ids,
            finish_reason=reason or hypothesis.finish_reason,
            arrival_time=parent.arrival_time,
            token_times=hypothesis.token_times,
            cached_tokens=min(search.cached_tokens, len(parent.prompt_ids)),
            params=params,
            logprobs=_joined(hypothesis.logprobs, params.logprobs),
            prompt_logprobs=_joined(search.prompt_logprobs, params.prompt_logprobs),
            error=error,
            index=i,
            beam_score=hypothesis.score,
        )
        for i, hypothesis in enumerate(found[: params.n])
    ]
    return replace(ends[0], siblings=tuple(ends[1:]))


def _joined(parts: Sequence[LogProbs], num_top: int | None) -> LogProbs | None:
    return None if num_top is None else join(parts, num_top)
