"""A served tiny model: in this process for the test client, and over loopback for real ones."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI

from compress.runtime.engine_config import EngineConfig
from compress.runtime.llm import LLM
from compress.runtime.server.run import bind

SECONDS = 60.0  # for what takes none, on a busy machine
CONFIG = EngineConfig(block_size=16, num_blocks=65, max_num_seqs=5, token_budget=64)


@pytest.fixture(scope="module")
def llm(llama: Path) -> LLM:
    """A tiny Llama with room for 1040 tokens."""
    return LLM(llama, config=CONFIG)


@pytest.fixture(scope="module")
def oracle(llama: Path) -> LLM:
    """The same model with an engine of its own: that of `llm` belongs to the worker's thread."""
    return LLM(llama, config=CONFIG)


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def check_idle(llm: LLM) -> None:
    """Wait until nothing is in flight; then no block may be owned."""
    eventually(lambda: not llm.engine.has_unfinished)
    blocks = llm.engine.blocks
    blocks.check()
    assert blocks.num_free_blocks == blocks.num_blocks


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The address of `app` behind uvicorn, on a free port of this machine."""
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        eventually(lambda: server.started)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(SECONDS)
