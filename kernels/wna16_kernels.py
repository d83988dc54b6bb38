"""The Triton kernels of `wna16`; contract, layout and launches are in that file.

Legend: BM tokens, BN weight rows, BW words of a weight row per step. Each word holds CODES columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from compress.kernels.jit import tl, triton


@triton.jit
def _to_float(codes, BITS: tl.constexpr, dtype: tl.constexpr):
    # int32 0 .. 2^BITS - 1 -> the same number in `dtype`, exactly: written into the mantissa of a
    # power of two, which is then subtracted. bfloat16 has 7 bits of mantissa.
    if dtype == tl.float16:
        return (codes | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1024.0
    elif dtype == tl.bfloat16 and BITS < 8:
        return (codes | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True) - 128.0
    else:
        return codes.to(tl.float32).to(dtype)


# fmt: off
@triton.jit
def accumulate(
    x_ptr, w_ptr, high_ptr, scale_ptr, zero_ptr,
    offs_m, offs_n, first, last, M, N, num_words, num_groups,
    stride_sn, stride_sg,
    BITS: tl.constexpr, CODES: tl.constexpr, GROUP_WORDS: tl.constexpr,
    HAS_ZERO: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):
    # fmt: on
    # The product over words first .. last - 1, [BN, BM] fp32
    PLANE: tl.constexpr = 2 if BITS == 3 else BITS  # bits of a code within its word
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    mask_m, mask_n = (offs_m < M)[:, None], (offs_n < N)[:, None]
    acc = tl.full((BLOCK_N, BLOCK_M), 0.0, dtype=tl.float32)
    for start in range(first, last, BLOCK_W):
        offs_w = start + tl.arange(0, BLOCK_W)
        mask_x, mask_w = mask_m, mask_n
        if not EVEN_K:
            inside = (offs_w < num_words)[None, :]
            mask_x, mask_w = mask_m & inside, mask_n & inside
        within = offs_n[:, None] * num_words + offs_w[None, :]
        words = tl.load(w_ptr + within, mask=mask_w, other=0)  # [BN, BW]
        high = tl.full((1, 1), 0, dtype=tl.int32)
        if BITS == 3:
            high = tl.load(high_ptr + within, mask=mask_w, other=0).to(tl.int32)  # [BN, BW]
        if GROUP_WORDS % BLOCK_W == 0:  # one scale per row serves the whole step
            group, mask_g = tl.full((1,), 0, tl.int32) + start // GROUP_WORDS, mask_n
        else:
            group, mask_g = offs_w // GROUP_WORDS, mask_w
        offs_s = offs_n[:, None] * stride_sn + group[None, :] * stride_sg
        scale = tl.load(scale_ptr + offs_s, mask=mask_g, other=0.0)  # [BN, BW] or [BN, 1]
        zero = tl.full(scale.shape, 1 << (BITS - 1), dtype=tl.int32)
        if HAS_ZERO:
            offs_z = offs_n[:, None] * num_groups + group[None, :]
            zero += tl.load(zero_ptr + offs_z, mask=mask_g, other=0).to(tl.int32)
        zero = zero.to(tl.float32).to(dtype)
        for i in tl.static_range(CODES):
            offs_x = (offs_m[:, None] * CODES + i) * num_words + offs_w[None, :]
            x = tl.load(x_ptr + offs_x, mask=mask_x, other=0.0)  # [BM, BW], columns CODES w + i
            codes = (words >> (PLANE * i)) & ((1 << PLANE) - 1)
            if BITS == 3:
                codes = codes | (((high >> i) & 1) << 2)
            weight = (_to_float(codes, BITS, dtype) - zero) * scale  # [BN, BW]
            acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    return acc


# fmt: off
@triton.jit
def whole_kernel(
    x_ptr, w_ptr, high_ptr, scale_ptr, zero_ptr, y_ptr,
    M, N, num_groups, split_words,
    stride_sn, stride_sg,
    ONE_SPLIT: tl.constexpr,
    BITS: tl.constexpr, CODES: tl.constexpr, GROUP_WORDS: tl.constexpr,
    HAS_ZERO: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):
    # fmt: on
    # one program = a (BLOCK_N, BLOCK_M) tile of y.T; the splits one after the other
    pid_m, pid_n = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    num_words = num_groups * GROUP_WORDS  # the compiler sees how rows are aligned
    if ONE_SPLIT:
        total = accumulate(
            x_ptr, w_ptr, high_ptr, scale_ptr, zero_ptr,
            offs_m, offs_n, 0, num_words, M, N, num_words, num_groups, stride_sn, stride_sg,
            BITS, CODES, GROUP_WORDS, HAS_ZERO, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_W,
        )  # fmt: skip
    else:
        total = tl.full((BLOCK_N, BLOCK_M), 0.0, dtype=tl.float32)
        for first in range(0, num_words, split_words):
            total += accumulate(
                x_ptr, w_ptr, high_ptr, scale_ptr, zero_ptr,
                offs_m, offs_n, first, tl.minimum(first + split_words, num_words),
                M, N, num_words, num_groups, stride_sn, stride_sg,
                BITS, CODES, GROUP_WORDS, HAS_ZERO, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_W,
            )  # fmt: skip
    mask = (offs_n < N)[:, None] & (offs_m < M)[None, :]
    offs_y = offs_m[None, :] * N + offs_n[:, None]
    tl.store(y_ptr + offs_y, total.to(y_ptr.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def split_kernel(
    x_ptr, w_ptr, high_ptr, scale_ptr, zero_ptr, part_ptr,
    M, N, num_groups, split_words,
    stride_sn, stride_sg,
    BITS: tl.constexpr, CODES: tl.constexpr, GROUP_WORDS: tl.constexpr,
    HAS_ZERO: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr,
):
    # fmt: on
    # one program = a (BLOCK_N, BLOCK_M) tile of y.T over one split
    pid_m, pid_n = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    split = tl.program_id(2).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    num_words = num_groups * GROUP_WORDS
    first = tl.program_id(2) * split_words
    acc = accumulate(
        x_ptr, w_ptr, high_ptr, scale_ptr, zero_ptr,
        offs_m, offs_n, first, tl.minimum(first + split_words, num_words),
        M, N, num_words, num_groups, stride_sn, stride_sg,
        BITS, CODES, GROUP_WORDS, HAS_ZERO, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_W,
    )  # fmt: skip
    mask = (offs_n < N)[:, None] & (offs_m < M)[None, :]
    offs = (split * M + offs_m[None, :]) * N + offs_n[:, None]
    tl.store(part_ptr + offs, acc, mask=mask)


# fmt: off
@triton.jit
def sum_splits_kernel(
    part_ptr, y_ptr,
    size, num_splits,
    BLOCK: tl.constexpr,
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
    tl.store(y_ptr + offs, total.to(y_ptr.dtype.element_ty), mask=mask)
