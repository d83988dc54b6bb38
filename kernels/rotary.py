"""Rotary position embedding of queries and keys, rotate-half form (GPT-NeoX, Llama).

Shapes (T tokens, Hq query heads, Hk key heads, D head_dim, R <= D values that rotate, even;
NB blocks of BS tokens):
  q               (T, Hq, D)       fp16 | bf16 | fp32   contiguous rows, which may lie apart (a
  k, v            (T, Hk, D)       dtype of q           slice of a fused projection)
  cos, sin        (T, R / 2)       fp32   of each token's position
  q', k'          shapes and dtype of q and k; new tensors
  k_pool, v_pool  (NB, Hk, BS, D)  dtype of q, contiguous; changed in place
  slots           (T,)             int64  block * BS + offset of each token; negative: skip it
Mathematics: with [a, b] = x[:R] split in halves, x' = [a cos - b sin, b cos + a sin, x[R:]], in
fp32, rounded once. R < D is partial rotary embedding (Phi).
  rotary           gives q' and k'.
  rotary_kv_write  gives q', and writes k' and v as `kv_write` does, k_pool[slots // BS, :, slots %
                   BS] = k', in the same pass.
Contract: a token's result depends on that token only. The non-negative slots are distinct and below
NB * BS. Triton does not check the slots, which would wait for the GPU; torch raises IndexError.

Su et al., RoFormer, arXiv:2104.09864.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from functools import partial

import torch

from compress.kernels.jit import (
    FLOAT_DTYPES,
    BenchCase,
    CompileCase,
    check_one_device,
    check_rows,
    check_tensor,
    tl,
    triton,
)
from compress.kernels.kv_write import kv_write_ref, kv_write_torch

# (largest number of values in a half of the heads that are rotated at once, num_warps): one program
# does the heads of one token, and loops if they are more. Set from the compiler's register counts
# for sm_90, not yet timed on a card.
_TILES: tuple[tuple[int, int], ...] = ((2048, 4), (8192, 8))


def rotary_ref(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle: `rotary` in float64, one rounding."""

    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = cos.shape[1]
        a, b, passed = x.double().split((half, half, x.shape[-1] - 2 * half), dim=-1)
        c, s = cos.double()[:, None], sin.double()[:, None]  # (T, 1, R / 2)
        return torch.cat((a * c - b * s, b * c + a * s, passed), dim=-1).to(x.dtype)

    return rotate(q), rotate(k)


def rotary_kv_write_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Oracle: `rotary_kv_write`, the rotation in float64, the writes token by token."""
    q, k = rotary_ref(q, k, cos, sin)
    kv_write_ref(k, v, k_pool, v_pool, slots)
    return q


# fmt: off
@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, row, row_stride, cos, sin, keep,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):
    # fmt: on
    # heads of one token at x_ptr to the rows row, row + row_stride ... of y, if keep
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    offs_d, offs_p = tl.arange(0, BLOCK_D)[None, :], 2 * HALF + tl.arange(0, BLOCK_P)[None, :]
    for start in range(0, NUM_HEADS, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H)[:, None]
        x_ptrs = x_ptr + heads * HEAD_DIM  # [BH, 1]
        y_ptrs = y_ptr + (row + heads * row_stride) * HEAD_DIM  # [BH, 1]
        mask_h = keep & (heads < NUM_HEADS)
        mask = mask_h & (offs_d < HALF)
        a = tl.load(x_ptrs + offs_d, mask=mask, other=0.0).to(tl.float32)  # [BH, BD]
        b = tl.load(x_ptrs + HALF + offs_d, mask=mask, other=0.0).to(tl.float32)  # [BH, BD]
        tl.store(y_ptrs + offs_d, (a * cos - b * sin).to(dtype), mask=mask)
        tl.store(y_ptrs + HALF + offs_d, (b * cos + a * sin).to(dtype), mask=mask)
        if 2 * HALF < HEAD_DIM:
            mask = mask_h & (offs_p < HEAD_DIM)
            tl.store(y_ptrs + offs_p, tl.load(x_ptrs + offs_p, mask=mask), mask=mask)


# fmt: off
@triton.jit
def _copy_heads(
    x_ptr, y_ptr, row, row_stride, keep,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):
    # fmt: on
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    for start in range(0, NUM_HEADS, BLOCK_H):
        heads = start + tl.arange(0, BLOCK_H)[:, None]
        mask = keep & (heads < NUM_HEADS) & (offs_d < HEAD_DIM)
        x = tl.load(x_ptr + heads * HEAD_DIM + offs_d, mask=mask)  # [BH, BD]
        tl.store(y_ptr + (row + heads * row_stride) * HEAD_DIM + offs_d, x, mask=mask)


# fmt: off
@triton.jit
def _rotary_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, yq_ptr, yk_ptr, yv_ptr, slots_ptr,
    stride_qt, stride_kt, stride_vt,
    NUM_Q_HEADS: tl.constexpr, NUM_K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_V: tl.constexpr,
):
    # fmt: on
    # one program = all heads of one token; BLOCK_SIZE 0 = no pool
    t = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    cos = tl.load(cos_ptr + t * HALF + offs_d, mask=offs_d < HALF, other=0.0)  # [1, BD]
    sin = tl.load(sin_ptr + t * HALF + offs_d, mask=offs_d < HALF, other=0.0)  # [1, BD]
    _rotate_heads(
        q_ptr + t * stride_qt, yq_ptr, t * NUM_Q_HEADS, 1, cos, sin, t >= 0,
        NUM_Q_HEADS, HEAD_DIM, HALF, BLOCK_Q, BLOCK_D, BLOCK_P,
    )  # fmt: skip
    k_ptr += t * stride_kt
    if BLOCK_SIZE == 0:
        _rotate_heads(
            k_ptr, yk_ptr, t * NUM_K_HEADS, 1, cos, sin, t >= 0,
            NUM_K_HEADS, HEAD_DIM, HALF, BLOCK_K, BLOCK_D, BLOCK_P,
        )  # fmt: skip
    else:
        slot = tl.load(slots_ptr + t)
        row = slot // BLOCK_SIZE * (NUM_K_HEADS * BLOCK_SIZE) + slot % BLOCK_SIZE
        _rotate_heads(
            k_ptr, yk_ptr, row, BLOCK_SIZE, cos, sin, slot >= 0,
            NUM_K_HEADS, HEAD_DIM, HALF, BLOCK_K, BLOCK_D, BLOCK_P,
        )  # fmt: skip
        _copy_heads(
            v_ptr + t * stride_vt, yv_ptr, row, BLOCK_SIZE, slot >= 0,
            NUM_K_HEADS, HEAD_DIM, BLOCK_K, BLOCK_V,
        )  # fmt: skip


def _variant(
    num_q_heads: int, num_k_heads: int, head_dim: int, rotary_dim: int, block_size: int
) -> tuple[dict[str, int], int]:
    """Compile-time constants and num_warps for these heads; ValueError if they are too wide."""
    half = rotary_dim // 2
    block_d, block_p, block_v = (
        triton.next_power_of_2(max(size, 1)) for size in (half, head_dim - rotary_dim, head_dim)
    )
    widest = max(block_d, block_p, block_v // 2)
    most = _TILES[-1][0]
    if widest > most:
        raise ValueError(f"q must have a head_dim of at most {2 * most}, got {head_dim}")
    block_q, block_k = (
        min(triton.next_power_of_2(num_heads), most // widest)
        for num_heads in (num_q_heads, num_k_heads)
    )
    constexprs = {
        "NUM_Q_HEADS": num_q_heads,
        "NUM_K_HEADS": num_k_heads,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "BLOCK_SIZE": block_size,
        "BLOCK_Q": block_q,
        "BLOCK_K": block_k,
        "BLOCK_D": block_d,
        "BLOCK_P": block_p,
        "BLOCK_V": block_v,
    }
    values = max(block_q, block_k) * widest
    return constexprs, next(warps for largest, warps in _TILES if values <= largest)


def _check(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    check_tensor("q", q, shape=(None, None, None), dtypes=FLOAT_DTYPES)
    num_tokens, num_heads, head_dim = q.shape
    check_tensor("k", k, shape=(num_tokens, None, head_dim), dtypes=(q.dtype,))
    if not num_heads or not k.shape[1]:
        raise ValueError(f"q and k must have heads, got {num_heads} and {k.shape[1]}")
    check_tensor("cos", cos, shape=(num_tokens, None), dtypes=(torch.float32,))
    if not 0 < 2 * cos.shape[1] <= head_dim:
        raise ValueError(
            f"cos must have 1 to {head_dim // 2} columns, half of head_dim {head_dim} at most, got "
            f"{cos.shape[1]}"
        )
    check_tensor("sin", sin, shape=tuple(cos.shape), dtypes=(torch.float32,))
    check_rows("q", q)
    check_rows("k", k)
    check_one_device(q=q, k=k, cos=cos, sin=sin)


def rotary_triton(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton `rotary`; shapes and contract in the module docstring, ValueError if broken."""
    _check(q, k, cos, sin)
    num_tokens, num_q_heads, head_dim = q.shape
    yq, yk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    constexprs, num_warps = _variant(num_q_heads, k.shape[1], head_dim, 2 * cos.shape[1], 0)
    if num_tokens:
        _rotary_kernel[(num_tokens,)](
            q, k, k, cos.contiguous(), sin.contiguous(), yq, yk, yk, cos,
            q.stride(0), k.stride(0), k.stride(0),
            **constexprs, num_warps=num_warps,
        )  # fmt: skip
    return yq, yk


def rotary_kv_write_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Triton `rotary_kv_write`, q'; contract in the module docstring, ValueError if broken."""
    _check(q, k, cos, sin)
    num_tokens, num_q_heads, head_dim = q.shape
    num_k_heads = k.shape[1]
    check_tensor("v", v, shape=tuple(k.shape), dtypes=(q.dtype,))
    check_rows("v", v)
    check_tensor("k_pool", k_pool, shape=(None, num_k_heads, None, head_dim), dtypes=(q.dtype,))
    check_tensor("v_pool", v_pool, shape=tuple(k_pool.shape), dtypes=(q.dtype,))
    check_tensor("slots", slots, shape=(num_tokens,), dtypes=(torch.int64,))
    for name, tensor in (("k_pool", k_pool), ("v_pool", v_pool), ("slots", slots)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    check_one_device(q=q, v=v, k_pool=k_pool, v_pool=v_pool, slots=slots)
    block_size = k_pool.shape[2]
    if not block_size:
        raise ValueError(f"k_pool must have blocks of 1 token or more, got {tuple(k_pool.shape)}")
    yq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    constexprs, num_warps = _variant(
        num_q_heads, num_k_heads, head_dim, 2 * cos.shape[1], block_size
    )
    if num_tokens:
        _rotary_kernel[(num_tokens,)](
            q, k, v, cos.contiguous(), sin.contiguous(), yq, k_pool, v_pool, slots,
            q.stride(0), k.stride(0), v.stride(0),
            **constexprs, num_warps=num_warps,
        )  # fmt: skip
    return yq


def rotary_torch(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch `rotary`: queries and keys in one pass; the results are views of one tensor."""
    heads = torch.cat((q, k), dim=1)
    half = cos.shape[1]
    a, b = heads[..., : 2 * half].float().chunk(2, dim=-1)  # views of `heads` if it is fp32
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)  # (T, 1, R / 2)
    rotated_a = torch.addcmul(a * c, b, s, value=-1)
    rotated_b = torch.addcmul(b * c, a, s)
    heads[..., :half], heads[..., half : 2 * half] = rotated_a, rotated_b
    return heads[:, : q.shape[1]], heads[:, q.shape[1] :]


def rotary_kv_write_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Torch `rotary_kv_write`, q': the two operations; q' is a view of a larger tensor."""
    q, k = rotary_torch(q, k, cos, sin)
    kv_write_torch(k, v, k_pool, v_pool, slots)
    return q


def compile_cases() -> list[CompileCase]:
    """Every row of the tile table, whole heads and partial ones, with and without the pool."""
    types = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "yq_ptr", "yk_ptr", "yv_ptr"), "*bf16")
    types |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32"}
    heads = ((9, 3, 64, 64), (32, 8, 128, 128), (24, 8, 128, 96), (96, 8, 128, 64))
    cases = []
    for num_q_heads, num_k_heads, head_dim, rotary_dim in (*heads, (256, 256, 256, 256)):
        for block_size in (0, 64):
            constexprs, num_warps = _variant(
                num_q_heads, num_k_heads, head_dim, rotary_dim, block_size
            )
            name = "rotary_kv_write" if block_size else "rotary"
            shape = f"heads={num_q_heads}/{num_k_heads},head_dim={head_dim},rotary={rotary_dim}"
            cases.append(
                CompileCase(
                    kernel=_rotary_kernel,
                    label=f"{name},{shape}",
                    types=types | {"slots_ptr": "*i64" if block_size else "*fp32"},
                    constexprs=constexprs,
                    divisible=("stride_qt", "stride_kt", "stride_vt"),
                    num_warps=num_warps,
                    meant=("load16",),
                )
            )
    return cases


def bench_cases() -> list[BenchCase]:
    """The heads of an 8B Llama, as slices of one fused projection; pools of blocks of 64."""

    def make(num_tokens, paged, device, dtype):
        qkv = torch.randn(num_tokens, 48, 128, device=device).to(dtype)
        q, k, v = qkv.split((32, 8, 8), dim=1)
        angles = torch.rand(num_tokens, 64, device=device) * 6.28
        if not paged:
            return q, k, angles.cos(), angles.sin()
        pools = (torch.zeros(num_tokens // 64, 8, 64, 128, device=device).to(dtype) for _ in "kv")
        slots = torch.randperm(num_tokens // 64, device=device)[:, None] * 64
        slots = (slots + torch.arange(64, device=device)).flatten()
        return q, k, v, angles.cos(), angles.sin(), *pools, slots

    def plain(q, k, cos, sin):
        def rotate(x):
            a, b = x.chunk(2, dim=-1)
            return (x * both_cos + torch.cat((-b, a), dim=-1) * both_sin).to(x.dtype)

        both_cos, both_sin = (torch.cat((x, x), dim=-1)[:, None] for x in (cos, sin))
        return rotate(q), rotate(k)

    def plain_write(q, k, v, cos, sin, k_pool, v_pool, slots):
        q, k = plain(q, k, cos, sin)
        kv_write_torch(k, v, k_pool, v_pool, slots)
        return q, k_pool, v_pool

    def fused(q, k, v, cos, sin, k_pool, v_pool, slots):
        return rotary_kv_write_triton(q, k, v, cos, sin, k_pool, v_pool, slots), k_pool, v_pool

    def exact(q, k, v, cos, sin, k_pool, v_pool, slots):
        k_pool, v_pool = k_pool.double(), v_pool.double()
        q, k = rotary_ref(q.double(), k.double(), cos, sin)
        kv_write_torch(k, v.double(), k_pool, v_pool, slots)
        return q, k_pool, v_pool

    cases = []
    for num_tokens, goal in ((16384, 0.85), (64, None)):
        tables = 2 * 64 * 4
        cases.append(
            BenchCase(
                label=f"rotary {num_tokens} tokens",
                make=partial(make, num_tokens, False),
                triton=rotary_triton,
                plain=plain,
                exact=lambda q, k, cos, sin: rotary_ref(q.double(), k.double(), cos, sin),
                num_bytes=num_tokens * (2 * 2 * 40 * 128 + tables),
                num_flops=num_tokens * 3 * 40 * 128,
                ceiling="memory",
                goal=goal,
            )
        )
        cases.append(
            BenchCase(
                label=f"rotary_kv_write {num_tokens} tokens",
                make=partial(make, num_tokens, True),
                triton=fused,
                plain=plain_write,
                exact=exact,
                num_bytes=num_tokens * (2 * 2 * 48 * 128 + tables + 8),
                num_flops=num_tokens * 3 * 40 * 128,
                ceiling="memory",
                goal=goal,
            )
        )
    return cases
