"""Foreign CPU use: the arithmetic, and a neighbour that really computes."""

import subprocess
import sys
import time

import pytest

from compress.evalsuite.contention import CpuSnapshot, cpu_snapshot, foreign_cpus


@pytest.mark.parametrize(
    ("busy", "own", "expected"), [(12.0, 4.0, 2.0), (4.0, 4.0, 0.0), (3.9, 4.0, 0.0)]
)
def test_foreign_cpus_is_what_this_process_did_not_use(
    busy: float, own: float, expected: float
) -> None:
    before = CpuSnapshot(wall=1.0, busy=100.0, own=10.0)
    after = CpuSnapshot(wall=5.0, busy=100.0 + busy, own=10.0 + own)
    assert foreign_cpus(before, after) == pytest.approx(expected)


def test_cpu_snapshot_sees_a_busy_neighbour() -> None:
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        before = cpu_snapshot()
        time.sleep(1.0)
        assert foreign_cpus(before, cpu_snapshot()) > 0.3
    finally:
        neighbour.kill()
        neighbour.wait()
