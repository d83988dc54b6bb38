"""The end of a quantization: from part files to a checked checkpoint folder and its report."""

import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compress import __version__
from compress.devices import peak_rss_bytes
from compress.errors import CheckFailed
from compress.export.compressed_tensors import quantization_config
from compress.export.inspect import write_provenance
from compress.export.verify import verify_checkpoint
from compress.export.writer import copy_side_files, merge_shards, write_json, write_safetensors
from compress.models.checkpoint import open_checkpoint
from compress.run import Run


def finish(run: Run, started: float) -> dict[str, Any]:
    """Make the finished checkpoint folder and check it; returns the report."""
    folder = run.state.folder / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    parts = [run.state.part_file(index) for index in range(len(run.blocks))]
    merge_shards([_write_rest(run), *parts], folder)
    ignore = [row.name for row in run.plan.left_in_float]
    config = run.checkpoint.config | {
        "quantization_config": quantization_config(run.job.recipe.scheme, ignore)
    }
    if run.job.recipe.dtype != "auto":
        config = {key: value for key, value in config.items() if key != "torch_dtype"}
        config["dtype"] = run.job.recipe.dtype
    write_json(folder / "config.json", config)
    copy_side_files(run.checkpoint.path, folder)
    report = _report(run, folder, run.seconds_before + time.monotonic() - started)
    write_provenance(folder, _provenance(run, report))
    _check_finished(run, folder)
    return report


def _write_rest(run: Run) -> Path:
    """The part file of every tensor outside the blocks."""
    file = run.state.folder / "part-rest.safetensors"
    inside = tuple(f"{run.family.blocks}.{index}." for index in range(len(run.blocks)))
    rest = [name for name in run.checkpoint.tensors if not name.startswith(inside)]
    write_safetensors(file, {name: run.stored(run.checkpoint.read(name)) for name in rest})
    return file


def _report(run: Run, folder: Path, seconds: float) -> dict[str, Any]:
    """The report of a run, as it is printed, written to JSON and kept in the checkpoint."""
    weights = sum(out * inputs for out, inputs in (row.shape for row in run.plan.linears))
    after = open_checkpoint(folder)
    packed = sum(
        info.nbytes
        for name, info in after.tensors.items()
        if name.rpartition(".")[2].startswith("weight_")
    )
    return {
        "model": run.job.model,
        "recipe": run.job.recipe.to_dict(),
        "calibration": _calibration(run),
        "seconds": round(seconds, 2),
        "peak_rss_bytes": peak_rss_bytes(),
        "planned_peak_rss_bytes": run.plan.peak_memory_bytes,
        "bytes": {"before": run.checkpoint.num_bytes, "after": after.num_bytes},
        "bits_per_weight": 8 * packed / weights,
        "layers": [asdict(row) for row in run.state.rows],
        "left_in_float": [asdict(row) for row in run.plan.left_in_float],
    }


def _calibration(run: Run) -> dict[str, Any]:
    return {
        **asdict(run.job.calibration),
        "description": run.data.description,
        "sha256": run.data.sha256,
    }


def _provenance(run: Run, report: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": __version__,
        "recipe": run.job.recipe.to_dict(),
        "calibration": _calibration(run),
        "source": run.job.model,
        "source_fingerprint": run.checkpoint.fingerprint,
        "kept_tensors": sorted(run.checkpoint.tensors.keys() - run.model.state_dict().keys()),
        "report": report,
    }


def _check_finished(run: Run, folder: Path) -> None:
    """Raise CheckFailed if a Linear was forgotten or the folder is not sound."""
    planned = {linear.name for linear in run.plan.linears}
    done = {row.name for row in run.state.rows}
    if planned != done:
        raise CheckFailed(f"not as planned: {', '.join(sorted(planned ^ done))}")
    failures = verify_checkpoint(folder).failures
    if failures:
        raise CheckFailed("; ".join(failures))
