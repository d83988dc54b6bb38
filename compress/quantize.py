"""Quantize a checkpoint: the only place that knows the whole order.

    plan -> calibration tokens -> input of the first block -> for each block:
        load it, replay it on its inputs and collect statistics,
        round its Linears to codes, write its part file and read it back,
        replay it with the quantized weights: its outputs are the next block's inputs
    -> remaining tensors -> merge parts, copy side files, verify, rename to the final name

One block of weights, its statistics and one batch are in memory at a time. Each block sees the
outputs of the *quantized* blocks before it, so later blocks can make up for earlier errors.
"""

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from compress import __version__
from compress.artifacts import LayerReport, QuantizedLinear
from compress.calib.capture import BlockCalls, record_block_calls
from compress.calib.collectors import InputStatistics
from compress.calib.data import load_calibration
from compress.calib.methods import ROUNDERS
from compress.calib.replay import collect_statistics, propagate
from compress.devices import fast_dtype, pick_device
from compress.export.compressed_tensors import pack_linear
from compress.export.verify import check_part
from compress.export.writer import check_free, check_keeps, publish, staging_dir, write_safetensors
from compress.finish import finish
from compress.models.checkpoint import Checkpoint, open_checkpoint
from compress.models.family import ModelFamily, SharedInput, family_of
from compress.models.load import (
    build_skeleton,
    dematerialize,
    load_tokenizer,
    map_large_tensors,
    materialize,
    resolve_model,
)
from compress.plan import Plan, make_plan
from compress.progress import progress
from compress.resume import fingerprint_of, open_run
from compress.run import QuantizeJob, Run
from compress.scheme import dequantize


def plan_job(job: QuantizeJob) -> tuple[Checkpoint, ModelFamily, Plan]:
    """Open the model and decide what will be done, without reading a weight."""
    checkpoint = open_checkpoint(resolve_model(job.model, offline=job.offline, quiet=job.quiet))
    family = family_of(checkpoint.config)
    tokens = job.calibration.num_samples * job.calibration.length
    plan = make_plan(checkpoint, family, job.recipe, calibration_tokens=tokens)
    return checkpoint, family, plan


def quantize(job: QuantizeJob) -> dict[str, Any]:
    """Run `job` and return its report. Raises CheckFailed if the result is not what was planned."""
    started = time.monotonic()
    map_large_tensors()
    check_free(job.output, force=job.force)
    checkpoint, family, plan = plan_job(job)
    check_keeps(checkpoint.path, job.output)
    tokenizer = load_tokenizer(checkpoint.path)
    data = load_calibration(job.calibration, tokenizer, offline=job.offline)
    device = pick_device(job.device)
    dtype = fast_dtype(device)
    fingerprint = fingerprint_of(
        {
            "version": __version__,
            "torch": torch.__version__,
            "recipe": job.recipe.to_dict(),
            "model": checkpoint.fingerprint,
            "calibration": data.sha256,
            "compute": f"{device.type} {dtype}, {torch.get_num_threads()} threads",
        }
    )
    staging = staging_dir(job.output)
    with open_run(staging, fingerprint, resume=job.resume, force=job.force) as state:
        run = Run(
            job=job,
            checkpoint=checkpoint,
            family=family,
            plan=plan,
            data=data,
            model=build_skeleton(checkpoint),
            state=state,
            seconds_before=state.seconds,
            device=device,
            dtype=dtype,
        )
        _quantize_blocks(run, started)
        report = finish(run, started)
        publish(staging / "checkpoint", job.output, force=job.force)
        shutil.rmtree(staging)
    return report


def _quantize_blocks(run: Run, started: float) -> None:
    calls = _enter(run)
    first = run.state.next_block or 0
    total = len(run.blocks)
    with progress("quantizing blocks", total, quiet=run.job.quiet, done=first) as tick:
        for index in range(first, total):
            rows = _quantize_block(run, calls, index)
            run.state.commit(index + 1, rows, run.seconds_before + time.monotonic() - started)
            worst = max(rows, key=lambda row: row.relative_error, default=None)
            tick(note=f"worst {worst.name} {worst.relative_error:.3f}" if worst else "")


def _enter(run: Run) -> BlockCalls:
    """Note how blocks are called and, unless the run is resumed, store the first block's input."""
    name = run.family.embedding
    embedding = run.model.get_submodule(name)
    materialize(embedding, run.checkpoint, f"{name}.", device=run.device, dtype=run.dtype)
    decoder = run.model.get_submodule(run.family.blocks.rpartition(".")[0])
    tokens, blocks = run.data.tokens, run.blocks
    if run.state.next_block is None:
        first = run.activations(0, create=True)

        def store(samples: slice, hidden: torch.Tensor) -> None:
            first[samples] = hidden.to(first.device)

        calls = record_block_calls(decoder, blocks, tokens, run.batch_size, run.device, store)
    else:
        calls = record_block_calls(decoder, blocks, tokens, run.batch_size, run.device, None)
    dematerialize(embedding)
    return calls


def _quantize_block(run: Run, calls: BlockCalls, index: int) -> list[LayerReport]:
    """Do block `index`: its part file and the next block's input are complete on return."""
    prefix = f"{run.family.blocks}.{index}."
    block = run.blocks[index]
    inputs = run.activations(index)
    with _named(f"block {index}"):
        materialize(block, run.checkpoint, prefix, device=run.device, dtype=run.dtype)
        linears, rows = _round_block(run, calls, index, prefix, inputs)
        _write_part(run, index, prefix, linears)
        if index + 1 < len(run.blocks):
            _load_quantized(block, prefix, linears)
            outputs = run.activations(index + 1, create=True)
            propagate(block, index, calls, inputs, outputs, run.batch_size, run.device)
    del linears  # before the heap is trimmed
    dematerialize(block)
    return rows


def _round_block(
    run: Run, calls: BlockCalls, index: int, prefix: str, inputs: torch.Tensor
) -> tuple[dict[str, QuantizedLinear], list[LayerReport]]:
    """Replay the block to see what its Linears read, and quantize each with that."""
    statistics = collect_statistics(
        run.blocks[index],
        index,
        calls,
        inputs,
        run.batch_size,
        _planned_inputs(run, prefix),
        full=ROUNDERS[run.job.recipe.method.kind].needs_second_moment,
        device=run.device,
    )
    linears: dict[str, QuantizedLinear] = {}
    rows: list[LayerReport] = []
    for shared, stats in statistics.items():
        rounded, shared_rows = _round_shared(run, prefix, shared, stats)
        linears |= rounded
        rows += shared_rows
    return linears, rows


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Put the place in front of what a ValueError says."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None


def _planned_inputs(run: Run, prefix: str) -> list[SharedInput]:
    planned = {linear.name for linear in run.plan.linears}
    return [
        shared
        for shared in run.family.shared_inputs
        if all(prefix + name in planned for name in shared.linears)
    ]


def _round_shared(
    run: Run, prefix: str, shared: SharedInput, statistics: InputStatistics
) -> tuple[dict[str, QuantizedLinear], list[LayerReport]]:
    """Quantize the Linears that read one input, stacked into one matrix: they share one Hessian."""
    started = time.monotonic()
    recipe = run.job.recipe
    weights = [_read_weight(run, prefix + name) for name in shared.linears]
    scheme = recipe.scheme.weights
    stacked, fallback = ROUNDERS[recipe.method.kind].fn(
        torch.cat(weights), statistics, scheme, recipe.method, run.plan.float_dtype
    )
    sizes = [weight.shape[0] for weight in weights]
    parts = _split_rows(stacked, sizes)
    share = (time.monotonic() - started) / sum(sizes)
    sample = statistics.sample.float()
    rows = [
        LayerReport(
            name=prefix + name,
            scheme=scheme.label,
            relative_error=_relative_error(sample, weight, part),
            seconds=share * weight.shape[0],
            fallback=fallback,
        )
        for name, weight, part in zip(shared.linears, weights, parts, strict=True)
    ]
    return {prefix + name: part for name, part in zip(shared.linears, parts, strict=True)}, rows


def _read_weight(run: Run, name: str) -> torch.Tensor:
    """(out, in) fp32 of one Linear, straight from the checkpoint."""
    weight = run.checkpoint.read(f"{name}.weight").to(run.device).float()
    if not torch.isfinite(weight).all():
        raise ValueError(f"{name}.weight holds values that are not finite")
    return weight


def _split_rows(stacked: QuantizedLinear, sizes: list[int]) -> list[QuantizedLinear]:
    zero = stacked.zero_point
    return [
        QuantizedLinear(
            codes=stacked.codes[end - size : end],
            scale=stacked.scale[end - size : end],
            zero_point=None if zero is None else zero[end - size : end],
            bits=stacked.bits,
        )
        for size, end in zip(sizes, accumulate(sizes), strict=True)
    ]


def _relative_error(sample: torch.Tensor, weight: torch.Tensor, linear: QuantizedLinear) -> float:
    """||X (W - W_hat)^T|| / ||X W^T||, `sample` X (S, in), 0 if the layer's output is all zero."""
    error = torch.linalg.norm(sample @ (weight - dequantize(linear)).T)
    return float(error / torch.linalg.norm(sample @ weight.T).clamp(min=1e-30))


def _write_part(run: Run, index: int, prefix: str, linears: Mapping[str, QuantizedLinear]) -> None:
    """Write every tensor of the block, packed or float, and check what the disk holds."""
    tensors: dict[str, torch.Tensor] = {}
    for name in run.checkpoint.tensors:
        if not name.startswith(prefix):
            continue
        module = name.removesuffix(".weight")
        if module in linears:
            packed = pack_linear(linears[module])
            tensors |= {f"{module}.{local}": tensor for local, tensor in packed.items()}
        else:
            tensors[name] = run.stored(run.checkpoint.read(name))
    file = run.state.part_file(index)
    write_safetensors(file, tensors)
    check_part(file, linears, run.job.recipe.scheme.weights)


@torch.no_grad()
def _load_quantized(block: nn.Module, prefix: str, linears: Mapping[str, QuantizedLinear]) -> None:
    for name, linear in linears.items():
        weight = block.get_parameter(f"{name.removeprefix(prefix)}.weight")
        weight.copy_(dequantize(linear))
