"""Measure a card, and each kernel on it beside plain torch."""

import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch

from compress.kernels.compare import Comparison, compare
from compress.kernels.jit import BenchCase
from compress.kernels.timing import Timer, median_seconds, rotation

GIB = 1 << 30
_CEILING_SECONDS = 1.0  # per ceiling, of repeats

Status = Literal["ok", "below goal", "wrong", "failed", "not run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What is measured on, and for how long.

    `cache_bytes` is the size of the L2 cache, `memory_bytes` what the inputs of one case may take.
    The ceilings are measured by copying `copy_bytes` and multiplying matrices of `matrix_size`.
    After `case_seconds` a function is not repeated again; after `total_seconds` no case is begun.
    """

    device: torch.device
    dtype: torch.dtype
    timer: Timer
    cache_bytes: int
    memory_bytes: int
    copy_bytes: int = GIB
    matrix_size: int = 8192
    case_seconds: float = 0.2
    total_seconds: float = 215.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """What the card can do at most: bytes read and written by a copy, operations of a product."""

    bytes_per_second: float
    flops_per_second: float

    def seconds(self, case: BenchCase) -> float:
        """Least time that the ceiling of `case` allows it."""
        if case.ceiling == "memory":
            return case.num_bytes / self.bytes_per_second
        return case.num_flops / (self.flops_per_second * (2 if case.ceiling == "matrix8" else 1))


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of one call, and fractions of the ceilings that they reach.

    `of_goal` is the fraction of the ceiling that the case names. `copies` of the inputs were taken
    in turn; unless `cold`, these were too few to pass the cache.
    """

    seconds: float
    plain_seconds: float
    of_copy: float
    of_matrix: float
    of_goal: float
    copies: int
    cold: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table; `note` says why the status is what it is, if that is not plain."""

    module: str
    label: str
    num_bytes: int
    num_flops: int
    ceiling: str
    goal: float | None
    status: Status
    note: str = ""
    comparison: Comparison | None = None
    timing: Timing | None = None


def measure_ceilings(machine: Machine) -> Ceilings:
    """Medians of a large copy and of a product of square matrices, in plain torch."""
    kind: dict[str, Any] = {"device": machine.device, "dtype": machine.dtype}
    source = torch.empty(machine.copy_bytes // machine.dtype.itemsize, **kind).normal_()
    target = torch.empty_like(source)
    copy = median_seconds(machine.timer, target.copy_, [(source,)], _CEILING_SECONDS)
    a, b = (torch.randn(machine.matrix_size, machine.matrix_size, **kind) for _ in range(2))
    product = median_seconds(machine.timer, torch.matmul, [(a, b)], _CEILING_SECONDS)
    return Ceilings(
        bytes_per_second=2 * source.nbytes / copy,
        flops_per_second=2 * machine.matrix_size**3 / product,
    )


def run_case(module: str, case: BenchCase, machine: Machine, ceilings: Ceilings) -> Row:
    """Check `case`, then time it; whatever goes wrong in it is told by its row."""

    def row(status: Status, note: str = "", **found: Any) -> Row:
        return Row(
            module=module, label=case.label, num_bytes=case.num_bytes, num_flops=case.num_flops,
            ceiling=case.ceiling, goal=case.goal, status=status, note=note, **found,
        )  # fmt: skip

    try:
        inputs = case.make(machine.device, machine.dtype)
        # Each has its own inputs, as an operation may write to them.
        exact, plain, ours = (
            function(*deepcopy(inputs)) for function in (case.exact, case.plain, case.triton)
        )
        comparison = compare(ours, plain, exact)
        del exact, plain, ours
        if comparison.problem:
            return row("wrong", comparison.problem, comparison=comparison)
        timing = _time(case, inputs, machine, ceilings)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return row("not run", "out of memory")
    except Exception as error:
        return row("failed", f"{type(error).__name__}: {error}")
    missed = case.goal is not None and timing.of_goal < case.goal
    note = "" if timing.cold else "inputs partly in the cache"
    return row("below goal" if missed else "ok", note, comparison=comparison, timing=timing)


def _time(case: BenchCase, inputs: tuple[Any, ...], machine: Machine, ceilings: Ceilings) -> Timing:
    copies, cold = rotation(
        inputs,
        case.num_bytes,
        cache_bytes=machine.cache_bytes,
        memory_bytes=machine.memory_bytes,
    )
    seconds, plain_seconds = (
        median_seconds(machine.timer, function, copies, machine.case_seconds)
        for function in (case.triton, case.plain)
    )
    return Timing(
        seconds=seconds,
        plain_seconds=plain_seconds,
        of_copy=case.num_bytes / ceilings.bytes_per_second / seconds,
        of_matrix=case.num_flops / ceilings.flops_per_second / seconds,
        of_goal=ceilings.seconds(case) / seconds,
        copies=len(copies),
        cold=cold,
    )


def bench(
    cases: Sequence[tuple[str, BenchCase]], machine: Machine, ceilings: Ceilings
) -> Iterator[Row]:
    """Every case in order, as long as there is time."""
    end = time.perf_counter() + machine.total_seconds
    with torch.no_grad():
        for module, case in cases:
            if time.perf_counter() < end:
                yield run_case(module, case, machine, ceilings)
                continue
            yield Row(
                module=module, label=case.label, num_bytes=case.num_bytes,
                num_flops=case.num_flops, ceiling=case.ceiling, goal=case.goal,
                status="not run", note="out of time: name it with --only",
            )  # fmt: skip
