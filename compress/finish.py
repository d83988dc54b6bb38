"""The end of a quantization: from part files to a checked checkpoint folder and its report."""

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from compress import __version__
from compress.artifacts import LayerReport, QuantizedLinear
from compress.budget import Sensitivity
from compress.calib.methods.rtn import round_to_nearest
from compress.calib.methods.scales import ScaleSearch
from compress.devices import peak_rss_bytes
from compress.errors import CheckFailed
from compress.export.formats import FORMATS, pack_linear, write_config
from compress.export.inspect import stored_bits, write_provenance
from compress.export.verify import check_part, verify_checkpoint
from compress.export.writer import copy_side_files, merge_shards, write_safetensors
from compress.models.checkpoint import open_checkpoint
from compress.plan import planned_config
from compress.run import Run
from compress.scheme import WeightScheme, dequantize

_FLOAT16_MARGIN = 0.25  # other text than that of calibration reaches further


def finish(run: Run, sensitivities: Sequence[Sensitivity] | None, started: float) -> dict[str, Any]:
    """Make the finished checkpoint folder and check it; returns the report."""
    folder = run.state.folder / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    parts = [run.state.part_file(index) for index in range(len(run.blocks))]
    rest, rows = _write_rest(run)
    merge_shards([rest, *parts], folder)
    copy_side_files(run.checkpoint.path, folder)
    write_config(folder, planned_config(run.checkpoint, run.job.recipe, run.plan))
    rows = [*run.state.rows, *rows]
    report = _report(run, rows, folder, run.seconds_before + time.monotonic() - started)
    report["sensitivities"] = [row.to_dict() for row in sensitivities or ()]
    write_provenance(folder, _provenance(run, report))
    _check_finished(run, rows, folder)
    return report


def _write_rest(run: Run) -> tuple[Path, list[LayerReport]]:
    """The part file of every tensor outside the blocks, and a row for each that is packed."""
    file = run.state.folder / "part-rest.safetensors"
    chosen = FORMATS[run.job.recipe.format]
    inside = tuple(f"{run.family.blocks}.{index}." for index in range(len(run.blocks)))
    tensors: dict[str, torch.Tensor] = {}
    linears: dict[str, QuantizedLinear] = {}
    rows = []
    for name in run.checkpoint.tensors:
        if name.startswith(inside):
            continue
        tensor, module = run.checkpoint.read(name), name.removesuffix(".weight")
        if module in run.schemes:
            scheme, started = run.schemes[module], time.monotonic()
            linears[module] = _round_rows(tensor, scheme.weights, run.plan.scale_dtype)
            error = torch.linalg.norm(tensor.float() - dequantize(linears[module]))
            rows.append(
                LayerReport(
                    name=module,
                    scheme=scheme.label,
                    relative_error=float(error / torch.linalg.norm(tensor.float())),
                    seconds=time.monotonic() - started,
                )
            )
            tensors |= pack_linear(module, linears[module], scheme, chosen)
        else:
            tensors[name] = run.stored(tensor)
    write_safetensors(file, tensors)
    check_part(file, linears, run.schemes, chosen)
    return file, rows


def _round_rows(
    weight: torch.Tensor, scheme: WeightScheme, scale_dtype: torch.dtype
) -> QuantizedLinear:
    """Round an embedding or head (vocabulary, hidden): each row is read alone, none weighs more."""
    weight = weight.float()
    if not torch.isfinite(weight).all():
        raise ValueError("the embedding or head holds values that are not finite")
    even = torch.ones(weight.shape[1])
    return round_to_nearest(weight, even, scheme, ScaleSearch(), scale_dtype)


def _report(run: Run, rows: Sequence[LayerReport], folder: Path, seconds: float) -> dict[str, Any]:
    """The report of a run, as it is printed, written to JSON and kept in the checkpoint."""
    after = open_checkpoint(folder)
    return {
        "model": run.job.model,
        "recipe": run.job.recipe.to_dict(),
        "calibration": _calibration(run),
        "seconds": round(seconds, 2),
        "peak_rss_bytes": peak_rss_bytes(),
        "planned_peak_rss_bytes": run.plan.peak_memory_bytes,
        "bytes": {"before": run.checkpoint.num_bytes, "after": after.num_bytes},
        "bits_per_weight": stored_bits(after).quantized,
        "layers": [asdict(row) for row in rows],
        "sites": [asdict(site) for site in run.state.sites],
        "largest_outputs": run.state.largest_outputs,
        "warnings": [*run.plan.warnings, *_overflow_warnings(run)],
        "left_in_float": [asdict(row) for row in run.plan.left_in_float],
    }


def _overflow_warnings(run: Run) -> Iterator[str]:
    """Readers compute in float16 if that is what the checkpoint stores: will the values fit?"""
    if torch.float16 not in (run.plan.float_dtype, run.plan.scale_dtype):
        return
    limit = torch.finfo(torch.float16).max
    largest = max(run.state.largest_outputs)
    if largest > _FLOAT16_MARGIN * limit:
        block = run.state.largest_outputs.index(largest)
        yield (
            f"block {block} puts out values up to {largest:.0f} in calibration, float16 ends at"
            f" {limit:.0f}: serve it in bfloat16, or write format compressed-tensors in bfloat16"
        )


def _calibration(run: Run) -> dict[str, Any]:
    return {
        **asdict(run.job.calibration),
        "description": run.data.description,
        "sha256": run.data.sha256,
    }


def _provenance(run: Run, report: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": __version__,
        "run_fingerprint": run.state.fingerprint,
        "recipe": run.job.recipe.to_dict(),
        "calibration": _calibration(run),
        "source": run.job.model,
        "source_fingerprint": run.checkpoint.fingerprint,
        "transformed_tensors": _transformed(run),
        "kept_tensors": sorted(run.checkpoint.tensors.keys() - run.model.state_dict().keys()),
        "report": report,
    }


def _transformed(run: Run) -> list[str]:
    """Tensors that are not the source's, rounding aside: there is nothing to compare them with."""
    if run.job.recipe.rotation is not None:
        return sorted(run.checkpoint.tensors)
    moved = {f"{row.name}.weight" for row in run.state.rows} if run.needs.float_chain else set()
    return sorted({*run.state.transformed, *moved})


def _check_finished(run: Run, rows: Sequence[LayerReport], folder: Path) -> None:
    """Raise CheckFailed if a Linear was forgotten or the folder is not sound."""
    planned = {linear.name for linear in run.plan.linears}
    done = {row.name for row in rows}
    if planned != done:
        raise CheckFailed(f"not as planned: {', '.join(sorted(planned ^ done))}")
    failures = verify_checkpoint(folder).failures
    if failures:
        raise CheckFailed("; ".join(failures))
