"""Paged attention on a CPU, block by block, without gathering keys and values.

Notation: T rows, S queries (sequences, or parts of one), Q rows of a query, N cache blocks read,
H key/value heads, G query heads per key/value head, B block size, D head_dim, L keys of the longest
sequence.

Short queries (decoding, and the verification of a few drafted tokens). Every (sequence, block) pair
is one item of a batched product, and a range of the pool is its items without a copy:

    s[n] = q[owner(n)] K[n]^T                         (N, H, Q*G, B)
    p    = softmax of s, regrouped by sequence        (S, H, Q*G, L)   in fp32
    o    = sum over the items n of a sequence, p[n] V[n]

Only the small scores move between the two orders. If the blocks of the batch do not lie densely in
the pool, or two sequences share one, they are gathered first; the rest is the same.

Long queries (prompts) go through `scaled_dot_product_attention`: a whole prompt over its own rows,
a later chunk over the gathered blocks of its sequence. It knows no soft cap: where scores have
one, `softcap.py` takes its place.

With `deterministic` a row has the same bits whatever shares its batch, and however its sequence is
cut: long queries go the way of short ones, a tile of 64 rows at a time; the partial sums of `o` are
added in fp32 in the order of the blocks, not by a product with a matrix of memberships; and in fp32
no product has fewer than 16 rows, which MKL adds up in another order. Blocks of another size than
64 are gathered into tiles of 64 keys first, so that the size does not matter. All else is
independent of the batch already: a row of a product with 64 keys, and a softmax whose rows end in
any number of hidden blocks.

The softmax is in fp32; scores and the partial sums of `o` are rounded to the dtype of q. The blocks
of a pool in 8 bits are converted to that dtype as they are read.
"""

from collections.abc import Sequence
from math import isfinite

import torch
import torch.nn.functional as F

from compress.runtime.attention.base import AttentionSpec
from compress.runtime.attention.block_plan import (
    MAX_SHORT_QUERY,
    LongPlan,
    Query,
    ShortPlan,
    TileGather,
    in_tiles,
    plan_long,
    plan_short,
    queries_of,
)
from compress.runtime.attention.pool import KVPool, PoolLayer, pool_rows
from compress.runtime.attention.softcap import capped_attention
from compress.runtime.batch import Batch

_TILE = 64  # rows of a long query at a time, and keys of a product, if deterministic
_MIN_PRODUCT_ROWS = {torch.bfloat16: 1, torch.float16: 16, torch.float32: 16}


class BlockwiseAttention:
    """Attention backend for CPUs."""

    def __init__(self, spec: AttentionSpec, pool: KVPool, *, deterministic: bool = False) -> None:
        self._spec = spec
        self._pool = pool
        self._deterministic = deterministic
        self._block_size = pool.k.shape[3]
        self._group = spec.num_heads // spec.num_kv_heads
        self._short: dict[int, _ShortStep] = {}  # window -> plan
        self._long: dict[int, list[LongPlan]] = {}
        self._tiles: dict[int, list[_Planned]] = {}
        self._layers = [pool.layer(i) for i in range(len(spec.windows))]
        self._rows: torch.Tensor | None = None

    def plan(self, batch: Batch) -> None:
        """Plan each distinct window of the model once."""
        lens = batch.host_query_lens
        short = [s for s, length in enumerate(lens) if length <= MAX_SHORT_QUERY]
        long = [s for s, length in enumerate(lens) if length > MAX_SHORT_QUERY]
        size = self._block_size
        self._rows = pool_rows(batch.slots, self._spec.num_kv_heads, size)
        self._short.clear()
        rows = _MIN_PRODUCT_ROWS[self._pool.dtype] if self._deterministic else 1
        min_rows = -(-rows // self._group)
        for window in set(self._spec.windows):
            if short:
                queries = queries_of(batch, short, size)
                self._short[window] = self._step(self._plan(queries, window, min_rows))
            if self._deterministic:
                tiles = queries_of(batch, long, size, tile=_TILE)
                self._tiles[window] = [self._plan([tile], window, min_rows) for tile in tiles]
                self._long[window] = []
            else:
                self._tiles[window] = []
                self._long[window] = plan_long(batch, long, size, window)

    def _plan(self, queries: Sequence[Query], window: int, min_rows: int) -> "_Planned":
        """The queries as one batch; if deterministic, over tiles of one size for any blocks."""
        if not self._deterministic or self._block_size == _TILE:
            return plan_short(queries, self._block_size, window, min_rows=min_rows), None
        queries, gather = in_tiles(queries, self._block_size, _TILE)
        return plan_short(queries, _TILE, window, min_rows=min_rows), gather

    def _step(self, planned: "_Planned") -> "_ShortStep":
        plan, gather = planned
        return _ShortStep(
            plan, self._spec, self._pool.dtype, ordered=self._deterministic, gather=gather
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """As in `AttentionBackend`."""
        assert self._rows is not None, "forward() before plan()"
        scales = self._pool.storage.scales
        if scales is not None:
            q = scales.scale_queries(q, layer)
            k, v = scales.encode(k, v, layer)
        pool = self._layers[layer]
        k, v = pool.write(k, v, self._rows)
        out = self._attend(q, k, v, pool, self._spec.windows[layer])
        return out if scales is None else scales.scale_outputs(out, layer)

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: PoolLayer, window: int
    ) -> torch.Tensor:
        """Every query of the batch over the pool, or over its own `k` and `v` as they are in it."""
        short, long, tiles = self._short.get(window), self._long[window], self._tiles[window]
        if short is not None and short.covers_batch(q):
            return short.attend(q, pool)
        if short is None and len(long) == 1:
            return self._attend_long(long[0], q, k, v, pool, window)
        out = torch.empty_like(q)
        if short is not None:
            short.attend_rows(q, pool, out)
        for tile in tiles:  # one at a time: their scores are large
            self._step(tile).attend_rows(q, pool, out)
        for plan in long:
            rows_end = plan.start + plan.count * plan.query_len
            sliced = slice(plan.start, rows_end)
            qkv = (q[sliced], k[sliced], v[sliced])
            out[sliced] = self._attend_long(plan, *qkv, pool, window)
        return out

    def _attend_long(
        self,
        plan: LongPlan,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: PoolLayer,
        window: int,
    ) -> torch.Tensor:
        rows, num_heads, head_dim = q.shape
        q = q.view(plan.count, plan.query_len, num_heads, head_dim).transpose(1, 2)
        if plan.block_ids is None:
            shape = (plan.count, plan.query_len, -1, head_dim)
            k, v = k.reshape(shape).transpose(1, 2), v.reshape(shape).transpose(1, 2)
        else:
            k, v = (_of_sequence(x, plan.context_len) for x in pool.read(plan.block_ids))
        if self._spec.soft_cap:
            out = capped_attention(
                q, k, v, scale=self._spec.scale, soft_cap=self._spec.soft_cap, window=window
            )
        else:
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=plan.mask,
                is_causal=plan.mask is None,
                scale=self._spec.scale,
                enable_gqa=self._group > 1,
            )
        return out.transpose(1, 2).reshape(rows, num_heads, head_dim)


_Planned = tuple[ShortPlan, TileGather | None]


class _ShortStep:
    """The short queries of one step: the plan and the buffers that its layers share.

    `ordered` adds the partial outputs of a query in the order of its blocks. With a `gather` the
    plan is for the tiles that it makes of the pools.
    """

    def __init__(
        self,
        plan: ShortPlan,
        spec: AttentionSpec,
        dtype: torch.dtype,
        *,
        ordered: bool,
        gather: TileGather | None = None,
    ) -> None:
        self.plan = plan
        self._gather = gather
        self._ordered = ordered
        self._spec = spec
        self._group = spec.num_heads // spec.num_kv_heads
        block_size = plan.mask.shape[-1]
        by_sequence = (
            plan.num_queries,
            spec.num_kv_heads,
            plan.query_len,
            self._group,
            plan.num_entries,
            block_size,
        )
        self._scores = torch.empty(by_sequence)
        self._probs = torch.empty_like(self._scores)
        by_entry = (plan.num_queries, plan.num_entries, *by_sequence[1:4], block_size)
        self._probs_by_entry = torch.empty(by_entry, dtype=dtype)
        self._membership = plan.membership.to(dtype)
        self._is_even = all(queries is None for queries, _ in plan.entries)

    def covers_batch(self, q: torch.Tensor) -> bool:
        """Whether the rows of the batch are exactly the padded queries, in order."""
        return self.plan.is_real is None and len(self.plan.rows) == len(q)

    def attend_rows(self, q: torch.Tensor, pool: PoolLayer, out: torch.Tensor) -> None:
        """Attend with the planned rows of `q` (T, H * G, D), and write those of `out`."""
        rows, is_real = self.plan.rows, self.plan.is_real
        attended = self.attend(q.index_select(0, rows), pool)
        if is_real is not None:
            rows, attended = rows[is_real], attended[is_real]
        out[rows] = attended

    def attend(self, q: torch.Tensor, pool: PoolLayer) -> torch.Tensor:
        """Queries (S * Q, H * G, D) over the pools (num_blocks, H, B, D); same shape out."""
        if self._gather is not None:
            pool = pool.mapped(self._gather)
        plan, group, heads = self.plan, self._group, self._spec.num_kv_heads
        num_queries, query_len, entries = plan.num_queries, plan.query_len, plan.num_entries
        block_size, head_dim = pool.k.shape[2:]
        rows = query_len * group
        in_place = slice(plan.first, plan.last)
        k, v = pool.read(in_place if plan.block_ids is None else plan.block_ids)
        items = len(plan.owner)
        queries = q.view(num_queries, query_len, heads, group, head_dim)
        if query_len > 1:
            queries = queries.transpose(1, 2)
        queries = queries.reshape(num_queries, heads * rows * head_dim)
        queries = queries.index_select(0, plan.owner).view(items * heads, rows, head_dim)

        keys = k.view(items * heads, block_size, head_dim).transpose(1, 2)
        if queries.dtype == torch.float16:  # the unscaled product can exceed its range
            queries, keys = queries.float(), keys.float()
        s = torch.bmm(queries, keys)
        s = s.view(items, heads * rows * block_size)
        if not plan.in_order:
            s = s.index_select(0, plan.item_of)
        s = s.view(num_queries, entries, heads, query_len, group, block_size)
        s, cap = s.permute(0, 2, 3, 4, 1, 5), self._spec.soft_cap
        if cap and self._ordered:  # tanh(x) = 2 sigmoid(2x) - 1: MKL's tanh depends on the place
            self._scores.copy_(s).mul_(2 * self._spec.scale / cap).sigmoid_().sub_(0.5)
            torch.add(plan.mask, self._scores, alpha=2 * cap, out=self._scores)
        elif cap:
            self._scores.copy_(s).mul_(self._spec.scale / cap).tanh_()
            torch.add(plan.mask, self._scores, alpha=cap, out=self._scores)
        else:
            torch.add(plan.mask, s, alpha=self._spec.scale, out=self._scores)
        torch.softmax(self._scores.flatten(4), dim=-1, out=self._probs.flatten(4))
        self._probs_by_entry.copy_(self._probs.permute(0, 4, 1, 2, 3, 5))
        p = self._probs_by_entry.view(num_queries * entries, heads * rows * block_size)
        if not plan.in_order:
            p = p.index_select(0, plan.entry_of)

        o = torch.bmm(
            p.view(items * heads, rows, block_size), v.view(items * heads, block_size, head_dim)
        )
        o = o.view(items, heads * rows * head_dim)
        o = self._sum_by_query(o).to(q.dtype)
        o = o.view(num_queries, heads, query_len, group, head_dim)
        if query_len > 1:
            o = o.transpose(1, 2)
        return o.reshape(num_queries * query_len, heads * group, head_dim)

    def _sum_by_query(self, o: torch.Tensor) -> torch.Tensor:
        """(S, ...) sums over the items of each query, from partial outputs (N, ...)."""
        plan = self.plan
        if not self._ordered:
            if self._is_even:
                if not plan.in_order:
                    o = o.index_select(0, plan.item_of)
                return o.view(plan.num_queries, plan.num_entries, -1).sum(1)
            total = self._membership @ o
            if isfinite(float(total.sum())):
                return total
            # 0 * NaN is not 0: a query that is not finite would take the others with it.
        total = torch.zeros(plan.num_queries, o.shape[1])
        for queries, items in plan.entries:
            part = o.index_select(0, items).float()
            if queries is None:
                total += part
            else:
                total.index_add_(0, queries, part)
        return total


def _of_sequence(blocks: torch.Tensor, context_len: int) -> torch.Tensor:
    """Blocks (n, num_kv_heads, block_size, D) as (1, num_kv_heads, context_len, D)."""
    rows = blocks.transpose(0, 1)
    return rows.reshape(1, rows.shape[0], -1, rows.shape[3])[:, :, :context_len]
