"""Real processes that start in milliseconds: forked from a server that has imported everything.

The server computes nothing, so its children are as fresh as a new interpreter: no threads, no
random state, no open groups. They use one thread each.
"""

import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_PRELOADED = [
    "compress",  # before torch
    "compress.cli",
    "compress.quantize",
    "compress.render",
    "compress.options",
    "accelerate",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llama.configuration_llama",
    "transformers.tokenization_utils_tokenizers",
    "torch.distributed",
    "pydoc_data.topics",
    "tests.forked",
]

# Starting a process polls all others, and of two threads that poll one only one gets its exit code.
_polling = threading.Lock()


@dataclass(frozen=True)
class Forked:
    """A running process and the file that gets what it prints."""

    process: BaseProcess
    log: Path

    def wait(self, timeout: float = 120) -> int:
        """Exit code; minus the signal that killed it. AssertionError if it does not end."""
        if not wait([self.process.sentinel], timeout):
            self.process.kill()
            wait([self.process.sentinel])
            raise AssertionError(f"still running after {timeout} s: {self.output}")
        code = self.exitcode
        assert code is not None
        return code

    @property
    def exitcode(self) -> int | None:
        """Exit code as of `wait`; None while it runs."""
        with _polling:
            return self.process.exitcode

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text() if self.log.exists() else ""


@cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def start(
    log: Path,
    arguments: Sequence[str],
    *,
    environment: dict[str, str] | None = None,
    prepare: Callable[[], None] | None = None,
) -> Forked:
    """Start `compress ARGUMENTS` with more `environment`; `prepare` runs first, in the process."""
    process = _context().Process(
        target=_child, args=(str(log), [*arguments], environment or {}, prepare)
    )
    with _polling:
        process.start()
    return Forked(process, log)


def start_ranks(
    folder: Path,
    arguments: Sequence[str],
    size: int,
    *,
    prepare: Callable[[], None] | None = None,
) -> list[Forked]:
    """Start `size` processes as `torchrun --nproc-per-node` would; they log to `folder`."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    common = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [
        start(
            folder / f"rank{rank}.log",
            arguments,
            environment=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            prepare=prepare,
        )
        for rank in range(size)
    ]


def _child(
    log: str, arguments: list[str], environment: dict[str, str], prepare: Callable[[], None] | None
) -> None:
    import torch

    from compress.cli import run

    with open(log, "wb") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ.update(environment)
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    code = run(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
