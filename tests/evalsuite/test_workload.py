"""Workload strings, arrival times and prompts."""

import pytest
import torch

from compress.evalsuite.workload import (
    Workload,
    arrival_times,
    parse_workloads,
    random_prompts,
    text_prompts,
)


def test_parse_workloads_reads_every_form() -> None:
    assert parse_workloads("batch:16, rate:4,rate:0.5x7") == (
        Workload(label="batch:16", num_requests=16),
        Workload(label="rate:4", num_requests=32, rate=4.0),
        Workload(label="rate:0.5x7", num_requests=7, rate=0.5),
    )
    assert parse_workloads("none") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "workload '' is not understood"),
        ("batch", "workload 'batch' is not understood"),
        ("batch:", "workload 'batch:' is not understood"),
        ("batch:0", "at least 1, got 0"),
        ("batch:-3", "at least 1, got -3"),
        ("batch:1.5", "'1.5'"),
        ("bach:4", "did you mean 'batch'"),
        ("rate:0", "must be a positive number, got 0"),
        ("rate:-1", "must be a positive number, got -1"),
        ("rate:nan", "must be a positive number, got nan"),
        ("rate:inf", "must be a positive number, got inf"),
        ("rate:4x", "workload 'rate:4x' is not understood"),
        ("rate:4x0", "at least 1, got 0"),
        ("batch:1,none", "workload 'none' is not understood"),
        ("batch:1,,batch:2", "workload '' is not understood"),
        ("batch:1,batch:1", "given twice"),
    ],
)
def test_parse_workloads_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_workloads(text)


def test_parse_workloads_error_shows_the_forms() -> None:
    with pytest.raises(ValueError, match=r"'rate:4x64' \(4 requests per second, 64 in all\)"):
        parse_workloads("16")


@pytest.mark.parametrize("num_requests", [1, 17, 130])
def test_arrival_times_end_at_requests_over_rate(num_requests: int) -> None:
    workload = Workload(label="rate", num_requests=num_requests, rate=4.0)
    times = arrival_times(workload, "seed")
    assert len(times) == num_requests
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] == pytest.approx(num_requests / 4.0)


def test_arrival_times_are_poisson_and_seeded() -> None:
    workload = Workload(label="rate", num_requests=4000, rate=2.0)
    times = torch.tensor(arrival_times(workload, "a"), dtype=torch.float64)
    gaps = times.diff()
    # exponential gaps: standard deviation = mean, and a share 1/e of them longer than the mean
    assert gaps.mean().item() == pytest.approx(0.5, rel=0.01)
    assert gaps.std().item() == pytest.approx(0.5, rel=0.1)
    assert (gaps > 0.5).double().mean().item() == pytest.approx(0.368, abs=0.03)
    assert arrival_times(workload, "a") == times.tolist()
    assert arrival_times(workload, "b") != times.tolist()


def test_arrival_times_of_a_batch_are_zero() -> None:
    assert arrival_times(Workload(label="batch:3", num_requests=3), "seed") == [0.0, 0.0, 0.0]


def test_text_prompts_are_distinct_stretches_of_the_text() -> None:
    tokens = torch.arange(1000, 1050)
    prompts = text_prompts(tokens, 33, 17, "a")
    assert len({tuple(prompt) for prompt in prompts}) == 33
    assert all(prompt == list(range(prompt[0], prompt[0] + 17)) for prompt in prompts)
    assert prompts == text_prompts(tokens, 33, 17, "a")
    assert prompts != text_prompts(tokens, 33, 17, "b")


def test_text_prompts_refuses_a_text_without_enough_places() -> None:
    assert len(text_prompts(torch.arange(20), 4, 17, "a")) == 4
    with pytest.raises(ValueError, match="20 tokens does not hold 5 different prompts"):
        text_prompts(torch.arange(20), 5, 17, "a")


def test_random_prompts_stay_in_the_vocabulary() -> None:
    prompts = random_prompts(7, 5, 130, "a")
    assert [len(prompt) for prompt in prompts] == [130] * 5
    assert {token for prompt in prompts for token in prompt} == set(range(7))
    assert prompts == random_prompts(7, 5, 130, "a")
    assert prompts != random_prompts(7, 5, 130, "b")
