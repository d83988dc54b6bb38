"""One block on its calibration inputs: what the transforms of its float weights work on.

Legend: N samples, L length, H hidden, B samples of one call.

The transforms promise that the float output of the block stays what it was. Two checks hold them
to it: `check_consumers` follows the tensors through a real call, so that no reader of a scaled
output is forgotten, and `check_unchanged` compares outputs in fp32 before and after.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from compress.calib.capture import Activations, Arguments, BlockCalls
from compress.models.family import ModelFamily, SmoothingSite
from compress.scheme import LinearScheme

UNCHANGED = 1e-4  # relative error allowed to fp32 arithmetic in another order


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockScene:
    """A block and all that is needed to call it as the model would.

    module       the block on `device`, in the dtype of the forward passes
    inputs       (N, L, H) what the calibration samples are when they reach it
    schemes      local name of each Linear that will be quantized -> how
    scale_dtype  in which the scales of quantized weights are stored
    float_dtype  in which what stays in float (norms) is stored
    """

    module: nn.Module
    index: int
    calls: BlockCalls
    inputs: Activations
    device: torch.device
    family: ModelFamily
    schemes: Mapping[str, LinearScheme]
    scale_dtype: torch.dtype = torch.float32
    float_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteReport:
    """What a transform did at one place, in plain values.

    `producer` is the layer whose output was scaled, or the Linear whose weights were clipped;
    `chosen` the settings that won. Losses are mean squared errors of an output once its weights
    are rounded. `left_alone` is None, or says why nothing was changed here.
    """

    producer: str
    chosen: dict[str, float | bool | str]
    loss_before: float | None = None
    loss_after: float | None = None
    left_alone: str | None = None


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a module: its arguments, and the output that the float weights gave."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: torch.Tensor


@torch.no_grad()
def record_calls(
    scene: BlockScene, names: Iterable[str], max_tokens: int
) -> dict[str, list[RecordedCall]]:
    """Calls of the submodules `names` ("" is the block) for about `max_tokens` tokens.

    The samples are spread evenly over `scene.inputs`; there is always at least one call.
    """
    num_samples, length, _ = scene.inputs.shape
    wanted = min(num_samples, max(1, max_tokens // length))
    sizes = scene.calls.by_batch_size
    size = max((size for size in sizes if size <= wanted), default=min(sizes))
    records: dict[str, list[RecordedCall]] = {name: [] for name in names}
    with _recording(scene.module, records):
        for samples in _spread(num_samples, size, wanted // size):
            _call(scene, samples)
    return records


@torch.no_grad()
def block_output(scene: BlockScene, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Output (B, L, H) fp32 of the block for its first few samples, computed in fp32.

    `weights` (local tensor name -> fp32 tensor) stand in for those of the module.
    """
    size = min(scene.calls.by_batch_size)
    args, kwargs = widened(scene.calls.by_batch_size[size][scene.index])
    hidden = scene.inputs[:size].to(scene.device).float()
    own = {**dict(scene.module.named_parameters()), **dict(scene.module.named_buffers())}
    tensors = {name: _widened(tensor) for name, tensor in own.items()} | dict(weights)
    return first_output(functional_call(scene.module, tensors, (hidden, *args), kwargs))


def check_unchanged(before: torch.Tensor, after: torch.Tensor, place: str) -> None:
    """Raise ValueError naming `place` unless outputs of one shape agree to 1e-4 (Frobenius)."""
    error = float(torch.linalg.norm(after - before) / torch.linalg.norm(before).clamp(min=1e-30))
    if not error <= UNCHANGED:
        raise ValueError(
            f"{place} changes the float output by {error:.1e} (at most {UNCHANGED:g} is rounding):"
            " the record of the architecture in models/family.py does not fit this model"
        )


@torch.no_grad()
def check_consumers(scene: BlockScene, sites: Sequence[SmoothingSite]) -> None:
    """Raise ValueError if a module reads the output of a site's producer but is not on its list.

    One call of the block is followed. A reader got the very storage that the producer filled, whole
    or as a view; a module that contains consumers may pass it on to them. Of a fused producer only
    the columns that the site means count.
    """
    outputs: dict[int, tuple[SmoothingSite, int]] = {}  # by storage: site, width of a row
    kept: list[torch.Tensor] = []  # storage that is still in use is not handed out again

    def note(site: SmoothingSite, output: torch.Tensor) -> None:
        kept.append(output)
        outputs[output.untyped_storage().data_ptr()] = site, output.shape[-1]

    def inspect(name: str, arguments: Any) -> None:
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, torch.Tensor):
                site, width = outputs.get(leaf.untyped_storage().data_ptr(), (None, 0))
                if site is None or not _reads(leaf, first_column(site, width), width):
                    continue
                if not any(_inside(consumer, name) for consumer in site.consumers):
                    raise ValueError(
                        f"block {scene.index}: {name} reads the output of {site.producer} too, but"
                        " is not among its consumers in models/family.py; scaling would change it"
                    )

    def first_column(site: SmoothingSite, width: int) -> int:
        in_features = scene.module.get_parameter(f"{site.consumers[0]}.weight").shape[1]
        return site.first_row(width, in_features)

    handles = []
    for name, module in scene.module.named_modules():
        if name:
            hook = _pre_hook(inspect, name)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    for site in sites:
        producer = scene.module.get_submodule(site.producer)
        handles.append(
            producer.register_forward_hook(lambda _, __, output, site=site: note(site, output))
        )
    try:
        _call(scene, slice(0, min(scene.calls.by_batch_size)))
    finally:
        for handle in handles:
            handle.remove()


def first_output(output: Any) -> torch.Tensor:
    """The tensor that a module returns, or the first one of several."""
    result: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return result


def _call(scene: BlockScene, samples: slice) -> torch.Tensor:
    dtype = next(scene.module.parameters()).dtype
    hidden = scene.inputs[samples].to(device=scene.device, dtype=dtype)
    return scene.calls.call(scene.module, scene.index, hidden)


def _spread(num_samples: int, size: int, count: int) -> Iterator[slice]:
    """`count` (at least one) runs of `size` samples, evenly spaced from the first to the last."""
    count = max(1, count)
    for i in range(count):
        start = i * (num_samples - size) // max(1, count - 1)
        yield slice(start, start + size)


@contextmanager
def _recording(block: nn.Module, records: dict[str, list[RecordedCall]]) -> Iterator[None]:
    def watch(name: str) -> torch.utils.hooks.RemovableHandle:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            records[name].append(RecordedCall(args, kwargs, first_output(output)))

        return block.get_submodule(name).register_forward_hook(hook, with_kwargs=True)

    handles = [watch(name) for name in records]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _pre_hook(inspect: Any, name: str) -> Any:
    return lambda _, args, kwargs: inspect(name, (args, kwargs))


def _reads(view: torch.Tensor, first: int, width: int) -> bool:
    """Whether a view of rows of `width` may hold columns from `first` on."""
    begin = view.storage_offset() % width
    return first == 0 or view.stride(-1) != 1 or begin + view.shape[-1] > first


def _inside(name: str, module: str) -> bool:
    """Whether `name` is `module` or lies inside it."""
    return f"{name}.".startswith(f"{module}.")


def widened(arguments: Arguments) -> Arguments:
    """The arguments of a call with every float tensor in fp32."""
    wide: Arguments = tree_map(_widened, arguments)
    return wide


def _widened(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if is_float else value
