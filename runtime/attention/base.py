"""The paged key-value cache and what an attention backend has to do with it.

The pool of one layer is (num_blocks, num_kv_heads, block_size, head_dim), the same on every device.
Block 64 suits both sides: one tile of a GPU kernel, one matrix of a batched product on a CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import psutil
import torch

from compress.runtime.batch import Batch

_CPU_MEMORY_FRACTION = 0.25  # of what is available, for the cache when its size is not given
_GPU_MEMORY_FRACTION = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """The shape of attention in a model: `windows[layer]` is 0 where all earlier keys are seen."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float(self.head_dim**-0.5)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one block holds over all layers."""
        per_layer = 2 * self.num_kv_heads * block_size * self.head_dim * dtype.itemsize
        return per_layer * len(self.windows)


@dataclass(frozen=True, slots=True)
class KVPool:
    """`k[layer]`, `v[layer]`: the pools, each (num_blocks, num_kv_heads, block_size, head_dim)."""

    k: torch.Tensor
    v: torch.Tensor

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy block source to block destination, in every layer, for each pair."""
        if copies:
            source, destination = torch.tensor(copies, device=self.k.device).unbind(1)
            for pool in (self.k, self.v):
                pool[:, destination] = pool[:, source]


def allocate_pool(
    spec: AttentionSpec,
    num_blocks: int,
    block_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> KVPool:
    """A zeroed pool. Zeros matter: unwritten slots have weight 0, and 0 * NaN is not 0."""
    shape = (len(spec.windows), num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
    if device.type != "cpu":
        k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
        return KVPool(k, v)
    # Unlike torch.zeros, numpy.zeros takes no memory before a block is first written.
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    k, v = (torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape) for _ in "kv")
    return KVPool(k, v)


def affordable_blocks(block_bytes: int, device: torch.device, *, wanted: int) -> int:
    """`wanted` cache blocks, or as many as fit a fraction of the free memory of `device`."""
    if device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(device)[0] * _GPU_MEMORY_FRACTION)
    else:
        budget = int(psutil.virtual_memory().available * _CPU_MEMORY_FRACTION)
    if budget < block_bytes:
        raise ValueError(
            f"no memory for the cache: a block takes {block_bytes} bytes, {budget} are left for it"
        )
    return min(wanted, budget // block_bytes)


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
