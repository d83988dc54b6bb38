"""How much CPU other processes used while something was measured.

A speed measured on a busy machine is a fact about the neighbours. Nothing here prevents it; the
report says it, so that nobody has to guess:

    foreign CPUs = (busy CPU time of the machine - CPU time of this process) / wall time

Busy time has the resolution of the kernel's clock tick (10 ms on Linux), so the figure is rough for
runs of less than a few tenths of a second.
"""

import time
from dataclasses import dataclass

import psutil

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuSnapshot:
    """Seconds since some fixed moments: of the wall clock, of all CPUs busy, of this process."""

    wall: float
    busy: float
    own: float


def cpu_snapshot() -> CpuSnapshot:
    """The counters now."""
    machine, process = psutil.cpu_times(), psutil.Process().cpu_times()
    return CpuSnapshot(
        wall=time.perf_counter(),
        busy=sum(getattr(machine, kind, 0.0) for kind in _BUSY),
        own=process.user + process.system,
    )


def foreign_cpus(before: CpuSnapshot, after: CpuSnapshot) -> float:
    """CPUs that others kept busy between two snapshots, on average."""
    foreign = (after.busy - before.busy) - (after.own - before.own)
    return max(0.0, foreign / (after.wall - before.wall))
