"""What attention is in a model, and what an attention backend has to do."""

from dataclasses import dataclass
from typing import Protocol

import torch

from compress.runtime.batch import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """The shape of attention in a model: `windows[layer]` is 0 where all earlier keys are seen.

    Scores x, after `scale`, become c tanh(x / c) where `soft_cap` c is not 0. `scale_override`
    takes the place of 1 / sqrt(head_dim).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    scale_override: float | None = None
    soft_cap: float = 0.0

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return self.head_dim**-0.5 if self.scale_override is None else self.scale_override


class AttentionBackend(Protocol):
    """Causal attention of a batch through a paged pool that the backend was built with."""

    def plan(self, batch: Batch) -> None:
        """Prepare whatever depends on the shape of the batch, once for all layers of a step."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Write the new keys and values to the pool of `layer`, then attend.

        q (T, num_heads, head_dim); k, v (T, num_kv_heads, head_dim), rotated; rows as in the
        planned batch. Returns (T, num_heads, head_dim) in the dtype of q.
        """
