"""Write the keys and values of new tokens into the paged pool.

Shapes (T tokens, Hk heads, D head_dim, NB blocks of BS tokens):
  k, v            (T, Hk, D)       fp16 | bf16 | fp32 | float8_e4m3fn   contiguous rows, which may
                                                        lie apart
  k_pool, v_pool  (NB, Hk, BS, D)  dtype of k, contiguous; changed in place
  slots           (T,)             int64   block * BS + offset of each token; negative: skip it
Mathematics: k_pool[slots // BS, :, slots % BS] = k, and the same for v.
Contract: the non-negative slots are distinct and below NB * BS. Triton does not check the slots,
which would wait for the GPU; torch raises IndexError.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from itertools import product

import torch

from compress.kernels.jit import FLOAT_DTYPES, CompileCase, check_rows, check_tensor, tl, triton
from compress.scheme import FLOAT8

# (largest number of values in a token's tile, num_warps). Not yet timed on a card.
_TILES: tuple[tuple[int, int], ...] = ((1024, 1), (8192, 4), (65536, 16))


def kv_write_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Oracle: `kv_write`, token by token."""
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, k_pool.shape[2])
            k_pool[block, :, offset] = k[t]
            v_pool[block, :, offset] = v[t]


# fmt: off
@triton.jit
def _kv_write_kernel(
    k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, slots_ptr,
    stride_kt, stride_vt,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # fmt: on
    # one program = all heads of one token
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t)
    if slot < 0:
        return
    offs_h, offs_d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    mask = (offs_h < NUM_HEADS) & (offs_d < HEAD_DIM)
    token_offs = offs_h * HEAD_DIM + offs_d
    k = tl.load(k_ptr + t * stride_kt + token_offs, mask=mask)  # [BH, BD]
    v = tl.load(v_ptr + t * stride_vt + token_offs, mask=mask)  # [BH, BD]
    row = (slot // BLOCK_SIZE * NUM_HEADS + offs_h) * BLOCK_SIZE + slot % BLOCK_SIZE  # [BH, 1]
    pool_offs = row * HEAD_DIM + offs_d
    tl.store(k_pool_ptr + pool_offs, k, mask=mask)
    tl.store(v_pool_ptr + pool_offs, v, mask=mask)


def kv_write_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Triton `kv_write`; shapes and contract in the module docstring, ValueError if broken."""
    check_tensor("k", k, shape=(None, None, None), dtypes=(*FLOAT_DTYPES, FLOAT8))
    num_tokens, num_heads, head_dim = k.shape
    check_tensor("v", v, shape=tuple(k.shape), dtypes=(k.dtype,))
    check_tensor("k_pool", k_pool, shape=(None, num_heads, None, head_dim), dtypes=(k.dtype,))
    check_tensor("v_pool", v_pool, shape=tuple(k_pool.shape), dtypes=(k.dtype,))
    check_tensor("slots", slots, shape=(num_tokens,), dtypes=(torch.int64,))
    check_rows("k", k)
    check_rows("v", v)
    for name, tensor in (("k_pool", k_pool), ("v_pool", v_pool), ("slots", slots)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    if num_tokens:
        constexprs, num_warps = _variant(num_heads, head_dim, k_pool.shape[2])
        # float8 is copied as bytes, which every GPU can load
        as_stored = torch.uint8 if k.dtype == FLOAT8 else k.dtype
        pointers = [tensor.view(as_stored) for tensor in (k, v, k_pool, v_pool)]
        args = (*pointers, slots, k.stride(0), v.stride(0))
        _kv_write_kernel[(num_tokens,)](*args, **constexprs, num_warps=num_warps)


def _variant(num_heads: int, head_dim: int, block_size: int) -> tuple[dict[str, int], int]:
    """Compile-time constants and num_warps for these heads; ValueError if they are too many."""
    block_h, block_d = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_dim)
    if block_h * block_d > _TILES[-1][0]:
        raise ValueError(f"k is too wide: {num_heads} heads of {head_dim}")
    constexprs = {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
    }
    return constexprs, next(warps for largest, warps in _TILES if block_h * block_d <= largest)


def kv_write_torch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Torch `kv_write`: one indexed assignment per pool."""
    kept = slots >= 0
    if not kept.all():
        k, v, slots = k[kept], v[kept], slots[kept]
    block_size = k_pool.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    k_pool[blocks, :, offsets] = k
    v_pool[blocks, :, offsets] = v


def compile_cases() -> list[CompileCase]:
    """Every row of the tile table, 3 heads of 64, 16 of 128, 128 of 256, in 16 and in 8 bits."""
    tensors = ("k_ptr", "v_ptr", "k_pool_ptr", "v_pool_ptr")
    cases = []
    for (num_heads, head_dim), dtype in product(((3, 64), (16, 128), (128, 256)), ("bf16", "u8")):
        constexprs, num_warps = _variant(num_heads, head_dim, 64)
        cases.append(
            CompileCase(
                kernel=_kv_write_kernel,
                label=f"{dtype},heads={num_heads},head_dim={head_dim}",
                types=dict.fromkeys(tensors, f"*{dtype}") | {"slots_ptr": "*i64"},
                constexprs=constexprs,
                divisible=("stride_kt", "stride_vt"),
                num_warps=num_warps,
                meant=("load16",) if dtype == "bf16" else (),
            )
        )
    return cases
