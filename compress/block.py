"""Quantize one block of a model; see quantize.py for its place in the whole order.

    replay the block on its inputs, collecting what its Linears read
    -> float transforms, each checked to leave the block's output as it was
    -> round the Linears that share an input as one matrix, with one Hessian
    -> write the block's part file and read it back
    -> replay the quantized block: its outputs are the next block's inputs

With `true_sequential` the Linears are rounded in the order in which the block computes them, and
each sees inputs that come from the quantized ones before it.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import nn

from compress.artifacts import LayerReport, QuantizedLinear
from compress.calib.capture import BlockCalls
from compress.calib.collectors import InputStatistics
from compress.calib.methods import ROUNDERS
from compress.calib.replay import BlockReplay, FloatChain, KVRanges, Statistics
from compress.calib.scene import BlockScene
from compress.calib.transforms import apply_transform
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

_INT8_HALF_RANGE = 127.5


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
        materialize(block, run.checkpoint, prefix, device=run.device, dtype=run.dtype)
        replay = BlockReplay(
            block=block, index=index, calls=calls, batch_size=run.batch_size, device=run.device
        )
        work = _Work(run, replay, prefix, _read_weights(run, prefix))
        _round(work, index)
        _propagate(work, index)
        _write_part(work, index)
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
        tensor = run.checkpoint.read(name).to(run.device).float()
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
    if recipe.transforms:
        _transform(work, inputs, statistics)
        chain = None if chain is None else replace(chain, weights=_compute_weights(work))
    stages = [[shared] for shared in shared_inputs] if recipe.true_sequential else [shared_inputs]
    for number, stage in enumerate(stages):
        if number:
            statistics = _collect(work, stage, inputs, chain)
        for shared in stage:
            _round_shared(work, shared, statistics.pop(shared))
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
    inputs: torch.Tensor,
    chain: FloatChain | None,
) -> Statistics:
    needs = work.run.needs
    statistics = work.replay.new_statistics(
        shared_inputs,
        inputs.shape[0],
        full=needs.second_moment,
        magnitudes=needs.magnitudes,
        cross=needs.float_chain,
    )
    work.replay.collect(inputs, statistics, chain)
    return statistics


def _transform(work: _Work, inputs: torch.Tensor, statistics: Statistics) -> None:
    """Apply the recipe's transforms one after the other, to the weights and to the block."""
    run, replay = work.run, work.replay
    locals_ = [name for shared in run.family.shared_inputs for name in shared.linears]
    scene = BlockScene(
        module=replay.block,
        index=replay.index,
        calls=replay.calls,
        inputs=inputs,
        batch_size=replay.batch_size,
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


def _round_shared(work: _Work, shared: SharedInput, statistics: InputStatistics) -> None:
    """Quantize the Linears that read one input, stacked into one matrix: they share one Hessian."""
    started = time.monotonic()
    run, method = work.run, work.run.job.recipe.method
    weights = [work.weights[f"{name}.weight"] for name in shared.linears]
    scheme = work.scheme(shared.linears[0])
    stacked, fallback = ROUNDERS[method.kind].fn(
        torch.cat(weights), statistics, scheme.weights, method, run.plan.scale_dtype
    )
    if scheme.activations is not None and not scheme.activations.dynamic:
        stacked = replace(stacked, input_scale=_input_scale(statistics, scheme.activations))
    sizes = [len(weight) for weight in weights]
    parts = _split_rows(stacked, sizes)
    share = (time.monotonic() - started) / sum(sizes)
    sample = statistics.sample.float()
    work.result.rows += [
        LayerReport(
            name=work.prefix + name,
            scheme=scheme.label,
            relative_error=_relative_error(sample, weight, part, scheme.activations),
            seconds=share * len(weight),
            fallback=fallback,
        )
        for name, weight, part in zip(shared.linears, weights, parts, strict=True)
    ]
    work.linears |= dict(zip(shared.linears, parts, strict=True))


def _input_scale(statistics: InputStatistics, scheme: ActivationScheme) -> torch.Tensor:
    """(1,) fp32: the largest input seen fills the range of the codes."""
    half_range = _INT8_HALF_RANGE if scheme.type == "int" else FLOAT8_MAX
    largest = statistics.absmax.max().reshape(1).cpu()
    return (largest / half_range).clamp(min=torch.finfo(torch.float32).tiny)


def _split_rows(stacked: QuantizedLinear, sizes: list[int]) -> list[QuantizedLinear]:
    """The Linears of `sizes` rows that were stacked; a scale may serve rows of one Linear only."""
    block = stacked.block_size or 1
    ends = list(accumulate(sizes))
    scale_ends = list(accumulate(-(-size // block) for size in sizes))
    parts = []
    for size, end, scale_end in zip(sizes, ends, scale_ends, strict=True):
        rows = slice(end - size, end)
        scale_rows = slice(scale_end - -(-size // block), scale_end)
        zero = stacked.zero_point
        parts.append(
            replace(
                stacked,
                codes=stacked.codes[rows],
                scale=stacked.scale[scale_rows],
                zero_point=None if zero is None else zero[rows],
            )
        )
    return parts


def _relative_error(
    sample: torch.Tensor,
    weight: torch.Tensor,
    linear: QuantizedLinear,
    activations: ActivationScheme | None,
) -> float:
    """||X W^T - X_hat W_hat^T|| / ||X W^T||, `sample` X (S, in), 0 if the output is all zero."""
    seen = sample
    if activations is not None:
        seen = fake_quantize(sample, activations, linear.input_scale)
    outputs = sample @ weight.T
    error = torch.linalg.norm(outputs - seen @ dequantize(linear).T)
    return float(error / torch.linalg.norm(outputs).clamp(min=1e-30))


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
    with _quantized_inputs(work):
        work.replay.propagate(run.activations(index), outputs, ranges)
    if scheme is None or ranges is None:
        return
    assert ranges.keys is not None and ranges.values is not None, "attention stored no keys"
    k_scale, v_scale = (
        (largest if scheme.strategy == "head" else largest.max().view(1)) / FLOAT8_MAX
        for largest in (ranges.keys, ranges.values)
    )
    packed = pack_kv_scales(k_scale, v_scale, scheme)
    work.extra |= {f"{ATTENTION}.{local}": scale for local, scale in packed.items()}


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
