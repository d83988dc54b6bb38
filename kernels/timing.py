"""Time operations on a device.

A timer takes calls and gives the seconds that the device needs for all of them, back to back:
`CudaTimer` by events on a GPU, `clock_seconds` by the clock on a CPU. `median_seconds` times groups
of calls and takes the median. Each call takes the next of several copies of its inputs: between two
uses of a copy, twice the size of the L2 cache is read elsewhere, so that inputs come from memory.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch

Timer = Callable[[Sequence[Callable[[], object]]], float]

_GROUP_SECONDS = 1e-3  # of device time between two events, if calls are short
_MAX_GROUP = 32  # calls; their launches must fit the queue of a stream, of about 1000
_MAX_GROUPS = 50
_MIN_GROUPS = 3
_MAX_COPIES = 512
_CYCLES_PER_SECOND = 2e9  # more than the clocks of today's chips
_LONGEST_SLEEP = 20e-3


class CudaTimer:
    """Seconds between two events on the current stream.

    The device first sleeps while the calls are being launched, so that what is timed is its own
    work and not Python's, as in an engine that replays a recorded graph. An operation that waits
    for its own results cannot be launched ahead, and is timed with its waiting.
    """

    def __init__(self) -> None:
        self._sleep = 1e-3

    def __call__(self, calls: Sequence[Callable[[], object]]) -> float:
        """Seconds of `calls`, launched again behind a longer sleep if launching took longer."""
        while True:
            slept = self._sleep
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
            torch.cuda._sleep(int(slept * _CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
            start.record()
            began = time.perf_counter()
            for call in calls:
                call()
            launching = time.perf_counter() - began
            end.record()
            end.synchronize()
            self._sleep = min(1.5 * launching + 1e-4, _LONGEST_SLEEP)
            if launching < slept or slept == _LONGEST_SLEEP:
                return float(start.elapsed_time(end)) / 1e3


def clock_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds of `calls` on a device that computes while it is called."""
    began = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - began


def median_seconds(
    timer: Timer, function: Callable[..., object], inputs: Sequence[tuple[Any, ...]], cap: float
) -> float:
    """Median over groups of calls of the seconds of one call of `function`, on `inputs` in turn.

    The first calls compile, and are not counted. At least 3 groups, at most 50, and no new one
    after `cap` seconds.
    """
    turn = cycle(inputs)

    def group(size: int) -> float:
        return timer([partial(function, *next(turn)) for _ in range(size)]) / size

    group(1)
    size = min(max(round(_GROUP_SECONDS / max(group(2), 1e-9)), 1), _MAX_GROUP)
    began, times = time.perf_counter(), list[float]()
    while len(times) < _MIN_GROUPS or (
        len(times) < _MAX_GROUPS and time.perf_counter() - began < cap
    ):
        times.append(group(size))
    return statistics.median(times)


def rotation(
    inputs: tuple[Any, ...], num_bytes: int, *, cache_bytes: int, memory_bytes: int
) -> tuple[list[tuple[Any, ...]], bool]:
    """Copies of `inputs` to be taken in turn, and whether they are enough to pass the cache.

    One call moves `num_bytes`. The copies together take at most `memory_bytes`, or are one.
    """
    size = sum(tensor.nbytes for tensor in tensors_of(inputs))
    read = max(min(size, num_bytes), 1)
    wanted = 1 + math.ceil(2 * cache_bytes / read)
    count = min(wanted, _MAX_COPIES, max(memory_bytes // max(size, 1), 1))
    return [inputs, *(deepcopy(inputs) for _ in range(count - 1))], count == wanted


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor within tuples, lists and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from tensors_of(element)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))
