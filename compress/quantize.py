"""Quantize a checkpoint: the only place that knows the whole order.

    plan -> calibration tokens -> rotation of the whole model (a view of the checkpoint)
    -> bits of every Linear, if a budget asks for them -> input of the first block
    -> each block: collect, transform, round, write, propagate (block.py)
    -> remaining tensors -> merge parts, copy side files, verify, rename to the final name

One block of weights, its statistics and one batch are in memory at a time. Each block sees the
outputs of the *quantized* blocks before it, so later blocks can make up for earlier errors.
"""

import shutil
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from compress import __version__
from compress.block import quantize_block
from compress.budget import Sensitivity, choose_bits, measure_sensitivity
from compress.calib.capture import BlockCalls, record_block_calls
from compress.calib.data import CalibrationData, load_calibration
from compress.calib.methods.rotation import rotate_checkpoint
from compress.devices import fast_dtype, pick_device
from compress.export.writer import check_free, check_keeps, publish, staging_dir
from compress.finish import finish
from compress.models.checkpoint import Checkpoint, open_checkpoint
from compress.models.family import ModelFamily, family_of
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
from compress.resume import RunState, fingerprint_of, open_run
from compress.run import QuantizeJob, Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The model as it will be rounded, and what will be done to it.

    `data` and `sensitivities` are None unless a budget needed them for the plan.
    """

    checkpoint: Checkpoint
    family: ModelFamily
    plan: Plan
    data: CalibrationData | None = None
    sensitivities: list[Sensitivity] | None = None


def plan_job(job: QuantizeJob) -> Planned:
    """Open the model and decide what will be done; only a budget needs weights and data for it."""
    source = open_checkpoint(resolve_model(job.model, offline=job.offline, quiet=job.quiet))
    family = family_of(source.config)
    tokens = job.calibration.num_samples * job.calibration.length
    rotation = job.recipe.rotation
    checkpoint = rotate_checkpoint(source, family, rotation) if rotation else source
    plan = make_plan(checkpoint, family, job.recipe, calibration_tokens=tokens)
    planned = Planned(checkpoint=checkpoint, family=family, plan=plan)
    return planned if job.recipe.budget is None else _spend_budget(job, planned, tokens)


def _spend_budget(job: QuantizeJob, planned: Planned, calibration_tokens: int) -> Planned:
    budget = job.recipe.budget
    assert budget is not None
    checkpoint, family, plan = planned.checkpoint, planned.family, planned.plan
    data = _load_data(job, checkpoint)
    device = pick_device(job.device)
    sensitivities = measure_sensitivity(
        checkpoint,
        family,
        job.recipe,
        plan,
        data.tokens,
        device=device,
        dtype=fast_dtype(device),
        quiet=job.quiet,
    )
    chosen = choose_bits(sensitivities, budget)
    plan = make_plan(
        checkpoint, family, job.recipe, calibration_tokens=calibration_tokens, chosen=chosen
    )
    return replace(planned, plan=plan, data=data, sensitivities=sensitivities)


def _load_data(job: QuantizeJob, checkpoint: Checkpoint) -> CalibrationData:
    return load_calibration(job.calibration, load_tokenizer(checkpoint.path), offline=job.offline)


def quantize(job: QuantizeJob) -> dict[str, Any]:
    """Run `job` and return its report. Raises CheckFailed if the result is not what was planned."""
    started = time.monotonic()
    map_large_tensors()
    check_free(job.output, force=job.force)
    planned = plan_job(job)
    checkpoint = planned.checkpoint
    check_keeps(checkpoint.path, job.output)
    data = planned.data or _load_data(job, checkpoint)
    staging = staging_dir(job.output)
    fingerprint = _fingerprint(job, planned, data)
    with open_run(staging, fingerprint, resume=job.resume, force=job.force) as state:
        run = _make_run(job, planned, data, state)
        _quantize_blocks(run, started)
        report = finish(run, planned.sensitivities, started)
        publish(staging / "checkpoint", job.output, force=job.force)
        shutil.rmtree(staging)
    return report


def _fingerprint(job: QuantizeJob, planned: Planned, data: CalibrationData) -> str:
    """Of everything that the result depends on."""
    device = pick_device(job.device)
    return fingerprint_of(
        {
            "version": __version__,
            "torch": torch.__version__,
            "recipe": job.recipe.to_dict(),
            "schemes": {linear.name: asdict(linear.scheme) for linear in planned.plan.linears},
            "model": planned.checkpoint.fingerprint,
            "calibration": data.sha256,
            "compute": f"{device.type} {fast_dtype(device)}, {torch.get_num_threads()} threads",
        }
    )


def _make_run(job: QuantizeJob, planned: Planned, data: CalibrationData, state: RunState) -> Run:
    device = pick_device(job.device)
    return Run(
        job=job,
        checkpoint=planned.checkpoint,
        family=planned.family,
        plan=planned.plan,
        data=data,
        model=build_skeleton(planned.checkpoint),
        state=state,
        seconds_before=state.seconds,
        device=device,
        dtype=fast_dtype(device),
    )


def _quantize_blocks(run: Run, started: float) -> None:
    calls = _enter(run)
    first = run.state.next_block or 0
    total = len(run.blocks)
    with progress("quantizing blocks", total, quiet=run.job.quiet, done=first) as tick:
        for index in range(first, total):
            result = quantize_block(run, calls, index)
            run.state.commit(index + 1, result, run.seconds_before + time.monotonic() - started)
            worst = max(result.rows, key=lambda row: row.relative_error, default=None)
            tick(note=f"worst {worst.name} {worst.relative_error:.3f}" if worst else "")


def _enter(run: Run) -> BlockCalls:
    """Note how blocks are called and, unless the run is resumed, store the first block's input."""
    name = run.family.embedding
    embedding = run.model.get_submodule(name)
    materialize(embedding, run.checkpoint, f"{name}.", device=run.device, dtype=run.dtype)
    decoder = run.model.get_submodule(run.family.blocks.rpartition(".")[0])
    tokens, blocks = run.data.tokens, run.blocks
    if run.state.next_block is None:
        chains = [run.activations(0, create=True)]
        if run.needs.float_chain:
            chains.append(run.activations(0, chain="float", create=True))

        def store(samples: slice, hidden: torch.Tensor) -> None:
            for first in chains:
                first[samples] = hidden.to(first.device)

        calls = record_block_calls(decoder, blocks, tokens, run.batch_size, run.device, store)
    else:
        calls = record_block_calls(decoder, blocks, tokens, run.batch_size, run.device, None)
    dematerialize(embedding)
    return calls
