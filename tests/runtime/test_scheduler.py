"""What each step computes: order, budget, admission, preemption."""

from collections.abc import Sequence
from typing import Any

import pytest

from compress.runtime.blocks import BlockManager
from compress.runtime.request import Request, SamplingParams
from compress.runtime.scheduler import Schedule, Scheduler


def request(name: str, prompt: int, max_tokens: int = 4, priority: int = 0) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    ids = list(range(prompt))
    return Request(request_id=name, prompt_ids=ids, params=params, priority=priority)


def scheduler(
    num_blocks: int = 64, *, seqs: int = 8, budget: int = 16, block: int = 4, **fields: Any
) -> Scheduler:
    blocks = BlockManager(num_blocks, block)
    return Scheduler(blocks, max_num_seqs=seqs, token_budget=budget, **fields)


def hopeful(plan: Scheduler) -> Scheduler:
    """Admits without a look at the peak, so that preemption has to save it."""

    def can_admit() -> bool:
        is_room = bool(plan.waiting) and len(plan.running) < plan.max_num_seqs
        return is_room and plan._holds_pinned([*plan.running, plan.waiting[0]])

    plan._can_admit = can_admit  # type: ignore[method-assign]
    return plan


def compute(step: Schedule) -> None:
    """Pretend that the step ran: everything scheduled is computed, one token is chosen."""
    for item in step.scheduled:
        item.request.num_computed_tokens += item.num_tokens
        if item.request.num_computed_tokens >= len(item.request.token_ids):
            item.request.token_ids.append(7)


def finish(plan: Scheduler) -> None:
    """Remove the requests that have all their tokens."""
    for running in list(plan.running):
        if running.num_remaining_tokens == 0:
            plan.remove(running)


def names(requests: Sequence[Request]) -> list[str]:
    return [each.request_id for each in requests]


def rows(step: Schedule) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.num_tokens) for item in step.scheduled]


def test_schedule_splits_a_long_prompt_by_the_budget() -> None:
    plan = scheduler(budget=16)
    plan.add(request("a", 37))
    seen = []
    for _ in range(3):
        step = plan.schedule()
        seen += rows(step)
        compute(step)
    assert seen == [("a", 0, 16), ("a", 16, 16), ("a", 32, 5)]


def test_schedule_puts_decodes_before_prompts() -> None:
    plan = scheduler(budget=16)
    plan.add(request("a", 3))
    compute(plan.schedule())
    plan.add(request("b", 40))
    compute(plan.schedule())
    assert rows(plan.schedule()) == [("a", 4, 1), ("b", 15, 15)]


def test_schedule_serves_waiting_requests_in_order_of_arrival() -> None:
    plan = scheduler(budget=8)
    for name in ("a", "b", "c"):
        plan.add(request(name, 5))
    assert rows(plan.schedule()) == [("a", 0, 5), ("b", 0, 3)]


def test_schedule_trims_drafts_so_that_every_decode_gets_its_row() -> None:
    plan = scheduler(seqs=3, budget=6)
    for name in ("a", "b", "c"):
        plan.add(request(name, 2, max_tokens=50))
    compute(plan.schedule())
    for running in plan.running:
        running.draft_ids = [1, 2, 3]
    assert rows(plan.schedule()) == [("a", 2, 4), ("b", 2, 1), ("c", 2, 1)]


def test_schedule_keeps_to_max_num_seqs() -> None:
    plan = scheduler(seqs=2)
    for name in ("a", "b", "c"):
        plan.add(request(name, 2))
    assert [name for name, _, _ in rows(plan.schedule())] == ["a", "b"]


def test_add_refuses_what_can_never_fit_with_the_numbers() -> None:
    plan = scheduler(num_blocks=3, block=4)
    plan.add(request("fits", 9, max_tokens=4))  # 12 tokens are cached, the 13th never
    with pytest.raises(ValueError, match=r"'big' can never fit: 13 tokens need 4 .* has 3"):
        plan.add(request("big", 10, max_tokens=4))


def test_admission_waits_for_the_peak_not_for_the_moment() -> None:
    plan = scheduler(num_blocks=4, block=4)
    plan.add(request("a", 4, max_tokens=9))  # grows to 12 tokens, 3 blocks
    plan.add(request("b", 4, max_tokens=5))  # to 8 tokens, 2 blocks: with a's 2 that is the pool
    plan.add(request("c", 4, max_tokens=5))  # 1 block now, and one is free: too late at its end
    assert [name for name, _, _ in rows(plan.schedule())] == ["a", "b"]


def test_admission_lets_in_what_ends_before_the_peak() -> None:
    plan = scheduler(num_blocks=4, block=4)
    for name, max_tokens in (("a", 9), ("b", 5), ("c", 1)):
        plan.add(request(name, 4, max_tokens=max_tokens))
    assert [name for name, _, _ in rows(plan.schedule())] == ["a", "b", "c"]


def test_schedule_preempts_the_latest_request_when_the_pool_runs_out() -> None:
    plan = scheduler(num_blocks=4, block=4, budget=16)
    first, second = request("a", 4, max_tokens=9), request("b", 4, max_tokens=9)
    plan.add(first)
    compute(plan.schedule())
    plan.add(second)
    plan.waiting.remove(second)  # past the admission rule, as after a wrong estimate
    plan.running.append(second)
    preempted = []
    for _ in range(8):
        step = plan.schedule()
        preempted += step.preempted
        compute(step)
        plan.blocks.check()
    assert preempted[0] is second
    assert plan.waiting[0] is second
    assert second.num_computed_tokens == 0
    assert first.num_output_tokens == 9
    assert len(second.token_ids) > 4  # what it had generated is kept, and will be recomputed


def test_remove_frees_the_blocks() -> None:
    plan = scheduler(num_blocks=4)
    a, b = request("a", 8), request("b", 8)
    plan.add(a)
    plan.add(b)
    compute(plan.schedule())
    plan.remove(a)
    plan.remove(b)
    assert plan.blocks.num_free_blocks == 4
    assert not plan.schedule().scheduled


@pytest.mark.parametrize("limits", [(0, 4), (5, 4)], ids=["no-seqs", "budget-below-seqs"])
def test_scheduler_refuses_senseless_limits(limits: tuple[int, int]) -> None:
    seqs, budget = limits
    with pytest.raises(ValueError, match="max_num_seqs"):
        scheduler(seqs=seqs, budget=budget)


def test_priority_serves_lower_numbers_first_and_preempts_them_last() -> None:
    plan = hopeful(scheduler(num_blocks=5, block=4, seqs=3, policy="priority"))
    for name, priority in (("low", 9), ("mid", 5), ("high", 1)):
        plan.add(request(name, 4, max_tokens=9, priority=priority))
    assert names(plan.waiting) == ["high", "mid", "low"]
    lost: list[str] = []
    for _ in range(8):
        step = plan.schedule()
        lost += names(step.preempted)
        compute(step)
        finish(plan)
    assert lost
    assert set(lost) <= {"low", "mid"}
    assert lost[0] == "low"


def test_priority_never_pushes_out_what_runs() -> None:
    plan = scheduler(num_blocks=4, block=4, policy="priority")
    plan.add(request("low", 4, max_tokens=9, priority=9))
    compute(plan.schedule())
    plan.add(request("high", 9, max_tokens=5, priority=1))  # 4 blocks: the whole pool
    for _ in range(7):
        step = plan.schedule()
        assert rows(step)[0][0] == "low"
        assert not step.preempted
        compute(step)


def test_preempted_request_returns_to_its_place_in_the_order() -> None:
    plan = hopeful(scheduler(num_blocks=4, block=4, seqs=2))
    for name in ("a", "b", "c"):
        plan.add(request(name, 4, max_tokens=9))
    while not (step := plan.schedule()).preempted:
        compute(step)
    assert names(step.preempted) == ["b"]
    assert names(plan.waiting) == ["b", "c"]


def test_request_batching_lets_nobody_join_until_all_have_ended() -> None:
    plan = scheduler(seqs=2, batching="request")
    for name, max_tokens in (("a", 2), ("b", 5), ("c", 2), ("d", 2)):
        plan.add(request(name, 3, max_tokens=max_tokens))
    seen = []
    while plan.running or plan.waiting:
        step = plan.schedule()
        seen.append([name for name, _, _ in rows(step)])
        compute(step)
        finish(plan)
    assert seen == [["a", "b"], ["a", "b"], ["b"], ["b"], ["b"], ["c", "d"], ["c", "d"]]


def test_request_batching_fills_the_batch_whatever_the_budget() -> None:
    plan = scheduler(seqs=3, budget=4, batching="request")
    for name in ("a", "b", "c", "d"):
        plan.add(request(name, 3))
    plan.schedule()
    assert names(plan.running) == ["a", "b", "c"]


def test_whole_prompts_wait_for_a_step_that_holds_them() -> None:
    plan = scheduler(budget=8, chunked_prefill=False)
    for name in ("a", "b", "c"):
        plan.add(request(name, 5))
    seen = []
    for _ in range(3):
        step = plan.schedule()
        seen.append(rows(step))
        compute(step)
    assert seen[0] == [("a", 0, 5)]
    assert seen[1] == [("a", 5, 1), ("b", 0, 5)]
    assert seen[2] == [("a", 6, 1), ("b", 5, 1), ("c", 0, 5)]


def test_whole_prompt_that_fits_no_step_with_others_is_computed_alone() -> None:
    plan = scheduler(budget=8, chunked_prefill=False)
    plan.add(request("a", 3, max_tokens=9))
    compute(plan.schedule())
    plan.add(request("long", 19, max_tokens=9))
    plan.add(request("b", 2))
    seen = []
    for _ in range(2):
        step = plan.schedule()
        seen.append(rows(step))
        compute(step)
    assert seen == [[("long", 0, 19)], [("a", 3, 1), ("long", 19, 1), ("b", 0, 2)]]


@pytest.mark.parametrize("max_preemptions", [0, 1, 3])
def test_requests_are_preempted_at_most_so_often_and_all_end(max_preemptions: int) -> None:
    plan = hopeful(scheduler(num_blocks=6, block=4, max_preemptions=max_preemptions))
    requests = [request(f"r{i}", 4 + i, max_tokens=9) for i in range(6)]
    for each in requests:
        plan.add(each)
    num_steps = num_lost = 0
    while plan.running or plan.waiting:
        step = plan.schedule()
        assert step.scheduled
        compute(step)
        finish(plan)
        num_lost += len(step.preempted)
        num_steps += 1
        assert num_steps < 500
    assert max(each.num_preemptions for each in requests) == max_preemptions
    assert (num_lost > 0) == (max_preemptions > 0)


@pytest.mark.parametrize(("max_preemptions", "admitted"), [(1, ["a", "b"]), (0, ["a"])])
def test_admission_counts_pinned_requests_at_their_full_length(
    max_preemptions: int, admitted: list[str]
) -> None:
    plan = scheduler(num_blocks=4, block=4, max_preemptions=max_preemptions)
    plan.add(request("a", 4, max_tokens=9))  # 3 blocks at its end
    plan.add(request("b", 4, max_tokens=5))  # 2, but a has no more than 2 then
    assert [name for name, _, _ in rows(plan.schedule())] == admitted


def test_fork_is_refused_where_pinned_requests_would_not_fit() -> None:
    plan = scheduler(num_blocks=4, block=4, max_preemptions=0)
    parent = request("a", 4, max_tokens=9)  # 3 blocks at its end
    plan.add(parent)
    compute(plan.schedule())
    with pytest.raises(ValueError, match="may not be preempted"):
        plan.fork(parent, request("b", 5, max_tokens=4))
    assert names(plan.running) == ["a"]
    assert plan.blocks.num_free_blocks == 3


def test_drafts_are_dropped_before_anyone_is_preempted() -> None:
    plan = scheduler(num_blocks=3, block=4)
    for name in ("a", "b"):
        plan.add(request(name, 2, max_tokens=3))
    compute(plan.schedule())
    plan.running[0].draft_ids = [1, 2]  # position 4 is in a second block
    plan.running[1].draft_ids = [1, 2]
    step = plan.schedule()
    assert rows(step) == [("a", 2, 3), ("b", 2, 1)]
    assert not step.preempted


def test_prefix_cache_starts_a_request_after_what_is_known() -> None:
    plan = scheduler(prefix_cache=True)
    first = request("a", 9, max_tokens=1)
    plan.add(first)
    compute(plan.schedule())
    plan.record_computed(first)
    plan.remove(first)
    second = request("b", 14)
    plan.add(second)
    step = plan.schedule()
    assert rows(step) == [("b", 8, 6)]
    assert (step.prefix_hit_tokens, second.num_cached_tokens) == (8, 8)


def test_what_follows_a_stop_token_is_not_offered_to_the_cache() -> None:
    plan = scheduler(prefix_cache=True)
    stopped = request("a", 10)
    plan.add(stopped)
    plan.schedule()
    stopped.num_computed_tokens = 12  # two accepted drafts, cut off by a stop token
    plan.record_computed(stopped)
    assert plan.blocks.cached_prefix([*stopped.token_ids, 0, 0, 0]) == [0, 1]
    plan.remove(stopped)
    assert plan.blocks.num_cached_blocks == 2


def test_score_computes_every_row_and_offers_them() -> None:
    plan = scheduler(prefix_cache=True)
    for name in ("a", "b"):
        scored = Request(request_id=name, prompt_ids=list(range(10)), params=None)
        plan.add(scored)
        step = plan.schedule()
        assert rows(step) == [(name, 0, 9)]
        scored.num_computed_tokens = 9
        plan.record_computed(scored)
        plan.remove(scored)
    plan.add(request("c", 10))
    assert rows(plan.schedule()) == [("c", 8, 2)]


def test_admission_takes_cached_blocks_for_available() -> None:
    plan = scheduler(num_blocks=4, block=4, prefix_cache=True)
    first = request("a", 16, max_tokens=1)
    plan.add(first)
    compute(plan.schedule())
    plan.record_computed(first)
    plan.remove(first)
    assert plan.blocks.num_cached_blocks == 4
    other = Request(request_id="b", prompt_ids=[99] * 13, params=SamplingParams(max_tokens=4))
    plan.add(other)
    assert rows(plan.schedule()) == [("b", 0, 13)]
    plan.blocks.check()


def test_preempted_request_finds_its_own_blocks_again() -> None:
    plan = scheduler(prefix_cache=True)
    victim = request("a", 10)
    plan.add(victim)
    compute(plan.schedule())
    plan.record_computed(victim)
    victim.draft_ids = [1, 2]
    plan._preempt(Schedule(), victim)
    assert rows(plan.schedule()) == [("a", 8, 3)]
    assert victim.num_cached_tokens == 0  # of its first admission


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"policy": "lifo"}, "unknown scheduling policy 'lifo'"),
        ({"batching": "requests"}, "did you mean 'request'"),
        ({"max_preemptions": -1}, "max_preemptions must not be negative"),
    ],
)
def test_scheduler_refuses_unknown_policies(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        scheduler(**fields)
