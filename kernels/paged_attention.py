"""Causal attention of new tokens over keys and values that lie in a paged pool.

Shapes (T new tokens of S sequences, Hq query heads, Hk KV heads, D head_dim, NB blocks of BS
tokens, MB blocks per table row; GROUP = Hq / Hk, any whole number):
  q                 (T, Hq, D)       fp16 | bf16 | fp32   contiguous rows, which may lie apart
  k_pool, v_pool    (NB, Hk, BS, D)  dtype of q, float8_e4m3fn or int8, contiguous
  k_scale, v_scale  (NB, Hk, BS)     fp32, contiguous: key = code * k_scale, value = code * v_scale;
                                     needed for int8; None: the codes are the values
  block_tables      (S, MB)          int32   pool block of each block of a sequence
  context_lens      (S,)             int32   tokens of each sequence, the new ones included
  query_starts      (S + 1,)         int32   s owns rows query_starts[s] to query_starts[s+1] of q
  tree_mask         (T,)             int64, contiguous, or None
  y                 (T, Hq, D)       dtype of q, contiguous
Mathematics: query i of sequence s stands at position p = context_lens[s] - query_len[s] + i and
sees the keys j with p - window < j <= p; y = softmax(cap(scale * q k^T)) v over these, with the
running maximum and sum of FlashAttention in fp32. window 0 sees all j <= p. cap(x) = soft_cap *
tanh(x / soft_cap), as in Gemma 2; soft_cap 0 leaves x as it is.
Trees: bit j of tree_mask[i] says that new token i sees new token j of its sequence, counted from 0:
its ancestors and itself. Key j keeps its place in the pool, context_len - query_len + j, but both
tokens stand at their depth: position context_len - query_len + (bits set in its mask) - 1, of which
the window counts. Keys before the new tokens are seen as ever. 64 bits serve at most 64 new tokens.
Contract: the new keys and values are in the pool already; context_lens[s] >= query_len[s]; no
query_len exceeds max_query_len; a tree mask has the bit of its own token, that of no token past the
query, and with the bit of a token all bits of that one's mask. Table entries past the context or
wholly before the first new token's window are never read, nor is what lies in slots outside, so
they may hold anything. On Triton BS is a power of two from 16 to 128. code * scale must be in the
range of q's dtype for the largest code.

How Triton does it: the GROUP heads that share a KV head are packed with consecutive tokens as the
rows of one tile; 64 key positions are one tile of keys, with one look-up per block in it. Scales
multiply scores and weights, not the keys and values. Sequences with at most 64 new tokens
(decoding, verification of drafts) are cut along the context into segments of 512 tokens, one
program each, merged in order by a second kernel; next to long ones, or where the segments' sums
would fill the memory, one program takes the segments in turn, with the same arithmetic. The cuts
are at fixed positions and the kernel depends on the sequence's own query length, and a key that is
hidden adds zero: a row gives the same bits alone, in a batch, in a verification pass, and in one of
a tree whose other branches lie behind the row's own.

Dao, FlashAttention-2, arXiv:2307.08691; Kwon et al., PagedAttention, arXiv:2309.06180; Miao et al.,
SpecInfer, arXiv:2305.09781, section 4 (trees).
"""

import torch

from compress.kernels.jit import (
    FLOAT_DTYPES,
    BenchCase,
    CompileCase,
    check_rows,
    check_tensor,
    triton,
)
from compress.kernels.kv_codes import CODE_DTYPES, codes_in
from compress.kernels.paged_attention_bench import attention_bench
from compress.kernels.paged_attention_kernels import (
    long_query_kernel,
    merge_segments_kernel,
    segment_kernel,
    short_query_kernel,
)
from compress.kernels.paged_attention_variants import (
    MAX_SHORT_QUERY,
    SEGMENT,
    attention_cases,
    make_variant,
)
from compress.scheme import FLOAT8

_NO_WINDOW = 1 << 30
_LOG2_E = 1.4426950408889634  # exp(x) = exp2(x log2(e))
_MAX_SUMS_BYTES = 1 << 30  # of the segments; beyond, one program takes a row's segments in turn


def paged_attention_ref(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    max_query_len: int,
    soft_cap: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Oracle: `paged_attention` in float64, one query row at a time."""
    y = torch.zeros_like(q)
    group, block_size = q.shape[1] // k_pool.shape[1], k_pool.shape[2]
    starts = query_starts.tolist()
    for s, context in enumerate(context_lens.tolist()):
        start, stop = starts[s], starts[s + 1]
        assert stop - start <= max_query_len, "max_query_len is too small"
        base = context - (stop - start)
        masks = [(2 << i) - 1 for i in range(stop - start)]  # a chain
        if tree_mask is not None:
            masks = [mask % 2**64 for mask in tree_mask[start:stop].tolist()]
        for i, mask in enumerate(masks):
            seen = [*range(base), *(base + j for j in range(stop - start) if mask >> j & 1)]
            depth = {base + j: base + branch.bit_count() - 1 for j, branch in enumerate(masks)}
            if window:
                seen = [j for j in seen if depth[base + i] - depth.get(j, j) < window]
            positions = torch.tensor(seen, device=q.device)
            blocks, offsets = (
                block_tables[s, positions // block_size].long(),
                positions % block_size,
            )
            k, v = (
                _exact_rows(pool, scales, blocks, offsets).repeat_interleave(group, dim=1)
                for pool, scales in ((k_pool, k_scale), (v_pool, v_scale))
            )  # (n, Hq, D)
            scores = torch.einsum("hd,nhd->hn", q[start + i].double(), k) * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            y[start + i] = torch.einsum("hn,nhd->hd", torch.softmax(scores, dim=-1), v).to(q.dtype)
    return y


def _exact_rows(
    pool: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    rows = pool[blocks, :, offsets].double()
    return rows if scales is None else rows * scales[blocks, :, offsets].double()[..., None]


def paged_attention_triton(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    max_query_len: int,
    soft_cap: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Triton `paged_attention`; shapes, contract in the module docstring, ValueError if broken."""
    sequences = (block_tables, context_lens, query_starts)
    _check_tensors(q, k_pool, v_pool, *sequences)
    _check_options(q, k_pool, window, max_query_len, soft_cap, k_scale, v_scale, tree_mask)
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.numel():
        return y
    flags = {"scaled": k_scale is not None, "capped": soft_cap > 0, "tree": tree_mask is not None}
    num_kv_heads, num_seqs = k_pool.shape[1], len(context_lens)
    segment = make_variant("segment", q, k_pool, **flags)
    pools = [x.view(torch.uint8) if x.dtype == FLOAT8 else x for x in (k_pool, v_pool)]
    # An argument that a variant does not read still needs a tensor of its type.
    scales = [q.new_empty(1, dtype=torch.float32) if x is None else x for x in (k_scale, v_scale)]
    tree = q.new_empty(1, dtype=torch.int64) if tree_mask is None else tree_mask
    # A capped score becomes cap tanh(z) by exp(2 z) = exp2(score).
    score_scale = scale * _LOG2_E * (2 / soft_cap if soft_cap else 1)
    factors = (score_scale, soft_cap * _LOG2_E, window or _NO_WINDOW)
    args, strides = (q, *pools, *scales, *sequences, tree), (q.stride(0), block_tables.stride(0))
    num_segments = triton.cdiv(block_tables.shape[1] * k_pool.shape[2], SEGMENT)
    short_tiles = segment.num_tiles(min(max_query_len, MAX_SHORT_QUERY))
    if max_query_len > MAX_SHORT_QUERY:
        long = make_variant("long", q, k_pool, **flags)
        long_query_kernel[(long.num_tiles(max_query_len), num_kv_heads, num_seqs)](
            *args, y, *factors, MAX_SHORT_QUERY + 1, *strides, **long.constexprs, **long.options
        )
    if max_query_len > MAX_SHORT_QUERY or 4 * q.numel() * num_segments > _MAX_SUMS_BYTES:
        short = make_variant("short", q, k_pool, **flags)
        short_query_kernel[(short_tiles, num_kv_heads, num_seqs)](
            *args, y, *factors, MAX_SHORT_QUERY, *strides, **short.constexprs, **short.options
        )
        return y
    acc = q.new_empty((*q.shape[:2], num_segments, q.shape[2]), dtype=torch.float32)
    peak, total = acc.new_empty((2, *acc.shape[:3])).unbind()
    segment_kernel[(short_tiles, num_kv_heads * num_segments, num_seqs)](
        *args, acc, peak, total, *factors, num_segments, *strides,
        **segment.constexprs, **segment.options,
    )  # fmt: skip
    merge_segments_kernel[(short_tiles, num_kv_heads, num_seqs)](
        acc, peak, total, context_lens, query_starts, y, factors[-1], num_segments,
        **segment.for_merge().constexprs,
    )  # fmt: skip
    return y


def _check_tensors(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
) -> None:
    check_tensor("q", q, shape=(None, None, None), dtypes=FLOAT_DTYPES)
    pool_shape = (None, None, None, q.shape[2])
    check_tensor("k_pool", k_pool, shape=pool_shape, dtypes=(q.dtype, *CODE_DTYPES))
    check_tensor("v_pool", v_pool, shape=tuple(k_pool.shape), dtypes=(k_pool.dtype,))
    check_tensor("context_lens", context_lens, shape=(None,), dtypes=(torch.int32,))
    num_seqs = len(context_lens)
    check_tensor("block_tables", block_tables, shape=(num_seqs, None), dtypes=(torch.int32,))
    check_tensor("query_starts", query_starts, shape=(num_seqs + 1,), dtypes=(torch.int32,))
    check_rows("q", q)
    check_rows("block_tables", block_tables)
    _check_placed(
        q,
        k_pool=k_pool,
        v_pool=v_pool,
        context_lens=context_lens,
        query_starts=query_starts,
    )
    if block_tables.device != q.device:
        raise ValueError(f"block_tables must be on {q.device}, the device of q")
    if not k_pool.shape[1] or q.shape[1] % k_pool.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, no multiple of {k_pool.shape[1]} KV heads")
    if k_pool.shape[2] not in (16, 32, 64, 128):
        raise ValueError(f"k_pool has blocks of {k_pool.shape[2]} tokens; need 16, 32, 64 or 128")


def _check_options(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    window: int,
    max_query_len: int,
    soft_cap: float,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    tree_mask: torch.Tensor | None,
) -> None:
    if window < 0:
        raise ValueError(f"window must be 0 (none) or positive, got {window}")
    if not 0 <= soft_cap < float("inf"):
        raise ValueError(f"soft_cap must be 0 (none) or positive, got {soft_cap}")
    if k_scale is not None and v_scale is not None:
        if k_pool.dtype not in CODE_DTYPES:
            raise ValueError(f"k_scale belongs to int8 and float8 pools, k_pool is {k_pool.dtype}")
        for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
            check_tensor(name, scales, shape=tuple(k_pool.shape[:3]), dtypes=(torch.float32,))
        _check_placed(q, k_scale=k_scale, v_scale=v_scale)
    elif k_scale is not None or v_scale is not None:
        raise ValueError("k_scale and v_scale must be given together")
    elif k_pool.dtype == torch.int8:
        raise ValueError("k_scale and v_scale are needed for int8 pools")
    if tree_mask is not None:
        check_tensor("tree_mask", tree_mask, shape=(len(q),), dtypes=(torch.int64,))
        _check_placed(q, tree_mask=tree_mask)
        if max_query_len > MAX_SHORT_QUERY:
            raise ValueError(
                f"tree_mask serves up to {MAX_SHORT_QUERY} new tokens, got {max_query_len=}"
            )


def _check_placed(q: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Raise ValueError unless `tensors` are contiguous and on the device of `q`."""
    for name, tensor in tensors.items():
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on {q.device}, the device of q")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def paged_attention_torch(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    max_query_len: int,
    soft_cap: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Torch `paged_attention`: one sequence at a time, its blocks gathered.

    The heads that share a KV head are packed as query rows, which spares a copy of the keys.
    """
    num_kv_heads, block_size, head_dim = k_pool.shape[1:]
    group = q.shape[1] // num_kv_heads
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts = query_starts.tolist()
    for s, context in enumerate(context_lens.tolist()):
        start, stop = starts[s], starts[s + 1]
        if start == stop:
            continue
        base = context - (stop - start)  # position of the first query
        low = max(0, base - window + 1) // block_size if window else 0
        blocks = block_tables[s, low : -(-context // block_size)].long()
        keys = slice(0, context - low * block_size)
        k, v = (
            codes_in(pool[blocks], q.dtype).transpose(0, 1).flatten(1, 2)[:, keys]
            for pool in (k_pool, v_pool)
        )  # (Hk, number of keys, D)
        rows = q[start:stop].view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        rows = rows.reshape(num_kv_heads, -1, head_dim)  # (Hk, GROUP * query_len, D)
        scores = torch.matmul(rows, k.transpose(1, 2)).float() * scale
        if k_scale is not None:
            scores *= k_scale[blocks].transpose(0, 1).flatten(1)[:, None, keys]
        if soft_cap:
            scores = scores.div_(soft_cap).tanh_().mul_(soft_cap)
        tree = None if tree_mask is None else tree_mask[start:stop]
        hidden = _hidden(base, low * block_size, context, window, tree, q.device)
        scores.view(-1, *hidden.shape).masked_fill_(hidden, float("-inf"))
        if v_scale is not None:
            v = (v * v_scale[blocks].transpose(0, 1).flatten(1)[:, keys, None]).to(q.dtype)
        out = torch.matmul(torch.softmax(scores, dim=-1).to(q.dtype), v)
        out = out.view(num_kv_heads, group, -1, head_dim).permute(2, 0, 1, 3)
        y[start:stop] = out.reshape(y[start:stop].shape)
    return y


def _hidden(
    base: int,
    first: int,
    context: int,
    window: int,
    tree: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """(query_len, context - first): True where the key, counted from `first`, is not seen."""
    q_pos = torch.arange(base, context, device=device)
    k_pos = torch.arange(first, context, device=device)
    if tree is None:
        distance = q_pos[:, None] - k_pos
        hidden = distance < 0
    else:
        bits = (tree[:, None] >> torch.arange(context - base, device=device)) & 1
        q_pos = base - 1 + bits.sum(dim=1)
        k_pos[base - first :] = q_pos  # `first` is never past the new tokens
        distance = q_pos[:, None] - k_pos
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        hidden[:, base - first :] = bits == 0
    return hidden if not window else hidden | (distance >= window)


def compile_cases() -> list[CompileCase]:
    """Those of `paged_attention_variants.py`."""
    return attention_cases()


def bench_cases() -> list[BenchCase]:
    """Those of `paged_attention_bench.py`."""
    return attention_bench(paged_attention_triton)
