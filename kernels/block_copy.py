"""Copy blocks of the paged pool to other blocks, in every layer: copy-on-write of shared blocks.

Shapes (L layers, NB blocks, P pairs):
  pool   (L, NB, ...)  any dtype, contiguous; changed in place. Keys or values (L, NB, Hk, BS, D),
                       or their scales (L, NB, Hk, BS)
  pairs  (P, 2)        int64, contiguous   source and destination block
Mathematics: pool[:, pairs[:, 1]] = pool[:, pairs[:, 0]], bit by bit.
Contract: blocks are 0 .. NB - 1; destinations are distinct, and none is a source of another pair,
so that the order of copies does not matter. torch raises ValueError if this is broken. Triton,
which does not wait for the GPU to look, leaves out a pair with a block outside the pool.

Triton copies words of 4 bytes, 4 at a time; bytes, where the size of a block has no such words.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from functools import partial
from math import prod

import torch

from compress.kernels.jit import (
    BenchCase,
    CompileCase,
    check_one_device,
    check_tensor,
    tl,
    triton,
)

# 16 words of 4 bytes per thread. Not yet timed on a card.
_BLOCK, _NUM_WARPS = 2048, 4


def copy_blocks_ref(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Oracle: `copy_blocks`, block by block."""
    for layer in pool:
        for source, destination in pairs.tolist():
            layer[destination] = layer[source]


# fmt: off
@triton.jit
def _copy_blocks_kernel(
    pool_ptr, pairs_ptr,
    num_blocks, block_words,
    BLOCK_W: tl.constexpr,
):
    # fmt: on
    # one program = BLOCK_W words of one pair in one layer
    pair, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    source = tl.load(pairs_ptr + 2 * pair)
    destination = tl.load(pairs_ptr + 2 * pair + 1)
    inside = (source >= 0) & (source < num_blocks) & (destination >= 0) & (destination < num_blocks)
    offs = tl.program_id(2).to(tl.int64) * BLOCK_W + tl.arange(0, BLOCK_W)
    mask = (offs < block_words) & inside
    first = layer * num_blocks
    words = tl.load(pool_ptr + (first + source) * block_words + offs, mask=mask)  # [BW]
    tl.store(pool_ptr + (first + destination) * block_words + offs, words, mask=mask)


def _check(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    if pool.dim() < 2:
        raise ValueError(f"pool must be of shape (layers, blocks, ...), got {tuple(pool.shape)}")
    check_tensor("pairs", pairs, shape=(None, 2), dtypes=(torch.int64,))
    for name, tensor in (("pool", pool), ("pairs", pairs)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def copy_blocks_triton(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Triton `copy_blocks`; shapes and contract in the module docstring, ValueError if broken."""
    _check(pool, pairs)
    check_one_device(pool=pool, pairs=pairs)
    num_layers, num_blocks = pool.shape[:2]
    block_bytes = prod(pool.shape[2:]) * pool.dtype.itemsize
    if not (num_layers and num_blocks and block_bytes and len(pairs)):
        return
    aligned = block_bytes % 16 == 0 and pool.data_ptr() % 16 == 0
    word = torch.int32 if aligned else torch.uint8
    words = pool.view(-1).view(torch.uint8).view(word)
    block_words = block_bytes // word.itemsize
    _copy_blocks_kernel[(len(pairs), num_layers, triton.cdiv(block_words, _BLOCK))](
        words, pairs, num_blocks, block_words, BLOCK_W=_BLOCK, num_warps=_NUM_WARPS
    )


def copy_blocks_torch(pool: torch.Tensor, pairs: torch.Tensor) -> None:
    """Torch `copy_blocks`: one strided copy per pair, no temporary."""
    _check(pool, pairs)
    listed = [tuple(pair) for pair in pairs.tolist()]
    num_blocks = pool.shape[1]
    into = {destination: source for source, destination in listed}
    if len(into) < len(listed):
        raise ValueError(f"pairs must have distinct destinations, got {listed}")
    for source, destination in listed:
        if not (0 <= source < num_blocks and 0 <= destination < num_blocks):
            raise ValueError(
                f"pairs must be of blocks 0 to {num_blocks - 1}, got {(source, destination)}"
            )
        if into.get(source, source) != source:
            raise ValueError(f"pairs must not copy from a block that one copies to: {source}")
    for source, destination in listed:
        pool[:, destination].copy_(pool[:, source])


def compile_cases() -> list[CompileCase]:
    """Words of 4 bytes, and bytes."""
    return [
        CompileCase(
            kernel=_copy_blocks_kernel,
            label=f"{word},block={_BLOCK}",
            types={"pool_ptr": f"*{word}", "pairs_ptr": "*i64"},
            constexprs={"BLOCK_W": _BLOCK},
            divisible=("block_words",) if word == "i32" else (),
            num_warps=_NUM_WARPS,
            meant=("load16",) if word == "i32" else (),
        )
        for word in ("i32", "u8")
    ]


def bench_cases() -> list[BenchCase]:
    """Blocks of 64 tokens in every layer of an 8B Llama: keys in 16 bits, and their scales."""

    def make(shape, num_pairs, device, dtype):
        pool = torch.empty(32, 2 * num_pairs, *shape, device=device, dtype=dtype).normal_()
        return pool, torch.randperm(2 * num_pairs, device=device).view(num_pairs, 2)

    def run(copy, pool, pairs):
        copy(pool, pairs)
        return pool

    def plain(pool, pairs):
        pool[:, pairs[:, 1]] = pool[:, pairs[:, 0]]
        return pool

    def exact(pool, pairs):
        return plain(pool.double(), pairs)

    return [
        BenchCase(
            label=f"copy_blocks {num_pairs} pairs of 32x{'x'.join(map(str, shape))}",
            make=partial(make, shape, num_pairs),
            triton=partial(run, copy_blocks_triton),
            plain=plain,
            exact=exact,
            num_bytes=2 * 2 * 32 * num_pairs * prod(shape),
            num_flops=0,
            ceiling="memory",
            goal=goal,
        )
        for shape, num_pairs, goal in (
            ((8, 64, 128), 64, 0.85),
            ((8, 64, 128), 1, None),
            ((8, 64), 64, None),
        )
    ]
