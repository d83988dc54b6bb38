"""Memory: models larger than the limit, activations larger than their budget, depth."""

import json
import re
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import devices, run
from compress import quantize as module
from compress.calib.capture import ActivationFile
from compress.export.verify import verify_checkpoint
from compress.models.checkpoint import open_checkpoint
from tests.compress.test_quantize import files, job
from tests.factory import tiny_model

ROOT = Path(__file__).parents[2]
GROUPS = ["--set", "scheme.weights.group_size=32"]
MIDDLE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
MEASURE = "import torch, transformers; print(open('/proc/self/status').read())"
LOAD_WHOLE = """
import sys
from compress import cli, quantize
work, kept = quantize.plan_job, []
def plan_job(job):
    planned = work(job)
    kept.extend(planned.checkpoint.read(name) for name in planned.checkpoint.tensors)
    return planned
quantize.plan_job = plan_job
sys.exit(cli.run(sys.argv[1:]))
"""


def python(*arguments: str, limit: int | None = None) -> "subprocess.CompletedProcess[str]":
    """Run an interpreter whose address space is limited to `limit` bytes."""
    limits = (limit, limit) if limit else None
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_AS, limits) if limits else None,
    )


def quantized(model: Path, out: Path, *options: str) -> dict[str, Any]:
    """The report of a run in a process of its own."""
    report = out.with_name(f"{out.name}.json")
    arguments = ["quantize", str(model), "-o", str(out), "--json", str(report), "-q", "--offline"]
    done = python("-m", "compress", *arguments, *options)
    assert done.returncode == 0, done.stderr
    values: dict[str, Any] = json.loads(report.read_text())
    return values


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_of_three_times_the_memory_is_quantized(tmp_path: Path) -> None:
    """The limit is that of an interpreter with torch and transformers and a third of the model."""
    model = tiny_model("LlamaForCausalLM", tmp_path / "model", num_layers=64, **MIDDLE)
    size = open_checkpoint(model).num_bytes
    baseline = re.search(r"VmPeak:\s+(\d+) kB", python("-c", MEASURE).stdout)
    assert baseline is not None
    limit = int(baseline[1]) * 1024 + size // 3
    text = ["--calib-data", str(ROOT / "LICENSE"), "--calib-samples", "8", "--calib-length", "64"]
    options = ["--recipe", "rtn-w4a16", "--set", "method.scale.steps=1", *text, "--offline", "-q"]
    arguments = ["quantize", str(model), "-o", str(tmp_path / "out"), *options]
    whole = python("-c", LOAD_WHOLE, *arguments, limit=limit)
    assert whole.returncode == 1
    assert whole.stderr.splitlines()[-1] == "compress: error: out of memory"
    assert not (tmp_path / "out").exists()
    done = python("-m", "compress", *arguments, limit=limit)
    assert done.returncode == 0, done.stderr
    assert verify_checkpoint(tmp_path / "out").ok


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [[], ["--set", "true_sequential=true"]], ids=["at-once", "true-sequential"]
)
def test_peak_memory_of_two_chains_does_not_grow_with_depth(
    options: list[str], tmp_path: Path
) -> None:
    """GPTAQ keeps the activations of the float model, its weights, and a second moment more."""
    peaks = []
    for num_layers in (2, 8):
        folder = tmp_path / f"model{num_layers}"
        sizes = MIDDLE | {"hidden_size": 768, "intermediate_size": 1024}
        model = tiny_model("LlamaForCausalLM", folder, num_layers=num_layers, **sizes)
        report = quantized(
            model,
            tmp_path / f"out{num_layers}",
            *GROUPS,
            *("--set", "method.asymmetry=1.0", "--set", "method.scale.steps=2", *options),
            *("--calib-samples", "8", "--calib-length", "256"),
        )
        peaks.append(report["peak_rss_bytes"])
    assert peaks[1] < 1.12 * peaks[0]


@pytest.mark.slow
def test_activations_past_their_budget_take_no_memory(tmp_path: Path) -> None:
    """The peak falls by a good part of what a block's activations take; the result is the same."""
    model = tiny_model(
        "LlamaForCausalLM", tmp_path / "model", hidden_size=1536, intermediate_size=96
    )
    samples = ["--calib-samples", "384", "--calib-length", "256", "--recipe", "rtn-w4a16"]
    peaks = {}
    for budget in ("2GB", "1MB"):
        report = quantized(
            model, tmp_path / budget, *GROUPS, *samples, "--activation-budget", budget
        )
        peaks[budget] = report["peak_rss_bytes"]
    dtype = devices.fast_dtype(torch.device("cpu"))
    inputs_and_outputs = 2 * 384 * 256 * 1536 * dtype.itemsize
    assert peaks["2GB"] - peaks["1MB"] > 0.4 * inputs_and_outputs
    assert files(tmp_path / "2GB") == files(tmp_path / "1MB")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama") / "m", num_layers=3)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["method.asymmetry=1.0"],
        ["transforms=[{kind: awq}]"],
        ["transforms=[{kind: smoothquant}]", "true_sequential=true"],
    ],
    ids=["gptq", "two-chains", "awq", "smoothquant-sequential"],
)
def test_quantize_gives_the_same_with_activations_on_disk(
    overrides: list[str], llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, work = [], run.open_activations

    def note(*args: Any, **kwargs: Any) -> Any:
        opened.append(work(*args, **kwargs))
        return opened[-1]

    monkeypatch.setattr(run, "open_activations", note)
    kinds = []
    for budget in (1 << 30, 0):
        module.quantize(job(llama, tmp_path / str(budget), *overrides, activation_budget=budget))
        kinds.append({type(activations) for activations in opened})
        opened.clear()
    assert kinds == [{torch.Tensor}, {ActivationFile}]
    assert files(tmp_path / "0") == files(tmp_path / str(1 << 30))


def test_activations_on_disk_are_resumed(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that stopped with its activations mapped may go on with them on disk."""
    from tests.compress.test_quantize_ends import interrupt

    module.quantize(job(llama, tmp_path / "whole"))
    interrupt(llama, tmp_path / "out", monkeypatch)
    module.quantize(job(llama, tmp_path / "out", resume=True, activation_budget=0))
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize("chains", [1, 2])
def test_the_budget_counts_what_is_open_at_a_time(
    chains: int, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 samples of 32 tokens, 96 wide: inputs and outputs of a block, in each chain."""
    dtype = devices.fast_dtype(torch.device("cpu"))
    needed = 2 * chains * 6 * 32 * 96 * dtype.itemsize
    seen, work = [], run.open_activations

    def note(*args: Any, mapped: bool, **kwargs: Any) -> Any:
        seen.append(mapped)
        return work(*args, mapped=mapped, **kwargs)

    monkeypatch.setattr(run, "open_activations", note)
    for budget, expected in ((needed, True), (needed - 1, False)):
        overrides = [] if chains == 1 else ["method.asymmetry=0.5"]
        out = tmp_path / str(budget)
        module.quantize(job(llama, out, *overrides, activation_budget=budget))
        assert set(seen) == {expected}
        seen.clear()


def test_free_memory_knows_of_a_limit_of_the_address_space() -> None:
    code = (
        "import psutil, torch; from compress.devices import free_memory_bytes;"
        "print(free_memory_bytes(), psutil.Process().memory_info().vms)"
    )
    limit = 3 << 30
    free, used = map(int, python("-c", code, limit=limit).stdout.split())
    assert abs(free - (limit - used)) < 50e6
    unlimited, _ = map(int, python("-c", code).stdout.split())
    assert unlimited > free or unlimited < limit
