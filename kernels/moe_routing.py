"""Routing of a mixture of experts: which experts a token goes to, and its rows sorted by expert.

Shapes (T tokens, E experts, TOPK experts per token, S = T * TOPK slots; slot t TOPK + i is the i-th
choice of token t):
  logits    (T, E)     fp16 | bf16 | fp32   contiguous rows, which may lie apart
  weights   (T, TOPK)  fp32, contiguous     softmax of the logits over all experts; renormalized,
                                            those of a token add up to 1
  topk_ids  (T, TOPK)  int64, contiguous    the experts of the largest logits, largest first
Mathematics: softmax in fp32. Of equal logits the lowest expert comes first; a NaN ranks as -inf, so
that ids are always in 0 .. E - 1, and makes all weights of its token NaN.
Contract: a token's result depends on that token only. `route` never waits for the GPU: what it
launches, and the shapes of what it returns, depend on T, TOPK and E alone.

Gale et al., MegaBlocks, arXiv:2211.15841 (no expert is padded to the rows of another).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass
from functools import partial

import torch

from compress.kernels.jit import (
    FLOAT_DTYPES,
    BenchCase,
    CompileCase,
    check_rows,
    check_tensor,
    tl,
    triton,
)

BLOCKS_M = (16, 32, 64, 128)  # rows of a tile
MAX_EXPERTS, MAX_TOP_K = 1024, 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """The slots sorted by expert, and their cut into tiles of up to `block_m` rows of one expert.

    sorted_rows    (S,)      int32  slots in the order of their experts; slots of one expert ascend
    expert_starts  (E + 1,)  int32  expert e has sorted_rows[its start : the next one's]
    tile_expert    (tiles,)  int32  the expert of each tile
    tile_first     (tiles,)  int32  its first index into sorted_rows; S in tiles without a row
    """

    sorted_rows: torch.Tensor
    expert_starts: torch.Tensor
    tile_expert: torch.Tensor
    tile_first: torch.Tensor
    block_m: int
    top_k: int

    @property
    def num_experts(self) -> int:
        return len(self.expert_starts) - 1


def route(topk_ids: torch.Tensor, num_experts: int, block_m: int | None = None) -> Routing:
    """Sort the slots of `topk_ids` (T, TOPK) int64 by expert. `block_m`, one of `BLOCKS_M`, is by
    default the one that fits the mean number of rows of an expert.

    The ids must be in 0 .. num_experts - 1: checked on a CPU only, where looking costs nothing;
    elsewhere the rows of other ids belong to no expert and are not written.
    """
    check_tensor("topk_ids", topk_ids, shape=(None, None), dtypes=(torch.int64,))
    num_slots, top_k = topk_ids.numel(), topk_ids.shape[1]
    if num_experts < 1 or not top_k:
        raise ValueError(
            f"topk_ids must choose of at least one expert, got {top_k}, {num_experts=}"
        )
    if block_m is None:
        mean = -(-num_slots // num_experts)
        block_m = next((block for block in BLOCKS_M if mean <= block), BLOCKS_M[-1])
    elif block_m not in BLOCKS_M:
        raise ValueError(f"block_m must be one of {BLOCKS_M}, got {block_m}")
    on_cpu = topk_ids.device.type == "cpu"
    if on_cpu and num_slots and not 0 <= int(topk_ids.min()) <= int(topk_ids.max()) < num_experts:
        low, high = int(topk_ids.min()), int(topk_ids.max())
        raise ValueError(f"topk_ids must be in 0 .. {num_experts - 1}, got {low} .. {high}")
    experts, order = torch.sort(topk_ids.flatten(), stable=True)
    bounds = torch.arange(num_experts + 1, device=topk_ids.device)
    starts = torch.searchsorted(experts, bounds)  # (E + 1,): how many ids are smaller
    tiles = (starts.diff() + block_m - 1) // block_m  # (E,)
    ends = tiles.cumsum(0)
    # Each expert with rows has at most one tile that is not full.
    num_tiles = (num_slots + min(num_experts, num_slots) * (block_m - 1)) // block_m
    index = torch.arange(num_tiles, device=topk_ids.device)
    expert = torch.searchsorted(ends, index, right=True).clamp_(max=num_experts - 1)
    first = starts[expert] + (index - (ends - tiles)[expert]) * block_m
    first = torch.where(index < ends[-1], first, num_slots)
    return Routing(
        sorted_rows=order.to(torch.int32),
        expert_starts=starts.to(torch.int32),
        tile_expert=expert.to(torch.int32),
        tile_first=first.to(torch.int32),
        block_m=block_m,
        top_k=top_k,
    )


def topk_softmax_ref(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle: `topk_softmax` in float64, one expert at a time; weights are rounded to fp32."""
    weights = torch.empty(len(logits), top_k, dtype=torch.float64, device=logits.device)
    ids = torch.empty(len(logits), top_k, dtype=torch.int64, device=logits.device)
    for t, row in enumerate(logits.double()):
        values = row.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).tolist()
        best = sorted(range(len(values)), key=lambda e: (-values[e], e))[:top_k]
        ids[t] = torch.tensor(best)
        weights[t] = torch.softmax(row, dim=0)[ids[t]]
        if renormalize:
            weights[t] /= weights[t].sum()
    return weights.float(), ids


# fmt: off
@triton.jit
def _topk_softmax_kernel(
    logits_ptr, weights_ptr, ids_ptr,
    num_experts, stride_t,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # fmt: on
    # one program = one token
    t = tl.program_id(0).to(tl.int64)
    offs_e, offs_k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    left = offs_e < num_experts  # experts not chosen so far
    nothing = float("-inf")
    row = logits_ptr + t * stride_t + offs_e
    logits = tl.load(row, mask=left, other=nothing).to(tl.float32)  # [BE]
    probability = tl.exp(logits - tl.max(logits, 0))
    probability = probability / tl.sum(probability, 0)
    rank = tl.where(logits == logits, logits, nothing)
    weights = tl.full((BLOCK_K,), 0.0, dtype=tl.float32)
    ids = tl.full((BLOCK_K,), 0, dtype=tl.int32)
    for i in range(TOP_K):
        best = tl.max(tl.where(left, rank, nothing), 0)
        chosen = tl.min(tl.where(left & (rank == best), offs_e, BLOCK_E), 0)
        weight = tl.sum(tl.where(offs_e == chosen, probability, 0.0), 0)
        weights = tl.where(offs_k == i, weight, weights)
        ids = tl.where(offs_k == i, chosen, ids)
        left = left & (offs_e != chosen)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 0)
    offs = t * TOP_K + offs_k
    tl.store(weights_ptr + offs, weights, mask=offs_k < TOP_K)
    tl.store(ids_ptr + offs, ids.to(tl.int64), mask=offs_k < TOP_K)


def topk_softmax_triton(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton `topk_softmax`; shapes and contract in the module docstring, ValueError if broken."""
    _check(logits, top_k)
    check_rows("logits", logits)
    num_tokens, num_experts = logits.shape
    if num_experts > MAX_EXPERTS or top_k > MAX_TOP_K:
        raise ValueError(
            f"logits may have up to {MAX_EXPERTS} experts and top_k be up to {MAX_TOP_K},"
            f" got {num_experts} and {top_k}"
        )
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int64, device=logits.device)
    if num_tokens:
        _topk_softmax_kernel[(num_tokens,)](
            logits, weights, ids, num_experts, logits.stride(0),
            **_variant(num_experts, top_k, renormalize), num_warps=1,
        )  # fmt: skip
    return weights, ids


def _check(logits: torch.Tensor, top_k: int) -> None:
    check_tensor("logits", logits, shape=(None, None), dtypes=FLOAT_DTYPES)
    if not 1 <= top_k <= logits.shape[1]:
        raise ValueError(f"top_k must be in 1 .. {logits.shape[1]}, the experts, got {top_k}")


def _variant(num_experts: int, top_k: int, renormalize: bool) -> dict[str, int]:
    return {
        "TOP_K": top_k,
        "RENORMALIZE": renormalize,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_K": triton.next_power_of_2(top_k),
    }


def topk_softmax_torch(
    logits: torch.Tensor, top_k: int, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch `topk_softmax`: sorts, since `torch.topk` leaves the order of equal logits open."""
    _check(logits, top_k)
    values = logits.float()
    rank = torch.where(values.isnan(), -torch.inf, values)
    ids = torch.sort(rank, dim=1, descending=True, stable=True).indices[:, :top_k].contiguous()
    weights = torch.softmax(values, dim=1).gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return weights, ids


def compile_cases() -> list[CompileCase]:
    """8 experts of which 2 (Mixtral), 128 of which 8 (Qwen3), 1024 of which 32 (the largest)."""
    return [
        CompileCase(
            kernel=_topk_softmax_kernel,
            label=f"top {top_k} of {num_experts},{'sum 1' if renormalize else 'softmax'}",
            types={"logits_ptr": "*bf16", "weights_ptr": "*fp32", "ids_ptr": "*i64"},
            constexprs=_variant(num_experts, top_k, renormalize),
            divisible=("stride_t",),
            num_warps=1,
        )
        for num_experts, top_k in ((8, 2), (128, 8), (MAX_EXPERTS, MAX_TOP_K))
        for renormalize in (True, False)
    ]


def bench_cases() -> list[BenchCase]:
    """Mixtral 8x7B and 128 experts of which 8, 4096 tokens: bound by the launch and by memory."""

    def make(num_experts, device, dtype):
        return (torch.randn(4096, num_experts, device=device, dtype=dtype),)

    return [
        BenchCase(
            label=f"T=4096,top {top_k} of {num_experts}",
            make=partial(make, num_experts),
            triton=partial(topk_softmax_triton, top_k=top_k, renormalize=True),
            plain=partial(topk_softmax_torch, top_k=top_k, renormalize=True),
            exact=partial(topk_softmax_ref, top_k=top_k, renormalize=True),
            num_bytes=4096 * (2 * num_experts + 12 * top_k),
            num_flops=4096 * num_experts * (4 + top_k),
            ceiling="memory",
        )
        for num_experts, top_k in ((8, 2), (128, 8))
    ]
