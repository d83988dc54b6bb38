"""Where kernel tests run: on the GPU if there is one, else in Triton's interpreter."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, at its file's import

import triton.language as tl  # noqa: E402, after the choice above
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

if not HAS_GPU and not isinstance(tl.cdiv, InterpretedFunction):
    raise pytest.UsageError(
        "triton was imported before tests/kernels could choose its interpreter: "
        "run with TRITON_INTERPRET=1"
    )


@pytest.fixture
def device():
    """Where the tensors of a kernel test live."""
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture
def poisoned_empty(monkeypatch):
    """Fill new output tensors with NaN, so that an element a kernel forgets is seen."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _poison(getattr(owner, name)))


def _poison(make):
    def poisoned(*args, **kwargs):
        tensor = make(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    return poisoned


@pytest.fixture(scope="session")
def offline_results():
    """Every kernel variant compiled for sm_80 and sm_90, by (module, label, arch)."""
    return compile_offline(80, 90)


@pytest.fixture(scope="session")
def blackwell_results():
    """The same for sm_100."""
    return compile_offline(100)


def compile_offline(*arches):
    """Results by (module, label, arch), from a process whose kernels are not interpreted."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "offline.json"
        command = [sys.executable, "-m", "compress.kernels.bench", "--offline", f"--json={file}"]
        command += [f"--arch={arch}" for arch in arches]
        run = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert file.exists(), run.stderr
        rows = json.loads(file.read_text())
    return {(row["module"], row["label"], row["arch"]): row for row in rows}
