"""One run of `compress quantize`: what was asked for, and what its steps share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from compress.calib.capture import Activations, create_activations, open_activations
from compress.calib.data import CalibrationData, CalibrationSpec
from compress.calib.methods import ROUNDERS
from compress.calib.methods.gptq import GPTQ
from compress.devices import free_memory_bytes
from compress.distributed import Ranks
from compress.models.checkpoint import Checkpoint
from compress.models.family import ModelFamily
from compress.plan import BATCH_TOKENS, Plan
from compress.recipe import Recipe
from compress.resume import RunState
from compress.scheme import LinearScheme

Chain = Literal["quantized", "float"]
_ACTIVATION_SHARE = 4  # activations may have a quarter of the memory that is free


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeJob:
    """One run of `compress quantize`.

    `activation_budget` is the memory in bytes for the activations of the calibration samples, None
    for a share of what is free; see `Run.activations`. `target` names the program that must be able
    to load the result.
    """

    model: str
    output: Path
    recipe: Recipe
    calibration: CalibrationSpec
    device: str = "auto"
    offline: bool = False
    resume: bool = False
    force: bool = False
    quiet: bool = False
    activation_budget: int | None = None
    target: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Which statistics the recipe needs of the inputs of Linears, see collectors.py."""

    second_moment: bool
    magnitudes: bool
    float_chain: bool


def batch_size_of(data: CalibrationData) -> int:
    """Samples of one forward pass."""
    length: int = data.tokens.shape[1]
    return max(1, BATCH_TOKENS // length)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What the steps of one run share. `dtype` is that of the forward passes.

    `checkpoint` is the float model as it is to be rounded: rotated, if the recipe rotates it.
    """

    job: QuantizeJob
    checkpoint: Checkpoint
    family: ModelFamily
    plan: Plan
    data: CalibrationData
    model: nn.Module
    state: RunState
    seconds_before: float
    device: torch.device
    dtype: torch.dtype
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def batch_size(self) -> int:
        return batch_size_of(self.data)

    @property
    def blocks(self) -> nn.ModuleList:
        blocks = self.model.get_submodule(self.family.blocks)
        assert isinstance(blocks, nn.ModuleList), f"{self.family.blocks} is not a list of blocks"
        return blocks

    @cached_property
    def schemes(self) -> Mapping[str, LinearScheme]:
        """Full name -> scheme of every Linear that will be quantized."""
        return {linear.name: linear.scheme for linear in self.plan.linears}

    @property
    def needs(self) -> Needs:
        """What must be collected for the recipe."""
        recipe = self.job.recipe
        activations = recipe.scheme.activations
        return Needs(
            second_moment=ROUNDERS[recipe.method.kind].needs_second_moment,
            magnitudes=bool(recipe.block_transforms)
            or (activations is not None and not activations.dynamic),
            float_chain=isinstance(recipe.method, GPTQ) and recipe.method.asymmetry > 0,
        )

    @property
    def share(self) -> slice:
        """The calibration samples of this process."""
        return self.ranks.share(self.data.tokens.shape[0], self.batch_size)

    @cached_property
    def maps_activations(self) -> bool:
        """Whether the files of activations that are open at a time fit the budget for them.

        Those of a block's inputs and outputs, in one chain or two, are mapped into memory then.
        """
        tokens = self.data.tokens.numel()
        size = tokens * int(self.checkpoint.config["hidden_size"]) * self.dtype.itemsize
        budget = self.job.activation_budget
        limit = free_memory_bytes() // _ACTIVATION_SHARE if budget is None else budget
        return size * (4 if self.needs.float_chain else 2) <= limit

    def activations(
        self, block: int, *, chain: Chain = "quantized", create: bool = False, whole: bool = False
    ) -> Activations:
        """The input of `block`, (num_samples, length, hidden), in one of the two chains.

        That of this process's share of the samples, or of `whole`: all processes use one file.
        `create` makes the file; all ranks must ask for it.
        """
        num_samples, length = self.data.tokens.shape
        shape = (num_samples, length, int(self.checkpoint.config["hidden_size"]))
        file = self.state.activations_file(block, chain)
        if create:
            self.ranks.first(lambda: create_activations(file, shape, self.dtype))
        samples = slice(None) if whole else self.share
        return open_activations(
            file, shape, self.dtype, samples=samples, mapped=self.maps_activations
        )

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in the dtype in which it is written."""
        keep = self.job.recipe.dtype == "auto" or not tensor.is_floating_point()
        return tensor if keep else tensor.to(self.plan.float_dtype)
