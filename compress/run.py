"""One run of `compress quantize`: what was asked for, and what its steps share."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from compress.calib.capture import open_activations
from compress.calib.data import CalibrationData, CalibrationSpec
from compress.models.checkpoint import Checkpoint
from compress.models.family import ModelFamily
from compress.plan import BATCH_TOKENS, Plan
from compress.recipe import Recipe
from compress.resume import RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizeJob:
    """One run of `compress quantize`."""

    model: str
    output: Path
    recipe: Recipe
    calibration: CalibrationSpec
    device: str = "auto"
    offline: bool = False
    resume: bool = False
    force: bool = False
    quiet: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What the steps of one run share. `dtype` is that of the forward passes."""

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

    @property
    def batch_size(self) -> int:
        length: int = self.data.tokens.shape[1]
        return max(1, BATCH_TOKENS // length)

    @property
    def blocks(self) -> nn.ModuleList:
        blocks = self.model.get_submodule(self.family.blocks)
        assert isinstance(blocks, nn.ModuleList), f"{self.family.blocks} is not a list of blocks"
        return blocks

    def activations(self, block: int, *, create: bool = False) -> torch.Tensor:
        """The input of `block`, (num_samples, length, hidden)."""
        num_samples, length = self.data.tokens.shape
        shape = (num_samples, length, int(self.checkpoint.config["hidden_size"]))
        return open_activations(
            self.state.activations_file(block), shape, self.dtype, create=create
        )

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` in the dtype in which it is written."""
        keep = self.job.recipe.dtype == "auto" or not tensor.is_floating_point()
        return tensor if keep else tensor.to(self.plan.float_dtype)
