"""Progress as a script sees it (plain lines) and as a person does (a bar), on a fake clock."""

import io
import sys
from types import SimpleNamespace

import pytest

from compress import progress as module
from compress.progress import progress


class Clock:
    """Seconds that pass only when told; it starts long after the machine did."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    return clock


@pytest.mark.parametrize("done", [0, 4], ids=["fresh", "resumed"])
def test_plain_lines_count_all_steps_and_time_only_those_of_this_run(
    done: int, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    total = 6 + done
    with progress("work", total, done=done) as tick:
        clock.now += 2
        tick(note="first")  # 1 of 6 steps in 2 s
        clock.now += 6
        tick(steps=2, note="third")  # 3 of 6 in 8 s
        clock.now += 12
        tick()  # 4 of 6 in 20 s
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        f"work: {1 + done}/{total}, 2 s elapsed, eta 10 s  first",
        f"work: {3 + done}/{total}, 8 s elapsed, eta 8 s  third",
        f"work: {4 + done}/{total}, 20 s elapsed, eta 10 s",
    ]


def test_plain_lines_are_seconds_apart_but_the_last_always_comes(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("work", 8) as tick:
        for _ in range(8):
            clock.now += 2
            tick()
    counts = [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()]
    assert counts == ["work: 1/8", "work: 4/8", "work: 7/8", "work: 8/8"]


@pytest.mark.parametrize("is_terminal", [False, True], ids=["file", "terminal"])
def test_quiet_prints_nothing(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("work", 2, quiet=True) as tick:
        tick()
        tick(note="last")
    assert stream.getvalue() == ""


def test_bar_starts_at_the_steps_that_were_done(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(is_terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with progress("work", 9, done=4) as tick:
        tick(note="fifth")
        tick(steps=2, note="seventh")
    frames = stream.getvalue()
    assert "4/9" in frames
    assert frames.rpartition("work")[2].count("7/9") == 1
    assert "seventh" in frames


class Stream(io.StringIO):
    """Text that was written to what may be a terminal."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal
