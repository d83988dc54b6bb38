"""Write the keys and values of new tokens into the paged pool, as they are or as codes of 8 bits.

Shapes (T tokens, Hk heads, D head_dim, NB blocks of BS tokens):
  k, v              (T, Hk, D)       fp16 | bf16 | fp32 | float8_e4m3fn   contiguous rows, which may
                                                          lie apart
  k_pool, v_pool    (NB, Hk, BS, D)  dtype of k, contiguous; changed in place
  slots             (T,)             int64   block * BS + offset of each token; negative: skip it
  k_scale, v_scale  (NB, Hk, BS)     fp32, contiguous, changed in place; or None. With them the
                                     pools are int8 or float8_e4m3fn, and k and v wider floats
Mathematics: k_pool[slots // BS, :, slots % BS] = k, and the same for v. With scales it is the
codes of k that are written, and the scale of each token and head: see `kv_codes.py`.
Contract: the non-negative slots are distinct and below NB * BS. Triton does not check the slots,
which would wait for the GPU; torch raises IndexError.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import partial
from itertools import product
from typing import Any

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
from compress.kernels.kv_codes import CODE_DTYPES, quantize_heads, quantize_rows
from compress.scheme import FLOAT8

# (largest number of values in a token's tile, num_warps). Not yet timed on a card.
_TILES: tuple[tuple[int, int], ...] = ((1024, 1), (8192, 4), (65536, 16))


def kv_write_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Oracle: `kv_write`, token by token."""
    for x, pool, scales in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
        codes, scale = (x, None) if scales is None else quantize_heads(x, pool.dtype)
        for t, slot in enumerate(slots.tolist()):
            if slot >= 0:
                block, offset = divmod(slot, pool.shape[2])
                pool[block, :, offset] = codes[t]
                if scales is not None and scale is not None:
                    scales[block, :, offset] = scale[t]


# fmt: off
@triton.jit
def _write_heads(
    x_ptr, pool_ptr, scale_ptr, row, offs_d, x_offs, mask,
    HEAD_DIM: tl.constexpr, QUANTIZED: tl.constexpr,
):
    # fmt: on
    # The heads of one token, [BH, BD], to the rows [BH] of the pool.
    x = tl.load(x_ptr + x_offs, mask=mask, other=0)
    if QUANTIZED:
        is_int8: tl.constexpr = pool_ptr.dtype.element_ty == tl.int8
        x, scale = quantize_rows(x.to(tl.float32), is_int8)
        tl.store(scale_ptr + row, scale, mask=tl.max(mask.to(tl.int32), axis=1) > 0)
    tl.store(pool_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], x, mask=mask)


# fmt: off
@triton.jit
def _kv_write_kernel(
    k_ptr, v_ptr, k_pool_ptr, v_pool_ptr, k_scale_ptr, v_scale_ptr, slots_ptr,
    stride_kt, stride_vt,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, QUANTIZED: tl.constexpr,
):
    # fmt: on
    # one program = all heads of one token
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t)
    if slot < 0:
        return
    offs_h, offs_d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    mask = (offs_h < NUM_HEADS)[:, None] & (offs_d < HEAD_DIM)[None, :]
    offs = offs_h[:, None] * HEAD_DIM + offs_d[None, :]
    row = (slot // BLOCK_SIZE * NUM_HEADS + offs_h) * BLOCK_SIZE + slot % BLOCK_SIZE  # [BH]
    k_ptr += t * stride_kt
    v_ptr += t * stride_vt
    _write_heads(k_ptr, k_pool_ptr, k_scale_ptr, row, offs_d, offs, mask, HEAD_DIM, QUANTIZED)
    _write_heads(v_ptr, v_pool_ptr, v_scale_ptr, row, offs_d, offs, mask, HEAD_DIM, QUANTIZED)


def kv_write_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Triton `kv_write`; shapes and contract in the module docstring, ValueError if broken."""
    _check(k, v, k_pool, v_pool, slots, k_scale, v_scale)
    num_tokens, num_heads, head_dim = k.shape
    if not num_tokens:
        return
    quantized = k_scale is not None
    constexprs, num_warps = _variant(num_heads, head_dim, k_pool.shape[2], quantized=quantized)
    # float8 is stored as bytes, which every GPU can do
    tensors = [x.view(torch.uint8) if x.dtype == FLOAT8 else x for x in (k, v, k_pool, v_pool)]
    scales = [k.new_empty(1, dtype=torch.float32) if x is None else x for x in (k_scale, v_scale)]
    args = (*tensors, *scales, slots, k.stride(0), v.stride(0))
    _kv_write_kernel[(num_tokens,)](*args, **constexprs, num_warps=num_warps)


def _check(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    quantized = k_scale is not None and v_scale is not None
    if not quantized and (k_scale is not None or v_scale is not None):
        raise ValueError("k_scale and v_scale must be given together")
    check_tensor(
        "k",
        k,
        shape=(None, None, None),
        dtypes=FLOAT_DTYPES if quantized else (*FLOAT_DTYPES, FLOAT8),
    )
    num_tokens, num_heads, head_dim = k.shape
    check_tensor("v", v, shape=tuple(k.shape), dtypes=(k.dtype,))
    pool_dtypes = CODE_DTYPES if quantized else (k.dtype,)
    check_tensor("k_pool", k_pool, shape=(None, num_heads, None, head_dim), dtypes=pool_dtypes)
    check_tensor("v_pool", v_pool, shape=tuple(k_pool.shape), dtypes=(k_pool.dtype,))
    check_tensor("slots", slots, shape=(num_tokens,), dtypes=(torch.int64,))
    check_rows("k", k)
    check_rows("v", v)
    pools = {"k_pool": k_pool, "v_pool": v_pool, "slots": slots}
    for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scales is not None:
            check_tensor(name, scales, shape=tuple(k_pool.shape[:3]), dtypes=(torch.float32,))
            pools[name] = scales
    for name, tensor in pools.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    for name, tensor in {"v": v, **pools}.items():
        if tensor.device != k.device:
            raise ValueError(f"{name} must be on {k.device}, the device of k, not {tensor.device}")


def _variant(
    num_heads: int, head_dim: int, block_size: int, *, quantized: bool
) -> tuple[dict[str, Any], int]:
    """Compile-time constants and num_warps for these heads; ValueError if they are too many."""
    block_h, block_d = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_dim)
    largest = _TILES[-1][0]
    if block_h * block_d > largest:
        raise ValueError(
            f"k is too wide: {num_heads} heads of {head_dim}; up to {largest} values are "
            "supported, both rounded up to powers of two"
        )
    constexprs = {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_H": block_h,
        "BLOCK_D": block_d,
        "QUANTIZED": quantized,
    }
    return constexprs, next(warps for values, warps in _TILES if block_h * block_d <= values)


def kv_write_torch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Torch `kv_write`: one indexed assignment per pool."""
    kept = slots >= 0
    if not kept.all():
        k, v, slots = k[kept], v[kept], slots[kept]
    block_size = k_pool.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    for x, pool, scales in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
        if scales is None:
            pool[blocks, :, offsets] = x
        else:
            pool[blocks, :, offsets], scales[blocks, :, offsets] = quantize_heads(x, pool.dtype)


def compile_cases() -> list[CompileCase]:
    """Every row of the tile table: 3 heads of 64, 16 of 128, 128 of 256; every kind of pool."""
    types = dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "*fp32") | {"slots_ptr": "*i64"}
    pools = (("bf16", "bf16"), ("u8", "u8"), ("bf16", "u8"), ("bf16", "i8"))
    cases = []
    for (num_heads, head_dim), (new, pool) in product(((3, 64), (16, 128), (128, 256)), pools):
        constexprs, num_warps = _variant(num_heads, head_dim, 64, quantized=new != pool)
        cases.append(
            CompileCase(
                kernel=_kv_write_kernel,
                label=f"{new} to {pool},heads={num_heads},head_dim={head_dim}",
                types=types
                | dict.fromkeys(("k_ptr", "v_ptr"), f"*{new}")
                | dict.fromkeys(("k_pool_ptr", "v_pool_ptr"), f"*{pool}"),
                constexprs=constexprs,
                divisible=("stride_kt", "stride_vt"),
                num_warps=num_warps,
                meant=("load16",) if new == "bf16" else (),
            )
        )
    return cases


def bench_cases() -> list[BenchCase]:
    """8192 tokens of 8 heads of 128, as they are and to int8."""
    num_tokens, num_heads, head_dim, block_size = 8192, 8, 128, 64
    num_values = 2 * num_tokens * num_heads * head_dim

    def make(pool_dtype: Any, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        shape = (num_tokens // block_size, num_heads, block_size, head_dim)
        new = torch.randn(2, num_tokens, num_heads, head_dim, device=device, dtype=dtype)
        pools = torch.zeros(2, *shape, device=device, dtype=pool_dtype or dtype)
        slots = torch.randperm(num_tokens, device=device)
        if pool_dtype is None:
            return (*new, *pools, slots, None, None)
        return (*new, *pools, slots, *torch.zeros(2, *shape[:3], device=device))

    def returning(write: Any) -> Any:
        def run(k, v, k_pool, v_pool, slots, k_scale, v_scale):
            write(k, v, k_pool, v_pool, slots, k_scale=k_scale, v_scale=v_scale)
            scales = [1.0, 1.0] if k_scale is None else [k_scale[..., None], v_scale[..., None]]
            return k_pool, v_pool, *scales

        return run

    return [
        BenchCase(
            label=label,
            make=partial(make, pool_dtype),
            triton=returning(kv_write_triton),
            plain=returning(kv_write_torch),
            exact=returning(kv_write_ref),
            num_bytes=num_bytes,
            num_flops=0,
            ceiling="memory",
            goal=None,
        )
        for label, pool_dtype, num_bytes in (
            (f"{num_tokens} tokens", None, 4 * num_values),
            (f"{num_tokens} tokens to int8", torch.int8, 3 * num_values),
        )
    ]
