"""What the checks of a checkpoint share: their result, and what the config says must be stored."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from compress.export.compressed_tensors import SCALE_DTYPES, read_scheme, tensor_layout
from compress.models.checkpoint import Checkpoint, TensorInfo
from compress.models.family import family_of
from compress.models.load import build_skeleton
from compress.scheme import WeightScheme

_COMPUTED_SUFFIX = "rotary_emb.inv_freq"  # stored by old exporters, computed from the config now
_MAX_SHOWN = 3
_INT_DTYPES = {
    "weight_packed": torch.int32,
    "weight_zero_point": torch.int32,
    "weight_shape": torch.int64,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One property of a checkpoint; `detail` says what was looked at, or what is wrong."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The checkpoint under test and what its config says it must hold."""

    checkpoint: Checkpoint
    linears: Mapping[str, tuple[int, int]]  # name -> (out, in) of every Linear of the model
    packed: Mapping[str, WeightScheme]  # those that the config says are packed
    expected: Mapping[str, tuple[int, ...]]  # name -> shape of every tensor that must be stored
    optional: frozenset[str]  # tied or computed tensors, which may be stored as well

    def layout(self, name: str) -> dict[str, tuple[int, ...]]:
        """Local name -> shape of the tensors of packed Linear `name`."""
        return tensor_layout(*self.linears[name], self.packed[name])

    def is_intact(self, name: str) -> bool:
        """Whether the tensors of a packed Linear can be unpacked; if not, `tensors` reports it."""
        return all(
            not tensor_problem(f"{name}.{local}", self.checkpoint.tensors, shape)
            for local, shape in self.layout(name).items()
        )


def subject_of(checkpoint: Checkpoint) -> Subject:
    """Work out from its config what `checkpoint` must hold; ValueError if that is not readable."""
    # the skeleton is that of the float model: packed tensors replace the weights of its Linears
    float_config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    model = build_skeleton(replace(checkpoint, config=float_config))
    linears = {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    scheme_for = read_scheme(checkpoint.config)
    packed = {name: scheme for name in linears if (scheme := scheme_for(name)) is not None}
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, scheme in packed.items():
        del expected[f"{name}.weight"]
        try:
            layout = tensor_layout(*linears[name], scheme)
        except ValueError as error:
            raise ValueError(f"{checkpoint.path}: {name}: {error}") from None
        expected |= {f"{name}.{local}": shape for local, shape in layout.items()}
    optional = {name for name in checkpoint.tensors if name.endswith(_COMPUTED_SUFFIX)}
    config: Any = model.config
    if config.tie_word_embeddings:
        head = f"{family_of(checkpoint.config).head}.weight"
        optional.add(head)
        expected.pop(head, None)
    return Subject(
        checkpoint=checkpoint,
        linears=linears,
        packed=packed,
        expected=expected,
        optional=frozenset(optional),
    )


def result(name: str, problems: Sequence[str], passed: str) -> Check:
    """A check that failed with `problems`, or passed with the text `passed` if there are none."""
    if not problems:
        return Check(name=name, ok=True, detail=passed)
    more = len(problems) - _MAX_SHOWN
    shown = "; ".join(problems[:_MAX_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return Check(name=name, ok=False, detail=shown)


def tensor_problem(
    name: str, tensors: Mapping[str, TensorInfo], shape: tuple[int, ...]
) -> str | None:
    """What is wrong with the presence, shape or dtype of tensor `name`, or None."""
    if name not in tensors:
        return f"missing {name}"
    info = tensors[name]
    if info.shape != shape:
        return f"{name} has shape {info.shape}, expected {shape}"
    local = name.rpartition(".")[2]
    if local in _INT_DTYPES:
        is_right = info.dtype == _INT_DTYPES[local]
    elif local == "weight_scale":
        is_right = info.dtype in SCALE_DTYPES
    else:
        is_right = info.dtype.is_floating_point
    return None if is_right else f"{name} has dtype {info.dtype}"


def same_bits(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """Whether dtype, shape and bytes are equal (-0.0 is not 0.0), or both tensors are None."""
    if first is None or second is None:
        return first is second
    first, second = first.cpu().contiguous(), second.cpu().contiguous()
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8))
