"""What each mechanism of the engine brings, counted in steps, tokens and requests, not in time.

Outputs must not depend on any of them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.errors import CheckFailed
from compress.runtime.blocks import BlockManager
from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.request import Completion, Request, SamplingParams
from compress.runtime.scheduler import Schedule, Scheduler

VOCAB = 331
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
OFF: dict[str, dict[str, Any]] = {
    "request-level": {"batching": "request"},
    "contiguous": {"allocation": "contiguous", "prefix_cache": False, "max_model_len": 160},
    "no-prefix-cache": {"prefix_cache": False},
    "whole-prompts": {"chunked_prefill": False},
    "priority": {"policy": "priority"},
    "all-off": {
        "batching": "request",
        "allocation": "contiguous",
        "max_model_len": 160,
        "prefix_cache": False,
        "chunked_prefill": False,
    },
}


def prompts() -> list[list[int]]:
    """Awkward lengths; the last three share 33 tokens with the one of 130."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (1, 17, 33, 130)]
    return [*made, made[3][:33], made[3][:48], [*made[3][:33], 5, 6]]


def load(path: Path, **config: Any) -> Engine:
    fields: dict[str, Any] = {"num_blocks": 64, "block_size": 16, "max_num_seqs": 8}
    return Engine.load(path, dtype="float32", config=EngineConfig(**(fields | config)))


def outputs(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[int]]:
    """Each prompt alone, in one piece, with every mechanism off."""
    engine = load(llama, token_budget=512, prefix_cache=False)
    return [outputs(engine.generate([prompt], PARAMS))[0] for prompt in prompts()]


@pytest.mark.parametrize("budget", [20, 512])
@pytest.mark.parametrize("name", OFF)
def test_output_does_not_depend_on_the_mechanisms(
    name: str, budget: int, llama: Path, expected: list[list[int]]
) -> None:
    engine = load(llama, token_budget=budget, **OFF[name])
    for _ in range(2):  # the second time the prompts are known
        assert outputs(engine.generate(prompts(), PARAMS)) == expected
    assert (engine.stats.prefix_hit_tokens > 0) == engine.config.prefix_cache


@pytest.mark.parametrize("block_size", [4, 16])
def test_output_is_that_of_a_miss_when_prefixes_are_hit(
    block_size: int, llama: Path, expected: list[list[int]]
) -> None:
    engine = load(llama, block_size=block_size, num_blocks=256)
    cold, warm = engine.generate(prompts(), PARAMS), engine.generate(prompts(), PARAMS)
    assert outputs(cold) == outputs(warm) == expected
    hits = [(c.prompt_tokens - 1) // block_size * block_size for c in warm]
    assert [c.cached_tokens for c in warm] == hits
    assert engine.stats.prefix_hit_tokens == sum(hits)


def test_cache_continues_into_the_output_of_an_earlier_turn(llama: Path) -> None:
    engine = load(llama)
    prompt = prompts()[2]  # 33 tokens, and 12 more: 44 are computed, two full blocks
    (first,) = engine.generate([prompt], PARAMS)
    (second,) = engine.generate([[*prompt, *first.token_ids, 7, 8, 9, 10, 11]], PARAMS)
    assert second.cached_tokens == 32
    (third,) = engine.generate([[*prompt, *first.token_ids, 7, 8, 9, 10, 12]], PARAMS)
    assert third.cached_tokens == 48


def test_score_is_bitwise_that_of_an_engine_that_saw_nothing(llama: Path) -> None:
    engine = load(llama)
    engine.generate(prompts(), PARAMS)
    (score,) = engine.score([prompts()[3]])
    (expected,) = load(llama).score([prompts()[3]])
    assert len(score) == 129
    torch.testing.assert_close(score, expected, rtol=0, atol=0)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_output_survives_preemption_with_and_without_a_prefix_cache(
    prefix_cache: bool, llama: Path, expected: list[list[int]]
) -> None:
    engine = load(llama, num_blocks=13, prefix_cache=prefix_cache, max_preemptions=2)
    plan = engine.scheduler
    plan._can_admit = lambda: (  # type: ignore[method-assign]
        bool(plan.waiting) and plan._holds_pinned([*plan.running, plan.waiting[0]])
    )
    requests = [
        Request(request_id=f"r{i}", prompt_ids=prompt, params=PARAMS)
        for i, prompt in enumerate(prompts())
    ]
    for request in requests:
        engine.add_request(request)
    done = {}
    while engine.has_unfinished:
        done.update((c.request_id, c.token_ids) for c in engine.step())
        engine.blocks.check()
    assert engine.stats.preemptions > 0
    assert max(request.num_preemptions for request in requests) <= 2
    assert [done[f"r{i}"] for i in range(len(requests))] == expected


def steps_of_mixed_load(batching: str, count: int, max_num_seqs: int) -> int:
    """Steps for outputs of 8, 50 and 200 tokens in turn; nothing is computed, only scheduled."""
    blocks = BlockManager(max_num_seqs * 16, 64)
    plan = Scheduler(blocks, max_num_seqs=max_num_seqs, token_budget=2048, batching=batching)
    for i in range(count):
        params = SamplingParams(max_tokens=(8, 50, 200)[i % 3])
        plan.add(Request(request_id=f"r{i}", prompt_ids=[1] * 32, params=params))
    num_steps = 0
    while plan.running or plan.waiting:
        for item in plan.schedule().scheduled:
            item.request.num_computed_tokens += item.num_tokens
            item.request.token_ids.append(1)
            if item.request.num_remaining_tokens == 0:
                plan.remove(item.request)
        num_steps += 1
    return num_steps


@pytest.mark.parametrize("max_num_seqs", [4, 16])
def test_iteration_level_batching_needs_half_the_steps_of_request_level(max_num_seqs: int) -> None:
    """A batch lasts as long as its longest: of 16 slots less than 7 are busy in the mean."""
    count = 12 * max_num_seqs
    steps = {
        batching: steps_of_mixed_load(batching, count, max_num_seqs)
        for batching in ("iteration", "request")
    }
    assert steps["request"] == 12 * 200
    assert steps["iteration"] * 2 <= steps["request"]


def test_paging_runs_three_times_as_many_requests_in_the_same_memory(llama: Path) -> None:
    """An eighth of the longest length is used: 16 + 16 tokens of 256."""
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    ids = [[2 + i] * 16 for i in range(40)]
    peak, waste = {}, {}
    for allocation in ("paged", "contiguous"):
        engine = load(
            llama,
            allocation=allocation,
            prefix_cache=False,
            max_model_len=256,
            max_num_seqs=40,
            num_blocks=64,
            block_size=16,
        )
        engine.generate(ids, params)
        peak[allocation], waste[allocation] = engine.stats.peak_running, engine.stats.kv_waste
        assert engine.stats.preemptions == 0
    assert peak == {"paged": 32, "contiguous": 4}
    assert waste["paged"] < 0.3 < 0.8 < waste["contiguous"]


def test_prefix_cache_computes_a_shared_prompt_once(llama: Path) -> None:
    common = prompts()[3]
    computed = {}
    for prefix_cache in (True, False):
        engine = load(llama, prefix_cache=prefix_cache, max_num_seqs=1)
        engine.generate([[*common, 5 + i] for i in range(5)], SamplingParams(max_tokens=1))
        computed[prefix_cache] = engine.stats.computed_tokens
    assert computed == {True: 131 + 4 * (131 - 128), False: 5 * 131}


def test_shared_prefix_admits_more_requests(llama: Path) -> None:
    """The pool holds two prompts of nine blocks, or nine whose first eight are one."""
    common = prompts()[3][:128]
    peak = {}
    for prefix_cache in (True, False):
        engine = load(llama, prefix_cache=prefix_cache, num_blocks=18)
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        engine.generate([[*common, 4]], SamplingParams(max_tokens=1))
        engine.generate([[*common, 5 + i] for i in range(8)], params)
        peak[prefix_cache] = engine.stats.peak_running
    assert peak == {True: 8, False: 2}


def test_chunked_prefill_bounds_the_rows_of_a_step(llama: Path) -> None:
    largest = {}
    for chunked in (True, False):
        engine = load(llama, chunked_prefill=chunked, token_budget=20)
        engine.add_request(Request(request_id="a", prompt_ids=[5], params=PARAMS))
        engine.step()
        engine.add_request(Request(request_id="b", prompt_ids=prompts()[3], params=PARAMS))
        rows, before = [], engine.stats.computed_tokens
        while engine.has_unfinished:
            engine.step()
            rows.append(engine.stats.computed_tokens - before)
            before = engine.stats.computed_tokens
        largest[chunked] = max(rows)
    assert largest == {True: 20, False: 130}


def test_beams_share_blocks_and_free_them_in_any_order(
    llama: Path, expected: list[list[int]]
) -> None:
    """As beam search does it: fork the best, abort the worst, over a block boundary."""
    engine = load(llama, block_size=4, num_blocks=40)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.add_request(Request(request_id="b0", prompt_ids=prompts()[2], params=params))
    engine.step()
    beams = ["b0"]
    for number in range(1, 13):
        beams.append(f"b{number}")
        engine.fork(beams[0], beams[-1], params)
        if len(beams) == 4:
            engine.abort(beams.pop(0))
        engine.step()
        engine.blocks.check()
        owned = engine.blocks.num_blocks - engine.blocks.num_free_blocks
        assert owned <= 12 + 3 * len(beams)  # apart they would own 9 to 12 each
    for beam in beams:
        engine.abort(beam)
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks


@pytest.mark.parametrize("num_steps", range(7))
def test_abort_at_any_moment_frees_everything(num_steps: int, llama: Path) -> None:
    engine = load(llama, token_budget=40, num_blocks=14)
    for i, prompt in enumerate(prompts()):
        engine.add_request(Request(request_id=f"r{i}", prompt_ids=prompt, params=PARAMS))
    done = [c.request_id for _ in range(num_steps) for c in engine.step()]
    for i in range(len(prompts())):
        if f"r{i}" not in done:
            assert engine.abort(f"r{i}").finish_reason == "abort"
    assert not engine.has_unfinished
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks
    assert not engine.scheduler.waiting


def test_engine_checks_its_blocks_whenever_it_is_idle(llama: Path) -> None:
    engine = load(llama)
    engine.generate([[5, 6]], PARAMS)
    engine.blocks.reserve("leaked", 0, 3)
    with pytest.raises(AssertionError, match="an idle engine owns blocks"):
        engine.generate([[5, 6]], PARAMS)


def test_watchdog_fails_all_requests_with_the_state(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load(llama, watchdog_steps=3)
    engine.add_request(Request(request_id="a", prompt_ids=[5, 6], params=PARAMS))
    engine.step()
    monkeypatch.setattr(engine.scheduler, "schedule", Schedule)
    engine.add_request(Request(request_id="b", prompt_ids=[7] * 9, params=PARAMS))
    assert engine.step() == engine.step() == []
    failed = engine.step()
    assert [(c.request_id, c.finish_reason) for c in failed] == [("a", "error"), ("b", "error")]
    report = failed[0].error
    assert report is not None
    assert "3 steps computed nothing" in report
    assert "running 'a': 2 of 3 known tokens computed, at most 13, 0 drafted, 1 blocks" in report
    assert "waiting 'b': 0 of 9 known tokens" in report
    assert "64 blocks of 16: 1 owned, 0 cached, 63 free" in report
    assert report in caplog.text
    assert not engine.has_unfinished
    assert engine.blocks.num_free_blocks == 64


def test_watchdog_counts_only_steps_in_a_row(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(llama, watchdog_steps=2)
    engine.add_request(Request(request_id="a", prompt_ids=[5, 6], params=PARAMS))
    work, turns = engine.scheduler.schedule, iter(range(1000))
    monkeypatch.setattr(
        engine.scheduler, "schedule", lambda: Schedule() if next(turns) % 2 else work()
    )
    done: list[Completion] = []
    while engine.has_unfinished:
        done += engine.step()
    assert [c.finish_reason for c in done] == ["length"]
    for _ in range(5):
        assert engine.step() == []  # idle is no stall


def test_generate_and_score_raise_what_the_watchdog_saw(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(llama, watchdog_steps=3)
    monkeypatch.setattr(engine.scheduler, "schedule", Schedule)
    with pytest.raises(CheckFailed, match="waiting '#1': 0 of 2 known"):
        engine.generate([[5, 6]], PARAMS)
    with pytest.raises(CheckFailed, match="waiting '#2': 0 of 2 known"):
        engine.score([[5, 6, 7]])
    assert not engine.has_unfinished


def test_stats_say_how_the_cache_was_used(llama: Path) -> None:
    engine = load(llama, num_blocks=10, block_size=16, prefix_cache=False)
    engine.generate([[5] * 20], SamplingParams(max_tokens=3, ignore_eos=True))
    stats = engine.stats
    assert stats.num_steps == 3
    assert stats.peak_running == 1
    assert stats.kv_utilization == pytest.approx(0.2)  # 2 blocks of 10, in every step
    assert stats.kv_waste == pytest.approx((12 + 11 + 10) / (3 * 32))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"allocation": "contiguous"}, "prefix_cache=False"),
        ({"allocation": "pages"}, "did you mean 'paged'"),
        ({"watchdog_steps": 0}, "watchdog_steps must be positive"),
    ],
)
def test_engine_config_refuses_what_cannot_work(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        EngineConfig(**fields)


def test_contiguous_request_that_can_never_fit_is_refused_with_the_numbers(llama: Path) -> None:
    engine = load(
        llama, allocation="contiguous", prefix_cache=False, max_model_len=256, num_blocks=15
    )
    with pytest.raises(ValueError, match="13 tokens need 16 cache blocks, the pool has 15"):
        engine.generate([[5, 6]], PARAMS)
