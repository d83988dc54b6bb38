from dataclasses import dataclass
from itertools import cycle

import pytest
import torch

from compress.kernels import timing
from compress.kernels.timing import (
    CudaTimer,
    clock_seconds,
    median_seconds,
    rotation,
    tensors_of,
)


class FakeTimer:
    """Calls take the given seconds, in turn; remembers how many were in each group."""

    def __init__(self, *seconds):
        self.seconds, self.groups = cycle(seconds), []

    def __call__(self, calls):
        self.groups.append(len(calls))
        for call in calls:
            call()
        return next(self.seconds) * len(calls)


def test_median_is_per_call_and_leaves_out_the_first_calls():
    timer = FakeTimer(100.0, 1.0, 7.0, 5.0, 20.0)  # compiling, estimating, then three groups
    assert median_seconds(timer, lambda: None, [()], cap=0.0) == 7.0
    assert timer.groups == [1, 2, 1, 1, 1]


@pytest.mark.parametrize(("seconds", "size"), [(1e-6, 32), (1e-4, 10), (2e-3, 1)])
def test_short_calls_are_timed_in_groups(seconds, size):
    timer = FakeTimer(seconds)
    assert median_seconds(timer, lambda: None, [()], cap=60.0) == pytest.approx(seconds)
    assert timer.groups == [1, 2] + [size] * 50


def test_no_group_is_begun_after_the_cap(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    timer = FakeTimer(1.0)
    median_seconds(timer, lambda: None, [()], cap=6.0)  # each look at the clock takes a second
    assert len(timer.groups) == 2 + 3 + 5


def test_inputs_are_taken_in_turn_across_groups():
    seen = []
    median_seconds(FakeTimer(2e-4), lambda *x: seen.append(x), [(0, 1), (2, 3), (4, 5)], cap=0.0)
    assert len(seen) == 1 + 2 + 3 * 5
    assert seen == ([(0, 1), (2, 3), (4, 5)] * 6)[: len(seen)]


def test_clock_seconds_covers_every_call(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call():
        now[0] += 3.0

    assert clock_seconds([call] * 4) == 12.0


class FakeDevice:
    """Stands in for torch.cuda: a stream whose events lie 5 ms apart, and a host clock."""

    def __init__(self, monkeypatch):
        self.now, self.slept = 0.0, []
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.slept.append(cycles / 2e9))
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def record(self):
        pass

    synchronize = record

    def elapsed_time(self, end):
        return 5.0

    def launch(self, seconds):
        self.now += seconds


def test_cuda_timer_sleeps_longer_than_launching_takes(monkeypatch):
    device, timer = FakeDevice(monkeypatch), CudaTimer()
    assert timer([lambda: device.launch(1e-4)] * 2) == 5e-3
    assert device.slept == pytest.approx([1e-3])
    device.slept.clear()
    assert timer([lambda: device.launch(1e-3)] * 4) == 5e-3
    assert device.slept == pytest.approx([4e-4, 6.1e-3])  # too short for 4 ms, again with 6.1


def test_cuda_timer_ends_for_calls_that_wait(monkeypatch):
    device, timer = FakeDevice(monkeypatch), CudaTimer()
    assert timer([lambda: device.launch(device.slept[-1] + 1e-3)]) == 5e-3
    assert device.slept[-1] == pytest.approx(20e-3) and len(device.slept) < 12


def test_rotation_reads_twice_the_cache_between_uses():
    inputs = (torch.arange(1000, dtype=torch.float32), 3)
    copies, cold = rotation(inputs, 4000, cache_bytes=10_000, memory_bytes=1 << 30)
    assert cold and len(copies) == 1 + 5
    assert copies[0][0] is inputs[0]
    assert len({tensor.data_ptr() for tensor, _ in copies}) == 6
    assert all(torch.equal(tensor, inputs[0]) and number == 3 for tensor, number in copies)


def test_rotation_counts_what_is_read_of_a_large_input():
    inputs = (torch.zeros(1000),)
    copies, cold = rotation(inputs, 500, cache_bytes=1000, memory_bytes=1 << 30)
    assert cold and len(copies) == 1 + 4


@pytest.mark.parametrize(("memory_bytes", "count"), [(12_500, 3), (100, 1)])
def test_rotation_says_when_memory_is_too_small(memory_bytes, count):
    inputs = (torch.zeros(1000),)
    copies, cold = rotation(inputs, 4000, cache_bytes=10_000, memory_bytes=memory_bytes)
    assert len(copies) == count and not cold


def test_rotation_of_no_tensors_is_bounded():
    copies, cold = rotation((1,), 0, cache_bytes=10_000, memory_bytes=1000)
    assert len(copies) == 512 and not cold


def test_tensors_of_looks_into_tuples_lists_and_dataclasses():
    @dataclass
    class Weight:
        words: torch.Tensor
        high: torch.Tensor | None

    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    found = list(tensors_of((a, [Weight(b, None)], 1, None, (c,))))
    assert [len(tensor) for tensor in found] == [1, 2, 3]
