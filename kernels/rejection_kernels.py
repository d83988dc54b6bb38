"""The Triton kernels of `rejection.py`: who is accepted, and what is drawn after that."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from compress.kernels.jit import tl, triton
from compress.kernels.noise import triton_coins, triton_exponentials, triton_states


# fmt: off
@triton.jit
def chain_kernel(
    target_ptr, draft_ids_ptr, draft_probs_ptr, num_drafts_ptr, seed_ptr, position_ptr,
    num_accepted_ptr,
    vocab, max_drafts,
    stride_tr, stride_qr,
    COIN_KEY: tl.constexpr, HAS_PROBS: tl.constexpr,
):
    # fmt: on
    # one program = one row, its drafts in order
    row = tl.program_id(0).to(tl.int64)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    num_accepted = tl.zeros((), tl.int64)
    for i in range(0, tl.load(num_drafts_ptr + row)):
        if num_accepted == i:
            token = tl.load(draft_ids_ptr + row * max_drafts + num_accepted)
            known = (token >= 0) & (token < vocab)
            p_ptr = target_ptr + row * stride_tr + num_accepted * vocab
            p = tl.load(p_ptr + token, mask=known, other=0.0)
            q = tl.full((), 1.0, tl.float32)
            if HAS_PROBS:
                q_ptr = draft_probs_ptr + row * stride_qr + num_accepted * vocab
                q = tl.load(q_ptr + token, mask=known, other=1.0)
            coin = triton_coins(triton_states(seed, position + num_accepted, token, COIN_KEY))
            if coin * q < p:
                num_accepted += 1
    tl.store(num_accepted_ptr + row, num_accepted)


# fmt: off
@triton.jit
def tree_kernel(
    target_ptr, parents_ptr, tokens_ptr, starts_ptr, seed_ptr, position_ptr,
    path_ptr, num_accepted_ptr, last_ptr,
    vocab,
    stride_tr,
    COIN_KEY: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    # one program = one tree: parents stand before their children, so one walk over the nodes does
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(starts_ptr + row).to(tl.int64), tl.load(starts_ptr + row + 1).to(tl.int64)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    current = tl.zeros((), tl.int64)
    depth = tl.zeros((), tl.int64)
    rest = tl.full((), 1.0, tl.float32)
    for node in range(1, end - start):
        if tl.load(parents_ptr + start + node) == current:
            token = tl.load(tokens_ptr + start + node)
            num_tried = tl.zeros((), tl.int32)
            for first in range(1, node, BLOCK):
                offs = first + tl.arange(0, BLOCK)
                older = offs < node
                parents = tl.load(parents_ptr + start + offs, mask=older, other=-1)
                tokens = tl.load(tokens_ptr + start + offs, mask=older, other=-1)
                num_tried += tl.sum(((parents == current) & (tokens == token)).to(tl.int32))
            known = (token >= 0) & (token < vocab) & (num_tried == 0)
            p = tl.load(target_ptr + (start + current) * stride_tr + token, mask=known, other=0.0)
            coin = triton_coins(triton_states(seed, position + depth, token, COIN_KEY))
            if coin * rest < p:
                current = tl.zeros((), tl.int64) + node
                tl.store(path_ptr + start + depth, current)
                depth += 1
                rest = tl.full((), 1.0, tl.float32)
            else:
                rest -= p
    tl.store(num_accepted_ptr + row, depth)
    tl.store(last_ptr + row, current)


# fmt: off
@triton.jit
def next_kernel(
    target_ptr, draft_probs_ptr, ids_ptr, parents_ptr, bounds_ptr, num_accepted_ptr, last_ptr,
    seed_ptr, position_ptr,
    scores_ptr, choices_ptr,
    vocab, max_drafts, part_stride,
    stride_tr, stride_qr,
    KIND: tl.constexpr, SALT_KEY: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    # One program = SPAN tokens of one row: the best of them by what the rejected drafts leave, and
    # by the target alone. KIND is "probs", "points" (chains; `bounds` is num_drafts, `last` is not
    # read) or "tree" (`bounds` is node_starts).
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_accepted = tl.load(num_accepted_ptr + row)
    if KIND == "tree":
        start = tl.load(bounds_ptr + row).to(tl.int64)
        end = tl.load(bounds_ptr + row + 1).to(tl.int64)
        last = tl.load(last_ptr + row)
        p_ptr = target_ptr + (start + last) * stride_tr
    else:
        p_ptr = target_ptr + row * stride_tr + num_accepted * vocab
        q_ptr = draft_probs_ptr + row * stride_qr + num_accepted * vocab
        is_rejected = num_accepted < tl.load(bounds_ptr + row)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row) + num_accepted
    score, plain_score = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    choice, plain_choice = tl.full((BLOCK,), -1, tl.int32), tl.full((BLOCK,), -1, tl.int32)
    num_bad = tl.zeros((BLOCK,), tl.int32)
    for first in range(part * SPAN, tl.minimum(part * SPAN + SPAN, vocab), BLOCK):
        offs = first + tl.arange(0, BLOCK)
        p = tl.load(p_ptr + offs, mask=offs < vocab, other=0.0)
        weight = p
        if KIND == "probs":
            if is_rejected:
                q = tl.load(q_ptr + offs, mask=offs < vocab, other=0.0)
                weight = tl.where(p > q, p - q, 0.0)
        elif KIND == "points":
            if is_rejected:
                token = tl.load(ids_ptr + row * max_drafts + num_accepted)
                weight = tl.where(offs == token, 0.0, p)
        else:
            for node in range(1, end - start):
                if tl.load(parents_ptr + start + node) == last:
                    weight = tl.where(offs == tl.load(ids_ptr + start + node), 0.0, weight)
        num_bad += ((p != p) | (p == float("inf"))).to(tl.int32)
        if tl.max(p) > 0.0:
            time = triton_exponentials(triton_states(seed, position, offs, SALT_KEY))
            new_score, new_plain_score = weight / time, p / time
            choice = tl.where(new_score > score, offs, choice)
            score = tl.maximum(new_score, score)
            plain_choice = tl.where(new_plain_score > plain_score, offs, plain_choice)
            plain_score = tl.maximum(new_plain_score, plain_score)
    out = row * tl.num_programs(1) + part
    best, plain_best = tl.max(score), tl.max(plain_score)
    token = tl.min(tl.where(score == best, choice, 0x7FFFFFFF))
    plain_token = tl.min(tl.where(plain_score == plain_best, plain_choice, 0x7FFFFFFF))
    if tl.sum(num_bad) > 0:
        best = tl.full((), float("inf"), tl.float32)
        token = tl.full((), -1, tl.int32)
        plain_best, plain_token = best, token
    tl.store(scores_ptr + out, best)
    tl.store(choices_ptr + out, token.to(tl.int64))
    tl.store(scores_ptr + part_stride + out, plain_best)
    tl.store(choices_ptr + part_stride + out, plain_token.to(tl.int64))
