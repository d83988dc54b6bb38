"""Which Linear of a checkpoint gets which scheme, and which stay in float.

Decided from names and shapes alone. What can be known to be wrong by then is an error that names
every culprit: a pattern that matches nothing, a Linear that two overrides claim, a group that does
not divide, Linears that serving engines fuse but that would be stored differently, a scheme that
the format cannot hold.
"""

import re
from collections.abc import Mapping, Sequence

from compress.artifacts import LeftInFloat
from compress.calib.methods.rotation import RotatedCheckpoint
from compress.export.formats import FORMATS
from compress.lookup import lookup
from compress.models.checkpoint import Checkpoint
from compress.models.family import ModelFamily
from compress.recipe import Recipe
from compress.scheme import LinearScheme, Override, WeightScheme

_SMALLER_GROUPS = (128, 64, 32, 16)


def block_linears(checkpoint: Checkpoint, family: ModelFamily) -> list[str]:
    """Full names of the Linears of all blocks, in the order in which they are computed."""
    num_blocks = checkpoint.config.get("num_hidden_layers")
    if not isinstance(num_blocks, int) or num_blocks < 1:
        raise ValueError(
            f"{checkpoint.path / 'config.json'}: num_hidden_layers must be a positive number,"
            f" got {num_blocks!r}"
        )
    names = [
        f"{family.blocks}.{block}.{linear}"
        for block in range(num_blocks)
        for linear in family.block_linears
    ]
    missing = [name for name in names if f"{name}.weight" not in checkpoint.tensors]
    if missing:
        raise ValueError(f"{checkpoint.path}: no tensor {missing[0]}.weight")
    return names


def assign_schemes(
    checkpoint: Checkpoint,
    family: ModelFamily,
    recipe: Recipe,
    chosen: Mapping[str, WeightScheme] | None = None,
) -> tuple[dict[str, LinearScheme], list[LeftInFloat]]:
    """Name -> scheme of every Linear to quantize, in order, and those left in float, with reasons.

    `chosen` replaces the weights of the Linears it names: what the budget search decided.
    """
    names = block_linears(checkpoint, family)
    others = _linears_outside(checkpoint, family, names)
    vocabulary = [family.embedding] if recipe.embedding is not None else []
    ignored = _ignored(recipe.ignore, [*names, *(row.name for row in others), *vocabulary])
    candidates = [name for name in names if name not in ignored]
    if not candidates:
        raise ValueError("the recipe ignores every Linear: nothing would be quantized")
    weights = dict.fromkeys(candidates, recipe.scheme.weights)
    weights |= _overridden(recipe.scheme.overrides, candidates)
    weights |= chosen or {}
    activations = recipe.scheme.activations
    schemes = {
        name: LinearScheme(weights=scheme, activations=activations)
        for name, scheme in weights.items()
    }
    _check_fused(checkpoint, family, schemes, ignored)
    if recipe.embedding is not None:
        schemes |= _vocabulary_schemes(checkpoint, family, recipe.embedding.weights, ignored)
    _check_groups(checkpoint, schemes)
    _check_format(checkpoint, recipe.format, schemes)
    left = [LeftInFloat(name=name, reason=f"ignored by {ignored[name]!r}") for name in ignored]
    left += [row for row in others if row.name not in {*ignored, *schemes}]
    return schemes, left


def _vocabulary_schemes(
    checkpoint: Checkpoint,
    family: ModelFamily,
    weights: WeightScheme,
    ignored: Mapping[str, str],
) -> dict[str, LinearScheme]:
    """The embedding, and the head if it has a matrix of its own; a tied head reads its codes."""
    return {
        name: LinearScheme(weights=weights)
        for name in (family.embedding, family.head)
        if f"{name}.weight" in checkpoint.tensors and name not in ignored
    }


def is_untied(checkpoint: Checkpoint) -> bool:
    """Whether a rotation gives `checkpoint` a head of its own, which its source has not."""
    return isinstance(checkpoint, RotatedCheckpoint) and (
        checkpoint.tensors.keys() > checkpoint.source.tensors.keys()
    )


def linear_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """(out, in) of the Linear `name`; ValueError if its weight is no matrix."""
    shape = checkpoint.tensors[f"{name}.weight"].shape
    if len(shape) != 2:
        raise ValueError(f"{checkpoint.path}: {name}.weight has shape {shape}, expected a matrix")
    return shape[0], shape[1]


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
        reason = "not in the family's list of Linears"
        if name == family.head:
            reason = (
                "output head, untied by the rotation" if is_untied(checkpoint) else "output head"
            )
        rows.append(LeftInFloat(name=name, reason=reason))
    if f"{family.head}.weight" not in checkpoint.tensors:
        rows.append(LeftInFloat(name=family.head, reason="output head, tied to the embedding"))
    return rows


def _ignored(patterns: Sequence[str], names: list[str]) -> dict[str, str]:
    """Name -> the first pattern that matches it. A pattern that matches nothing is an error."""
    ignored: dict[str, str] = {}
    for pattern in patterns:
        for name in _matching(pattern, names, "ignore"):
            ignored.setdefault(name, pattern)
    return ignored


def _overridden(overrides: Sequence[Override], names: list[str]) -> dict[str, WeightScheme]:
    """Name -> the weights of the one override that names it; two that do are an error."""
    claimed: dict[str, tuple[str, WeightScheme]] = {}
    for override in overrides:
        for pattern in override.targets:
            for name in _matching(pattern, names, "scheme.overrides"):
                if name in claimed:
                    raise ValueError(
                        f"scheme.overrides: {name} is matched by both {claimed[name][0]!r} and"
                        f" {pattern!r}; make the patterns exclude each other"
                    )
                claimed[name] = pattern, override.weights
    return {name: weights for name, (_, weights) in claimed.items()}


def _matching(pattern: str, names: list[str], key: str) -> list[str]:
    try:
        expression = re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"{key}: {pattern!r} is not a regular expression ({error})") from None
    is_regex = pattern.startswith("re:")
    hits = [name for name in names if (expression.match(name) if is_regex else name == pattern)]
    if not hits:
        raise ValueError(f"{key}: {pattern!r} matches no Linear, such as {names[0]!r}")
    return hits


def _check_groups(checkpoint: Checkpoint, schemes: Mapping[str, LinearScheme]) -> None:
    """Raise one ValueError that names every Linear whose groups are not whole."""
    inputs = {name: linear_shape(checkpoint, name)[1] for name in schemes}
    bad = [
        name
        for name, scheme in schemes.items()
        if scheme.weights.group_size > 0 and inputs[name] % scheme.weights.group_size
    ]
    if not bad:
        return
    sizes = set(inputs.values())
    fitting = [size for size in _SMALLER_GROUPS if not any(n % size for n in sizes)]
    advice = f"group_size {fitting[0]} divides all" if fitting else "use group_size -1"
    names = ", ".join(f"{name} ({inputs[name]} inputs)" for name in bad)
    raise ValueError(
        f"group_size {schemes[bad[0]].weights.group_size} does not divide the inputs"
        f" of {len(bad)} Linears ({advice}): {names}"
    )


def _check_fused(
    checkpoint: Checkpoint,
    family: ModelFamily,
    schemes: Mapping[str, LinearScheme],
    ignored: Mapping[str, str],
) -> None:
    """Linears that serving engines fuse into one matrix must be stored in one way, or all left."""
    for block in range(int(checkpoint.config["num_hidden_layers"])):
        for shared in family.shared_inputs:
            names = [f"{family.blocks}.{block}.{linear}" for linear in shared.linears]
            kept = [name for name in names if name in ignored]
            if kept and len(kept) < len(names):
                rest = ", ".join(name for name in names if name not in ignored)
                raise ValueError(
                    f"ignore: {', '.join(kept)} would stay in float but {rest} not; serving engines"
                    " fuse them into one matrix, so ignore all or none"
                )
            labels = {name: schemes[name].label for name in names if name in schemes}
            if len(set(labels.values())) > 1:
                shown = ", ".join(f"{name} {label}" for name, label in labels.items())
                raise ValueError(
                    f"scheme.overrides: {shown}; serving engines fuse them into one matrix, so"
                    " give them one scheme"
                )


def _check_format(
    checkpoint: Checkpoint, format_name: str, schemes: Mapping[str, LinearScheme]
) -> None:
    chosen = lookup(FORMATS, format_name, "format")
    for name, scheme in schemes.items():
        if reason := chosen.refusal(scheme, linear_shape(checkpoint, name)):
            raise ValueError(f"format {format_name} cannot hold {name} ({scheme.label}): {reason}")
