"""Verifying drafted tokens so that what is emitted has exactly the target's law.

Shapes (R rows, n most drafts of a row, V vocabulary; N nodes of all R trees together):
  chain
    target_probs  (R, n + 1, V)  fp32   row i: the law of the token after i drafts; probabilities
                                        as `sampling_probs` gives them; target_probs[r] contiguous
    draft_ids     (R, n)         int64
    draft_probs   (R, n, V)      fp32   the laws that the drafts were drawn from, or None: the
                                        drafts are given (greedy, n-gram), each a point mass
    num_drafts    (R,)           int32  drafts of each row, at most n; None: n in every row
  tree
    target_probs  (N, V)         fp32   row j: the law of the token that follows node j
    parents       (N,)           int64  node of the same tree, counted from its first, before the
                                        child; the first node is the root, the last known token
    tokens        (N,)           int64  token of each node; the root's is not read
    node_starts   (R + 1,)       int32  tree r is nodes [node_starts[r], node_starts[r + 1])
  both
    seed          (R,)           int64
    position      (R,)           int64  of the first drafted token
    num_accepted  (R,)           int64
    path          (N,)           int64  tree: the accepted nodes of tree r, first to last, stand at
                                        node_starts[r] and after, counted as in `parents`; then -1
    next_token    (R,)           int64  the token after the accepted ones
Mathematics, with p the target's law, q the draft's, u a coin in [0, 1):
  chain  draft x is accepted if u q(x) < p(x). The first that is not is replaced by a draw from
         max(0, p - q), and all after it are dropped. If all are accepted, a bonus token comes from
         the last row. A point mass has q(x) = 1: what is left after a rejection is p without x.
  tree   the children of the last accepted node, in order: x is accepted if u rest < p(x), where
         rest is 1 less the p of the siblings rejected before it. If none is, the next token comes
         from p without the children. This needs candidates that were chosen without regard to the
         coins, not drafts drawn from q; a token that occurs twice among siblings counts once.
  Both are without loss: the emitted tokens have the law of sampling from the target, token by
  token. A greedy row is a one-hot p, for which the same rules accept exactly its token.
  A draw from weights w is argmax w / e, e the exponentials of (seed, position, token); a coin is
  that of (seed, position, token of the draft): see `noise.py`, whose salts keep them apart. The
  drafts themselves must not use salts 0 and 2.
Contract: a row depends on that row only. A row whose law is not finite or has no mass gets the next
token -1. A draft outside [0, V) is rejected. If rounding left nothing of p - q, the draw is from p.

`acceptance.py` has the rules alone, in a form that can be checked exactly.

Leviathan et al., arXiv:2211.17192, algorithm 1; Chen et al., arXiv:2302.01318; trees of point
masses: Li et al., EAGLE-2, arXiv:2406.16858, and SpecInfer, arXiv:2305.09781.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from compress.kernels.acceptance import accepts, tree_path, verify_chain, verify_tree
from compress.kernels.jit import BenchCase, CompileCase, check_rows, check_tensor, triton
from compress.kernels.noise import (
    COIN_SALT,
    TARGET_SALT,
    coins,
    noise_states,
    salt_key,
    weighted_draw,
)
from compress.kernels.rejection_kernels import chain_kernel, next_kernel, tree_kernel

# Not yet timed on a card.
_BLOCK, _SPAN, _WARPS = 1024, 16384, 8
_NODE_BLOCK = 64
_COIN_KEY, _TARGET_KEY = salt_key(COIN_SALT), salt_key(TARGET_SALT)


def accept_chain_ref(
    target_probs: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    *,
    seed: torch.Tensor,
    position: torch.Tensor,
    num_drafts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle: `accept_chain` by `verify_chain` in float64, row by row."""
    num_accepted, next_token = torch.zeros_like(seed), torch.zeros_like(seed)
    for r in range(len(draft_ids)):
        n = draft_ids.shape[1] if num_drafts is None else int(num_drafts[r])
        ids = draft_ids[r, :n]
        u = coins(noise_states(seed[r], position[r] + torch.arange(n), ids, COIN_SALT))
        laws = target_probs[r, : n + 1].double().tolist()
        draft_laws = None if draft_probs is None else draft_probs[r, :n].double().tolist()
        count, weights = verify_chain(laws, ids.tolist(), draft_laws, u.tolist())
        num_accepted[r] = count
        next_token[r] = _draw_one(weights, target_probs[r, count], seed[r], position[r] + count)
    return num_accepted, next_token


def accept_tree_ref(
    target_probs: torch.Tensor,
    parents: torch.Tensor,
    tokens: torch.Tensor,
    node_starts: torch.Tensor,
    *,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Oracle: `accept_tree` by `verify_tree` in float64, tree by tree."""
    path = torch.full_like(parents, -1)
    num_accepted, next_token = torch.zeros_like(seed), torch.zeros_like(seed)
    for r in range(len(seed)):
        start, end = node_starts[r : r + 2].tolist()
        nodes = slice(start, end)
        u = _node_coins(parents[nodes].tolist(), tokens[nodes], seed[r], position[r])
        laws = target_probs[nodes]
        accepted, weights = verify_tree(
            laws.double().tolist(), parents[nodes].tolist(), tokens[nodes].tolist(), u
        )
        path[start : start + len(accepted)] = torch.tensor(accepted, dtype=torch.int64)
        num_accepted[r] = len(accepted)
        law = laws[accepted[-1] if accepted else 0]
        next_token[r] = _draw_one(weights, law, seed[r], position[r] + len(accepted))
    return path, num_accepted, next_token


def _draw_one(
    weights: Sequence[float], law: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> int:
    """`weighted_draw` of one row."""
    exact = torch.tensor(weights, dtype=torch.float64, device=law.device)
    return int(weighted_draw(exact[None], law.double()[None], seed[None], position[None]))


def _node_coins(
    parents: list[int], tokens: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> list[float]:
    """The coin of each node of a tree, at the position that its depth says."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    offsets = torch.tensor(depths, device=tokens.device) - 1
    result: list[float] = coins(noise_states(seed, position + offsets, tokens, COIN_SALT)).tolist()
    return result


def _check(
    named: dict[str, tuple[torch.Tensor | None, tuple[int | None, ...], torch.dtype]],
) -> None:
    """Shapes, dtypes, one device; all contiguous but those of several dimensions: their rows."""
    device = next(tensor.device for tensor, _, _ in named.values() if tensor is not None)
    for name, (tensor, shape, dtype) in named.items():
        if tensor is not None:
            check_tensor(name, tensor, shape=shape, dtypes=(dtype,))
            if tensor.device != device:
                raise ValueError(f"{name} must be on {device}, got {tensor.device}")
            if tensor.numel():
                check_rows(name, tensor if "probs" in name else tensor[None])


def _check_chain(target_probs, draft_ids, draft_probs, seed, position, num_drafts) -> None:
    check_tensor("draft_ids", draft_ids, shape=(None, None), dtypes=(torch.int64,))
    num_rows, n = draft_ids.shape
    vocab = target_probs.shape[-1]
    _check({
        "target_probs": (target_probs, (num_rows, n + 1, None), torch.float32),
        "draft_ids": (draft_ids, (num_rows, n), torch.int64),
        "draft_probs": (draft_probs, (num_rows, n, vocab), torch.float32),
        "num_drafts": (num_drafts, (num_rows,), torch.int32),
        "seed": (seed, (num_rows,), torch.int64),
        "position": (position, (num_rows,), torch.int64),
    })  # fmt: skip


def _check_tree(target_probs, parents, tokens, node_starts, seed, position) -> None:
    check_tensor("target_probs", target_probs, shape=(None, None), dtypes=(torch.float32,))
    check_tensor("seed", seed, shape=(None,), dtypes=(torch.int64,))
    num_nodes, num_rows = len(target_probs), len(seed)
    _check({
        "target_probs": (target_probs, (num_nodes, None), torch.float32),
        "parents": (parents, (num_nodes,), torch.int64),
        "tokens": (tokens, (num_nodes,), torch.int64),
        "node_starts": (node_starts, (num_rows + 1,), torch.int32),
        "seed": (seed, (num_rows,), torch.int64),
        "position": (position, (num_rows,), torch.int64),
    })  # fmt: skip


def _launch_next(
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    ids: torch.Tensor,
    parents: torch.Tensor,
    bounds: torch.Tensor,
    num_accepted: torch.Tensor,
    last: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    kind: str,
) -> torch.Tensor:
    """The token after the accepted ones, of every row."""
    num_rows, vocab = len(seed), target_probs.shape[-1]
    num_parts = triton.cdiv(vocab, _SPAN)
    scores = torch.empty((2, num_rows, num_parts), dtype=torch.float32, device=seed.device)
    choices = torch.empty((2, num_rows, num_parts), dtype=torch.int64, device=seed.device)
    next_kernel[(num_rows, num_parts)](
        target_probs, draft_probs, ids, parents, bounds, num_accepted, last, seed, position,
        scores, choices, vocab, ids.shape[-1], num_rows * num_parts,
        target_probs.stride(0), draft_probs.stride(0),
        KIND=kind, SALT_KEY=_TARGET_KEY, SPAN=_SPAN, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    best, part = scores.max(dim=2, keepdim=True)
    token, plain = choices.gather(2, part).squeeze(2)
    return torch.where(best[0, :, 0] > 0, token, plain)


def accept_chain_triton(
    target_probs: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    *,
    seed: torch.Tensor,
    position: torch.Tensor,
    num_drafts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton `accept_chain`; shapes and contract in the module docstring, ValueError if broken."""
    _check_chain(target_probs, draft_ids, draft_probs, seed, position, num_drafts)
    num_rows, n = draft_ids.shape
    num_accepted = torch.empty_like(seed)
    if not num_rows:
        return num_accepted, seed.new_empty(0)
    if num_drafts is None:
        num_drafts = torch.full((num_rows,), n, dtype=torch.int32, device=seed.device)
    has_probs, q = draft_probs is not None, target_probs if draft_probs is None else draft_probs
    chain_kernel[(num_rows,)](
        target_probs, draft_ids, q, num_drafts, seed, position, num_accepted,
        target_probs.shape[2], n, target_probs.stride(0), q.stride(0),
        COIN_KEY=_COIN_KEY, HAS_PROBS=has_probs, num_warps=1,
    )  # fmt: skip
    args = (target_probs, q, draft_ids, draft_ids, num_drafts, num_accepted, num_accepted)
    kind = "probs" if has_probs else "points"
    return num_accepted, _launch_next(*args, seed, position, kind)


def accept_tree_triton(
    target_probs: torch.Tensor,
    parents: torch.Tensor,
    tokens: torch.Tensor,
    node_starts: torch.Tensor,
    *,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Triton `accept_tree`; shapes and contract in the module docstring, ValueError if broken."""
    _check_tree(target_probs, parents, tokens, node_starts, seed, position)
    path = torch.full_like(parents, -1)
    num_accepted, last = torch.empty_like(seed), torch.empty_like(seed)
    if not len(seed):
        return path, num_accepted, seed.new_empty(0)
    tree_kernel[(len(seed),)](
        target_probs, parents, tokens, node_starts, seed, position, path, num_accepted, last,
        target_probs.shape[1], target_probs.stride(0),
        COIN_KEY=_COIN_KEY, BLOCK=_NODE_BLOCK, num_warps=1,
    )  # fmt: skip
    args = (target_probs, target_probs, tokens, parents, node_starts, num_accepted, last)
    return path, num_accepted, _launch_next(*args, seed, position, "tree")


def accept_chain_torch(
    target_probs: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    *,
    seed: torch.Tensor,
    position: torch.Tensor,
    num_drafts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch `accept_chain`: all coins at once, then a draw per row from what has weight."""
    _check_chain(target_probs, draft_ids, draft_probs, seed, position, num_drafts)
    num_rows, n = draft_ids.shape
    steps = torch.arange(n, device=seed.device)
    known = (draft_ids >= 0) & (draft_ids < target_probs.shape[2])
    ids = torch.where(known, draft_ids, 0)
    p = target_probs[:, :n].gather(2, ids[..., None])[..., 0]
    q = 1.0 if draft_probs is None else draft_probs.gather(2, ids[..., None])[..., 0]
    u = coins(noise_states(seed[:, None], position[:, None] + steps, draft_ids, COIN_SALT))
    counts = torch.full_like(seed, n) if num_drafts is None else num_drafts
    is_accepted = accepts(u, p, q) & known & (steps < counts[:, None])
    num_accepted = is_accepted.cumprod(1).sum(1)
    laws = target_probs[torch.arange(num_rows, device=seed.device), num_accepted]
    rejected = (num_accepted < counts).nonzero().flatten()
    places = num_accepted[rejected]
    weights = laws.clone()
    if draft_probs is None:
        first = ids[rejected, places]  # of an unknown draft the probability is 0, not its p
        weights[rejected, first] *= ~known[rejected, places]
    else:
        left = laws[rejected], draft_probs[rejected, places]
        weights[rejected] = torch.where(left[0] > left[1], left[0] - left[1], 0.0)
    return num_accepted, weighted_draw(weights, laws, seed, position + num_accepted)


def accept_tree_torch(
    target_probs: torch.Tensor,
    parents: torch.Tensor,
    tokens: torch.Tensor,
    node_starts: torch.Tensor,
    *,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Torch `accept_tree`: the walk of `tree_path` on the probabilities of the nodes' tokens."""
    _check_tree(target_probs, parents, tokens, node_starts, seed, position)
    bounds, above, ids = node_starts.tolist(), parents.tolist(), tokens.tolist()
    known = (tokens >= 0) & (tokens < target_probs.shape[1])
    sizes = node_starts.diff()
    first = torch.repeat_interleave(node_starts[:-1], sizes)  # of each node's tree
    p = target_probs[first + parents.clamp(min=0), torch.where(known, tokens, 0)]
    masses = torch.where(known, p, 0.0).tolist()
    path, num_accepted, last = [-1] * len(parents), [], []
    for r, (start, end) in enumerate(pairwise(bounds)):
        tree = slice(start, end)
        u = _node_coins(above[tree], tokens[tree], seed[r], position[r])
        accepted = tree_path(above[tree], ids[tree], masses[tree].__getitem__, u)
        path[start : start + len(accepted)] = accepted
        num_accepted.append(len(accepted))
        last.append(accepted[-1] if accepted else 0)
    counts, ends = (
        torch.tensor(x, dtype=torch.int64).to(seed.device) for x in (num_accepted, last)
    )
    laws = target_probs[node_starts[:-1] + ends]
    weights = laws.clone()
    row = torch.repeat_interleave(torch.arange(len(seed), device=seed.device), sizes)
    child = (parents == ends[row]) & known
    weights[row[child], tokens[child]] = 0.0
    path_tensor = torch.tensor(path, dtype=torch.int64).to(seed.device)
    return path_tensor, counts, weighted_draw(weights, laws, seed, position + counts)


def compile_cases() -> list[CompileCase]:
    """The chain with and without the drafts' laws, the tree, and each kind of next token."""
    types = dict.fromkeys(("target_ptr", "draft_probs_ptr", "scores_ptr"), "*fp32")
    integers = ("draft_ids", "ids", "tokens", "parents", "seed", "position", "choices", "path")
    types |= {f"{name}_ptr": "*i64" for name in (*integers, "num_accepted", "last")}
    types |= dict.fromkeys(("num_drafts_ptr", "starts_ptr", "bounds_ptr"), "*i32")
    tile = {"SALT_KEY": _TARGET_KEY, "SPAN": _SPAN, "BLOCK": _BLOCK}
    coin = {"COIN_KEY": _COIN_KEY}
    variants: list[tuple[Any, str, dict[str, Any], int]] = [
        (chain_kernel, "chain,probs", coin | {"HAS_PROBS": True}, 1),
        (chain_kernel, "chain,points", coin | {"HAS_PROBS": False}, 1),
        (tree_kernel, "tree", coin | {"BLOCK": _NODE_BLOCK}, 1),
        *(
            (next_kernel, f"next,{kind}", tile | {"KIND": kind}, _WARPS)
            for kind in ("probs", "points", "tree")
        ),
    ]
    return [
        CompileCase(
            kernel=kernel,
            label=label,
            types=types,
            constexprs=constexprs,
            divisible=("vocab", "stride_tr", "stride_qr"),
            num_warps=num_warps,
            meant=("load16",) if kernel is next_kernel else (),
        )
        for kernel, label, constexprs, num_warps in variants
    ]


def bench_cases() -> list[BenchCase]:
    """64 rows of 4 drafts over a vocabulary of 128256, with and without the drafts' laws."""
    num_rows, n, vocab = 64, 4, 128256

    def case(has_probs: bool) -> BenchCase:
        def make(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
            logits = torch.randn(num_rows, n + 1, vocab, device=device).mul_(3)
            target = torch.softmax(logits, dim=-1)
            law = torch.softmax(logits[:, :n] + torch.randn(num_rows, n, vocab, device=device), -1)
            ids = torch.multinomial(law.flatten(0, 1), 1).view(num_rows, n)
            seed = torch.randint(0, 2**31, (num_rows,), device=device)
            return target, ids, law if has_probs else None, seed, torch.full_like(seed, 100)

        def run(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(target, ids, law, seed, position):
                return function(target, ids, law, seed=seed, position=position)

            return call

        return BenchCase(
            label=f"chain,{'probs' if has_probs else 'points'},R={num_rows},n={n},V={vocab}",
            make=make,
            triton=run(accept_chain_triton),
            plain=run(accept_chain_torch),
            exact=run(accept_chain_ref),
            num_bytes=num_rows * vocab * 4 * (2 if has_probs else 1),
            num_flops=0,
            ceiling="memory",
        )

    return [case(True), case(False)]
