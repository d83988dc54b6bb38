"""`compress serve` in a process of its own, for the tests."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(the process, its address) once it says that it serves; it is killed if it still runs."""
    command = [sys.executable, "-m", "compress", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if match := re.search(r"at (http://\S+)/v1; Ctrl-C ends", line):
                break
        else:
            raise AssertionError(f"it ended: {''.join(said)}")
        yield process, match[1]
    finally:
        process.kill()
        process.communicate()
