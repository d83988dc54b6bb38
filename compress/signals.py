"""Ctrl-C and SIGTERM end a command alike: it cleans up, says what is kept, and has its code."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import NoReturn, ParamSpec

from compress.errors import one_line

P = ParamSpec("P")


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived."""


class Interrupted(Exception):
    """A command was stopped, in a form that typer does not turn into a plain exit.

    `code` is the exit code that shells know: 128 and the number of the signal.
    """

    code = 128 + signal.SIGINT


class _Stopped(Interrupted):
    code = 128 + signal.SIGTERM


def interruptible(command: Callable[P, None]) -> Callable[P, None]:
    """`command`, but Ctrl-C and SIGTERM raise `Interrupted` with a message once it has ended."""

    @wraps(command)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with sigterm_raised():
                command(*args, **kwargs)
        except Terminated as error:
            raise _Stopped(one_line(error, "terminated")) from error
        except KeyboardInterrupt as error:
            raise Interrupted(one_line(error, "interrupted")) from error

    return wrapper


@contextmanager
def sigterm_raised() -> Iterator[None]:
    """Have SIGTERM raise `Terminated` in the main thread for the time of the context."""
    if threading.current_thread() is not threading.main_thread():
        yield  # other threads cannot set handlers, nor are they interrupted
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
