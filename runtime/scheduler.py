"""Iteration-level scheduling: what each step of the engine computes.

Every step spends a budget of tokens. Requests that are decoding come first (one row each, plus
their drafted tokens), so that a long prompt never stalls them; what is left of the budget goes to
prompts in order of arrival, in chunks (Orca, Yu et al. 2022; chunked prefill as in Sarathi-Serve,
Agrawal et al. 2024).

Admission looks at the peak of future block use (the rule of LightLLM): if all running requests and
the candidate advance one token per step until their `max_tokens`, the pool must hold them at every
moment a request ends. Where that estimate is too hopeful (prompts still being computed, drafts
accepted at different rates) the most recently admitted request is preempted: it gives its blocks
back, waits at the front, and recomputes.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from compress.runtime.blocks import BlockManager
from compress.runtime.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRequest:
    """`request` computes its tokens [start, start + num_tokens) in this step."""

    request: Request
    start: int
    num_tokens: int


@dataclass(kw_only=True, slots=True)
class Schedule:
    """One step: the rows of the batch in order, and block copies to make before writing them."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """Decides, step by step, which tokens of which requests are computed."""

    def __init__(self, blocks: BlockManager, *, max_num_seqs: int, token_budget: int) -> None:
        if not 1 <= max_num_seqs <= token_budget:
            raise ValueError(
                f"need 1 <= max_num_seqs <= token_budget, got {max_num_seqs} and {token_budget}"
            )
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request; ValueError with the numbers if the pool could never hold it."""
        self._check_fits(request)
        self.waiting.append(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Run `child` beside the running `parent`, sharing the blocks computed so far."""
        if len(self.running) >= self.max_num_seqs:
            raise ValueError(f"cannot fork: max_num_seqs {self.max_num_seqs} requests are running")
        self._check_fits(child)
        child.num_computed_tokens = parent.num_computed_tokens
        self.blocks.fork(parent.request_id, child.request_id)
        self.running.append(child)

    def remove(self, request: Request) -> None:
        """Forget a finished or aborted request and free its blocks."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self.blocks.free(request.request_id)

    def schedule(self) -> Schedule:
        """Plan the next step; empty only if there is no request at all."""
        step = Schedule()
        budget = self.token_budget
        decoding = [request for request in self.running if request.is_decoding]
        prefilling = [request for request in self.running if not request.is_decoding]
        num_undone = len(decoding)
        for request in decoding:
            if request in self.running:  # not preempted by an earlier one
                num_undone -= 1
                # Drafts may use what the other decoding requests do not need.
                budget -= self._schedule_running(step, request, budget - num_undone)
        for request in prefilling:
            if budget and request in self.running:
                budget -= self._schedule_running(step, request, budget)
        while budget and not step.preempted and self._can_admit():
            request = self.waiting.popleft()
            self.running.append(request)
            budget -= self._schedule_running(step, request, budget)
        assert step.scheduled or not (self.waiting or self.running), "no request can make progress"
        return step

    def _check_fits(self, request: Request) -> None:
        needed = self.blocks.blocks_for(request.max_cached_tokens)
        if needed > self.blocks.num_blocks:
            raise ValueError(
                f"request {request.request_id!r} can never fit: {request.max_cached_tokens} tokens"
                f" need {needed} cache blocks, the pool has {self.blocks.num_blocks}"
            )

    def _schedule_running(self, step: Schedule, request: Request, budget: int) -> int:
        """Add up to `budget` tokens of `request` to the step; 0 if it had to be preempted."""
        start = request.num_computed_tokens
        num_tokens = min(request.num_uncomputed_tokens, budget)
        while (
            copies := self.blocks.reserve(request.request_id, start, start + num_tokens)
        ) is None:
            victim = self._victim(step)
            self._preempt(step, victim)
            if victim is request:
                return 0
        step.copies += copies
        step.scheduled.append(ScheduledRequest(request=request, start=start, num_tokens=num_tokens))
        return num_tokens

    def _victim(self, step: Schedule) -> Request:
        """The most recently admitted request that is not part of the step yet."""
        taken = {id(item.request) for item in step.scheduled}
        return next(request for request in reversed(self.running) if id(request) not in taken)

    def _preempt(self, step: Schedule, request: Request) -> None:
        self.running.remove(request)
        self.blocks.free(request.request_id)
        request.num_computed_tokens = 0
        request.draft_ids.clear()
        request.log_probs.clear()
        if request.hidden is not None:
            request.hidden.clear()
        self.waiting.appendleft(request)
        step.preempted.append(request)

    def _can_admit(self) -> bool:
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return False
        return peak_blocks([*self.running, self.waiting[0]], self.blocks) <= self.blocks.num_blocks


def peak_blocks(requests: Sequence[Request], blocks: BlockManager) -> int:
    """Most blocks in use at once if all `requests` advance one token per step to their end."""
    lengths = [(len(r.token_ids), r.max_cached_tokens - len(r.token_ids)) for r in requests]
    return max(
        sum(blocks.blocks_for(length + step) for length, left in lengths if left >= step)
        for step in {left for _, left in lengths}
    )
