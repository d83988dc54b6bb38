"""What each step computes: order, budget, admission, preemption."""

import pytest

from compress.runtime.admission import peak_blocks
from compress.runtime.blocks import BlockManager
from compress.runtime.request import Request, SamplingParams
from compress.runtime.scheduler import Schedule, Scheduler


def request(name: str, prompt: int, max_tokens: int = 4) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(request_id=name, prompt_ids=list(range(prompt)), params=params)


def scheduler(
    num_blocks: int = 64, *, seqs: int = 8, budget: int = 16, block: int = 4
) -> Scheduler:
    return Scheduler(BlockManager(num_blocks, block), max_num_seqs=seqs, token_budget=budget)


def compute(step: Schedule) -> None:
    """Pretend that the step ran: everything scheduled is computed, one token is chosen."""
    for item in step.scheduled:
        item.request.num_computed_tokens += item.num_tokens
        if item.request.num_computed_tokens >= len(item.request.token_ids):
            item.request.token_ids.append(7)


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


def test_peak_blocks_counts_a_block_freed_before_another_grows() -> None:
    blocks = BlockManager(64, 4)
    short, long = request("short", 8, max_tokens=1), request("long", 4, max_tokens=9)
    assert peak_blocks([short], blocks) == 2
    assert peak_blocks([long], blocks) == 3
    assert peak_blocks([short, long], blocks) == 3  # 2 + 1 at once, then 3 alone


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
