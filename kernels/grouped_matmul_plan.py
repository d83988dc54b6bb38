"""Tiles, splits and kernel arguments of `grouped_matmul`, for a dense and for a packed weight."""

from typing import Any, NamedTuple

import torch

from compress.kernels.grouped_matmul_kernels import dense_kernel, packed_kernel
from compress.kernels.moe_routing import Routing
from compress.kernels.wna16 import (
    CODES_PER_WORD,
    PackedWeight,
    expert_weight,
    splits_of,
    tile_for,
    variant,
)


class _Tile(NamedTuple):
    block_m: int  # slots
    block_n: int  # weight rows
    num_warps: int
    num_stages: int


# Rows of a tile of the routing -> tile; in fp32, which tensor cores do not multiply exactly, every
# one is computed in pieces of 16. Nothing spills on sm_80 to sm_100. Not yet timed on a card.
TILES: dict[int, _Tile] = {
    16: _Tile(16, 64, 4, 5),
    32: _Tile(32, 64, 4, 4),
    64: _Tile(64, 64, 4, 4),
    128: _Tile(128, 128, 8, 3),
}
_FP32_TILE = _Tile(16, 64, 4, 4)
_LARGEST_SPLIT_N = 64  # a split and the sum of those before it are both in registers
_BLOCK_K = {torch.float16: 64, torch.bfloat16: 64, torch.float32: 32}
APART = 16  # tiles of so many rows have a program for each split
_PROGRAMS = 256  # that fill a card: about two for each multiprocessor
_MIN_SPLIT = 1024  # columns
_MAX_SPLITS = 16


class Plan(NamedTuple):
    """What is launched, but for what depends on the values in the routing."""

    kernel: Any
    tensors: tuple[torch.Tensor, ...]
    sizes: tuple[int, ...]
    num_splits: int
    constexprs: dict[str, Any]
    options: dict[str, int]


def plan_dense(x: torch.Tensor, weight: torch.Tensor, routing: Routing) -> Plan:
    _, out_features, in_features = weight.shape
    num_splits, split_columns = _dense_splits(out_features, in_features, _BLOCK_K[x.dtype])
    constexprs, options = dense_variant(x.dtype, routing.block_m, in_features, num_splits)
    sizes = (len(routing.sorted_rows), out_features, in_features, split_columns)
    return Plan(dense_kernel, (x, weight), sizes, num_splits, constexprs, options)


def plan_packed(x: torch.Tensor, weight: PackedWeight, routing: Routing) -> Plan:
    _, out_features, num_groups = weight.scale.shape
    bits, group = weight.bits, weight.in_features // num_groups
    num_splits, split_words = splits_of(expert_weight(weight, 0))
    constexprs, options = packed_variant(
        routing.block_m, bits, group, num_groups, num_splits,
        asymmetric=weight.zero_point is not None,
    )  # fmt: skip
    by_code = x.view(len(x), -1, CODES_PER_WORD[bits]).transpose(1, 2).contiguous()
    unread = weight.words  # in the place of what is not read without its constant
    tensors = (
        by_code,  # (rows, C, K / C)
        weight.words,
        unread if weight.high is None else weight.high,
        weight.scale,
        unread if weight.zero_point is None else weight.zero_point,
    )
    strides = weight.scale.stride()
    sizes = (len(x), len(routing.sorted_rows), out_features, num_groups, split_words, *strides)
    return Plan(packed_kernel, tensors, sizes, num_splits, constexprs, options)


def _dense_splits(out_features: int, in_features: int, block_k: int) -> tuple[int, int]:
    """How many splits, and columns of each: whole steps, the last split may have fewer."""
    num_tiles = -(-out_features // TILES[16].block_n)
    wanted = min(_MAX_SPLITS, -(-_PROGRAMS // max(num_tiles, 1)), in_features // _MIN_SPLIT)
    num_steps = -(-in_features // block_k)
    steps = -(-num_steps // max(wanted, 1))
    return -(-num_steps // steps), steps * block_k


def dense_variant(
    dtype: torch.dtype, block_m: int, in_features: int, num_splits: int
) -> tuple[dict[str, Any], dict[str, int]]:
    """Compile-time constants and launch options for tiles of `block_m` rows."""
    tile = _FP32_TILE if dtype == torch.float32 else TILES[block_m]
    constexprs = {
        "EVEN_K": in_features % _BLOCK_K[dtype] == 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n if num_splits == 1 else min(tile.block_n, _LARGEST_SPLIT_N),
        "BLOCK_K": _BLOCK_K[dtype],
    }
    return constexprs, {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def packed_variant(
    block_m: int, bits: int, group: int, num_groups: int, num_splits: int, *, asymmetric: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """The same of a packed weight. With 16 codes per word (2 and 3 bits) the tile must be smaller,
    or have more warps, than in wna16.py, or registers spill."""
    many_codes = CODES_PER_WORD[bits] == 16
    tile = tile_for(16 if many_codes and num_splits > 1 else block_m, bits)
    if many_codes and tile.block_m == 16:
        tile = tile._replace(num_warps=8)
    return variant(tile, bits, group, num_groups, asymmetric=asymmetric)
