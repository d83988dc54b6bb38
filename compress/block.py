"""Quantize one block of a model; see quantize.py for its place in the whole order.

    replay the block on its inputs, collecting what its Linears read
    -> float transforms, each checked to leave the block's output as it was
    -> round the Linears that share an input as one matrix, with one Hessian
    -> write the block's part file and read it back
    -> replay the quantized block: its outputs are the next block's inputs

With `true_sequential` the Linears are rounded in the order in which the block computes them, and
each sees inputs that come from the quantized ones before it.

With several processes (distributed.py) each replays the block on its share of the samples and
solves its share of the inputs. Transforms look at a few samples from all shares, with the summed
statistics: every process runs them alike, so that there is nothing to send and the result is that
of one process.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from compress.artifacts import QuantizedLinear
from compress.calib.capture import Activations, BlockCalls
from compress.calib.replay import BlockReplay, FloatChain, KVRanges, Statistics
from compress.calib.scene import BlockScene
from compress.calib.transforms import apply_transform
from compress.distributed import deal_out
from compress.export.formats import FORMATS, pack_linear
from compress.export.kv_scales import ATTENTION, pack_kv_scales
from compress.export.verify import check_part
from compress.export.writer import write_safetensors
from compress.kernels.activations import fake_quantize
from compress.models.family import SharedInput
from compress.models.load import dematerialize, materialize
from compress.resume import BlockResult
from compress.run import Run
from compress.scheme import FLOAT8_MAX, ActivationScheme, LinearScheme, dequantize
from compress.solve import Solved, solve_cost, solve_shared


@dataclass(slots=True)
class _Work:
    """The block in progress: fp32 `weights` by local tensor name, and what is finished of it."""

    run: Run
    replay: BlockReplay
    prefix: str
    weights: dict[str, torch.Tensor]
    linears: dict[str, QuantizedLinear] = field(default_factory=dict)  # by local name
    extra: dict[str, torch.Tensor] = field(default_factory=dict)  # further tensors to store
    result: BlockResult = field(default_factory=BlockResult)

    def scheme(self, local_name: str) -> LinearScheme:
        return self.run.schemes[self.prefix + local_name]


def quantize_block(run: Run, calls: BlockCalls, index: int) -> BlockResult:
    """Do block `index`: its part file and the next block's input are complete on return."""
    prefix = f"{run.family.blocks}.{index}."
    block = run.blocks[index]
    with _named(f"block {index}"):
        with run.ranks.together():
            materialize(block, run.checkpoint, prefix, device=run.device, dtype=run.dtype)
            replay = BlockReplay(
                block=block, index=index, calls=calls, batch_size=run.batch_size, device=run.device
            )
            work = _Work(run, replay, prefix, _read_weights(run, prefix))
        _round(work, index)
        _propagate(work, index)
        run.ranks.first(partial(_write_part, work, index))
        result = work.result
    del work, replay  # before the heap is trimmed
    dematerialize(block)
    return result


def _read_weights(run: Run, prefix: str) -> dict[str, torch.Tensor]:
    """Every float tensor of the block in fp32, straight from the checkpoint, by local name."""
    weights = {}
    for name, info in run.checkpoint.tensors.items():
        if not name.startswith(prefix) or not info.dtype.is_floating_point:
            continue
        tensor = run.checkpoint.read_float(name).to(run.device)
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} holds values that are not finite")
        weights[name.removeprefix(prefix)] = tensor
    return weights


def _round(work: _Work, index: int) -> None:
    """Collect, transform and round, stage by stage; the block ends up quantized."""
    run, recipe = work.run, work.run.job.recipe
    shared_inputs = planned_inputs(run, work.prefix)
    inputs = run.activations(index)
    chain = _float_chain(work, index)
    statistics = _collect(work, shared_inputs, inputs, chain)
    if recipe.block_transforms:
        with run.ranks.together():
            _transform(work, run.activations(index, whole=True), statistics)
        chain = None if chain is None else replace(chain, weights=_compute_weights(work))
    stages = [[shared] for shared in shared_inputs] if recipe.true_sequential else [shared_inputs]
    for number, stage in enumerate(stages):
        if number:
            statistics = _collect(work, stage, inputs, chain)
        _round_stage(work, stage, statistics)
        _load_quantized(work, [name for shared in stage for name in shared.linears])


def planned_inputs(run: Run, prefix: str) -> list[SharedInput]:
    """The inputs of those Linears of the block that will be quantized."""
    return [
        shared
        for shared in run.family.shared_inputs
        if all(prefix + name in run.schemes for name in shared.linears)
    ]


def _float_chain(work: _Work, index: int) -> FloatChain | None:
    if not work.run.needs.float_chain:
        return None
    return FloatChain(
        inputs=work.run.activations(index, chain="float"),
        outputs=work.run.activations(index + 1, chain="float", create=True),
        weights=_compute_weights(work),
    )


def _compute_weights(work: _Work) -> dict[str, torch.Tensor]:
    """A copy of the block's parameters as they stand, in the dtype of the forward passes."""
    return {name: tensor.clone() for name, tensor in work.replay.block.named_parameters()}


def _collect(
    work: _Work,
    shared_inputs: Sequence[SharedInput],
    inputs: Activations,
    chain: FloatChain | None,
) -> Statistics:
    """What the Linears read in the samples of all processes."""
    needs, ranks = work.run.needs, work.run.ranks
    statistics = work.replay.new_statistics(
        shared_inputs,
        len(work.run.data.tokens),
        full=needs.second_moment,
        magnitudes=needs.magnitudes,
        cross=needs.float_chain,
    )
    with ranks.together(), _quantized_inputs(work):  # of those rounded in earlier stages
        is_last = work.replay.index + 1 == len(work.run.blocks)  # others are propagated
        largest = work.replay.collect(inputs, statistics, chain, to_end=is_last)
    _note_largest(work, largest)
    for counted in statistics.values():
        counted.reduce(ranks)
    return statistics


def _transform(work: _Work, inputs: Activations, statistics: Statistics) -> None:
    """Apply the recipe's transforms one after the other, to the weights and to the block.

    `inputs` are those of all samples.
    """
    run, replay = work.run, work.replay
    locals_ = [name for shared in run.family.shared_inputs for name in shared.linears]
    scene = BlockScene(
        module=replay.block,
        index=replay.index,
        calls=replay.calls,
        inputs=inputs,
        device=replay.device,
        family=run.family,
        schemes={n: work.scheme(n) for n in locals_ if work.prefix + n in run.schemes},
        scale_dtype=run.plan.scale_dtype,
        float_dtype=run.plan.float_dtype,
    )
    for transform in run.job.recipe.block_transforms:
        changed, sites = apply_transform(transform, work.weights, statistics, scene)
        work.weights |= changed
        work.result.sites += [replace(site, producer=work.prefix + site.producer) for site in sites]
        _load(work, changed)
        known = set(work.result.transformed)
        work.result.transformed += [
            work.prefix + name for name in changed if work.prefix + name not in known
        ]


@torch.no_grad()
def _load(work: _Work, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        work.replay.block.get_parameter(name).copy_(tensor)


def _round_stage(work: _Work, stage: Sequence[SharedInput], statistics: Statistics) -> None:
    """Quantize what reads the inputs in `stage`, each in one process; uses up `statistics`."""
    run = work.run
    weights = [
        {work.prefix + name: work.weights[f"{name}.weight"] for name in shared.linears}
        for shared in stage
    ]
    owners = deal_out([solve_cost(each) for each in weights], run.ranks.size)
    solved: list[Solved | None] = [None] * len(stage)
    with run.ranks.together():
        for i, shared in enumerate(stage):
            own = statistics.pop(shared)  # the last reference: a solve frees what it has read
            if owners[i] == run.ranks.rank:
                scheme, method = work.scheme(shared.linears[0]), run.job.recipe.method
                solved[i] = solve_shared(weights[i], own, scheme, method, run.plan.scale_dtype)
    for result, owner in zip(solved, owners, strict=True):
        shared_result = _share_result(run, result, owner)
        work.linears |= {
            name.removeprefix(work.prefix): linear for name, linear in shared_result.linears.items()
        }
        work.result.rows += shared_result.rows


def _share_result(run: Run, solved: Solved | None, owner: int) -> Solved:
    if run.ranks.size > 1:
        on_cpu = None if solved is None else solved.to(torch.device("cpu"))
        return run.ranks.from_rank(on_cpu, owner).to(run.device)
    assert solved is not None, "one process solves everything"
    return solved


@torch.no_grad()
def _load_quantized(work: _Work, names: Sequence[str]) -> None:
    """Give the block the weights that the codes of the Linears `names` stand for."""
    _load(work, {f"{name}.weight": dequantize(work.linears[name]) for name in names})


def _propagate(work: _Work, index: int) -> None:
    """Store the next block's input; note the ranges of keys and values if they are quantized."""
    run = work.run
    scheme = run.job.recipe.scheme.kv_cache
    ranges = None if scheme is None else KVRanges()
    is_last = index + 1 == len(run.blocks)
    if is_last and ranges is None:
        return
    outputs = None if is_last else run.activations(index + 1, create=True)
    with run.ranks.together(), _quantized_inputs(work):
        largest = work.replay.propagate(run.activations(index), outputs, ranges)
    _note_largest(work, largest)
    if scheme is None or ranges is None:
        return
    assert ranges.keys is not None and ranges.values is not None, "attention stored no keys"
    for magnitudes in (ranges.keys, ranges.values):
        run.ranks.maximum(magnitudes)
    k_scale, v_scale = (
        (
            (magnitudes if scheme.strategy == "head" else magnitudes.max().view(1)) / FLOAT8_MAX
        ).clamp(
            min=torch.finfo(torch.float32).tiny  # of a head that is always zero
        )
        for magnitudes in (ranges.keys, ranges.values)
    )
    packed = pack_kv_scales(k_scale, v_scale, scheme)
    work.extra |= {f"{ATTENTION}.{local}": scale for local, scale in packed.items()}


def _note_largest(work: _Work, largest: torch.Tensor) -> None:
    work.run.ranks.maximum(largest)
    work.result.largest_output = max(work.result.largest_output, float(largest))


@contextmanager
def _quantized_inputs(work: _Work) -> Iterator[None]:
    """Quantize what the Linears read as their schemes say, for the time of the context."""

    def quantizer(scheme: ActivationScheme, linear: QuantizedLinear) -> object:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            rows = args[0].reshape(-1, args[0].shape[-1])
            return (fake_quantize(rows, scheme, linear.input_scale).view(args[0].shape),)

        return hook

    handles = []
    for name, linear in work.linears.items():
        if (scheme := work.scheme(name).activations) is not None:
            module = work.replay.block.get_submodule(name)
            handles.append(module.register_forward_pre_hook(quantizer(scheme, linear)))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _write_part(work: _Work, index: int) -> None:
    """Write every tensor of the block, packed or float, and check what the disk holds."""
    run, prefix = work.run, work.prefix
    chosen = FORMATS[run.job.recipe.format]
    transformed = set(work.result.transformed)
    tensors: dict[str, torch.Tensor] = {}
    for name in run.checkpoint.tensors:
        if not name.startswith(prefix):
            continue
        local = name.removeprefix(prefix)
        module = local.removesuffix(".weight")
        if module in work.linears:
            tensors |= pack_linear(
                prefix + module, work.linears[module], work.scheme(module), chosen
            )
        elif name in transformed:
            tensors[name] = work.weights[local].to(run.plan.float_dtype)
        else:
            tensors[name] = run.stored(run.checkpoint.read(name))
    tensors |= {prefix + local: tensor for local, tensor in work.extra.items()}
    file = run.state.part_file(index)
    write_safetensors(file, tensors)
    linears = {prefix + name: linear for name, linear in work.linears.items()}
    check_part(file, linears, run.schemes, chosen)


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Put the place in front of what a ValueError says."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
