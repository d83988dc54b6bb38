"""Beam search: the k most likely continuations of a prompt, kept side by side.

Every running beam is a request of its own. In each round all beams compute their newest token, and
the best candidates (beam, next token) of all of them together become the beams of the next round: a
beam with several forks (`Scheduler.fork`: cache blocks are shared, and copied when written), a beam
without any is removed. A beam that has computed its token waits until the others have.

The rules are those of transformers' `_beam_search`, so that the same sequences come out: of the
best max(2, 1 + number of ending tokens) * k candidates, those that end and are among the best k
are finished, and the best k that go on are the next beams. A finished beam has the score
log-probability / length ** length_penalty, and the best k of them are kept. Penalties, biases and
bans change log-probabilities here, not logits, and are not followed by another normalization.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from compress.runtime.logprobs import LogProbs, chunks, largest, pick
from compress.runtime.model import Decoder
from compress.runtime.processors import SampledRow, process_rows
from compress.runtime.request import Request
from compress.runtime.sampling_params import SamplingParams
from compress.runtime.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best next tokens of one beam, most likely first, and what each adds to the score.

    `own` are their log-probabilities before penalties, with the reported top of the row, or None.
    """

    token_ids: list[int]
    values: list[float]
    own: LogProbs | None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output: its tokens, when each was known, and what it is compared by."""

    score: float
    token_ids: list[int]
    token_times: list[float]
    finish_reason: str
    logprobs: list[LogProbs]


def num_candidates(params: SamplingParams, eos_token_ids: frozenset[int]) -> int:
    """How many candidates a round looks at, so that k remain even if the best of each beam end."""
    return max(2, 1 + len(params.ending_ids(eos_token_ids))) * params.beam_width


def propose_beams(
    decoder: Decoder,
    hidden: torch.Tensor,
    rows: Sequence[SampledRow],
    eos_token_ids: frozenset[int],
) -> list[Candidates]:
    """The candidates of each of `rows`, whose final hidden states are `hidden` (R, H)."""
    found: list[Candidates] = []
    for part in chunks(len(rows), decoder.config.vocab_size):
        own = decoder.logits(hidden[part]).log_softmax(dim=-1)
        found += _propose_chunk(decoder, own, rows[part], eos_token_ids)
    return found


def _propose_chunk(
    decoder: Decoder, own: torch.Tensor, rows: Sequence[SampledRow], eos_token_ids: frozenset[int]
) -> list[Candidates]:
    values = process_rows(own.clone(), rows, decoder.ops, eos_token_ids)
    found = []
    for i, row in enumerate(rows):
        count = min(num_candidates(row.params, eos_token_ids), values.shape[1])
        best, ids = largest(values[i : i + 1], count)
        # A row that is not finite has no candidates, an impossible token is none.
        possible = best[0].isfinite()
        token_ids = ids[0, possible]
        reported = None
        if row.params.logprobs is not None and len(token_ids):
            row_own = own[i].expand(len(token_ids), -1)
            reported = pick(row_own, token_ids, 0)
            top = pick(own[i : i + 1], token_ids[:1], row.params.logprobs)
            reported = replace(reported, top_ids=top.top_ids, top=top.top)
        found.append(Candidates(token_ids.tolist(), best[0, possible].tolist(), reported))
    return found


def check_search(request: Request, scheduler: Scheduler) -> None:
    """Raise ValueError if the beams of `request` could not all be running at their full length."""
    width = request.params.beam_width if request.params else 1
    blocks = scheduler.blocks
    needed = width * blocks.footprint(request.max_cached_tokens)
    if width > scheduler.max_num_seqs:
        raise ValueError(
            f"request {request.request_id!r}: beam_width {width} is more than max_num_seqs"
            f" {scheduler.max_num_seqs} of the engine"
        )
    if needed > blocks.num_blocks:
        raise ValueError(
            f"request {request.request_id!r} can never fit: {width} beams of"
            f" {request.max_cached_tokens} tokens may need {needed} cache blocks, the pool has"
            f" {blocks.num_blocks}"
        )


class BeamSearch:
    """The beams of one `parent`, which has a `beam_width`; `beams` are its running children."""

    def __init__(self, parent: Request, eos_token_ids: frozenset[int]) -> None:
        params = parent.params
        assert params is not None
        self.parent = parent
        self.params = params
        self.prompt_logprobs: list[LogProbs] = []
        self.finished: list[Hypothesis] = []  # the best first
        self.is_done = False
        self.cached_tokens = 0
        self._ends = params.ending_ids(eos_token_ids)
        self._num_candidates = num_candidates(params, eos_token_ids)
        self._candidates: dict[str, Candidates] = {}
        self._scores: dict[str, float] = {}
        self._num_named = 0
        first = self._beam(list(parent.prompt_ids), params)
        first.num_forks = params.beam_width - 1
        self._scores[first.request_id] = 0.0
        self.beams = [first]

    @property
    def is_ready(self) -> bool:
        """Whether every beam has its candidates."""
        return not self.is_done and all(b.request_id in self._candidates for b in self.beams)

    def offer(self, beam: Request, candidates: Candidates) -> None:
        """Take the candidates of `beam`, whose newest token is computed."""
        self._candidates[beam.request_id] = candidates

    def has_candidates(self, beam: Request) -> bool:
        """Whether some token is possible after `beam`, whose logits are finite then."""
        return bool(self._candidates[beam.request_id].token_ids)

    def forget_candidates(self) -> None:
        """Be ready for those of the next round."""
        self._candidates.clear()

    def advance(self, now: float) -> list[tuple[Request, Request]]:
        """Replace the beams by those of the next round; (beam, new one that forks it) of each fork.

        Beams that are no longer in `beams` are over. Sets `is_done` at the end of the search.
        """
        self._report_prompt()
        ranked = self._ranked()
        length = self.beams[0].num_output_tokens + 1
        ending = [
            length == self.params.max_tokens or token in self._ends for _, _, _, token in ranked
        ]
        width = self.params.beam_width
        self._finish([c for c, ends in zip(ranked[:width], ending, strict=False) if ends], now)
        going_on = [c for c, ends in zip(ranked, ending, strict=True) if not ends][:width]
        self.is_done = not going_on or self._cannot_improve(going_on[0][0], length)
        return [] if self.is_done else self._replace_beams(going_on, now)

    def best_running(self) -> Hypothesis:
        """The best beam as it stands, for a search that is aborted."""
        beam = max(self.beams, key=lambda beam: self._scores[beam.request_id])
        return Hypothesis(
            score=self._scores[beam.request_id]
            / max(beam.num_output_tokens, 1) ** self.params.length_penalty,
            token_ids=beam.token_ids[len(beam.prompt_ids) :],
            token_times=beam.token_times,
            finish_reason="abort",
            logprobs=beam.logprobs,
        )

    def _ranked(self) -> list[tuple[float, int, int, int]]:
        """(score, beam, place among its candidates, token) of the best candidates, best first."""
        ranked = []
        for i, beam in enumerate(self.beams):
            found = self._candidates[beam.request_id]
            so_far = self._scores[beam.request_id]
            for place, (token, value) in enumerate(zip(found.token_ids, found.values, strict=True)):
                ranked.append((so_far + value, i, place, token))
        ranked.sort(key=lambda c: (-c[0], c[1], c[3]))
        return ranked[: self._num_candidates]

    def _finish(self, ended: Sequence[tuple[float, int, int, int]], now: float) -> None:
        """Keep the best hypotheses of those there are and the candidates that just ended."""
        for score, i, place, token in ended:
            beam = self.beams[i]
            length = beam.num_output_tokens + 1
            self.finished.append(
                Hypothesis(
                    score=score / length**self.params.length_penalty,
                    token_ids=[*beam.token_ids[len(beam.prompt_ids) :], token],
                    token_times=[*beam.token_times, now],
                    finish_reason="stop" if token in self._ends else "length",
                    logprobs=[*beam.logprobs, *self._own(beam, place)],
                )
            )
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: earlier ones first
        del self.finished[self.params.beam_width :]

    def _cannot_improve(self, best_running: float, length: int) -> bool:
        """Whether no beam, continued from this `length`, can beat the worst hypothesis."""
        params = self.params
        if len(self.finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0.0:
            length = params.max_tokens
        return bool(best_running / length**params.length_penalty <= self.finished[-1].score)

    def _replace_beams(
        self, going_on: Sequence[tuple[float, int, int, int]], now: float
    ) -> list[tuple[Request, Request]]:
        """Make `going_on` the beams: the first of each continues it, the others fork."""
        old = self.beams
        known = [list(beam.token_ids) for beam in old]
        times, reported = [b.token_times for b in old], [b.logprobs for b in old]
        own = [self._own(old[i], place) for _, i, place, _ in going_on]
        self.beams, forks, scores = [], [], dict[str, float]()
        for (score, i, _, token), part in zip(going_on, own, strict=True):
            if old[i] in self.beams:
                beam = self._beam(known[i], self.params)
                beam.order = old[i].order
                forks.append((old[i], beam))
            else:
                beam = old[i]
            beam.token_ids = [*known[i], token]
            beam.token_times = [*times[i], now]
            beam.logprobs = [*reported[i], *part]
            scores[beam.request_id] = score
            self.beams.append(beam)
        self._scores = scores
        return forks

    def _own(self, beam: Request, place: int) -> list[LogProbs]:
        """What is reported of a candidate: one part, or none."""
        own = self._candidates[beam.request_id].own
        return [] if own is None else [replace(own, chosen=own.chosen[place, None])]

    def _report_prompt(self) -> None:
        """After the first round: keep the log-probabilities of the prompt, and ask no more."""
        first = self.beams[0]
        self.cached_tokens = max(self.cached_tokens, first.num_cached_tokens or 0)
        first.num_forks = 0
        if first.prompt_logprobs:
            self.prompt_logprobs = list(first.prompt_logprobs)
            first.prompt_logprobs.clear()
        first.params = replace(self.params, prompt_logprobs=None)

    def _beam(self, token_ids: list[int], params: SamplingParams) -> Request:
        beam = Request(
            request_id=f"{self.parent.request_id}/{self._num_named}",
            prompt_ids=list(self.parent.prompt_ids),
            params=params if self._num_named == 0 else replace(params, prompt_logprobs=None),
            priority=self.parent.priority,
            arrival_time=self.parent.arrival_time,
            parent_id=self.parent.request_id,
            is_beam=True,
            is_drafted=False,
        )
        beam.token_ids = token_ids
        self._num_named += 1
        return beam
