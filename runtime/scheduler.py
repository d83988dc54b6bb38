"""Scheduling: what each step of the engine computes.

Every step spends a budget of tokens. Requests that are decoding come first (one row each, plus
their drafted tokens), so that a long prompt never stalls them; what is left of the budget goes to
prompts in the order of the policy, in chunks (Orca, Yu et al. 2022; chunked prefill as in
Sarathi-Serve, Agrawal et al. 2024).

Admission looks at the peak of future block use (`admission.py`). Where that estimate is too hopeful
(prompts still being computed, forks) a request is preempted: it gives its blocks back, waits in its
place in the order, and recomputes. The victim is the last in the order of the policy that is not
part of the step yet; that is also all that priority does to a running request: one that waits never
pushes out one that runs. Drafts preempt nobody, they are dropped.

A request that was preempted `max_preemptions` times is pinned: from its next admission on it is
never a victim, and it is admitted only if the pool holds all pinned requests at their full length.
So a pinned request always gets its blocks, from the others if need be, and since each request can
lose its work only so many times, all come to their end.

A beam that has computed all it knows holds its blocks until the other beams of its search have, too
(`beam.py`). If nothing else can go on, such beams are preempted until the first waiting request
gets in; as that is the first in the order of the policy, a search cannot wait for itself.

Two switches replace a mechanism by what engines did before it. `batching="request"` admits a batch
only when the one before has ended. `chunked_prefill=False` computes a prompt in one step: beside
the decoding requests if it fits the budget, else alone, while they wait.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from compress.lookup import lookup
from compress.runtime.admission import peak_blocks
from compress.runtime.blocks import BlockManager
from compress.runtime.request import Request


def fifo_key(request: Request) -> tuple[int, int]:
    """Order of arrival."""
    return (0, request.order)


def priority_key(request: Request) -> tuple[int, int]:
    """The lowest priority number first, equal ones in order of arrival."""
    return (request.priority, request.order)


# Name -> sort key: who is served first, and who is preempted last.
POLICIES: dict[str, Callable[[Request], tuple[int, int]]] = {
    "fifo": fifo_key,
    "priority": priority_key,
}
# Name -> whether a request may join others that are running.
BATCHING: dict[str, bool] = {"iteration": True, "request": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledRequest:
    """`request` computes its tokens [start, start + num_tokens) in this step."""

    request: Request
    start: int
    num_tokens: int


@dataclass(kw_only=True, slots=True)
class Schedule:
    """One step: the rows of the batch in order, and block copies to make before writing them.

    `prefix_hit_tokens` of the requests that joined came from the prefix cache.
    """

    scheduled: list[ScheduledRequest] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    prefix_hit_tokens: int = 0


class Scheduler:
    """Decides, step by step, which tokens of which requests are computed."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        token_budget: int,
        policy: str = "fifo",
        batching: str = "iteration",
        chunked_prefill: bool = True,
        prefix_cache: bool = False,
        max_preemptions: int = 4,
    ) -> None:
        if not 1 <= max_num_seqs <= token_budget:
            raise ValueError(
                f"need 1 <= max_num_seqs <= token_budget, got {max_num_seqs} and {token_budget}"
            )
        if max_preemptions < 0:
            raise ValueError(f"max_preemptions must not be negative, got {max_preemptions}")
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.token_budget = token_budget
        self.chunked_prefill = chunked_prefill
        self.prefix_cache = prefix_cache
        self.max_preemptions = max_preemptions
        self.waiting: list[Request] = []  # in the order of the policy
        self.running: list[Request] = []  # in order of admission
        self._key = lookup(POLICIES, policy, "scheduling policy")
        self._may_join = lookup(BATCHING, batching, "batching")
        self._num_arrived = 0

    def add(self, request: Request) -> None:
        """Queue a request; ValueError with the numbers if the pool could never hold it."""
        self._check_fits(request)
        self._number(request)
        insort(self.waiting, request, key=self._key)

    def can_fork(self, parent: Request, child: Request) -> bool:
        """Whether `fork` has room; if not, the child may be added like any request."""
        return (
            parent in self.running
            and len(self.running) < self.max_num_seqs
            and self.blocks.can_share
            and self._holds_pinned([*self.running, child])
        )

    def fork(self, parent: Request, child: Request) -> None:
        """Run `child` beside the running `parent`, sharing the blocks computed so far."""
        if len(self.running) >= self.max_num_seqs:
            raise ValueError(f"cannot fork: max_num_seqs {self.max_num_seqs} requests are running")
        self._check_fits(child)
        if not self._holds_pinned([*self.running, child]):
            raise ValueError("cannot fork: the pool cannot hold all that may not be preempted")
        self.blocks.fork(parent.request_id, child.request_id)
        child.num_computed_tokens = parent.num_computed_tokens
        self._number(child)
        self.running.append(child)

    def remove(self, request: Request) -> None:
        """Forget a finished or aborted request and free its blocks."""
        (self.running if request in self.running else self.waiting).remove(request)
        self.blocks.free(request.request_id)

    def discard(self, request: Request) -> list[int]:
        """`remove` one whose blocks hold something wrong; which of them nobody else holds."""
        (self.running if request in self.running else self.waiting).remove(request)
        return self.blocks.discard(request.request_id)

    def schedule(self) -> Schedule:
        """Plan the next step; empty if there is no request at all."""
        step = Schedule()
        if not self._may_join and not self.running:
            while self._can_admit():
                self._admit(step)
        running = sorted((r for r in self.running if r.num_uncomputed_tokens), key=self._key)
        decoding = [request for request in running if request.is_decoding]
        prompts = [request for request in running if not request.is_decoding]
        if not self.chunked_prefill:
            if not prompts and self._may_join and self._can_admit():
                prompts = [self._admit(step)]
            if prompts and self._schedule_alone(step, prompts[0], decoding):
                return step
        budget = self.token_budget - self._schedule_decoding(step, decoding)
        for request in prompts:
            if request in step.preempted:
                continue
            if not self._fits_step(request.num_uncomputed_tokens, budget):
                break
            budget -= self._schedule_request(step, request, budget)
        else:
            if self._may_join:
                self._admit_and_schedule(step, budget)
        if not step.scheduled:
            self._preempt_idle(step)
        return step

    def record_computed(self, request: Request) -> None:
        """Offer what a step has computed of `request` to the prefix cache."""
        if self.prefix_cache:
            num_certain = min(request.num_computed_tokens, len(request.token_ids))
            self.blocks.register(request.request_id, request.token_ids, num_certain)

    def _number(self, request: Request) -> None:
        """Give an order of arrival, unless it has that of the request it belongs to."""
        self._num_arrived += 1
        request.order = request.order or self._num_arrived

    def _check_fits(self, request: Request) -> None:
        needed = self.blocks.footprint(request.max_cached_tokens)
        if needed > self.blocks.num_blocks:
            raise ValueError(
                f"request {request.request_id!r} can never fit: {request.max_cached_tokens} tokens"
                f" need {needed} cache blocks, the pool has {self.blocks.num_blocks}"
            )

    def _schedule_decoding(self, step: Schedule, decoding: Sequence[Request]) -> int:
        """Add every decoding request to the step, with its drafts; how many tokens that is."""
        num_tokens, num_undone = 0, len(decoding)
        for request in decoding:
            num_undone -= 1
            if request not in step.preempted:
                # Drafts may use what the other decoding requests do not need.
                budget = self.token_budget - num_tokens - num_undone
                num_tokens += self._schedule_request(step, request, budget)
        return num_tokens

    def _admit_and_schedule(self, step: Schedule, budget: int) -> None:
        """Let waiting requests in while something is left of the budget for them."""
        while not step.preempted and self._can_admit():
            if not self._fits_step(self._num_to_compute(), budget):
                return  # nobody overtakes
            budget -= self._schedule_request(step, self._admit(step), budget)

    def _fits_step(self, num_tokens: int, budget: int) -> bool:
        """Whether some of `num_tokens` can be computed in this step; without chunks, all."""
        return budget > 0 and (self.chunked_prefill or num_tokens <= budget)

    def _schedule_alone(self, step: Schedule, prompt: Request, decoding: Sequence[Request]) -> bool:
        """Give the step to one whole prompt if it does not fit beside the decoding requests.

        False if it fits, or was preempted for want of blocks: then the others go on.
        """
        beside = sum(request.num_uncomputed_tokens for request in decoding)
        size = prompt.num_uncomputed_tokens
        return size + beside > self.token_budget and bool(
            self._schedule_request(step, prompt, size)
        )

    def _schedule_request(self, step: Schedule, request: Request, budget: int) -> int:
        """Add up to `budget` tokens of `request` to the step, and say how many.

        0 if it had to be preempted, or is pinned and waits for blocks of those in the step.
        """
        start = request.num_computed_tokens
        while True:
            num_tokens = min(request.num_uncomputed_tokens, budget)
            copies = self.blocks.reserve(request.request_id, start, start + num_tokens)
            if copies is not None:
                break
            if request.draft_ids:
                request.draft_ids.clear()
                continue
            victim = self._victim(step)
            if victim is not None:
                self._preempt(step, victim)
            if victim is None or victim is request:
                return 0
        step.copies += copies
        step.scheduled.append(ScheduledRequest(request=request, start=start, num_tokens=num_tokens))
        return num_tokens

    def _victim(self, step: Schedule) -> Request | None:
        """The last request of the policy that is neither pinned nor part of the step yet."""
        taken = {item.request for item in step.scheduled}
        free = [r for r in self.running if r not in taken and not self._is_pinned(r)]
        return max(free, key=self._key, default=None)

    def _preempt_idle(self, step: Schedule) -> None:
        """Preempt beams that wait for others, until one of these can get in."""
        idle = sorted((r for r in self.running if not r.num_uncomputed_tokens), key=self._key)
        while idle and self.waiting and not (self._may_join and self._can_admit()):
            self._preempt(step, idle.pop())

    def _preempt(self, step: Schedule, request: Request) -> None:
        self.running.remove(request)
        self.blocks.free(request.request_id)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.draft_ids.clear()
        request.prompt_logprobs.clear()
        if request.hidden is not None:
            request.hidden.clear()
        insort(self.waiting, request, key=self._key)
        step.preempted.append(request)

    def _is_pinned(self, request: Request) -> bool:
        return request.num_preemptions >= self.max_preemptions

    def _holds_pinned(self, requests: Sequence[Request]) -> bool:
        """Whether the pool holds those of `requests` that are pinned, at their full length."""
        pinned = [request for request in requests if self._is_pinned(request)]
        needed = sum(self.blocks.footprint(request.max_cached_tokens) for request in pinned)
        return needed <= self.blocks.num_blocks

    def _can_admit(self) -> bool:
        """Whether the first waiting request can run to its end beside those that are running."""
        if not self.waiting or len(self.running) >= self.max_num_seqs:
            return False
        if not self.running:
            return True  # alone it fits, even if what will fork from it has to be preempted
        requests = [*self.running, self.waiting[0]]
        if not self._holds_pinned(requests):
            return False
        peak = peak_blocks(requests, self.blocks, self._cached_prefix(self.waiting[0]))
        return peak <= self.blocks.num_blocks

    def _admit(self, step: Schedule) -> Request:
        """Start the first waiting request, on what the prefix cache has of it."""
        request = self.waiting.pop(0)
        self.running.append(request)
        if self._reads_cache(request):
            request.num_computed_tokens = self.blocks.share_prefix(
                request.request_id, request.token_ids
            )
            step.prefix_hit_tokens += request.num_computed_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
        return request

    def _num_to_compute(self) -> int:
        """Tokens that the first waiting request has to compute."""
        request = self.waiting[0]
        num_cached = len(self._cached_prefix(request)) * self.blocks.block_size
        return request.num_uncomputed_tokens - num_cached

    def _cached_prefix(self, request: Request) -> list[int]:
        return self.blocks.cached_prefix(request.token_ids) if self._reads_cache(request) else []

    def _reads_cache(self, request: Request) -> bool:
        """Log-probabilities of a prompt need a row for every token, so it computes them all."""
        return self.prefix_cache and request.num_top_of_prompt is None
