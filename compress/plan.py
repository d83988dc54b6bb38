"""What will be done to every Linear, decided before anything is done.

The plan is made from the names and shapes in the checkpoint, without reading a weight. Whatever can
be known to be wrong by then is an error here: a group that does not divide, a pattern that matches
nothing, an architecture without a record.
"""

import re
from dataclasses import dataclass

import torch

from compress.artifacts import LeftInFloat
from compress.devices import DTYPES
from compress.models.checkpoint import Checkpoint
from compress.models.family import ModelFamily, SharedInput
from compress.recipe import Recipe
from compress.scheme import WeightScheme, group_width

BATCH_TOKENS = 4096  # of one forward pass of a block
_INTERPRETER_BYTES = 600_000_000  # Python, torch, transformers and a tokenizer, measured on Linux


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLinear:
    """A Linear that will be quantized."""

    name: str
    shape: tuple[int, int]
    scheme: WeightScheme
    scale_dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its codes, scales and zero points on disk (padding aside)."""
        out_features, in_features = self.shape
        groups = out_features * (in_features // group_width(self.scheme, in_features))
        zero_bits = 0 if self.scheme.symmetric else self.scheme.bits
        code_bits = out_features * in_features * self.scheme.bits
        return (code_bits + groups * zero_bits) // 8 + groups * self.scale_dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """`linears` in the order in which they are quantized, `left_in_float` with the reasons."""

    linears: tuple[PlannedLinear, ...]
    left_in_float: tuple[LeftInFloat, ...]
    float_dtype: torch.dtype
    bytes_before: int
    bytes_after: int
    peak_memory_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight of the quantized Linears, scales and zero points included."""
        weights = sum(linear.shape[0] * linear.shape[1] for linear in self.linears)
        return 8 * sum(linear.num_bytes for linear in self.linears) / weights


def make_plan(
    checkpoint: Checkpoint, family: ModelFamily, recipe: Recipe, *, calibration_tokens: int
) -> Plan:
    """Decide for every Linear of `checkpoint`. ValueError names each that cannot be done.

    `calibration_tokens`, of all sequences together, only enters the estimate of peak memory.
    """
    if "quantization_config" in checkpoint.config:
        raise ValueError(f"{checkpoint.path}: already quantized; start from the float checkpoint")
    num_blocks = int(checkpoint.config["num_hidden_layers"])
    names = [
        f"{family.blocks}.{block}.{linear}"
        for block in range(num_blocks)
        for linear in family.block_linears
    ]
    missing = [name for name in names if f"{name}.weight" not in checkpoint.tensors]
    if missing:
        raise ValueError(f"{checkpoint.path}: no tensor {missing[0]}.weight")
    others = _linears_outside(checkpoint, family, names)
    ignored = _ignored(recipe.ignore, [*names, *(row.name for row in others)])
    float_dtype = _float_dtype(checkpoint, family, recipe)
    planned = tuple(
        PlannedLinear(
            name=name,
            shape=_shape(checkpoint, name),
            scheme=recipe.scheme.weights,
            scale_dtype=float_dtype,
        )
        for name in names
        if name not in ignored
    )
    if not planned:
        raise ValueError("the recipe ignores every Linear: nothing would be quantized")
    _check_groups(planned)
    _check_fused(family, num_blocks, ignored)
    left = [LeftInFloat(name=name, reason=f"ignored by {ignored[name]!r}") for name in ignored]
    left += [row for row in others if row.name not in ignored]
    return Plan(
        linears=planned,
        left_in_float=tuple(left),
        float_dtype=float_dtype,
        bytes_before=checkpoint.num_bytes,
        bytes_after=_bytes_after(checkpoint, planned, float_dtype),
        peak_memory_bytes=_peak_memory(checkpoint, family, calibration_tokens),
    )


def _linears_outside(
    checkpoint: Checkpoint, family: ModelFamily, inside: list[str]
) -> list[LeftInFloat]:
    """Matrices that are not among the Linears of the blocks, the embedding aside."""
    known = {*inside, family.embedding}
    rows = []
    for tensor, info in checkpoint.tensors.items():
        name = tensor.removesuffix(".weight")
        if len(info.shape) != 2 or name in known or name == tensor:
            continue
        reason = "output head" if name == family.head else "not in the family's list of Linears"
        rows.append(LeftInFloat(name=name, reason=reason))
    if f"{family.head}.weight" not in checkpoint.tensors:
        rows.append(LeftInFloat(name=family.head, reason="output head, tied to the embedding"))
    return rows


def _ignored(patterns: tuple[str, ...], names: list[str]) -> dict[str, str]:
    """Name -> the first pattern that matches it. A pattern that matches nothing is an error."""
    ignored: dict[str, str] = {}
    for pattern in patterns:
        try:
            expression = re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise ValueError(f"ignore: {pattern!r} is not a regular expression ({error})") from None
        is_regex = pattern.startswith("re:")
        hits = [name for name in names if (expression.match(name) if is_regex else name == pattern)]
        if not hits:
            raise ValueError(f"ignore: {pattern!r} matches no Linear, such as {names[0]!r}")
        for name in hits:
            ignored.setdefault(name, pattern)
    return ignored


def _float_dtype(checkpoint: Checkpoint, family: ModelFamily, recipe: Recipe) -> torch.dtype:
    if recipe.dtype != "auto":
        return DTYPES[recipe.dtype]
    dtype = checkpoint.tensors[f"{family.embedding}.weight"].dtype
    if dtype not in DTYPES.values():
        raise ValueError(f"{checkpoint.path}: weights in {dtype}; set dtype to one of {[*DTYPES]}")
    return dtype


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    out_features, in_features = checkpoint.tensors[f"{name}.weight"].shape
    return out_features, in_features


def _check_groups(planned: tuple[PlannedLinear, ...]) -> None:
    """Raise one ValueError that names every Linear whose groups are not whole."""
    width = planned[0].scheme.group_size
    bad = [linear for linear in planned if width > 0 and linear.shape[1] % width]
    if not bad:
        return
    sizes = {linear.shape[1] for linear in planned}
    fitting = [size for size in (128, 64, 32, 16) if not any(n % size for n in sizes)]
    advice = f"group_size {fitting[0]} divides all" if fitting else "use group_size -1"
    names = ", ".join(f"{linear.name} ({linear.shape[1]} inputs)" for linear in bad)
    raise ValueError(
        f"scheme.weights.group_size {width} does not divide the inputs of {len(bad)} Linears"
        f" ({advice}): {names}"
    )


def _check_fused(family: ModelFamily, num_blocks: int, ignored: dict[str, str]) -> None:
    """Linears that serving engines fuse into one matrix must be all quantized or all left."""
    for block in range(num_blocks):
        for shared in family.shared_inputs:
            names = [f"{family.blocks}.{block}.{linear}" for linear in shared.linears]
            kept = [name for name in names if name in ignored]
            if kept and len(kept) < len(names):
                rest = ", ".join(name for name in names if name not in ignored)
                raise ValueError(
                    f"ignore: {', '.join(kept)} would stay in float but {rest} not; serving engines"
                    " fuse them into one matrix, so ignore all or none"
                )


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
