"""The Triton kernels of `grouped_matmul`; contract, layout and launches are in that file.

Legend: BM slots of one expert, BN weight rows, BK columns per step (BW words of a packed weight).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from compress.kernels.jit import tl, triton
from compress.kernels.wna16_kernels import accumulate


@triton.jit
def _accumulate_dense(
    x_ptr, w_ptr,
    rows, mask_m, offs_n, first, last, N, K,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # The product over columns first .. last - 1, [BN, BM] fp32
    mask_n = (offs_n < N)[:, None]
    acc = tl.full((BLOCK_N, BLOCK_M), 0.0, dtype=tl.float32)
    for start in range(first, last, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_x, mask_w = mask_m[:, None], mask_n
        if not EVEN_K:
            inside = (offs_k < K)[None, :]
            mask_x, mask_w = mask_x & inside, mask_w & inside
        # [BN, BK], [BM, BK]
        w = tl.load(w_ptr + offs_n[:, None] * K + offs_k[None, :], mask=mask_w, other=0.0)
        x = tl.load(x_ptr + rows[:, None] * K + offs_k[None, :], mask=mask_x, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    return acc


@triton.jit
def _store_slots(
    y_ptr, factor_ptr, sorted_rows_ptr, total, first_row, last_row, offs_n, N,
    HAS_FACTOR: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    position = first_row + tl.arange(0, BLOCK_M)
    mask_m = position < last_row
    # Read again (volatile: not merged with the first time), so as to hold no registers in the loop.
    slots = tl.load(sorted_rows_ptr + position, mask=mask_m, other=0, volatile=True).to(tl.int64)
    if HAS_FACTOR:
        total *= tl.load(factor_ptr + slots, mask=mask_m, other=0.0)[None, :]
    offs_y = slots[None, :] * N + offs_n[:, None]
    mask = (offs_n < N)[:, None] & mask_m[None, :]
    tl.store(y_ptr + offs_y, total.to(y_ptr.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def dense_kernel(
    x_ptr, w_ptr, factor_ptr, y_ptr,
    sorted_rows_ptr, expert_starts_ptr, tile_expert_ptr, tile_first_ptr,
    num_slots, N, K, split_columns,
    SLOTS_PER_ROW: tl.constexpr, SUB_TILES: tl.constexpr, HAS_FACTOR: tl.constexpr,
    ONE_SPLIT: tl.constexpr, APART: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # fmt: on
    # one program = a (BLOCK_N, BLOCK_M) tile of y.T, of one expert; the splits of the columns one
    # after the other, or with APART one of them, to be added by `sum_parts_kernel`
    tile = tl.program_id(0) // SUB_TILES
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    first_row = tl.load(tile_first_ptr + tile) + tl.program_id(0) % SUB_TILES * BLOCK_M
    last_row = tl.load(expert_starts_ptr + expert + 1)
    if first_row >= last_row:
        return
    position = first_row + tl.arange(0, BLOCK_M)
    mask_m = position < last_row
    slots = tl.load(sorted_rows_ptr + position, mask=mask_m, other=0).to(tl.int64)  # [BM]
    rows = slots // SLOTS_PER_ROW
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    w_ptr += expert * N * K
    if APART:
        first = tl.program_id(2) * split_columns
        y_ptr += tl.program_id(2).to(tl.int64) * num_slots * N
        total = _accumulate_dense(
            x_ptr, w_ptr, rows, mask_m, offs_n, first, tl.minimum(first + split_columns, K), N, K,
            EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    elif ONE_SPLIT:
        total = _accumulate_dense(
            x_ptr, w_ptr, rows, mask_m, offs_n, 0, K, N, K,
            EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        total = tl.full((BLOCK_N, BLOCK_M), 0.0, dtype=tl.float32)
        for first in range(0, K, split_columns):
            total += _accumulate_dense(
                x_ptr, w_ptr, rows, mask_m, offs_n, first, tl.minimum(first + split_columns, K),
                N, K, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    _store_slots(
        y_ptr, factor_ptr, sorted_rows_ptr, total, first_row, last_row, offs_n, N,
        HAS_FACTOR, BLOCK_M,
    )  # fmt: skip


# fmt: off
@triton.jit
def packed_kernel(
    x_ptr, w_ptr, high_ptr, scale_ptr, zero_ptr, factor_ptr, y_ptr,
    sorted_rows_ptr, expert_starts_ptr, tile_expert_ptr, tile_first_ptr,
    num_rows, num_slots, N, num_groups, split_words,
    stride_se, stride_sn, stride_sg,
    SLOTS_PER_ROW: tl.constexpr, SUB_TILES: tl.constexpr, HAS_FACTOR: tl.constexpr,
    ONE_SPLIT: tl.constexpr, APART: tl.constexpr,
    BITS: tl.constexpr, CODES: tl.constexpr, GROUP_WORDS: tl.constexpr,
    HAS_ZERO: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):
    # fmt: on
    # one program = as in `dense_kernel`
    tile = tl.program_id(0) // SUB_TILES
    expert = tl.load(tile_expert_ptr + tile).to(tl.int64)
    first_row = tl.load(tile_first_ptr + tile) + tl.program_id(0) % SUB_TILES * BLOCK_M
    last_row = tl.load(expert_starts_ptr + expert + 1)
    if first_row >= last_row:
        return
    position = first_row + tl.arange(0, BLOCK_M)
    mask_m = position < last_row
    slots = tl.load(sorted_rows_ptr + position, mask=mask_m, other=0).to(tl.int64)  # [BM]
    rows = tl.where(mask_m, slots // SLOTS_PER_ROW, num_rows)  # num_rows: not read
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    num_words = num_groups * GROUP_WORDS  # the compiler sees how rows are aligned
    w_ptr += expert * N * num_words
    high_ptr += expert * N * num_words
    scale_ptr += expert * stride_se
    zero_ptr += expert * N * num_groups
    if APART:
        first = tl.program_id(2) * split_words
        y_ptr += tl.program_id(2).to(tl.int64) * num_slots * N
        total = accumulate(
            x_ptr, w_ptr, high_ptr, scale_ptr, zero_ptr,
            rows, offs_n, first, tl.minimum(first + split_words, num_words),
            num_rows, N, num_words, num_groups, stride_sn, stride_sg,
            BITS, CODES, GROUP_WORDS, HAS_ZERO, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_W,
        )  # fmt: skip
    elif ONE_SPLIT:
        total = accumulate(
            x_ptr, w_ptr, high_ptr, scale_ptr, zero_ptr,
            rows, offs_n, 0, num_words,
            num_rows, N, num_words, num_groups, stride_sn, stride_sg,
            BITS, CODES, GROUP_WORDS, HAS_ZERO, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_W,
        )  # fmt: skip
    else:
        total = tl.full((BLOCK_N, BLOCK_M), 0.0, dtype=tl.float32)
        for first in range(0, num_words, split_words):
            total += accumulate(
                x_ptr, w_ptr, high_ptr, scale_ptr, zero_ptr,
                rows, offs_n, first, tl.minimum(first + split_words, num_words),
                num_rows, N, num_words, num_groups, stride_sn, stride_sg,
                BITS, CODES, GROUP_WORDS, HAS_ZERO, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_W,
            )  # fmt: skip
    _store_slots(
        y_ptr, factor_ptr, sorted_rows_ptr, total, first_row, last_row, offs_n, N,
        HAS_FACTOR, BLOCK_M,
    )  # fmt: skip


# fmt: off
@triton.jit
def sum_parts_kernel(
    part_ptr, factor_ptr, y_ptr,
    size, N, num_splits,
    HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    # one program = BLOCK elements of y; their splits are added in order
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    total = tl.full((BLOCK,), 0.0, dtype=tl.float32)
    part_offs = offs
    for _ in range(num_splits):
        total += tl.load(part_ptr + part_offs, mask=mask, other=0.0)
        part_offs += size
    if HAS_FACTOR:
        total *= tl.load(factor_ptr + offs // N, mask=mask, other=0.0)
    tl.store(y_ptr + offs, total.to(y_ptr.dtype.element_ty), mask=mask)
