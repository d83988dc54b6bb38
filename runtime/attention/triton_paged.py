"""Paged attention by the paged kernels, straight from the tensors of the batch: the GPU's way."""

import torch

from compress.kernels.ops import Ops
from compress.runtime.attention.base import AttentionSpec
from compress.runtime.attention.pool import KVPool
from compress.runtime.batch import Batch


class PagedAttention:
    """Attention backend over `ops.kv_write` and `ops.paged_attention`."""

    def __init__(self, spec: AttentionSpec, pool: KVPool, ops: Ops) -> None:
        self._spec = spec
        self._pool = pool
        self._ops = ops
        self._batch: Batch | None = None

    def plan(self, batch: Batch) -> None:
        """Keep the batch: its tensors are all that the kernels read."""
        self._batch = batch

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """As in `AttentionBackend`."""
        batch = self._batch
        assert batch is not None, "forward() before plan()"
        pool, scales = self._pool.layer(layer), self._pool.storage.scales
        if scales is not None:
            q = scales.scale_queries(q, layer)
            k, v = scales.encode(k, v, layer)
        of_tokens = {"k_scale": pool.k_scale, "v_scale": pool.v_scale}
        self._ops.kv_write(k, v, pool.k, pool.v, batch.slots, **of_tokens)
        out = self._ops.paged_attention(
            q,
            pool.k,
            pool.v,
            batch.block_tables,
            batch.context_lens,
            batch.query_starts,
            scale=self._spec.scale,
            window=self._spec.windows[layer],
            max_query_len=max(batch.host_query_lens),
            soft_cap=self._spec.soft_cap,
            **of_tokens,
        )
        return out if scales is None else scales.scale_outputs(out, layer)
