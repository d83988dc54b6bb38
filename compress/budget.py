"""Choose the bits of every Linear under a budget of stored bits per weight.

Sensitivity is measured, not guessed: on a few calibration sequences the float model runs block by
block; for each set of Linears that serving engines fuse and each bit width, these Linears alone are
rounded to nearest (with the recipe's scales) and the block runs again. The error is

    e(set, bits) = mean over tokens t of ||block(X)_t - block_rounded(X)_t||^2 / ||block(X)_t||^2

X being the block's input in the float model. Block outputs are the residual stream, which every
later layer normalizes token by token, so relative errors of different blocks can be added. A ratio
of sums would count little but the few tokens with massive activations, and leave the middle of a
model, where those live, to the fewest bits. No gradient is needed.
The choice with the least sum under the budget is found exactly, see knapsack.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from compress.artifacts import QuantizedLinear
from compress.calib.capture import BlockCalls, record_block_calls
from compress.calib.methods.rtn import RTN, round_rtn
from compress.calib.replay import BlockReplay
from compress.export.formats import Format
from compress.knapsack import Option, choose_options
from compress.models.checkpoint import Checkpoint
from compress.models.family import ModelFamily, SharedInput
from compress.models.load import build_skeleton, dematerialize, materialize
from compress.plan import BATCH_TOKENS, Plan, PlannedLinear, stored_bytes
from compress.progress import progress
from compress.recipe import Budget, Recipe
from compress.scheme import WeightScheme, dequantize


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """Errors of one set of fused Linears: `errors[bits]` is e(set, bits), `costs[bits]` in bits."""

    linears: tuple[PlannedLinear, ...]
    errors: Mapping[int, float]
    costs: Mapping[int, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for reports."""
        names = [linear.name for linear in self.linears]
        return {"linears": names, "errors": dict(self.errors), "bits": dict(self.costs)}


def check_choices(budget: Budget, plan: Plan, format: Format) -> None:
    """Raise ValueError for a bit width that no Linear can have, or that the format cannot hold."""
    for bits in budget.choices:
        for linear in plan.linears:
            try:
                weights = replace(linear.scheme.weights, bits=bits)
            except ValueError as error:
                raise ValueError(f"budget.choices: {error}") from None
            scheme = replace(linear.scheme, weights=weights)
            if reason := format.refusal(scheme, linear.shape):
                raise ValueError(f"budget.choices: {bits} bits in {linear.name}: {reason}")


def choose_bits(sensitivities: Sequence[Sensitivity], budget: Budget) -> dict[str, WeightScheme]:
    """Name -> weights of every Linear: least total error within the budget.

    ValueError if not even the fewest bits fit.
    """
    linears = [linear for row in sensitivities for linear in row.linears]
    weights = sum(linear.shape[0] * linear.shape[1] for linear in linears)
    items = [
        [Option(row.costs[bits], row.errors[bits]) for bits in budget.choices]
        for row in sensitivities
    ]
    try:
        chosen = choose_options(items, int(min(budget.bits_per_weight, 64.0) * weights))
    except ValueError:
        least = sum(min(row.costs.values()) for row in sensitivities) / weights
        raise ValueError(
            f"budget.bits_per_weight {budget.bits_per_weight}: even the fewest bits take"
            f" {least:.2f} per weight, scales included; use larger groups or a 16-bit dtype"
        ) from None
    return {
        linear.name: replace(linear.scheme.weights, bits=budget.choices[index])
        for row, index in zip(sensitivities, chosen, strict=True)
        for linear in row.linears
    }


def measure_sensitivity(
    checkpoint: Checkpoint,
    family: ModelFamily,
    recipe: Recipe,
    plan: Plan,
    tokens: torch.Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype,
    quiet: bool,
) -> list[Sensitivity]:
    """Measure every set of Linears on `tokens` (num_samples, length), one block in memory."""
    assert recipe.budget is not None, "without a budget there is nothing to measure"
    model = build_skeleton(checkpoint)
    tokens = tokens[: recipe.budget.num_samples]
    batch_size = max(1, BATCH_TOKENS // tokens.shape[1])
    hidden, calls = _first_input(model, checkpoint, family, tokens, batch_size, device, dtype)
    blocks = model.get_submodule(family.blocks)
    assert isinstance(blocks, nn.ModuleList), f"{family.blocks} is not a list of blocks"
    planned = {linear.name: linear for linear in plan.linears}
    rows: list[Sensitivity] = []
    with progress("measuring sensitivity", len(blocks), quiet=quiet) as tick:
        for index, block in enumerate(blocks):
            prefix = f"{family.blocks}.{index}."
            materialize(block, checkpoint, prefix, device=device, dtype=dtype)
            replay = BlockReplay(
                block=block, index=index, calls=calls, batch_size=batch_size, device=device
            )
            shared_inputs = [
                shared for shared in family.shared_inputs if prefix + shared.linears[0] in planned
            ]
            here = {name.removeprefix(prefix): row for name, row in planned.items()}
            measured, hidden = _measure_block(replay, hidden, shared_inputs, here, recipe)
            rows += measured
            dematerialize(block)
            tick()
    return rows


@torch.no_grad()
def _first_input(
    model: nn.Module,
    checkpoint: Checkpoint,
    family: ModelFamily,
    tokens: torch.Tensor,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, BlockCalls]:
    embedding = model.get_submodule(family.embedding)
    materialize(embedding, checkpoint, f"{family.embedding}.", device=device, dtype=dtype)
    decoder = model.get_submodule(family.blocks.rpartition(".")[0])
    blocks = model.get_submodule(family.blocks)
    assert isinstance(blocks, nn.ModuleList), f"{family.blocks} is not a list of blocks"
    parts: list[torch.Tensor] = []
    calls = record_block_calls(
        decoder, blocks, tokens, batch_size, device, lambda _, hidden: parts.append(hidden.clone())
    )
    dematerialize(embedding)
    return torch.cat(parts), calls


def _measure_block(
    replay: BlockReplay,
    inputs: torch.Tensor,
    shared_inputs: Sequence[SharedInput],
    planned: Mapping[str, PlannedLinear],
    recipe: Recipe,
) -> tuple[list[Sensitivity], torch.Tensor]:
    """Sensitivities of one block, and its float outputs (N, L, H)."""
    assert recipe.budget is not None
    statistics = replay.new_statistics(shared_inputs, inputs.shape[0], full=False)
    replay.collect(inputs, statistics)
    outputs = torch.empty_like(inputs)
    replay.propagate(inputs, outputs)
    rounded = torch.empty_like(inputs)
    method = RTN(scale=recipe.method.scale)
    rows = []
    for shared, stats in statistics.items():
        linears = [planned[name] for name in shared.linears]
        errors, costs = {}, {}
        for bits in recipe.budget.choices:
            scheme = replace(linears[0].scheme.weights, bits=bits)
            weights = [replay.block.get_parameter(f"{name}.weight") for name in shared.linears]
            stacked, _ = round_rtn(
                torch.cat([weight.data for weight in weights]).float(),
                stats,
                scheme,
                method,
                linears[0].scale_dtype,
            )
            with _holding(weights, stacked):
                replay.propagate(inputs, rounded)
            errors[bits] = _relative_square(outputs, rounded)
            costs[bits] = 8 * sum(
                stored_bytes(
                    linear.shape, replace(linear.scheme, weights=scheme), linear.scale_dtype
                )
                for linear in linears
            )
        rows.append(Sensitivity(linears=tuple(linears), errors=errors, costs=costs))
    return rows, outputs


@contextmanager
def _holding(weights: Sequence[nn.Parameter], stacked: QuantizedLinear) -> Iterator[None]:
    """Give `weights` the values that the codes of the stacked matrix stand for, for a while."""
    own = [weight.data for weight in weights]
    parts = dequantize(stacked).split_with_sizes([len(weight) for weight in own])
    for weight, part in zip(weights, parts, strict=True):
        weight.data = part.to(weight.dtype)
    try:
        yield
    finally:
        for weight, data in zip(weights, own, strict=True):
            weight.data = data


def _relative_square(outputs: torch.Tensor, rounded: torch.Tensor) -> float:
    """Mean over the tokens of `outputs` (N, L, H) of their relative squared error."""
    reference = outputs.float()
    errors = (reference - rounded.float()).square().sum(-1)
    return float((errors / reference.square().sum(-1).clamp(min=1e-30)).mean())
