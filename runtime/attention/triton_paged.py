"""Paged attention by the paged kernels, straight from the tensors of the batch: the GPU's way."""

import torch

from compress.kernels.ops import Ops
from compress.runtime.attention.base import AttentionSpec, KVPool
from compress.runtime.batch import Batch


class PagedAttention:
    """Attention backend over `ops.kv_write` and `ops.paged_attention`."""

    def __init__(self, spec: AttentionSpec, pool: KVPool, ops: Ops) -> None:
        self._spec = spec
        self._pool = pool
        self._ops = ops
        self._batch: Batch | None = None
        self._extra = {"softcap": spec.softcap} if spec.softcap else {}

    def plan(self, batch: Batch) -> None:
        """Keep the batch: its tensors are all that the kernels read."""
        self._batch = batch

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """As in `AttentionBackend`."""
        batch = self._batch
        assert batch is not None, "forward() before plan()"
        k_pool, v_pool = self._pool.k[layer], self._pool.v[layer]
        scales = self._pool.scales
        if scales is not None:
            q = scales.scale_queries(q, layer)
            k, v = scales.encode(k, v, layer)
        self._ops.kv_write(k, v, k_pool, v_pool, batch.slots)
        out = self._ops.paged_attention(
            q,
            k_pool,
            v_pool,
            batch.block_tables,
            batch.context_lens,
            batch.query_starts,
            scale=self._spec.scale,
            window=self._spec.windows[layer],
            max_query_len=max(batch.host_query_lens),
            **self._extra,
        )
        return out if scales is None else scales.scale_outputs(out, layer)
