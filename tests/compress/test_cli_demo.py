"""`compress demo` must measure what it wrote, whatever the folder is called."""

from pathlib import Path
from typing import Any

import pytest

from compress import quantize, render
from compress.cli import run
from compress.evalsuite import report, serve_eval


@pytest.mark.parametrize("folder", ["demo", "demo-w4a16"])
def test_demo_measures_the_folder_that_it_wrote(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quantize, "quantize", lambda job: jobs.append(job) or {})
    monkeypatch.setattr(serve_eval, "serve_eval", lambda options: jobs.append(options) or {})
    monkeypatch.setattr(render, "print_quantize_report", lambda *_: None)
    monkeypatch.setattr(report, "print_report", lambda *_: None)
    assert run(["demo", "-o", folder]) == 0
    written, measured = jobs
    assert (written.model, measured.baseline) == ("demo", "demo")
    assert measured.model == f"./{folder}"  # `demo` alone names the model, not the folder
    assert written.output == Path(folder)
