"""`compress serve` in a process of its own, for the tests."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SECONDS = 120.0  # to load a tiny model on a busy machine


@dataclass
class Server:
    """The process, the address that it has said, and its log so far."""

    process: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)
    reader: threading.Thread = field(init=False)
    has_said: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.reader = threading.Thread(target=self._read)  # a full pipe would stop the server
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if match := re.search(r"at (http://\S+)/v1; Ctrl-C ends", line):
                self.url = match[1]
                self.has_said.set()
        self.has_said.set()


@contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    """A server, once it says that it serves; it is killed if it still runs at the end."""
    command = [sys.executable, "-m", "compress", "serve", *arguments, "--port", "0"]
    server = Server(subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True))
    try:
        assert server.has_said.wait(_SECONDS)
        assert server.url, f"it ended: {''.join(server.log)}"
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        server.reader.join()
