"""The Triton kernels of `paged_attention`; contract, layout and launches are in that file.

Legend: BM packed query rows, BN key positions of a tile, BD head_dim rounded up to a power of two.
A row's softmax state is (peak, total, acc): the largest score so far (in log2 units), the sum of
exp2(score - peak), and the sum of exp2(score - peak) * v. With scales, v stands for its codes times
V_GAIN * v_scale, and V_GAIN is taken out when the sum is complete.

`base` is the number of tokens before the new ones: new token j has the key position base + j. `low`
is the first key position that any row of a tile sees.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from compress.kernels.jit import tl, triton
from compress.kernels.kv_codes import decode_codes


@triton.jit
def _count_bits(x):
    # Of int64, the sign included: sums of neighbouring 1, 2, 4, ... bits.
    x -= (x >> 1) & 0x5555555555555555
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x += x >> 8
    x += x >> 16
    x += x >> 32
    return (x & 0x7F).to(tl.int32)


# fmt: off
@triton.jit
def _query_rows(
    query_starts_ptr, context_lens_ptr, tree_ptr, tile, kv_head, s, window,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, TREE: tl.constexpr,
):
    # fmt: on
    # Row m of a tile is head m % GROUP of token m // GROUP; the last rows may be unused.
    tokens_per_tile: tl.constexpr = BLOCK_M // GROUP
    query_start = tl.load(query_starts_ptr + s)
    query_len = tl.load(query_starts_ptr + s + 1) - query_start
    context_len = tl.load(context_lens_ptr + s)
    base = context_len - query_len
    row = tl.arange(0, BLOCK_M)
    token = tile * tokens_per_tile + row // GROUP
    used = (row < tokens_per_tile * GROUP) & (token < query_len)
    head = kv_head * GROUP + row % GROUP
    t = (query_start + token).to(tl.int64)
    if TREE:  # a row may see any of the new tokens, and stands at least at `base`
        tree = tl.load(tree_ptr + t, mask=used, other=1)  # [BM]
        q_pos = base + _count_bits(tree) - 1
        first_pos = base
        last_pos = context_len - 1
    else:
        tree = t
        q_pos = base + token
        first_pos = base + tile * tokens_per_tile
        last_pos = tl.minimum(first_pos + tokens_per_tile, context_len) - 1
    is_empty = tile * tokens_per_tile >= query_len
    low = tl.maximum(first_pos - window + 1, 0)
    return query_len, context_len, base, t, head, used, is_empty, tree, q_pos, low, last_pos


@triton.jit
def _empty_state(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    peak = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total = tl.full((BLOCK_M,), 0.0, dtype=tl.float32)
    return peak, total, tl.full((BLOCK_M, BLOCK_D), 0.0, dtype=tl.float32)


@triton.jit
def _soft_capped(x, cap_log2, PRECISE: tl.constexpr):
    # cap tanh(z) in log2 units, where x = 2 z log2(e), so that exp2(x) = exp(2 z).
    if PRECISE:
        decay = tl.exp2(-tl.abs(x))
        large = (1.0 - decay) / (1.0 + decay)
        z = x * 0.34657359027997264  # ln(2) / 2
        z2 = z * z  # the Taylor series; the next term is 8e-9 of it at |z| = 1/4
        series = ((z2 * (62.0 / 2835.0) - 17.0 / 315.0) * z2 + 2.0 / 15.0) * z2 - 1.0 / 3.0
        small = z + z * (z2 * series)
        capped = cap_log2 * tl.where(z2 < 0.0625, small, tl.where(x < 0, -large, large))
    else:  # to about 1e-7 of the cap: below what the dtype of q resolves
        capped = cap_log2 - 2.0 * cap_log2 / (1.0 + tl.exp2(x))
    return capped


# fmt: off
@triton.jit
def _visible(
    q_pos, k_pos, tree, tree_ptr, base, context_len, window,
    TREE: tl.constexpr,
):
    # fmt: on
    # [BM, BN]: whether row m sees key n. With TREE a new token stands at the depth of its branch.
    if TREE:
        is_new = (k_pos >= base) & (k_pos < context_len)
        branch = tl.load(tree_ptr + k_pos - base, mask=is_new, other=1)  # [BN]
        depth_pos = tl.where(is_new, base + _count_bits(branch) - 1, k_pos)
        bit = tl.minimum(tl.maximum(k_pos - base, 0), 63).to(tl.int64)
        on_branch = ((tree[:, None] >> bit[None, :]) & 1) != 0
        seen = (k_pos < base)[None, :] | (is_new[None, :] & on_branch)
        seen = seen & (q_pos[:, None] - depth_pos[None, :] < window)
    else:
        distance = q_pos[:, None] - k_pos[None, :]
        seen = (distance >= 0) & (distance < window)
    return seen


# fmt: off
@triton.jit
def _attend(
    peak, total, acc, q, q_pos, tree,
    k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, table_ptr, tree_ptr,
    first_tile, last_tile, low, base, context_len, kv_head, score_scale, cap_log2, window,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    V_GAIN: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, TREE: tl.constexpr,
):
    # fmt: on
    # The softmax state of the rows after key tiles first_tile .. last_tile - 1 as well. A row that
    # sees no key keeps the maximum -inf, the sum 0 and the output 0. Not MASKED: all rows see all.
    offs_n, offs_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    for tile in range(first_tile, last_tile):
        k_pos = tile * BLOCK_N + offs_n
        readable = (k_pos >= low) & (k_pos < context_len)
        if BLOCK_SIZE >= BLOCK_N:  # the tile lies in one block: one look-up
            block = tl.load(table_ptr + tile * BLOCK_N // BLOCK_SIZE).to(tl.int64)
            start = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + tile * BLOCK_N % BLOCK_SIZE
            start_d = start * HEAD_DIM
            rows = offs_n
        else:
            block = tl.load(table_ptr + k_pos // BLOCK_SIZE, mask=readable, other=0).to(tl.int64)
            start, start_d = 0, 0
            rows = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + k_pos % BLOCK_SIZE  # [BN]
        offs = rows[:, None] * HEAD_DIM + offs_d[None, :]
        if MASKED:
            # The unwritten end of a block may hold NaN, which 0 * v would let through.
            mask = readable[:, None] & (offs_d < HEAD_DIM)[None, :]
            k = tl.load(k_pool_ptr + start_d + offs, mask=mask, other=0)  # [BN, BD]
            v = tl.load(v_pool_ptr + start_d + offs, mask=mask, other=0)  # [BN, BD]
        elif HEAD_DIM < BLOCK_D:
            mask = (offs_d < HEAD_DIM)[None, :]
            k = tl.load(k_pool_ptr + start_d + offs, mask=mask, other=0)
            v = tl.load(v_pool_ptr + start_d + offs, mask=mask, other=0)
        else:
            k = tl.load(k_pool_ptr + start_d + offs)
            v = tl.load(v_pool_ptr + start_d + offs)
        score = tl.dot(q, tl.trans(decode_codes(k, q.dtype)), input_precision="ieee")  # [BM, BN]
        if V_GAIN > 0:
            k_scale = tl.load(k_scale_ptr + start + rows, mask=readable, other=0.0)  # [BN]
            score = score * k_scale[None, :]
        score = score * score_scale
        if CAPPED:
            score = _soft_capped(score, cap_log2, q.dtype == tl.float32)
        if MASKED:
            seen = _visible(q_pos, k_pos, tree, tree_ptr, base, context_len, window, TREE)
            score = tl.where(seen, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(score - shift[:, None])  # [BM, BN]
        decay = tl.exp2(peak - shift)
        total = tl.fma(total, decay, tl.sum(weight, axis=1))
        if V_GAIN > 0:
            v_scale = tl.load(v_scale_ptr + start + rows, mask=readable, other=0.0)  # [BN]
            weight = weight * (v_scale * V_GAIN)[None, :]
        v = decode_codes(v, q.dtype)  # not before: two decoded tiles would spill registers
        acc = tl.dot(weight.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        peak = new_peak
    return peak, total, acc


# fmt: off
@triton.jit
def _attend_segment(
    q, q_pos, tree,
    k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, table_ptr, tree_ptr,
    first_tile, last_tile, low, base, context_len, kv_head, score_scale, cap_log2, window,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    V_GAIN: tl.constexpr, CAPPED: tl.constexpr, TREE: tl.constexpr,
):
    # fmt: on
    # State of the rows of a short query over one segment. Only the last tiles have new tokens, and
    # only they look at the tree.
    stop = last_tile
    if TREE:
        stop = tl.minimum(stop, tl.maximum(first_tile, base // BLOCK_N))
    peak, total, acc = _empty_state(BLOCK_M, BLOCK_D)
    peak, total, acc = _attend(
        peak, total, acc, q, q_pos, tree,
        k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, table_ptr, tree_ptr,
        first_tile, stop, low, base, context_len, kv_head, score_scale, cap_log2, window,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, V_GAIN, CAPPED, True, False,
    )  # fmt: skip
    if TREE:
        peak, total, acc = _attend(
            peak, total, acc, q, q_pos, tree,
            k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, table_ptr, tree_ptr,
            stop, last_tile, low, base, context_len, kv_head, score_scale, cap_log2, window,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, V_GAIN, CAPPED, True, True,
        )  # fmt: skip
    if V_GAIN > 0:
        acc = acc * (1.0 / V_GAIN)
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
def long_query_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr,
    block_tables_ptr, context_lens_ptr, query_starts_ptr, tree_ptr, y_ptr,
    score_scale, cap_log2, window, min_query,
    stride_qt, stride_bs,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    V_GAIN: tl.constexpr, CAPPED: tl.constexpr,
):
    # fmt: on
    # one program = BLOCK_M packed query rows of one sequence and KV head; whole context. The last
    # rows see most keys: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, s = tl.program_id(1), tl.program_id(2).to(tl.int64)
    query_len, context_len, base, t, head, used, is_empty, tree, q_pos, low, last_pos = _query_rows(
        query_starts_ptr, context_lens_ptr, tree_ptr, tile, kv_head, s, window,
        GROUP, BLOCK_M, False,
    )  # fmt: skip
    if (query_len < min_query) | is_empty:
        return
    offs_d = tl.arange(0, BLOCK_D)
    mask = used[:, None] & (offs_d < HEAD_DIM)[None, :]
    offs = (t * stride_qt + head * HEAD_DIM)[:, None] + offs_d[None, :]
    q = tl.load(q_ptr + offs, mask=mask, other=0.0)  # [BM, BD]
    table_ptr = block_tables_ptr + s * stride_bs
    first_tile, last_tile = low // BLOCK_N, last_pos // BLOCK_N + 1
    peak, total, acc = _empty_state(BLOCK_M, BLOCK_D)
    # Tiles that the window cuts, tiles that all rows see whole, tiles that the diagonal cuts.
    first_pos = base + tile * (BLOCK_M // GROUP)
    full_start = tl.cdiv(tl.maximum(last_pos - window + 1, 0), BLOCK_N)
    full_start = tl.minimum(full_start, last_tile)
    full_stop = tl.maximum((first_pos + 1) // BLOCK_N, full_start)
    peak, total, acc = _attend(
        peak, total, acc, q, q_pos, tree,
        k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, table_ptr, tree_ptr,
        first_tile, full_start, low, base, context_len, kv_head, score_scale, cap_log2, window,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, V_GAIN, CAPPED, True, False,
    )  # fmt: skip
    peak, total, acc = _attend(
        peak, total, acc, q, q_pos, tree,
        k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, table_ptr, tree_ptr,
        full_start, full_stop, low, base, context_len, kv_head, score_scale, cap_log2, window,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, V_GAIN, CAPPED, False, False,
    )  # fmt: skip
    peak, total, acc = _attend(
        peak, total, acc, q, q_pos, tree,
        k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, table_ptr, tree_ptr,
        full_stop, last_tile, low, base, context_len, kv_head, score_scale, cap_log2, window,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D, V_GAIN, CAPPED, True, False,
    )  # fmt: skip
    if V_GAIN > 0:
        acc = acc * (1.0 / V_GAIN)
    y = (acc / tl.where(used, total, 1.0)[:, None]).to(y_ptr.dtype.element_ty)
    row = (t * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(y_ptr + row[:, None] + offs_d[None, :], y, mask=mask)


# fmt: off
@triton.jit
def short_query_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr,
    block_tables_ptr, context_lens_ptr, query_starts_ptr, tree_ptr, y_ptr,
    score_scale, cap_log2, window, max_query,
    stride_qt, stride_bs,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SEGMENT_TILES: tl.constexpr, V_GAIN: tl.constexpr, CAPPED: tl.constexpr, TREE: tl.constexpr,
):
    # fmt: on
    # one program = BLOCK_M packed query rows of one sequence and KV head; its segments in order
    tile, kv_head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    query_len, context_len, base, t, head, used, is_empty, tree, q_pos, low, last_pos = _query_rows(
        query_starts_ptr, context_lens_ptr, tree_ptr, tile, kv_head, s, window,
        GROUP, BLOCK_M, TREE,
    )  # fmt: skip
    if (query_len > max_query) | is_empty:
        return
    offs_d = tl.arange(0, BLOCK_D)
    mask = used[:, None] & (offs_d < HEAD_DIM)[None, :]
    offs = (t * stride_qt + head * HEAD_DIM)[:, None] + offs_d[None, :]
    q = tl.load(q_ptr + offs, mask=mask, other=0.0)  # [BM, BD]
    new_tree_ptr = tree_ptr + tl.load(query_starts_ptr + s)
    table_ptr = block_tables_ptr + s * stride_bs
    first_tile, last_tile = low // BLOCK_N, last_pos // BLOCK_N + 1
    peak, total, acc = _empty_state(BLOCK_M, BLOCK_D)
    for segment in range(first_tile // SEGMENT_TILES, tl.cdiv(last_tile, SEGMENT_TILES)):
        start = tl.maximum(first_tile, segment * SEGMENT_TILES)
        stop = tl.minimum(last_tile, (segment + 1) * SEGMENT_TILES)
        peak_b, total_b, acc_b = _attend_segment(
            q, q_pos, tree,
            k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, table_ptr, new_tree_ptr,
            start, stop, low, base, context_len, kv_head, score_scale, cap_log2, window,
            NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, V_GAIN, CAPPED, TREE,
        )  # fmt: skip
        peak, total, acc = _merge(peak, total, acc, peak_b, total_b, acc_b)
    y = (acc / tl.where(used, total, 1.0)[:, None]).to(y_ptr.dtype.element_ty)
    row = (t * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
    tl.store(y_ptr + row[:, None] + offs_d[None, :], y, mask=mask)


# fmt: off
@triton.jit
def segment_kernel(
    q_ptr, k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr,
    block_tables_ptr, context_lens_ptr, query_starts_ptr, tree_ptr, acc_ptr, peak_ptr, total_ptr,
    score_scale, cap_log2, window, num_segments,
    stride_qt, stride_bs,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SEGMENT_TILES: tl.constexpr, V_GAIN: tl.constexpr, CAPPED: tl.constexpr, TREE: tl.constexpr,
):
    # fmt: on
    # one program = BLOCK_M packed query rows of one sequence and KV head; one segment of context
    tile, s = tl.program_id(0), tl.program_id(2).to(tl.int64)
    kv_head, segment = tl.program_id(1) // num_segments, tl.program_id(1) % num_segments
    _, context_len, base, t, head, used, is_empty, tree, q_pos, low, last_pos = _query_rows(
        query_starts_ptr, context_lens_ptr, tree_ptr, tile, kv_head, s, window,
        GROUP, BLOCK_M, TREE,
    )  # fmt: skip
    start = tl.maximum(low // BLOCK_N, segment * SEGMENT_TILES)
    stop = tl.minimum(last_pos // BLOCK_N + 1, (segment + 1) * SEGMENT_TILES)
    if is_empty | (start >= stop):
        return
    offs_d = tl.arange(0, BLOCK_D)
    mask = used[:, None] & (offs_d < HEAD_DIM)[None, :]
    offs = (t * stride_qt + head * HEAD_DIM)[:, None] + offs_d[None, :]
    q = tl.load(q_ptr + offs, mask=mask, other=0.0)  # [BM, BD]
    new_tree_ptr = tree_ptr + tl.load(query_starts_ptr + s)
    peak, total, acc = _attend_segment(
        q, q_pos, tree,
        k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr,
        block_tables_ptr + s * stride_bs, new_tree_ptr,
        start, stop, low, base, context_len, kv_head, score_scale, cap_log2, window,
        NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D, V_GAIN, CAPPED, TREE,
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
    SEGMENT_TILES: tl.constexpr, TREE: tl.constexpr,
):
    # fmt: on
    # one program = BLOCK_M packed query rows of one sequence and KV head; all segments, in order
    tile, kv_head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    _, context_len, base, t, head, used, is_empty, _tree, _q_pos, low, last_pos = _query_rows(
        query_starts_ptr, context_lens_ptr, query_starts_ptr, tile, kv_head, s, window,
        GROUP, BLOCK_M, False,
    )  # fmt: skip
    if is_empty:
        return
    if TREE:  # the key range of `_query_rows` with a tree, whose masks are not needed here
        low, last_pos = tl.maximum(base - window + 1, 0), context_len - 1
    offs_d = tl.arange(0, BLOCK_D)
    mask = used[:, None] & (offs_d < HEAD_DIM)[None, :]
    first_tile, last_tile = low // BLOCK_N, last_pos // BLOCK_N + 1
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
