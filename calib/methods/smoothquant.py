"""SmoothQuant: move outliers from the inputs of Linears, which are hard to round, to the weights.

Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language
Models", arXiv 2211.10438. Channel j of what a norm puts out is divided by

    s_j = max |X_j|^alpha / max |W_j|^(1 - alpha)                                          (eq. 4)

X_j over the calibration tokens, W_j over the rows of every Linear that reads it. alpha 0.5 shares
the difficulty evenly; the more the inputs have outliers, the larger it should be. With `alpha:
search` each site gets the alpha of `grid`, or none at all, with which the block's output errs least
when weights and inputs are rounded as the schemes of the site's Linears say.

`sites: all` also scales between values and the output projection and inside the MLP, where the
producer is a Linear.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict

from compress.calib.methods.scales import ScaleSearch
from compress.calib.methods.smoothing import (
    Choice,
    Chosen,
    SiteProblem,
    Statistics,
    Weights,
    choose_scale,
    live_scale,
    smooth_block,
)
from compress.calib.scene import BlockScene, SiteReport

_MIN_SCALE = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class SmoothQuant:
    """`scale` is how weights are rounded when losses are measured, on `max_tokens` tokens."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    kind: Literal["smoothquant"] = "smoothquant"
    alpha: float | Literal["search"] = 0.5
    grid: tuple[float, ...] = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    sites: Literal["norms", "all"] = "norms"
    max_tokens: int = 2048
    scale: ScaleSearch = field(default_factory=ScaleSearch)

    def __post_init__(self) -> None:
        searching = self.alpha == "search"
        if not searching and (isinstance(self.alpha, str) or not 0 <= self.alpha <= 1):
            raise ValueError(f"alpha must be between 0 and 1, or search; got {self.alpha}")
        if not self.grid or not all(0 <= alpha <= 1 for alpha in self.grid):
            raise ValueError(f"grid must hold values between 0 and 1, got {self.grid}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be positive, got {self.max_tokens}")


def apply_smoothquant(
    weights: Weights, statistics: Statistics, scene: BlockScene, method: SmoothQuant
) -> tuple[dict[str, torch.Tensor], list[SiteReport]]:
    """Changed tensors of the block (local name -> fp32) and a report per site.

    `weights` are all tensors of the block, fp32. `statistics` are made those of the new inputs.
    """
    return smooth_block(
        weights,
        statistics,
        scene,
        lambda problem: _choose(problem, method),
        norms_only=method.sites == "norms",
        whole_block=True,
        max_tokens=method.max_tokens,
    )


def _choose(problem: SiteProblem, method: SmoothQuant) -> Choice:
    must_gain = method.alpha == "search"  # an alpha that was asked for is taken
    candidates = _candidates(problem, method)
    return choose_scale(problem, candidates, method.scale, inputs=True, must_gain=must_gain)


def _candidates(problem: SiteProblem, method: SmoothQuant) -> Iterator[tuple[Chosen, torch.Tensor]]:
    """Every alpha with its scale (C,), eq. 4."""
    x = problem.channels.amax(problem.statistics.absmax)
    largest = torch.stack([weight.abs().amax(0) for weight in problem.weights.values()]).amax(0)
    w = problem.channels.amax(largest)
    dead = (x == 0) | (w == 0)
    grid = method.grid if isinstance(method.alpha, str) else (method.alpha,)
    for alpha in grid:
        scale = x**alpha / w.clamp(min=_MIN_SCALE) ** (1 - alpha)
        yield {"alpha": alpha}, live_scale(scale.clamp(min=_MIN_SCALE), dead)
