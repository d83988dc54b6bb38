"""The Triton kernels of `paged_attention`; contract, layout and launches are in that file.

Legend: BM packed query rows, BN tokens of a pool block, BD head_dim rounded up to a power of two.
A row's softmax state is (peak, total, acc): the largest score so far (in log2 units), the sum of
exp2(score - peak), and the sum of exp2(score - peak) * v.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from compress.kernels.jit import tl, triton


@triton.jit
def _loaded(values, dtype: tl.constexpr):
    # A tile of the pool in `dtype`: itself, or the values of float8_e4m3fn bytes, exactly. Their
    # exponent has 4 bits, biased by 7; float16 has 5, biased by 15.
    if values.dtype != tl.uint8:
        return values
    bits = values.to(tl.int32)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    half = half.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    half = tl.where((bits & 0x7F) == 0x7F, float("nan"), half)
    return half.to(dtype)


# fmt: off
@triton.jit
def _query_rows(
    query_starts_ptr, context_lens_ptr, tile, kv_head, s,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
):
    # fmt: on
    # Row m of a tile is head m % GROUP of token m // GROUP; the last rows may be unused.
    tokens_per_tile: tl.constexpr = BLOCK_M // GROUP
    query_start = tl.load(query_starts_ptr + s)
    query_len = tl.load(query_starts_ptr + s + 1) - query_start
    context_len = tl.load(context_lens_ptr + s)
    row = tl.arange(0, BLOCK_M)
    token = tile * tokens_per_tile + row // GROUP
    used = (row < tokens_per_tile * GROUP) & (token < query_len)
    head = kv_head * GROUP + row % GROUP
    first_pos = context_len - query_len + tile * tokens_per_tile
    last_pos = tl.minimum(first_pos + tokens_per_tile, context_len) - 1
    t = (query_start + token).to(tl.int64)
    return query_len, context_len, t, head, used, first_pos, last_pos, first_pos + row // GROUP


@triton.jit
def _empty_state(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.full((BLOCK_M,), 0.0, dtype=tl.float32)
    return peak, total, tl.full((BLOCK_M, BLOCK_D), 0.0, dtype=tl.float32)


# fmt: off
@triton.jit
def _attend(
    q, q_pos, k_pool_ptr, v_pool_ptr, table_ptr,
    first_tile, last_tile, context_len, kv_head, scale_log2, window,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # fmt: on
    # Softmax state of the rows over key tiles first_tile .. last_tile - 1. A row that sees no key
    # keeps the maximum -inf, the sum 0 and the output 0.
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    mask_d = offs_d[None, :] < HEAD_DIM
    offs = offs_n[:, None] * HEAD_DIM + offs_d[None, :]  # within one block of the pool
    peak, total, acc = _empty_state(BLOCK_M, BLOCK_D)
    for tile in range(first_tile, last_tile):
        block = tl.load(table_ptr + tile).to(tl.int64)
        start = (block * NUM_KV_HEADS + kv_head) * (BLOCK_N * HEAD_DIM)
        k_pos = tile * BLOCK_N + offs_n
        # The unwritten end of a block may hold NaN, which 0 * v would let through.
        written = (k_pos < context_len)[:, None] & mask_d
        k = tl.load(k_pool_ptr + start + offs, mask=written, other=0)  # [BN, BD]
        v = tl.load(v_pool_ptr + start + offs, mask=written, other=0)  # [BN, BD]
        k, v = _loaded(k, q.dtype), _loaded(v, q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [BM, BN]
        distance = q_pos[:, None] - k_pos[None, :]
        score = tl.where((distance >= 0) & (distance < window), score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score - shift[:, None])  # [BM, BN]
        decay = tl.exp2(peak - shift)
        total = total * decay + tl.sum(weight, axis=1)
        acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return peak, total, acc


@triton.jit
def _merge(peak_a, total_a, acc_a, peak_b, total_b, acc_b):
    # The state over the union of two key ranges. Explicit fma: both kernels must round alike.
    peak = tl.maximum(peak_a, peak_b)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    decay_a, decay_b = tl.exp2(peak_a - shift), tl.exp2(peak_b - shift)
    total = tl.fma(total_b, decay_b, total_a * decay_a)
    acc = tl.fma(acc_b, tl.broadcast_to(decay_b[:, None], acc_b.shape), acc_a * decay_a[:, None])
    return peak, total, acc


# fmt: off
@triton.jit
def whole_context_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, block_tables_ptr, context_lens_ptr, query_starts_ptr, y_ptr,
    scale_log2, window, min_query, max_query,
    stride_qt, stride_bs,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SEGMENT_TILES: tl.constexpr,
):
    # fmt: on
    # one program = BLOCK_M packed query rows of one sequence and KV head; whole context
    tile, kv_head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    query_len, context_len, t, head, used, first_pos, last_pos, q_pos = _query_rows(
        query_starts_ptr, context_lens_ptr, tile, kv_head, s, GROUP, BLOCK_M
    )
    # Each sequence is served by the launch whose tile suits its own query length.
    if (query_len < min_query) | (query_len > max_query) | (first_pos > last_pos):
        return
    offs_d = tl.arange(0, BLOCK_D)
    mask = used[:, None] & (offs_d < HEAD_DIM)[None, :]
    offs = (t * stride_qt + head * HEAD_DIM)[:, None] + offs_d[None, :]
    q = tl.load(q_ptr + offs, mask=mask, other=0.0)  # [BM, BD]
    first_tile = tl.maximum(first_pos - window + 1, 0) // BLOCK_N
    last_tile = last_pos // BLOCK_N + 1
    table_ptr = block_tables_ptr + s * stride_bs
    if SEGMENT_TILES == 0:  # a long query: one segment, and no second accumulator
        peak, total, acc = _attend(
            q, q_pos, k_pool_ptr, v_pool_ptr, table_ptr,
            first_tile, last_tile, context_len, kv_head, scale_log2, window,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    else:
        peak, total, acc = _empty_state(BLOCK_M, BLOCK_D)
        for segment in range(first_tile // SEGMENT_TILES, tl.cdiv(last_tile, SEGMENT_TILES)):
            start = tl.maximum(first_tile, segment * SEGMENT_TILES)
            stop = tl.minimum(last_tile, (segment + 1) * SEGMENT_TILES)
            peak_b, total_b, acc_b = _attend(
                q, q_pos, k_pool_ptr, v_pool_ptr, table_ptr,
                start, stop, context_len, kv_head, scale_log2, window,
                NUM_KV_HEADS, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            peak, total, acc = _merge(peak, total, acc, peak_b, total_b, acc_b)
    y = (acc / tl.where(used, total, 1.0)[:, None]).to(y_ptr.dtype.element_ty)
    row = (t * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(y_ptr + row[:, None] + offs_d[None, :], y, mask=mask)


# fmt: off
@triton.jit
def segment_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, block_tables_ptr, context_lens_ptr, query_starts_ptr,
    acc_ptr, peak_ptr, total_ptr,
    scale_log2, window, num_segments,
    stride_qt, stride_bs,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SEGMENT_TILES: tl.constexpr,
):
    # fmt: on
    # one program = BLOCK_M packed query rows of one sequence and KV head; one segment of context
    tile, s = tl.program_id(0), tl.program_id(2).to(tl.int64)
    kv_head, segment = tl.program_id(1) // num_segments, tl.program_id(1) % num_segments
    _query_len, context_len, t, head, used, first_pos, last_pos, q_pos = _query_rows(
        query_starts_ptr, context_lens_ptr, tile, kv_head, s, GROUP, BLOCK_M
    )
    first_tile = tl.maximum(first_pos - window + 1, 0) // BLOCK_N
    start = tl.maximum(first_tile, segment * SEGMENT_TILES)
    stop = tl.minimum(last_pos // BLOCK_N + 1, (segment + 1) * SEGMENT_TILES)
    if (first_pos > last_pos) | (start >= stop):
        return
    offs_d = tl.arange(0, BLOCK_D)
    mask = used[:, None] & (offs_d < HEAD_DIM)[None, :]
    offs = (t * stride_qt + head * HEAD_DIM)[:, None] + offs_d[None, :]
    q = tl.load(q_ptr + offs, mask=mask, other=0.0)  # [BM, BD]
    peak, total, acc = _attend(
        q, q_pos, k_pool_ptr, v_pool_ptr, block_tables_ptr + s * stride_bs,
        start, stop, context_len, kv_head, scale_log2, window,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    row = (t * (NUM_KV_HEADS * GROUP) + head) * num_segments + segment
    tl.store(peak_ptr + row, peak, mask=used)
    tl.store(total_ptr + row, total, mask=used)
    tl.store(acc_ptr + (row * HEAD_DIM)[:, None] + offs_d[None, :], acc, mask=mask)


# fmt: off
@triton.jit
def merge_segments_kernel(
    acc_ptr, peak_ptr, total_ptr, context_lens_ptr, query_starts_ptr, y_ptr,
    window, num_segments,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SEGMENT_TILES: tl.constexpr,
):
    # fmt: on
    # one program = BLOCK_M packed query rows of one sequence and KV head; all segments, in order
    tile, kv_head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    _query_len, _context_len, t, head, used, first_pos, last_pos, _q_pos = _query_rows(
        query_starts_ptr, context_lens_ptr, tile, kv_head, s, GROUP, BLOCK_M
    )
    if first_pos > last_pos:
        return
    offs_d = tl.arange(0, BLOCK_D)
    mask = used[:, None] & (offs_d < HEAD_DIM)[None, :]
    first_tile = tl.maximum(first_pos - window + 1, 0) // BLOCK_N
    last_tile = last_pos // BLOCK_N + 1
    peak, total, acc = _empty_state(BLOCK_M, BLOCK_D)
    out_row = t * (NUM_KV_HEADS * GROUP) + head
    for segment in range(first_tile // SEGMENT_TILES, tl.cdiv(last_tile, SEGMENT_TILES)):
        row = out_row * num_segments + segment
        peak_b = tl.load(peak_ptr + row, mask=used, other=float("-inf"))  # [BM]
        total_b = tl.load(total_ptr + row, mask=used, other=0.0)  # [BM]
        offs = (row * HEAD_DIM)[:, None] + offs_d[None, :]
        acc_b = tl.load(acc_ptr + offs, mask=mask, other=0.0)  # [BM, BD]
        peak, total, acc = _merge(peak, total, acc, peak_b, total_b, acc_b)
    y = (acc / tl.where(used, total, 1.0)[:, None]).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (out_row * HEAD_DIM)[:, None] + offs_d[None, :], y, mask=mask)
