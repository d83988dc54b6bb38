"""What the checks of a checkpoint share: their result, and what the config says must be stored."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from compress.artifacts import QuantizedLinear
from compress.export.formats import Format, format_of, read_kv_cache, read_scheme
from compress.export.kv_scales import ATTENTION, kv_scale_layout
from compress.export.tensors import Dtypes
from compress.models.checkpoint import COMPUTED_SUFFIXES, Checkpoint
from compress.models.family import family_of
from compress.models.load import build_skeleton
from compress.scheme import LinearScheme

_MAX_SHOWN = 3


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
    format: Format | None  # None for a float checkpoint
    linears: Mapping[str, tuple[int, int]]  # name -> (out, in) of every Linear, and the embedding
    packed: Mapping[str, LinearScheme]  # those that the config says are packed
    expected: Mapping[str, tuple[int, ...]]  # name -> shape of every tensor that must be stored
    optional: frozenset[str]  # tied or computed tensors, which may be stored as well
    kv_scales: frozenset[str]  # those of `expected` that are scales of the KV cache

    def layout(self, name: str) -> dict[str, tuple[int, ...]]:
        """Local name -> shape of the tensors of packed module `name`."""
        assert self.format is not None, "a float checkpoint has no packed module"
        return self.format.layout(*self.linears[name], self.packed[name])

    def dtypes(self, name: str) -> Dtypes:
        """Local name -> dtypes that a tensor of packed module `name` may have."""
        assert self.format is not None, "a float checkpoint has no packed module"
        return self.format.dtypes(self.packed[name])

    def tensor_problem(self, name: str) -> str | None:
        """What is wrong with the presence, shape or dtype of tensor `name`, or None."""
        if (info := self.checkpoint.tensors.get(name)) is None:
            return f"missing {name}"
        if info.shape != self.expected[name]:
            return f"{name} has shape {info.shape}, expected {self.expected[name]}"
        module, _, local = name.rpartition(".")
        if module in self.packed and local in self.layout(module):
            is_right = info.dtype in self.dtypes(module)[local]
        else:
            is_right = info.dtype.is_floating_point and info.dtype.itemsize > 1
        return None if is_right else f"{name} has dtype {info.dtype}"

    def is_intact(self, name: str) -> bool:
        """Whether the tensors of a packed module can be unpacked; if not, `tensors` reports it."""
        return not any(self.tensor_problem(f"{name}.{local}") for local in self.layout(name))


def subject_of(checkpoint: Checkpoint) -> Subject:
    """Work out from its config what `checkpoint` must hold; ValueError if that is not readable."""
    # the skeleton is that of the float model: packed tensors replace the weights of its Linears
    float_config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    model = build_skeleton(replace(checkpoint, config=float_config))
    family = family_of(checkpoint.config)
    linears = {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    rows, columns = expected[f"{family.embedding}.weight"]
    linears[family.embedding] = (rows, columns)
    packed = _packed(checkpoint, linears)
    format = format_of(checkpoint.config) if checkpoint.config.get("quantization_config") else None
    for name, scheme in packed.items():
        assert format is not None, "only a format packs"
        del expected[f"{name}.weight"]
        try:
            layout = format.layout(*linears[name], scheme)
        except ValueError as error:
            raise ValueError(f"{checkpoint.path}: {name}: {error}") from None
        expected |= {f"{name}.{local}": shape for local, shape in layout.items()}
    optional = {name for name in checkpoint.tensors if name.endswith(COMPUTED_SUFFIXES)}
    config: Any = model.config
    if config.tie_word_embeddings:
        optional.add(f"{family.head}.weight")
        expected.pop(f"{family.head}.weight", None)
    kv_scales = _kv_scales(checkpoint, config)
    return Subject(
        checkpoint=checkpoint,
        format=format,
        linears=linears,
        packed=packed,
        expected=expected | kv_scales,
        optional=frozenset(optional),
        kv_scales=frozenset(kv_scales),
    )


def _packed(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, LinearScheme]:
    scheme_for = read_scheme(checkpoint.config)
    return {name: scheme for name in names if (scheme := scheme_for(name)) is not None}


def _kv_scales(checkpoint: Checkpoint, config: Any) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the scales of the KV cache that the config announces."""
    if (kv_cache := read_kv_cache(checkpoint.config)) is None:
        return {}
    blocks = family_of(checkpoint.config).blocks
    layout = kv_scale_layout(kv_cache, config.num_key_value_heads)
    return {
        f"{blocks}.{block}.{ATTENTION}.{local}": shape
        for block in range(config.num_hidden_layers)
        for local, shape in layout.items()
    }


def result(name: str, problems: Sequence[str], passed: str) -> Check:
    """A check that failed with `problems`, or passed with the text `passed` if there are none."""
    if not problems:
        return Check(name=name, ok=True, detail=passed)
    more = len(problems) - _MAX_SHOWN
    shown = "; ".join(problems[:_MAX_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return Check(name=name, ok=False, detail=shown)


def same_bits(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    """Whether dtype, shape and bytes are equal (-0.0 is not 0.0), or both tensors are None."""
    if first is None or second is None:
        return first is second
    first, second = first.cpu().contiguous(), second.cpu().contiguous()
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8))


def differing_part(stored: QuantizedLinear, meant: QuantizedLinear) -> str | None:
    """Which part of two Linears differs, or None if they are the same weights, exactly.

    Codes bit for bit; scales by value, whatever their dtype; no zero points are zero points of 0.
    """
    if not same_bits(stored.codes, meant.codes):
        return "codes"
    if not _same_values(stored.scale, meant.scale):
        return "scales"
    zeros = [
        torch.zeros_like(linear.scale, dtype=torch.int8)
        if linear.zero_point is None
        else linear.zero_point
        for linear in (stored, meant)
    ]
    if not same_bits(*zeros):
        return "zero points"
    if (stored.input_scale is None) != (meant.input_scale is None):
        return "activation scales"
    if stored.input_scale is not None and meant.input_scale is not None:
        same = _same_values(stored.input_scale.reshape(-1), meant.input_scale.reshape(-1))
        return None if same else "activation scales"
    return None


def _same_values(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first.double().cpu(), second.double().cpu())
