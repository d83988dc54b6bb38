import inspect
import subprocess
import sys

import pytest

from compress.kernels import ops
from compress.kernels.jit import triton

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # makes `import triton` raise ModuleNotFoundError
import torch
from compress.kernels import ops
chosen = ops.select("auto", "cpu")
print(chosen.gated_mul(torch.ones(1, 4)).shape)
ops.select("triton", "cuda")
"""


def test_select_auto_follows_the_device():
    assert ops.select("auto", "cpu").backend == "torch"
    with pytest.raises(ValueError, match="unknown device for backend 'auto' 'meta'"):
        ops.select("auto", "meta")


@pytest.mark.parametrize("backend", ops.BACKENDS)
def test_select_returns_every_operation_of_the_backend(backend, device):
    chosen = ops.select(backend, device)
    assert chosen.backend == backend
    for name in ops.OPS:
        assert getattr(chosen, name).__name__ == f"{name}_{backend}"


@pytest.mark.parametrize("name", ops.OPS)
def test_backends_have_one_signature(name, device):
    functions = [getattr(ops.select(backend, device), name) for backend in ops.BACKENDS]
    first, *others = [inspect.signature(function) for function in functions]
    assert all(other == first for other in others)


def test_select_refuses_an_unknown_backend():
    with pytest.raises(ValueError, match="unknown kernel backend 'tritn'; did you mean 'triton'"):
        ops.select("tritn", "cpu")


def test_select_refuses_triton_on_a_cpu_outside_the_interpreter(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=r"need a GPU, not device 'cpu'.*use backend 'torch'"):
        ops.select("triton", "cpu")


def test_torch_backend_works_where_triton_is_not_installed():
    run = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert run.stdout.strip() == "torch.Size([1, 2])", run.stderr
    assert "ValueError: backend 'triton' cannot be used: triton is not installed" in run.stderr
