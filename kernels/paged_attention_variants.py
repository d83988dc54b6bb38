"""The compiled variants of the kernels of `paged_attention`: tiles, constants, and which to check.

Legend as in `paged_attention.py`.
"""

from typing import Any, NamedTuple

import torch

from compress.kernels.jit import CompileCase, Instruction, triton
from compress.kernels.kv_codes import V_GAIN
from compress.kernels.paged_attention_kernels import (
    long_query_kernel,
    merge_segments_kernel,
    segment_kernel,
    short_query_kernel,
)

MAX_SHORT_QUERY = 64  # new tokens; longer queries fill large tiles, and are not cut
SEGMENT = 512  # context tokens per program of a short query
_BYTE_STAGES = 4  # at most, for pools of bytes: with 5, converting the values spills registers


class _Tile(NamedTuple):
    block_m: int  # packed query rows
    block_n: int  # key positions; a tile of several small blocks looks each of them up
    num_warps: int
    num_stages: int


class Variant(NamedTuple):
    """Compile-time constants of a kernel and the options of its launch."""

    constexprs: dict[str, Any]
    options: dict[str, int]

    def num_tiles(self, max_query_len: int) -> int:
        """Tiles of query rows that `max_query_len` new tokens of one KV head fill."""
        tokens_per_tile = self.constexprs["BLOCK_M"] // self.constexprs["GROUP"]
        return int(triton.cdiv(max_query_len, tokens_per_tile))

    def for_merge(self) -> "Variant":
        """That of the merge after a launch of segments."""
        names = merge_segments_kernel.arg_names
        return Variant({n: x for n, x in self.constexprs.items() if n in names}, {})


# Launch -> (largest bytes of one key, tile): short queries, over one segment or over all of them in
# turn, and long ones, over floats or bytes. The two forms for short queries share all of a tile but
# the stages, hence the order of their sums. The stages keep keys and values in flight within the
# shared memory of an A100, 163 KiB, and nothing spills on sm_80 to sm_100. Not yet timed on a card.
_TILES: dict[str, tuple[tuple[int, _Tile], ...]] = {
    "segment": (
        (128, _Tile(16, 64, 4, 5)),
        (256, _Tile(16, 64, 8, 6)),
        (512, _Tile(16, 64, 8, 3)),
    ),
    "short": ((128, _Tile(16, 64, 4, 3)), (256, _Tile(16, 64, 8, 3)), (512, _Tile(16, 64, 8, 3))),
    "long": ((128, _Tile(128, 64, 8, 3)), (256, _Tile(128, 64, 8, 2)), (512, _Tile(64, 32, 8, 2))),
    "long, bytes": (
        (128, _Tile(64, 32, 4, 3)),
        (256, _Tile(64, 64, 8, 2)),
        (512, _Tile(32, 32, 8, 2)),
    ),
}
_KERNELS = {"segment": segment_kernel, "short": short_query_kernel, "long": long_query_kernel}


def make_variant(
    launch: str,
    q: torch.Tensor,
    k_pool: torch.Tensor,
    *,
    scaled: bool = False,
    capped: bool = False,
    tree: bool = False,
) -> Variant:
    """The variant for these tensors; ValueError for a head_dim that no tile holds."""
    num_kv_heads, block_size, head_dim = k_pool.shape[1:]
    group = q.shape[1] // num_kv_heads
    block_d = triton.next_power_of_2(max(head_dim, 16))
    tiles = _TILES["long, bytes" if launch == "long" and k_pool.itemsize == 1 else launch]
    fitting = [tile for nbytes, tile in tiles if block_d * q.itemsize <= nbytes]
    if not fitting:
        largest = tiles[-1][0] // q.itemsize
        raise ValueError(f"q has head_dim {head_dim}; up to {largest} is supported in {q.dtype}")
    tile = fitting[0]
    constexprs: dict[str, Any] = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": max(tile.block_m, triton.next_power_of_2(group)),
        "BLOCK_N": tile.block_n,
        "BLOCK_D": block_d,
        "V_GAIN": V_GAIN[k_pool.dtype] if scaled else 0,
        "CAPPED": capped,
    }
    if launch != "long":
        constexprs |= {"SEGMENT_TILES": SEGMENT // tile.block_n, "TREE": tree}
    num_stages = tile.num_stages if k_pool.itemsize > 1 else min(tile.num_stages, _BYTE_STAGES)
    if launch == "short" and tree:  # rare, and with loads in flight it spills
        num_stages = 1
    return Variant(constexprs, {"num_warps": tile.num_warps, "num_stages": num_stages})


_POOL_TYPES = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "u8", torch.int8: "i8"}
_POINTERS = dict.fromkeys(("q_ptr", "y_ptr"), "*bf16")
_POINTERS |= dict.fromkeys(("block_tables_ptr", "context_lens_ptr", "query_starts_ptr"), "*i32")
_POINTERS |= dict.fromkeys(
    ("acc_ptr", "peak_ptr", "total_ptr", "k_scale_ptr", "v_scale_ptr"), "*fp32"
)
_POINTERS["tree_ptr"] = "*i64"


def attention_cases() -> list[CompileCase]:
    """Every tile with every kind of pool, and each further flag where it meets most of the others.

    Groups of 3 and 4, head_dim 64, 128 and 256, blocks of 16 to 128.
    """
    cases = []
    for heads in ((9, 3, 64), (32, 8, 128), (16, 4, 256)):
        for pool, scaled in (
            (torch.bfloat16, False),
            (torch.float8_e4m3fn, False),
            (torch.float8_e4m3fn, True),
            (torch.int8, True),
        ):
            for launch in ("segment", "long"):
                cases.append(_case(launch, heads, pool, scaled=scaled))
        cases.append(_case("short", heads, torch.bfloat16))
        cases.append(_case("merge", heads, torch.bfloat16))
        for launch in ("segment", "long"):
            cases.append(_case(launch, heads, torch.bfloat16, capped=True))
    llama = (32, 8, 128)
    for pool in (torch.bfloat16, torch.int8):
        scaled = pool == torch.int8
        for launch in ("segment", "short"):
            cases.append(_case(launch, llama, pool, scaled=scaled, tree=True))
        for launch in ("segment", "long"):
            cases.append(_case(launch, llama, pool, block_size=16, scaled=scaled))
    cases.append(_case("merge", llama, torch.bfloat16, tree=True))
    for block_size in (32, 128):
        cases.append(_case("segment", llama, torch.bfloat16, block_size=block_size))
    everything = {"scaled": True, "capped": True, "tree": True}
    for heads in ((9, 3, 64), (16, 4, 256)):
        cases.append(_case("segment", heads, torch.int8, block_size=16, **everything))
    return cases


def _case(
    launch: str,
    heads: tuple[int, int, int],
    pool: torch.dtype,
    *,
    block_size: int = 64,
    **flags: bool,
) -> CompileCase:
    num_heads, kv_heads, head_dim = heads
    q = torch.empty(1, num_heads, head_dim, dtype=torch.bfloat16, device="meta")
    k_pool = torch.empty(1, kv_heads, block_size, head_dim, dtype=pool, device="meta")
    variant = make_variant("segment" if launch == "merge" else launch, q, k_pool, **flags)
    meant: tuple[Instruction, ...] = ("load16",)
    if launch == "merge":
        variant, kernel = variant.for_merge(), merge_segments_kernel
    else:
        kernel = _KERNELS[launch]
        # wgmma multiplies 64 rows at least
        has_wgmma = launch == "long" and variant.constexprs["BLOCK_M"] >= 64
        meant = (*meant, "mma", "wgmma") if has_wgmma else (*meant, "mma")
    names = "".join(f",{name}" for name, is_set in flags.items() if is_set)
    label = f"{launch},{_POOL_TYPES[pool]}{names},group={num_heads // kv_heads}"
    floats = dict.fromkeys(("score_scale", "cap_log2"), "fp32")
    pools = dict.fromkeys(("k_pool_ptr", "v_pool_ptr"), f"*{_POOL_TYPES[pool]}")
    return CompileCase(
        kernel=kernel,
        label=f"{label},head_dim={head_dim},block={block_size}",
        types=_POINTERS | floats | pools,
        constexprs=variant.constexprs,
        divisible=("stride_qt",),
        meant=meant,
        **variant.options,
    )
