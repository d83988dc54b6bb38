"""The paged key-value cache and what an attention backend has to do with it.

The pool of one layer is (num_blocks, num_kv_heads, block_size, head_dim), the same on every device.
Block 64 suits both sides: one tile of a GPU kernel, one matrix of a batched product on a CPU.

A pool may be in float8_e4m3fn, with one scale for the keys and one for the values of each layer and
KV head. What is stored of a key k is the code k / k_scale, after the rotary embedding, and every
query attends to what the codes stand for, a prompt to its own keys as well. Scales are linear in
attention, so they are taken out of it: backends see queries times k_scale, keys and values that are
the codes themselves, and their output is multiplied by v_scale.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import psutil
import torch

from compress.kernels.activations import float8_codes
from compress.lookup import lookup
from compress.runtime.batch import Batch
from compress.scheme import FLOAT8

_CPU_MEMORY_FRACTION = 0.25  # of what is available, for the cache when its size is not given
_GPU_MEMORY_FRACTION = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """The shape of attention in a model: `windows[layer]` is 0 where all earlier keys are seen.

    Scores x, after `scale`, become c tanh(x / c) where `softcap` c is not 0. `scale_override` takes
    the place of 1 / sqrt(head_dim).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    scale_override: float | None = None
    softcap: float = 0.0

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return self.head_dim**-0.5 if self.scale_override is None else self.scale_override

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one block holds over all layers."""
        per_layer = 2 * self.num_kv_heads * block_size * self.head_dim * dtype.itemsize
        return per_layer * len(self.windows)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVScales:
    """Scales of a float8 cache: `k` and `v`, each (num_layers, num_kv_heads, 1) fp32."""

    k: torch.Tensor
    v: torch.Tensor

    def encode(
        self, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes float8_e4m3fn of keys and values (T, num_kv_heads, head_dim)."""
        return float8_codes(k, self.k[layer]), float8_codes(v, self.v[layer])

    def scale_queries(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Queries (T, num_heads, head_dim) for keys that are codes, in the dtype of q."""
        return _scale_heads(q, self.k[layer])

    def scale_outputs(self, out: torch.Tensor, layer: int) -> torch.Tensor:
        """Outputs (T, num_heads, head_dim) of values that were codes, in the dtype of `out`."""
        return _scale_heads(out, self.v[layer])


@dataclass(frozen=True, slots=True)
class KVPool:
    """`k[layer]`, `v[layer]`: the pools, each (num_blocks, num_kv_heads, block_size, head_dim).

    Both are in float8_e4m3fn if there are `scales`, else in `dtype`, that of the queries.
    """

    k: torch.Tensor
    v: torch.Tensor
    dtype: torch.dtype
    scales: KVScales | None = None

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy block source to block destination, in every layer, for each pair."""
        if copies:
            source, destination = torch.tensor(copies, device=self.k.device).unbind(1)
            for pool in (self.k, self.v):
                pool[:, destination] = pool[:, source]

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Zero blocks that hold NaN or infinity, before they get a new owner."""
        if blocks:
            for pool in (self.k, self.v):
                # As bytes, because float8 has no fill on every device.
                pool.view(torch.uint8)[:, torch.tensor(blocks, device=pool.device)] = 0


def allocate_pool(
    spec: AttentionSpec,
    num_blocks: int,
    block_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    scales: KVScales | None = None,
) -> KVPool:
    """A zeroed pool. Zeros matter: unwritten slots have weight 0, and 0 * NaN is not 0.

    `dtype` is that of the queries; with `scales` the pool itself is in float8_e4m3fn.
    """
    stored = dtype if scales is None else FLOAT8
    shape = (len(spec.windows), num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
    if device.type != "cpu":
        k, v = (torch.zeros(shape, dtype=stored, device=device) for _ in "kv")
        return KVPool(k, v, dtype, scales)
    # Unlike torch.zeros, numpy.zeros takes no memory before a block is first written.
    num_bytes = torch.Size(shape).numel() * stored.itemsize
    k, v = (torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(stored).view(shape) for _ in "kv")
    return KVPool(k, v, dtype, scales)


def choose_scales(
    kv_dtype: str, stored: KVScales | None, spec: AttentionSpec, device: torch.device
) -> KVScales | None:
    """Scales of the cache that `kv_dtype` asks for; None for a cache in the model's dtype.

    "auto" is float8 if the checkpoint has scales for it, `stored`; "model" never; "fp8" always,
    with scales of 1 for a model whose cache was not calibrated.
    """
    ones = torch.ones(len(spec.windows), spec.num_kv_heads, 1, device=device)
    by_name = {"auto": stored, "model": None, "fp8": stored or KVScales(k=ones, v=ones)}
    return lookup(by_name, kv_dtype, "kv_dtype")


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


def _scale_heads(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`x` (T, num_heads, head_dim) times the `scale` (num_kv_heads, 1) of the head it reads."""
    by_kv_head = x.view(len(x), len(scale), -1, x.shape[2])  # (T, num_kv_heads, group, head_dim)
    return (by_kv_head * scale[:, None]).to(x.dtype).view(x.shape)
