"""Serving figures on a clock whose every tick is known."""

from itertools import pairwise

import numpy as np
import pytest

from compress.evalsuite.throughput import (
    RequestRecord,
    Run,
    acceptance_length,
    batch_rates,
    identical_outputs,
    latencies,
    load_rates,
    measure,
    serve,
    summarize,
    workload_report,
)
from compress.evalsuite.workload import Workload
from compress.runtime.request import Completion
from tests.evalsuite.fake import FakeClock, FakeTarget


def _serve(target: FakeTarget, num: int, arrivals: list[float], output_tokens: int) -> Run:
    prompts = [[index] * 10 for index in range(num)]
    clock = target.clock
    return serve(target, prompts, arrivals, output_tokens, clock=clock, sleep=clock.sleep)


def _record(arrival: float, *times: float) -> RequestRecord:
    return RequestRecord(
        arrival=arrival, prompt_tokens=10, token_ids=(7,) * len(times), token_times=times
    )


def test_serve_batch_times_every_token_from_the_start() -> None:
    run = _serve(FakeTarget(clock=FakeClock(1000.0)), 3, [0.0] * 3, output_tokens=3)
    assert [record.token_times for record in run.records] == [
        (1.0, 4.0, 5.0),
        (2.0, 4.0, 5.0),
        (3.0, 4.0, 5.0),
    ]
    assert [record.arrival for record in run.records] == [0.0] * 3
    assert [record.prompt_tokens for record in run.records] == [10] * 3
    assert run.duration == 5.0


def test_serve_sleeps_until_the_next_arrival_and_counts_from_the_schedule() -> None:
    # request 0 runs from 2.0 to 4.0; request 1 was due at 2.5, inside a step that ended at 3.0
    run = _serve(FakeTarget(clock=FakeClock(50.0)), 3, [2.0, 2.5, 9.0], output_tokens=2)
    assert [record.token_times for record in run.records] == [
        (3.0, 5.0),
        (4.0, 5.0),
        (10.0, 11.0),
    ]
    assert [record.ttft for record in run.records] == [1.0, 1.5, 1.0]
    assert [record.latency for record in run.records] == [3.0, 2.5, 2.0]


def test_batch_rates_divide_at_the_last_first_token() -> None:
    run = _serve(FakeTarget(step_seconds=0.5), 4, [0.0] * 4, output_tokens=5)
    # prefill 4 steps = 2 s for 40 prompt tokens; then 4 steps = 2 s for 4 * 4 tokens
    assert batch_rates(run) == {"prefill_tokens_per_s": 20.0, "decode_tokens_per_s": 8.0}


def test_batch_rates_leave_tokens_decoded_during_prefill_out() -> None:
    run = Run(records=(_record(0, 1.0, 2.0, 3.0, 4.0), _record(0, 3.0, 4.0, 5.0)))
    assert batch_rates(run) == {
        "prefill_tokens_per_s": pytest.approx(20 / 3),
        "decode_tokens_per_s": pytest.approx(3 / 2),
    }


def test_load_rates_are_totals_over_the_duration() -> None:
    run = Run(records=(_record(1.0, 2.0, 3.0), _record(6.0, 7.0, 8.0)))
    assert load_rates(run) == {"prefill_tokens_per_s": 2.5, "decode_tokens_per_s": 0.5}


def test_latencies_follow_the_serving_benchmark_definitions() -> None:
    # the second request gets two tokens in one iteration: one gap, not a gap of zero
    run = Run(records=(_record(1.0, 1.5), _record(2.0, 3.0, 4.0, 4.0, 6.0)))
    assert latencies(run) == {
        "ttft": [0.5, 1.0],
        "tpot": [1.0],  # the one-token answer has none
        "itl": [1.0, 2.0],
        "e2el": [0.5, 4.0],
    }


def test_workload_report_reduces_latencies_with_numpy_percentiles() -> None:
    generator = np.random.default_rng(0)
    runs = [
        Run(records=tuple(_record(0.0, *np.cumsum(generator.random(5))) for _ in range(17)))
        for _ in range(3)
    ]
    report = workload_report(Workload(label="rate:2x17", num_requests=17, rate=2.0), runs)
    ttft = [[record.token_times[0] for record in run.records] for run in runs]
    gaps = [
        [b - a for record in run.records for a, b in pairwise(record.token_times)] for run in runs
    ]
    shown = report["latency_ms"]
    assert shown["ttft"]["mean"]["runs"] == pytest.approx([1000 * np.mean(v) for v in ttft])
    assert shown["ttft"]["p99"]["runs"] == pytest.approx(
        [1000 * np.percentile(values, 99) for values in ttft]
    )
    assert shown["itl"]["p50"]["runs"] == pytest.approx([1000 * np.median(v) for v in gaps])
    assert shown["itl"]["std"]["runs"] == pytest.approx([1000 * np.std(v) for v in gaps])
    assert report["decode_tokens_per_s"]["runs"] == pytest.approx(
        [17 * 5 / run.duration for run in runs]
    )
    assert report["requests_per_s"]["runs"] == pytest.approx([17 / run.duration for run in runs])


@pytest.mark.parametrize(("tokens_per_step", "expected"), [(1, 1.0), (3, 3.0), (4, 15 / 4)])
def test_acceptance_length_counts_tokens_per_iteration(
    tokens_per_step: int, expected: float
) -> None:
    target = FakeTarget(tokens_per_step=tokens_per_step)
    run = _serve(target, 2, [0.0, 0.0], output_tokens=16)
    assert acceptance_length([run]) == expected


def test_identical_outputs_is_the_share_of_equal_requests() -> None:
    run = _serve(FakeTarget(), 4, [0.0] * 4, output_tokens=2)
    other = Run(records=(*run.records[:3], _record(0.0, 1.0, 2.0)))
    assert identical_outputs([run], [run]) == 1.0
    assert identical_outputs([run, run], [run, other]) == 7 / 8


def _prompts(num: int, seed: str) -> list[list[int]]:
    return [[hash(seed), index] for index in range(num)]


def test_measure_alternates_targets_with_the_same_prompts_and_warms_up() -> None:
    order: list[str] = []

    class Recorder(FakeTarget):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def step(self) -> list[Completion]:
            if not order or order[-1] != self.name:
                order.append(self.name)
            return super().step()

    targets = {"model": Recorder("model"), "baseline": Recorder("baseline")}
    runs = measure(
        targets,
        Workload(label="batch:2", num_requests=2),
        make_prompts=_prompts,
        output_tokens=4,
        repeats=3,
        seed=5,
        quiet=True,
    )
    assert order == ["model", "baseline"] * 4  # the warm-up and three repeats
    assert [len(runs[name]) for name in targets] == [3, 3]
    assert targets["model"].seen == targets["baseline"].seen
    assert len({tuple(prompt) for prompt in targets["model"].seen}) == 2 * 4  # none seen twice


@pytest.mark.parametrize(
    ("output_tokens", "repeats", "message"),
    [(1, 3, "output tokens must be at least 2, got 1"), (8, 0, "repeats must be at least 1")],
)
def test_measure_refuses(output_tokens: int, repeats: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(
            {"model": FakeTarget()},
            Workload(label="batch:1", num_requests=1),
            make_prompts=_prompts,
            output_tokens=output_tokens,
            repeats=repeats,
            seed=0,
        )


def test_summarize_gives_median_sample_deviation_and_runs() -> None:
    assert summarize([1.0, 3.0, 8.0]) == {
        "median": 3.0,
        "std": pytest.approx(13.0**0.5),
        "runs": [1.0, 3.0, 8.0],
    }
    assert summarize([2.0]) == {"median": 2.0, "std": None, "runs": [2.0]}
