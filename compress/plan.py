"""What will be done to every Linear, decided before anything is done.

The plan is made from the names and shapes in the checkpoint, without reading a weight. Whatever can
be known to be wrong by then is an error here: a group that does not divide, a pattern that matches
nothing, an architecture without a record.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from compress.artifacts import LeftInFloat
from compress.assign import assign_schemes, is_untied, linear_shape
from compress.calib.methods import ROUNDERS
from compress.devices import DTYPES
from compress.export.formats import FORMATS
from compress.export.targets import lint_target
from compress.models.checkpoint import Checkpoint
from compress.models.family import ModelFamily, SharedInput
from compress.recipe import Recipe
from compress.scheme import LinearScheme, WeightScheme, group_width

BATCH_TOKENS = 1024  # of one forward pass of a block: temporaries that the allocator reuses
_INTERPRETER_BYTES = 600_000_000  # Python, torch, transformers and a tokenizer, measured on Linux


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLinear:
    """A Linear that will be quantized."""

    name: str
    shape: tuple[int, int]
    scheme: LinearScheme
    scale_dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its codes, scales and zero points on disk (padding aside)."""
        return stored_bytes(self.shape, self.scheme, self.scale_dtype)


def stored_bytes(shape: tuple[int, int], scheme: LinearScheme, scale_dtype: torch.dtype) -> int:
    """Bytes on disk of the codes, scales and zero points of a Linear (out, in), padding aside."""
    out_features, in_features = shape
    weights = scheme.weights
    if weights.block_size is not None:
        scales = -(-out_features // weights.block_size) * -(-in_features // weights.block_size)
    else:
        scales = out_features * (in_features // group_width(weights, in_features))
    zero_bits = 0 if weights.symmetric else weights.bits
    # with quantized inputs readers want whole bytes
    bits = weights.bits if scheme.activations is None else 8
    code_bits = out_features * in_features * bits
    return (code_bits + scales * zero_bits) // 8 + scales * scale_dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """`linears` in the order in which they are quantized, `left_in_float` with the reasons."""

    linears: tuple[PlannedLinear, ...]
    left_in_float: tuple[LeftInFloat, ...]
    float_dtype: torch.dtype
    scale_dtype: torch.dtype
    bytes_before: int
    bytes_after: int
    peak_memory_bytes: int
    warnings: tuple[str, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight of the quantized Linears, scales and zero points included."""
        weights = sum(linear.shape[0] * linear.shape[1] for linear in self.linears)
        return 8 * sum(linear.num_bytes for linear in self.linears) / weights


def make_plan(
    checkpoint: Checkpoint,
    family: ModelFamily,
    recipe: Recipe,
    *,
    calibration_tokens: int,
    chosen: Mapping[str, WeightScheme] | None = None,
) -> Plan:
    """Decide for every Linear of `checkpoint`. ValueError names each that cannot be done.

    `calibration_tokens`, of all sequences together, enters the estimate of peak memory and the
    warnings; `chosen` holds the weights that a budget search decided on.
    """
    if "quantization_config" in checkpoint.config:
        raise ValueError(f"{checkpoint.path}: already quantized; start from the float checkpoint")
    schemes, left = assign_schemes(checkpoint, family, recipe, chosen)
    float_dtype = _float_dtype(checkpoint, family, recipe)
    scale_dtype = FORMATS[recipe.format].scale_dtype or float_dtype
    planned = tuple(
        PlannedLinear(
            name=name,
            shape=linear_shape(checkpoint, name),
            scheme=scheme,
            scale_dtype=scale_dtype,
        )
        for name, scheme in schemes.items()
    )
    return Plan(
        linears=planned,
        left_in_float=tuple(left),
        float_dtype=float_dtype,
        scale_dtype=scale_dtype,
        bytes_before=checkpoint.num_bytes,
        bytes_after=_bytes_after(checkpoint, planned, float_dtype),
        peak_memory_bytes=_peak_memory(checkpoint, family, calibration_tokens),
        warnings=tuple(_warnings(checkpoint, family, planned, recipe, calibration_tokens)),
    )


def planned_config(checkpoint: Checkpoint, recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """The `config.json` of the checkpoint that `plan` will give."""
    schemes = {linear.name: linear.scheme for linear in plan.linears}
    ignore = [row.name for row in plan.left_in_float]
    quantization = FORMATS[recipe.format].config(schemes, ignore, recipe.scheme.kv_cache)
    config = checkpoint.config | {"quantization_config": quantization}
    if recipe.dtype != "auto":
        config = {key: value for key, value in config.items() if key != "torch_dtype"}
        config["dtype"] = recipe.dtype
    return config


def check_target(checkpoint: Checkpoint, recipe: Recipe, plan: Plan, target: str) -> None:
    """Raise one ValueError with all that `target` would refuse or misread in the result."""
    problems = lint_target(
        planned_config(checkpoint, recipe, plan),
        {linear.name: linear.scheme for linear in plan.linears},
        {linear.name: linear.shape for linear in plan.linears},
        plan.scale_dtype,
        target,
    )
    if problems:
        raise ValueError(f"--target {target}: {'; '.join(problems)}")


def _warnings(
    checkpoint: Checkpoint,
    family: ModelFamily,
    planned: tuple[PlannedLinear, ...],
    recipe: Recipe,
    calibration_tokens: int,
) -> Iterator[str]:
    if is_untied(checkpoint):
        head = checkpoint.tensors[f"{family.head}.weight"].nbytes
        yield f"the rotation unties the head from the embedding: {head / 1e6:.0f} MB more to store"
    widest = max(planned, key=lambda linear: linear.shape[1])
    if ROUNDERS[recipe.method.kind].needs_second_moment and calibration_tokens < widest.shape[1]:
        yield (
            f"{calibration_tokens} calibration tokens do not determine the {widest.shape[1]} inputs"
            f" of {widest.name}: use more samples (--calib-samples, --calib-length)"
        )


def _float_dtype(checkpoint: Checkpoint, family: ModelFamily, recipe: Recipe) -> torch.dtype:
    if recipe.dtype != "auto":
        return DTYPES[recipe.dtype]
    dtype = checkpoint.tensors[f"{family.embedding}.weight"].dtype
    if dtype not in DTYPES.values():
        raise ValueError(f"{checkpoint.path}: weights in {dtype}; set dtype to one of {[*DTYPES]}")
    return dtype


def _bytes_after(
    checkpoint: Checkpoint, planned: tuple[PlannedLinear, ...], dtype: torch.dtype
) -> int:
    replaced = {f"{linear.name}.weight" for linear in planned}
    kept = sum(
        torch.Size(info.shape).numel() * dtype.itemsize
        for name, info in checkpoint.tensors.items()
        if name not in replaced
    )
    return kept + sum(linear.num_bytes for linear in planned)


def _peak_memory(checkpoint: Checkpoint, family: ModelFamily, calibration_tokens: int) -> int:
    """Estimate, in bytes: the interpreter, the mapped inputs and outputs of a block, and the larger
    of the embedding and one block with its statistics and one batch on its way through it.
    """
    prefix = f"{family.blocks}.0."
    block = {
        name.removeprefix(prefix): torch.Size(info.shape)
        for name, info in checkpoint.tensors.items()
        if name.startswith(prefix)
    }
    weights = sum(shape.numel() for shape in block.values())
    moments = sum(_in_features(block, shared) ** 2 for shared in family.shared_inputs)
    largest = max(
        sum(block[f"{name}.weight"].numel() for name in shared.linears)
        for shared in family.shared_inputs
    )
    rows = sum(block[f"{name}.weight"][0] for name in family.block_linears)
    working = 4 * weights + 4 * moments + 4 * 6 * largest + 4 * rows * BATCH_TOKENS
    embedding = checkpoint.tensors[f"{family.embedding}.weight"].nbytes
    activations = 2 * 2 * calibration_tokens * int(checkpoint.config["hidden_size"])
    return _INTERPRETER_BYTES + activations + max(working, 2 * embedding)


def _in_features(block: dict[str, torch.Size], shared: SharedInput) -> int:
    return block[f"{shared.linears[0]}.weight"][1]
