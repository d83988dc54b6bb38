"""Causal attention of new tokens over keys and values that lie in a paged pool.

Shapes (T new tokens of S sequences, Hq query heads, Hk KV heads, D head_dim, NB blocks of BS
tokens, MB blocks per table row; GROUP = Hq / Hk, any whole number):
  q               (T, Hq, D)       fp16 | bf16 | fp32   contiguous rows, which may lie apart
  k_pool, v_pool  (NB, Hk, BS, D)  dtype of q, or float8_e4m3fn, contiguous
  block_tables    (S, MB)          int32   pool block of each block of a sequence
  context_lens    (S,)             int32   tokens of each sequence, the new ones included
  query_starts    (S + 1,)         int32   s owns rows query_starts[s] to query_starts[s+1] of q
  y               (T, Hq, D)       dtype of q, contiguous
Mathematics: query i of sequence s stands at position p = context_lens[s] - query_len[s] + i and
sees the keys j with p - window < j <= p; y = softmax(scale * q k^T) v over these, with the running
maximum and sum of FlashAttention in fp32. window 0 sees all j <= p.
Contract: the new keys and values are in the pool already; context_lens[s] >= query_len[s]; no
query_len exceeds max_query_len. Table entries past the context or wholly before the window are
never read, so they may hold anything. On Triton BS is a power of two from 16 to 128.

How Triton does it: the GROUP heads that share a KV head are packed with consecutive tokens as the
rows of one tile, and one block of the pool is one tile of keys, so a tile costs one scalar look-up.
Sequences with at most 16 new tokens (decoding, verification of a draft) are cut along the context
into segments of 512 tokens, one program each, merged in order by a second kernel. The cuts are at
fixed positions and the kernel depends on the sequence's own query length, so a row gives the same
bits alone, in a batch, or in a verification pass. A float8 pool is loaded as bytes, which every GPU
can do, and put into the bits of wider floats: the values are exact.

Dao, FlashAttention-2, arXiv:2307.08691; Kwon et al., PagedAttention, arXiv:2309.06180.
"""

from itertools import product
from typing import NamedTuple

import torch

from compress.kernels.float8 import decode_float8
from compress.kernels.jit import (
    FLOAT_DTYPES,
    CompileCase,
    Instruction,
    check_rows,
    check_tensor,
    triton,
)
from compress.kernels.paged_attention_kernels import (
    merge_segments_kernel,
    segment_kernel,
    whole_context_kernel,
)
from compress.scheme import FLOAT8

_MAX_SHORT_QUERY = 16  # new tokens; longer queries fill large tiles, and are not cut
_SEGMENT = 512  # context tokens per program of a short query
_NO_WINDOW = 1 << 30
_BYTE_STAGES = 4  # at most, for float8 pools: with 5, converting the values spills registers


class _Tile(NamedTuple):
    block_m: int  # packed query rows
    num_warps: int
    num_stages: int


_POOL_DTYPES = {"bf16": torch.bfloat16, "u8": torch.uint8}  # what is compiled without a GPU

# Launch -> (largest bytes of one key, tile): a short query over one segment or, next to long ones,
# over its whole context, and a long query. Short ones share block_m and num_warps, hence the order
# of their sums. The stages keep keys and values in flight within the shared memory of an A100
# (163 KiB), and nothing spills on sm_80 and sm_90. Not yet timed on a card.
_TILES: dict[str, tuple[tuple[int, _Tile], ...]] = {
    "segment": ((128, _Tile(16, 4, 5)), (256, _Tile(16, 8, 6)), (512, _Tile(16, 8, 3))),
    "short": ((128, _Tile(16, 4, 5)), (256, _Tile(16, 8, 6)), (512, _Tile(16, 8, 3))),
    "long": ((128, _Tile(64, 8, 3)), (256, _Tile(64, 8, 3)), (512, _Tile(64, 8, 2))),
}


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
) -> torch.Tensor:
    """Oracle: `paged_attention` in float64, one query row at a time."""
    y = torch.zeros_like(q)
    group, block_size = q.shape[1] // k_pool.shape[1], k_pool.shape[2]
    starts = query_starts.tolist()
    for s, context in enumerate(context_lens.tolist()):
        start, stop = starts[s], starts[s + 1]
        assert stop - start <= max_query_len, "max_query_len is too small"
        for t in range(start, stop):
            last = context - stop + t
            first = max(0, last - window + 1) if window else 0
            positions = torch.arange(first, last + 1, device=q.device)
            blocks, offsets = block_tables[s, positions // block_size], positions % block_size
            k, v = (
                pool[blocks, :, offsets].double().repeat_interleave(group, dim=1)  # (n, Hq, D)
                for pool in (k_pool, v_pool)
            )
            scores = torch.einsum("hd,nhd->hn", q[t].double(), k) * scale
            y[t] = torch.einsum("hn,nhd->hd", torch.softmax(scores, dim=-1), v).to(q.dtype)
    return y


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
) -> torch.Tensor:
    """Triton `paged_attention`; shapes, contract in the module docstring, ValueError if broken."""
    _check(q, k_pool, v_pool, block_tables, context_lens, query_starts, window)
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.numel():
        return y
    if k_pool.dtype == FLOAT8:
        k_pool, v_pool = k_pool.view(torch.uint8), v_pool.view(torch.uint8)
    num_kv_heads, num_seqs = k_pool.shape[1], len(context_lens)
    sequences = (block_tables, context_lens, query_starts)
    scale_log2 = scale * 1.4426950408889634  # exp(x) = exp2(x log2(e))
    reach = window or _NO_WINDOW
    strides = (q.stride(0), block_tables.stride(0))
    if max_query_len > _MAX_SHORT_QUERY:
        bounds = {"short": (1, _MAX_SHORT_QUERY), "long": (_MAX_SHORT_QUERY + 1, max_query_len)}
        for launch, (shortest, longest) in bounds.items():
            constexprs, options = _variant(launch, q, k_pool)
            grid = (_num_tiles(longest, constexprs), num_kv_heads, num_seqs)
            args = (q, k_pool, v_pool, *sequences, y, scale_log2, reach, shortest, longest)
            whole_context_kernel[grid](*args, *strides, **constexprs, **options)
        return y
    constexprs, options = _variant("segment", q, k_pool)
    num_segments = triton.cdiv(block_tables.shape[1], constexprs["SEGMENT_TILES"])
    acc = q.new_empty((*q.shape[:2], num_segments, q.shape[2]), dtype=torch.float32)
    peak, total = acc.new_empty((2, *acc.shape[:3])).unbind()
    tiles = _num_tiles(max_query_len, constexprs)
    segment_kernel[(tiles, num_kv_heads * num_segments, num_seqs)](
        q, k_pool, v_pool, *sequences, acc, peak, total, scale_log2, reach, num_segments, *strides,
        **constexprs, **options,
    )  # fmt: skip
    merge_segments_kernel[(tiles, num_kv_heads, num_seqs)](
        acc, peak, total, context_lens, query_starts, y, reach, num_segments, **constexprs
    )
    return y


def _check(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    window: int,
) -> None:
    check_tensor("q", q, shape=(None, None, None), dtypes=FLOAT_DTYPES)
    pool_shape = (None, None, None, q.shape[2])
    check_tensor("k_pool", k_pool, shape=pool_shape, dtypes=(q.dtype, FLOAT8))
    check_tensor("v_pool", v_pool, shape=tuple(k_pool.shape), dtypes=(k_pool.dtype,))
    check_tensor("context_lens", context_lens, shape=(None,), dtypes=(torch.int32,))
    num_seqs = len(context_lens)
    check_tensor("block_tables", block_tables, shape=(num_seqs, None), dtypes=(torch.int32,))
    check_tensor("query_starts", query_starts, shape=(num_seqs + 1,), dtypes=(torch.int32,))
    check_rows("q", q)
    check_rows("block_tables", block_tables)
    if not (k_pool.is_contiguous() and v_pool.is_contiguous()):
        raise ValueError("k_pool and v_pool must be contiguous")
    if q.shape[1] % k_pool.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads, no multiple of {k_pool.shape[1]} KV heads")
    if k_pool.shape[2] not in (16, 32, 64, 128):
        raise ValueError(f"k_pool has blocks of {k_pool.shape[2]} tokens; need 16, 32, 64 or 128")
    if window < 0:
        raise ValueError(f"window must be 0 (none) or positive, got {window}")


def _variant(
    launch: str, q: torch.Tensor, k_pool: torch.Tensor
) -> tuple[dict[str, int], dict[str, int]]:
    """Compile-time constants and launch options; ValueError for a head_dim that no tile holds."""
    num_kv_heads, block_size, head_dim = k_pool.shape[1:]
    group = q.shape[1] // num_kv_heads
    block_d = triton.next_power_of_2(max(head_dim, 16))
    fitting = [tile for nbytes, tile in _TILES[launch] if block_d * q.itemsize <= nbytes]
    if not fitting:
        raise ValueError(f"q has head_dim {head_dim}, too large for {q.itemsize}-byte values")
    tile = fitting[0]
    constexprs = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_M": max(tile.block_m, triton.next_power_of_2(group)),
        "BLOCK_N": block_size,
        "BLOCK_D": block_d,
        "SEGMENT_TILES": 0 if launch == "long" else _SEGMENT // block_size,
    }
    num_stages = tile.num_stages if k_pool.itemsize > 1 else min(tile.num_stages, _BYTE_STAGES)
    return constexprs, {"num_warps": tile.num_warps, "num_stages": num_stages}


def _num_tiles(max_query_len: int, constexprs: dict[str, int]) -> int:
    tokens_per_tile = constexprs["BLOCK_M"] // constexprs["GROUP"]
    return int(triton.cdiv(max_query_len, tokens_per_tile))


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
        first = context - (stop - start)  # position of the first query
        low = max(0, first - window + 1) // block_size if window else 0
        blocks = block_tables[s, low : -(-context // block_size)].long()
        shape = (num_kv_heads, len(blocks) * block_size, head_dim)
        num_keys = context - low * block_size
        k, v = (
            _in_dtype(p[blocks], q.dtype).transpose(0, 1).reshape(shape)[:, :num_keys]
            for p in (k_pool, v_pool)
        )
        rows = q[start:stop].view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
        rows = rows.reshape(num_kv_heads, -1, head_dim)  # (Hk, GROUP * query_len, D)
        scores = torch.matmul(rows, k.transpose(1, 2)).float() * scale
        q_pos = torch.arange(first, context, device=q.device)[:, None]
        distance = q_pos - torch.arange(low * block_size, context, device=q.device)
        hidden = distance < 0 if not window else (distance < 0) | (distance >= window)
        scores.view(-1, *hidden.shape).masked_fill_(hidden, float("-inf"))
        out = torch.matmul(torch.softmax(scores, dim=-1).to(q.dtype), v)
        out = out.view(num_kv_heads, group, -1, head_dim).permute(2, 0, 1, 3)
        y[start:stop] = out.reshape(y[start:stop].shape)
    return y


def _in_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else decode_float8(x, dtype)


def compile_cases() -> list[CompileCase]:
    """Every tile for short and long queries: groups of 3 and 4, head_dim 64, 128 and 256.

    Each with a pool in 16 and in 8 bits.
    """
    floats = dict.fromkeys(("q_ptr", "y_ptr"), "*bf16")
    tables = dict.fromkeys(("block_tables_ptr", "context_lens_ptr", "query_starts_ptr"), "*i32")
    states = dict.fromkeys(("acc_ptr", "peak_ptr", "total_ptr"), "*fp32")
    types = floats | tables | states | {"scale_log2": "fp32"}
    memory: tuple[Instruction, ...] = ("load16",)
    tensor_core: tuple[Instruction, ...] = (*memory, "mma")
    kernels = {
        "segment": (segment_kernel, tensor_core),
        "short": (whole_context_kernel, tensor_core),
        "long": (whole_context_kernel, (*tensor_core, "wgmma")),
    }
    cases = []
    shapes = ((3, 3, 64), (4, 8, 128), (4, 8, 256))
    for (group, kv_heads, head_dim), (name, dtype) in product(shapes, _POOL_DTYPES.items()):
        q = torch.empty(1, group * kv_heads, head_dim, dtype=torch.bfloat16, device="meta")
        pool = torch.empty(1, kv_heads, 64, head_dim, dtype=dtype, device="meta")
        variants = {
            launch: (kernel, meant, *_variant(launch, q, pool))
            for launch, (kernel, meant) in kernels.items()
        }
        segment_constexprs = variants["segment"][2]
        variants["merge"] = (merge_segments_kernel, memory, segment_constexprs, {})
        pools = dict.fromkeys(("k_pool_ptr", "v_pool_ptr"), f"*{name}")
        for launch, (kernel, meant, constexprs, options) in variants.items():
            cases.append(
                CompileCase(
                    kernel=kernel,
                    label=f"{launch},{name},group={group},head_dim={head_dim}",
                    types=types | pools,
                    constexprs=constexprs,
                    divisible=("stride_qt",),
                    meant=meant,
                    **options,
                )
            )
    return cases
