"""Progress of long work on stderr: a rich bar with ETA on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_PLAIN_INTERVAL_S = 5.0


Ticker = Callable[..., None]  # (steps=1, note=""): work advanced, and what the latest step was


@contextmanager
def progress(title: str, total: int, *, quiet: bool = False, done: int = 0) -> Iterator[Ticker]:
    """Show `title` with `total` steps, of which `done` were finished before (a resumed run)."""
    if quiet:
        yield lambda steps=1, note="": None
    elif sys.stderr.isatty():
        with _rich_bar(title, total, done) as ticker:
            yield ticker
    else:
        yield _plain_lines(title, total, done)


@contextmanager
def _rich_bar(title: str, total: int, done: int) -> Iterator[Ticker]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total, completed=done, note="")

        def tick(steps: int = 1, note: str = "") -> None:
            bar.update(task, advance=steps, note=note)

        yield tick


def _plain_lines(title: str, total: int, done: int) -> Ticker:
    started, state = time.monotonic(), {"done": done, "printed": 0.0}

    def tick(steps: int = 1, note: str = "") -> None:
        state["done"] += steps
        now = time.monotonic()
        if now - state["printed"] < _PLAIN_INTERVAL_S and state["done"] < total:
            return
        state["printed"] = now
        worked = max(state["done"] - done, 1)
        eta = (now - started) / worked * (total - state["done"])
        line = (
            f"{title}: {int(state['done'])}/{total}, {now - started:.0f} s elapsed, eta {eta:.0f} s"
        )
        print(f"{line}  {note}".rstrip(), file=sys.stderr, flush=True)

    return tick
