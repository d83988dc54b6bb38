"""The Triton kernels of `sampling.py`, and what they share with those of `rejection.py`.

`key` is the order-preserving integer of an fp32 number: its bits, with those below the sign
flipped where it is negative. Bisection over keys finds any fp32 threshold in at most 32 halvings;
each pass over the row tests three pivots, so it takes at most 16 passes, which after the first come
from the L2 cache.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from compress.kernels.jit import tl, triton
from compress.kernels.noise import triton_exponentials, triton_states


@triton.jit
def _key(x):
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


# fmt: off
@triton.jit
def _block(row_ptr, first, vocab, BLOCK: tl.constexpr):
    # fmt: on
    offs = first + tl.arange(0, BLOCK)
    return offs, tl.load(row_ptr + offs, mask=offs < vocab, other=float("-inf"))


# fmt: off
@triton.jit
def _weight(x, largest, inverse):
    # fmt: on
    # unnormalised probability of a logit, 1 for the largest
    return tl.exp((x - largest) * inverse)


# fmt: off
@triton.jit
def _threshold(
    row_ptr, vocab, low, largest, inverse, target,
    IS_MASS: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    # The largest value in [low, largest] with at least `target` tokens (or their weight) at or
    # above it. It is some token's logit, for between those nothing changes.
    low_key, high_key = _key(low), _key(largest)
    while low_key < high_key:
        width = high_key - low_key
        key1 = low_key + (width + 3) // 4
        key2 = low_key + (2 * width + 3) // 4
        key3 = low_key + (3 * width + 3) // 4
        pivot1, pivot2, pivot3 = _value(key1), _value(key2), _value(key3)
        above1 = tl.zeros((BLOCK,), tl.float32)
        above2 = tl.zeros((BLOCK,), tl.float32)
        above3 = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, vocab, BLOCK):
            _, x = _block(row_ptr, first, vocab, BLOCK)
            share = tl.full((BLOCK,), 1.0, tl.float32)
            if IS_MASS:
                share = _weight(x, largest, inverse)
            above1 += tl.where(x >= pivot1, share, 0.0)
            above2 += tl.where(x >= pivot2, share, 0.0)
            above3 += tl.where(x >= pivot3, share, 0.0)
        if tl.sum(above3) >= target:
            low_key = key3
        elif tl.sum(above2) >= target:
            low_key = key2
            high_key = key3 - 1
        elif tl.sum(above1) >= target:
            low_key = key1
            high_key = key2 - 1
        else:
            high_key = key1 - 1
    return _value(low_key)


# fmt: off
@triton.jit
def _mass(row_ptr, vocab, threshold, log_min_p, largest, inverse, BLOCK: tl.constexpr):
    # fmt: on
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab, BLOCK):
        _, x = _block(row_ptr, first, vocab, BLOCK)
        kept = (x >= threshold) & ((x - largest) * inverse >= log_min_p)
        total += tl.where(kept, _weight(x, largest, inverse), 0.0)
    return tl.sum(total)


# fmt: off
@triton.jit
def row_kernel(
    logits_ptr, inverse_ptr, top_k_ptr, top_p_ptr, log_min_p_ptr,
    best_ptr, largest_ptr, threshold_ptr, mass_ptr,
    vocab,
    stride_lr,
    HAS_TOP_K: tl.constexpr, HAS_TOP_P: tl.constexpr, WANTS_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # fmt: on
    # one program = one row: its largest logit, the threshold of what it keeps, and the mass of that
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_lr
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    num_bad = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, vocab, BLOCK):
        offs, x = _block(row_ptr, first, vocab, BLOCK)
        num_bad += ((x != x) | (x == float("inf"))).to(tl.int32)
        where = tl.where(x > most, offs, where)
        most = tl.where(x > most, x, most)
    largest = tl.max(most)
    best = tl.min(tl.where(most == largest, where, 0x7FFFFFFF))  # each lane has its first
    inverse = tl.load(inverse_ptr + row)
    if (tl.sum(num_bad) > 0) | (largest == float("-inf")):
        tl.store(best_ptr + row, -1)
        tl.store(largest_ptr + row, float("nan"))
        return
    tl.store(best_ptr + row, best)
    tl.store(largest_ptr + row, largest)
    if inverse == 0.0:  # greedy
        return
    threshold = tl.full((), float("-inf"), tl.float32)
    if HAS_TOP_K:
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < vocab):
            target = top_k.to(tl.float32)
            threshold = _threshold(
                row_ptr, vocab, threshold, largest, inverse, target, False, BLOCK
            )
    if HAS_TOP_P:
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            kept = _mass(row_ptr, vocab, threshold, float("-inf"), largest, inverse, BLOCK)
            threshold = _threshold(
                row_ptr, vocab, threshold, largest, inverse, top_p * kept, True, BLOCK
            )
    tl.store(threshold_ptr + row, threshold)
    if WANTS_MASS:
        log_min_p = tl.load(log_min_p_ptr + row)
        mass = _mass(row_ptr, vocab, threshold, log_min_p, largest, inverse, BLOCK)
        tl.store(mass_ptr + row, mass)


# fmt: off
@triton.jit
def draw_kernel(
    logits_ptr, inverse_ptr, log_min_p_ptr, seed_ptr, position_ptr,
    best_ptr, largest_ptr, threshold_ptr, scores_ptr, tokens_ptr,
    vocab,
    stride_lr,
    SALT_KEY: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    # one program = SPAN tokens of one row: the best of them with its noise
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    out = row * tl.num_programs(1) + part
    largest, inverse = tl.load(largest_ptr + row), tl.load(inverse_ptr + row)
    if (inverse == 0.0) | (largest != largest):
        tl.store(scores_ptr + out, float("-inf"))
        tl.store(tokens_ptr + out, tl.load(best_ptr + row))
        return
    threshold, log_min_p = tl.load(threshold_ptr + row), tl.load(log_min_p_ptr + row)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    row_ptr = logits_ptr + row * stride_lr
    scores = tl.full((BLOCK,), float("-inf"), tl.float32)
    tokens = tl.zeros((BLOCK,), tl.int32)
    for first in range(part * SPAN, tl.minimum(part * SPAN + SPAN, vocab), BLOCK):
        offs, x = _block(row_ptr, first, vocab, BLOCK)
        scaled = (x - largest) * inverse
        kept = (x >= threshold) & (scaled >= log_min_p)
        if tl.max(kept.to(tl.int32)) > 0:
            states = triton_states(seed, position, offs, SALT_KEY)
            score = tl.where(kept, scaled - tl.log(triton_exponentials(states)), float("-inf"))
            tokens = tl.where(score > scores, offs, tokens)
            scores = tl.maximum(score, scores)
    score = tl.max(scores)
    tl.store(scores_ptr + out, score)
    tl.store(tokens_ptr + out, tl.min(tl.where(scores == score, tokens, 0x7FFFFFFF)))


# fmt: off
@triton.jit
def probs_kernel(
    logits_ptr, inverse_ptr, log_min_p_ptr, best_ptr, largest_ptr, threshold_ptr, mass_ptr,
    probs_ptr,
    vocab,
    stride_lr,
    BLOCK: tl.constexpr,
):
    # fmt: on
    # one program = BLOCK tokens of one row
    row = tl.program_id(0).to(tl.int64)
    largest, inverse = tl.load(largest_ptr + row), tl.load(inverse_ptr + row)
    offs, x = _block(logits_ptr + row * stride_lr, tl.program_id(1) * BLOCK, vocab, BLOCK)
    if largest != largest:
        probs = tl.full((BLOCK,), float("nan"), tl.float32)
    elif inverse == 0.0:
        probs = (offs == tl.load(best_ptr + row)).to(tl.float32)
    else:
        threshold, log_min_p = tl.load(threshold_ptr + row), tl.load(log_min_p_ptr + row)
        kept = (x >= threshold) & ((x - largest) * inverse >= log_min_p)
        weight = tl.where(kept, _weight(x, largest, inverse), 0.0)
        mass = tl.load(mass_ptr + row)
        probs = tl.div_rn(weight, tl.broadcast_to(mass, weight.shape))
    tl.store(probs_ptr + row * vocab + offs, probs, mask=offs < vocab)
