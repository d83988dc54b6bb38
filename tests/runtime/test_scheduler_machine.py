"""The scheduler under every policy against a model that computes each request alone."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compress.runtime.blocks import BlockManager, ContiguousBlocks
from compress.runtime.request import Request, SamplingParams
from compress.runtime.scheduler import Schedule, ScheduledRequest, Scheduler
from compress.runtime.watchdog import describe

BLOCK_SIZE = 4
MAX_LEN = 22  # 6 blocks
Prefix = tuple[int, ...]


def next_token(tokens: list[int]) -> int:
    """The model: two tokens, and a choice that depends on everything before."""
    return (7 * sum(tokens[1::2]) + 3 * sum(tokens) + len(tokens) // 3) % 2


def continued(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens


@dataclass
class Pool:
    """What the slots hold: as with keys and values, all tokens up to their own."""

    blocks: BlockManager
    slots: dict[int, Prefix] = field(default_factory=dict)

    def slot(self, name: str, i: int) -> int:
        return self.blocks.table(name)[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE

    def run(self, step: Schedule) -> None:
        """Copy blocks, write the rows of the step, and read everything before them."""
        held = {
            s: [self.slots.get(s * BLOCK_SIZE + j, ()) for j in range(4)] for s, _ in step.copies
        }
        for source, destination in step.copies:
            for j, prefix in enumerate(held[source]):
                self.slots[destination * BLOCK_SIZE + j] = prefix
        for item in step.scheduled:
            end = item.start + item.num_tokens
            tokens = item.request.tokens_between(0, end)
            for i in range(item.start, end):
                self.slots[self.slot(item.request.request_id, i)] = tuple(tokens[: i + 1])
        for item in step.scheduled:
            self.check_reads(item.request, item.start + item.num_tokens)

    def check_reads(self, request: Request, end: int) -> None:
        tokens = request.tokens_between(0, end)
        for i in range(end):
            assert self.slots[self.slot(request.request_id, i)] == tuple(tokens[: i + 1])


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, steps, drafts, aborts, preempts, forks and evicts in any order."""

    @initialize(
        data=st.data(),
        sharing=st.sampled_from(["contiguous", "paged", "cached", "cached"]),
        num_blocks=st.integers(6, 10),
        max_num_seqs=st.sampled_from([1, 3, 4, 5]),
        policy=st.sampled_from(["fifo", "priority"]),
        batching=st.sampled_from(["iteration", "iteration", "request"]),
        chunked=st.booleans(),
        max_preemptions=st.integers(0, 2),
        is_hopeful=st.booleans(),
    )
    def start_scheduler(
        self,
        data: st.DataObject,
        sharing: str,
        num_blocks: int,
        max_num_seqs: int,
        policy: str,
        batching: str,
        chunked: bool,
        max_preemptions: int,
        is_hopeful: bool,
    ) -> None:
        if sharing == "contiguous":
            self.blocks: BlockManager = ContiguousBlocks(num_blocks, BLOCK_SIZE, MAX_LEN)
        else:
            self.blocks = BlockManager(num_blocks, BLOCK_SIZE)
        self.can_share = sharing != "contiguous"
        self.plan = Scheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            token_budget=data.draw(st.integers(max_num_seqs, 12)),
            policy=policy,
            batching=batching,
            chunked_prefill=chunked,
            prefix_cache=sharing == "cached",
            max_preemptions=max_preemptions,
        )
        if is_hopeful:  # no look at the peak: preemption has to save it
            plan = self.plan
            plan._can_admit = lambda: (  # type: ignore[method-assign]
                bool(plan.waiting)
                and len(plan.running) < max_num_seqs
                and plan._holds_pinned([*plan.running, plan.waiting[0]])
            )
        self.pool = Pool(self.blocks)
        self.requests: dict[str, Request] = {}
        self.seen: list[list[int]] = [[]]
        self.num_named = 0

    def name(self) -> str:
        self.num_named += 1
        return f"r{self.num_named}"

    @rule(
        data=st.data(),
        more=st.lists(st.sampled_from([(0,), (1,), (0,) * BLOCK_SIZE]), max_size=5),
        max_tokens=st.sampled_from([0, 1, 5, 8, 8]),
        priority=st.integers(0, 2),
        copies=st.integers(1, 3),
    )
    def add(
        self,
        data: st.DataObject,
        more: list[Prefix],
        max_tokens: int,
        priority: int,
        copies: int,
    ) -> None:
        known = data.draw(st.sampled_from(self.seen))[: data.draw(st.integers(0, 13))]
        prompt = [*known, *(token for part in more for token in part)][: MAX_LEN - max_tokens]
        if len(prompt) < 2:
            prompt = [0, 1]
        for _ in range(copies if len(self.requests) < 8 else 0):
            self.add_request(list(prompt), max_tokens, priority)

    def add_request(self, prompt: list[int], max_tokens: int, priority: int) -> None:
        params = SamplingParams(max_tokens=max_tokens) if max_tokens else None
        name = self.name()
        request = Request(request_id=name, prompt_ids=prompt, params=params, priority=priority)
        needed = self.blocks.footprint(request.max_cached_tokens)
        if needed > self.blocks.num_blocks:
            with pytest.raises(ValueError, match="can never fit"):
                self.plan.add(request)
            return
        self.plan.add(request)
        self.seen.append(request.token_ids)
        self.requests[name] = request

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_right=st.integers(0, 3), num_wrong=st.integers(0, 2))
    def draft(self, data: st.DataObject, num_right: int, num_wrong: int) -> None:
        for request in self.plan.running:
            if request.is_decoding and data.draw(st.booleans()):
                right = continued(request.token_ids, num_right)[len(request.token_ids) :]
                wrong = [1 - t for t in continued([*request.token_ids, *right], 1)[-1:]] * num_wrong
                request.draft_ids = (right + wrong)[: request.num_remaining_tokens - 1]

    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.one_step()

    def one_step(self) -> None:
        before = {r.request_id for r in self.plan.running}
        decoding = {r.request_id for r in self.plan.running if r.is_decoding}
        step = self.plan.schedule()
        self.check_step(step, before, decoding)
        for request in step.preempted:
            assert request.num_preemptions <= self.plan.max_preemptions
        self.pool.run(step)
        for item in step.scheduled:
            self.accept(item)

    def check_step(self, step: Schedule, before: set[str], decoding: set[str]) -> None:
        plan, names = self.plan, [item.request.request_id for item in step.scheduled]
        assert bool(names) == bool(self.requests), describe(plan)
        assert len(set(names)) == len(names)
        assert not {r.request_id for r in step.preempted} & set(names)
        assert len(plan.running) <= plan.max_num_seqs
        total = sum(item.num_tokens for item in step.scheduled)
        assert total <= plan.token_budget or (not plan.chunked_prefill and len(names) == 1)
        is_decode = [name in decoding for name in names]
        assert is_decode == sorted(is_decode, reverse=True), "a prompt before a decode"
        for item in step.scheduled:
            end = item.start + item.num_tokens
            assert item.start == item.request.num_computed_tokens
            assert 0 < item.num_tokens <= item.request.num_uncomputed_tokens
            if not plan.chunked_prefill and item.request.request_id not in decoding:
                assert end == len(item.request.token_ids), "a prompt in pieces"
        joined = {r.request_id for r in plan.running} - before
        if not plan._may_join and joined:
            assert not before, "a request joined a batch that was running"
        pinned = [r for r in plan.running if r.num_preemptions >= plan.max_preemptions]
        assert sum(self.blocks.footprint(r.max_cached_tokens) for r in pinned) <= (
            self.blocks.num_blocks
        )

    def accept(self, item: ScheduledRequest) -> None:
        """What the engine does with the results of a step."""
        request, end = item.request, item.start + item.num_tokens
        num_known = len(request.token_ids)
        drafts = request.draft_ids[: max(end - num_known, 0)]
        request.draft_ids.clear()
        chosen: list[int] = []
        if request.params is not None and end >= num_known:
            for draft in [*drafts, None]:
                chosen.append(next_token([*request.token_ids, *chosen]))
                if chosen[-1] != draft:
                    break
        request.num_computed_tokens = min(end, num_known + max(len(chosen) - 1, 0))
        request.token_ids += chosen
        self.plan.record_computed(request)
        is_scored = request.params is None and request.num_computed_tokens == num_known
        if is_scored or (request.params is not None and request.num_remaining_tokens == 0):
            if request.params is not None:
                prompt = request.prompt_ids
                assert request.token_ids == continued(prompt, request.max_tokens)
            self.forget(request)

    def forget(self, request: Request) -> None:
        self.plan.remove(request)
        assert not self.blocks.table(request.request_id)
        del self.requests[request.request_id]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.forget(self.requests[data.draw(st.sampled_from(sorted(self.requests)))])

    @precondition(lambda self: self.plan.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.plan.running))
        if not self.plan._is_pinned(request):
            self.plan._preempt(Schedule(), request)

    @precondition(lambda self: any(r.num_output_tokens > 0 for r in self.plan.running))
    @precondition(lambda self: len(self.plan.running) < self.plan.max_num_seqs)
    @rule(data=st.data(), max_tokens=st.integers(1, 6))
    def fork(self, data: st.DataObject, max_tokens: int) -> None:
        parents = [r for r in self.plan.running if r.num_output_tokens > 0]
        parent, name = data.draw(st.sampled_from(parents)), self.name()
        child = Request(
            request_id=name,
            prompt_ids=list(parent.token_ids),
            params=SamplingParams(max_tokens=max_tokens),
        )
        before = self.blocks.num_free_blocks
        try:
            self.plan.fork(parent, child)
        except ValueError:
            assert not self.blocks.table(name)
            assert child not in self.plan.running
        else:
            self.requests[name] = child
            assert self.can_share
        assert self.blocks.num_free_blocks == before

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        """Someone else takes blocks for a moment, cached ones too."""
        if self.can_share:
            self.blocks.reserve("other", 0, count * BLOCK_SIZE)
            self.blocks.free("other")

    @invariant()
    def counts_add_up(self) -> None:
        self.blocks.check()
        owners = {r.request_id for r in self.plan.running}
        assert self.blocks._tables.keys() <= owners
        assert {r.request_id for r in self.plan.waiting} | owners == self.requests.keys()
        assert [*self.plan.waiting] == sorted(self.plan.waiting, key=self.plan._key)

    @invariant()
    def everyone_reads_their_own_tokens(self) -> None:
        for request in self.plan.running:
            self.pool.check_reads(request, request.num_computed_tokens)

    def teardown(self) -> None:
        if not hasattr(self, "plan"):
            return
        for _ in range(500):
            if not self.requests:
                break
            self.one_step()
        assert not self.requests, f"still there after 500 steps: {describe(self.plan)}"
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        self.blocks.check()


SchedulerMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None
)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.slow
class TestSchedulerMachineLong(SchedulerMachine.TestCase):  # type: ignore[misc, name-defined]
    """Over 15,000 rules, most of them several steps."""

    settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
