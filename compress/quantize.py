"""Quantize a checkpoint: the only place that knows the whole order.

    plan -> calibration tokens -> rotation of the whole model (a view of the checkpoint)
    -> bits of every Linear, if a budget asks for them -> input of the first block
    -> each block: collect, transform, round, write, propagate (block.py)
    -> remaining tensors -> merge parts, copy side files, verify, rename to the final name

One block of weights, its statistics and one batch are in memory at a time. Each block sees the
outputs of the *quantized* blocks before it, so later blocks can make up for earlier errors.

Several processes (distributed.py) share the work on the blocks. What comes before and after, and
every file but the activations, is rank 0's.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch

from compress import __version__
from compress.block import quantize_block
from compress.budget import Sensitivity, check_choices, choose_bits, measure_sensitivity
from compress.calib.capture import BlockCalls, record_block_calls
from compress.calib.data import CalibrationData, load_calibration
from compress.calib.methods.rotation import RotatedCheckpoint, rotate_checkpoint
from compress.calib.rotation_check import check_rotation
from compress.devices import fast_dtype, pick_device
from compress.distributed import Ranks, join_ranks, rank_device
from compress.export.formats import FORMATS
from compress.export.writer import PROVENANCE_FILE, check_free, check_keeps, publish, staging_dir
from compress.finish import finish
from compress.models.checkpoint import Checkpoint, open_checkpoint, read_json
from compress.models.family import ModelFamily, family_of
from compress.models.load import (
    build_skeleton,
    check_tensors,
    dematerialize,
    load_tokenizer,
    map_large_tensors,
    materialize,
    resolve_model,
)
from compress.plan import Plan, check_target, make_plan, planned_config
from compress.progress import progress
from compress.resume import RunState, fingerprint_of, open_run, remove_run, sweep
from compress.run import QuantizeJob, Run, batch_size_of


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
    check_tensors(build_skeleton(checkpoint), checkpoint)
    planned = Planned(checkpoint=checkpoint, family=family, plan=plan)
    planned_config(checkpoint, job.recipe, plan)  # raises what the format's config cannot say
    if job.recipe.budget is not None:
        check_choices(job.recipe.budget, plan, FORMATS[job.recipe.format])
        planned = _spend_budget(job, planned, tokens)
        planned_config(checkpoint, job.recipe, planned.plan)
    context, length = source.config.get("max_position_embeddings"), job.calibration.length
    if isinstance(context, int) and length > context:
        warning = f"samples of {length} tokens are longer than the model's context of {context}"
        plan = replace(planned.plan, warnings=(*planned.plan.warnings, warning))
        planned = replace(planned, plan=plan)
    if job.target is not None:
        check_target(planned.checkpoint, job.recipe, planned.plan, job.target)
    return planned


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prepared:
    """All that is known before the first block; `report` if the output is there already."""

    planned: Planned
    data: CalibrationData
    fingerprint: str
    report: dict[str, Any] | None


def quantize(job: QuantizeJob) -> dict[str, Any]:
    """Run `job` and return its report. Raises CheckFailed if the result is not what was planned.

    With `resume`, an output that this very job has finished is left as it is. Processes that a
    launcher started work on `job` together; all return the report.
    """
    map_large_tensors()
    with join_ranks(pick_device(job.device)) as ranks:
        return _quantize(job if ranks.is_first else replace(job, quiet=True), ranks)


def _quantize(job: QuantizeJob, ranks: Ranks) -> dict[str, Any]:
    started = time.monotonic()
    prepared = ranks.first(lambda: _prepare(job, ranks))
    if prepared.report is not None:
        return prepared.report
    with _opened_run(job, prepared.fingerprint, ranks) as state:
        with ranks.together():
            run = _make_run(job, prepared, state, ranks)
            if state.next_block is None:
                _check_float(run)
        _quantize_blocks(run, started)
        return ranks.first(lambda: _finish(run, prepared.planned.sensitivities, started))


def _prepare(job: QuantizeJob, ranks: Ranks) -> _Prepared:
    """Refuse what cannot be done, then plan and read the calibration data."""
    sweep(staging_dir(job.output), job.output)
    may_be_done = job.resume and (job.output / PROVENANCE_FILE).is_file()
    if not may_be_done:
        check_free(job.output, force=job.force)
    planned = plan_job(job)
    if not job.quiet:
        for warning in planned.plan.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    check_keeps(planned.checkpoint.path, job.output)
    data = planned.data or _load_data(job, planned.checkpoint)
    ranks.share(len(data.tokens), batch_size_of(data))  # refuses too few samples
    fingerprint = _fingerprint(job, planned, data, ranks)
    report = _finished_report(job, fingerprint) if may_be_done else None
    if report is None:
        check_free(job.output, force=job.force)
    return _Prepared(planned=planned, data=data, fingerprint=fingerprint, report=report)


def _finished_report(job: QuantizeJob, fingerprint: str) -> dict[str, Any] | None:
    """The report of the output, if the very same job has made it: it was killed too late."""
    provenance = read_json(job.output / PROVENANCE_FILE)
    if provenance.get("run_fingerprint") != fingerprint:
        return None
    if not job.quiet:
        print(
            f"{job.output}: complete already; --force without --resume repeats it", file=sys.stderr
        )
    report: dict[str, Any] = provenance["report"]
    return report


@contextmanager
def _opened_run(job: QuantizeJob, fingerprint: str, ranks: Ranks) -> Iterator[RunState]:
    """The state of the run: rank 0 holds the folder, the others know what it found there."""
    folder = staging_dir(job.output)
    opened = open_run(folder, fingerprint, resume=job.resume, force=job.force)
    with ExitStack() as stack:
        yield ranks.first(lambda: stack.enter_context(opened))


def _check_float(run: Run) -> None:
    """Refuse, before the first block, what would only be found after the last."""
    inside = tuple(f"{run.family.blocks}.{index}." for index in range(len(run.blocks)))
    for name, info in run.checkpoint.tensors.items():
        if name.startswith(inside) or not info.dtype.is_floating_point:
            continue
        if not run.checkpoint.read(name).float().isfinite().all():
            raise ValueError(f"{name} holds values that are not finite")
    if isinstance(run.checkpoint, RotatedCheckpoint):
        tokens = run.data.tokens
        check_rotation(run.checkpoint, run.family, run.model, tokens, run.device)


def _finish(run: Run, sensitivities: list[Sensitivity] | None, started: float) -> dict[str, Any]:
    report = finish(run, sensitivities, started)
    publish(run.state.folder / "checkpoint", run.job.output, force=run.job.force)
    remove_run(run.state.folder)
    return report


def _fingerprint(job: QuantizeJob, planned: Planned, data: CalibrationData, ranks: Ranks) -> str:
    """Of everything that the result depends on."""
    device = pick_device(job.device)
    compute = f"{device.type} {fast_dtype(device)}, {torch.get_num_threads()} threads"
    return fingerprint_of(
        {
            "version": __version__,
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "recipe": job.recipe.to_dict(),
            "schemes": {linear.name: asdict(linear.scheme) for linear in planned.plan.linears},
            "model": planned.checkpoint.fingerprint,
            "calibration": data.sha256,
            "compute": compute,
            "processes": ranks.size,  # sums of statistics have their terms in another order
        }
    )


def _make_run(job: QuantizeJob, prepared: _Prepared, state: RunState, ranks: Ranks) -> Run:
    device = rank_device(pick_device(job.device))
    planned, data = prepared.planned, prepared.data
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
        ranks=ranks,
    )


def _quantize_blocks(run: Run, started: float) -> None:
    calls = _enter(run)
    first = run.state.next_block or 0
    total = len(run.blocks)
    with progress("quantizing blocks", total, quiet=run.job.quiet, done=first) as tick:
        for index in range(first, total):
            result = quantize_block(run, calls, index)
            seconds = run.seconds_before + time.monotonic() - started
            run.ranks.first(partial(run.state.commit, index + 1, result, seconds))
            worst = max(result.rows, key=lambda row: row.relative_error, default=None)
            tick(note=f"worst {worst.name} {worst.relative_error:.3f}" if worst else "")


def _enter(run: Run) -> BlockCalls:
    """Note how blocks are called and, unless the run is resumed, store the first block's input."""
    name = run.family.embedding
    embedding = run.model.get_submodule(name)
    decoder = run.model.get_submodule(run.family.blocks.rpartition(".")[0])
    store = _first_input(run) if run.state.next_block is None else None
    with run.ranks.together():
        materialize(embedding, run.checkpoint, f"{name}.", device=run.device, dtype=run.dtype)
        calls = record_block_calls(
            decoder, run.blocks, run.data.tokens, run.batch_size, run.device, store, run.share
        )
    dematerialize(embedding)
    return calls


def _first_input(run: Run) -> Callable[[slice, torch.Tensor], None]:
    """What stores the input of block 0, in both chains if there are two."""
    chains = [run.activations(0, create=True)]
    if run.needs.float_chain:
        chains.append(run.activations(0, chain="float", create=True))

    def store(samples: slice, hidden: torch.Tensor) -> None:
        for first in chains:
            first[samples] = hidden

    return store
