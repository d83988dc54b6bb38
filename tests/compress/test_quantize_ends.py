"""Runs that are stopped, resumed, or must not begin: nothing unsound gets the final name."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compress import block
from compress import finish as finishing
from compress import quantize as module
from compress.calib.data import CalibrationSpec
from compress.calib.replay import BlockReplay
from compress.errors import CheckFailed
from compress.export.verify import verify_checkpoint
from tests.compress.test_quantize import files, job
from tests.factory import tiny_model

TEXT = Path(__file__).parents[2] / "LICENSE"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama") / "m", num_layers=3)


def fail_at_call(number: int, error: BaseException, work: Callable[..., Any]) -> Callable[..., Any]:
    """`work`, but the call with this number (from 1) raises `error`."""
    calls = {"n": 0}

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls["n"] += 1
        if calls["n"] == number:
            raise error
        return work(*args, **kwargs)

    return wrapper


STEPS: dict[str, Any] = {
    "collect": BlockReplay,
    "write_safetensors": block,
    "propagate": BlockReplay,
    "finish": module,
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("call", [1, 2])
def test_interrupted_run_resumes_to_the_same_bytes(
    step: str, call: int, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.quantize(job(llama, tmp_path / "whole"))
    call = 1 if step == "finish" else call
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        owner = STEPS[step]
        patch.setattr(owner, step, fail_at_call(call, KeyboardInterrupt(), getattr(owner, step)))
        with pytest.raises(KeyboardInterrupt):
            module.quantize(job(llama, out))
    assert not out.exists()
    module.quantize(job(llama, out, resume=True))
    assert files(out) == files(tmp_path / "whole")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def interrupt(llama: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        stop = fail_at_call(2, KeyboardInterrupt(), BlockReplay.propagate)
        patch.setattr(BlockReplay, "propagate", stop)
        with pytest.raises(KeyboardInterrupt):
            module.quantize(job(llama, out))


def test_unfinished_run_is_not_overwritten_silently(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    interrupt(llama, out, monkeypatch)
    with pytest.raises(ValueError, match="unfinished run; add --resume or --force"):
        module.quantize(job(llama, out))
    with pytest.raises(ValueError, match="another model, recipe, calibration set"):
        module.quantize(job(llama, out, "scheme.weights.bits=8", resume=True))
    module.quantize(job(llama, out, force=True))
    assert verify_checkpoint(out, llama).ok


@pytest.mark.parametrize("changed", ["weights", "text"])
def test_resume_refuses_other_weights_or_text(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file

    source, text = tiny_model("LlamaForCausalLM", tmp_path / "m"), tmp_path / "text.txt"
    text.write_text(TEXT.read_text())
    spec = CalibrationSpec(source=str(text), num_samples=6, length=32, seed=0)
    asked = job(source, tmp_path / "out", calibration=spec, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(module, "finish", fail_at_call(1, KeyboardInterrupt(), module.finish))
        with pytest.raises(KeyboardInterrupt):
            module.quantize(asked)
    if changed == "text":
        text.write_text(TEXT.read_text().replace("the", "teh"))
    else:
        tensors = load_file(source / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="another model, recipe, calibration set"):
        module.quantize(asked)
    assert not (tmp_path / "out").exists()


def test_two_runs_cannot_write_the_same_output(llama: Path, tmp_path: Path) -> None:
    from compress.resume import open_run

    with (
        open_run(tmp_path / ".out.partial", "x", resume=False, force=False),
        pytest.raises(ValueError, match="another process is writing"),
    ):
        module.quantize(job(llama, tmp_path / "out"))


def test_full_disk_leaves_nothing_under_the_final_name(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(block, "write_safetensors", fail_at_call(2, full, block.write_safetensors))
    with pytest.raises(OSError, match="No space left"):
        module.quantize(job(llama, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_existing_output_is_kept_without_force(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="--force"):
        module.quantize(job(llama, out))
    assert (out / "config.json").read_text() == "{}"


def test_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tiny_model("LlamaForCausalLM", tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.gate_proj.weight"][3, 4] = torch.nan
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"block 1: .*(gate_proj|down_proj)"):
        module.quantize(job(source, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("index", [0, 1], ids=["a-block-that-is-propagated", "the-last-block"])
def test_outputs_of_every_block_are_seen(index: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tiny_model("LlamaForCausalLM", tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    tensors[f"model.layers.{index}.mlp.down_proj.weight"] *= 1e5
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = module.quantize(job(source, tmp_path / "out"))
    assert report["largest_outputs"][index] > 1e3


def test_forgotten_linear_fails_the_run(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = block.planned_inputs

    def forgetful(run: Any, prefix: str) -> Any:
        return work(run, prefix)[:-1]

    monkeypatch.setattr(block, "planned_inputs", forgetful)
    with pytest.raises(CheckFailed, match=r"not as planned: model.layers.0.mlp.down_proj"):
        module.quantize(job(llama, tmp_path / "out"))


def test_folder_that_is_not_sound_is_not_published(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file, save_file

    work = finishing.copy_side_files

    def damage(source: Path, folder: Path) -> None:
        work(source, folder)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.1.mlp.up_proj.weight_scale"][3] = torch.nan
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(finishing, "copy_side_files", damage)
        with pytest.raises(CheckFailed, match=r"1\.mlp\.up_proj"):
            module.quantize(job(llama, out))
    assert not out.exists()
    module.quantize(job(llama, out, resume=True))
    assert verify_checkpoint(out, llama).ok
