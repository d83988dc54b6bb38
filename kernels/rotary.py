"""Rotary position embedding of queries and keys, rotate-half form (GPT-NeoX, Llama).

Shapes (T tokens, Hq query heads, Hk key heads, D head_dim, even):
  q         (T, Hq, D)   fp16 | bf16 | fp32   contiguous rows, which may lie apart (a slice of a
  k         (T, Hk, D)   dtype of q           fused projection)
  cos, sin  (T, R / 2)   fp32, contiguous     of each token's position, R <= D even
  q', k'    shapes and dtype of q and k; new tensors
Mathematics: with x = [a, b, c], a and b of R / 2 channels, c the D - R that are not rotated (none
where R = D), x' = [a cos - b sin, b cos + a sin, c], in fp32, rounded once.
Contract: a token's result depends on that token only.

Su et al., RoFormer, arXiv:2104.09864.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch

from compress.kernels.jit import FLOAT_DTYPES, CompileCase, check_rows, check_tensor, tl, triton

# (largest number of values in the queries' half tile, num_warps): one program holds the heads of
# one token. Set from the compiler's register counts for sm_90, not yet timed on a card.
_TILES: tuple[tuple[int, int], ...] = ((1024, 4), (4096, 8), (32768, 16))


def rotary_ref(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle: `rotary` in float64, one rounding."""

    def rotate(x: torch.Tensor) -> torch.Tensor:
        half = cos.shape[1]
        a, b, rest = x.double().split_with_sizes((half, half, x.shape[-1] - 2 * half), dim=-1)
        c, s = cos.double()[:, None], sin.double()[:, None]  # (T, 1, R / 2)
        return torch.cat((a * c - b * s, b * c + a * s, rest), dim=-1).to(x.dtype)

    return rotate(q), rotate(k)


# fmt: off
@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, cos, sin,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):
    # fmt: on
    offs_h, offs_d = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    mask = (offs_h < NUM_HEADS) & (offs_d < HALF)
    offs = offs_h * HEAD_DIM + offs_d
    a = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)  # [BH, BD]
    b = tl.load(x_ptr + offs + HALF, mask=mask, other=0.0).to(tl.float32)  # [BH, BD]
    dtype = y_ptr.dtype.element_ty
    tl.store(y_ptr + offs, (a * cos - b * sin).to(dtype), mask=mask)
    tl.store(y_ptr + offs + HALF, (b * cos + a * sin).to(dtype), mask=mask)
    if HEAD_DIM > 2 * HALF:
        offs_r = 2 * HALF + tl.arange(0, BLOCK_R)[None, :]
        rest = (offs_h < NUM_HEADS) & (offs_r < HEAD_DIM)
        offs = offs_h * HEAD_DIM + offs_r
        tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=rest, other=0.0), mask=rest)


# fmt: off
@triton.jit
def _rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, yq_ptr, yk_ptr,
    stride_qt, stride_kt,
    NUM_Q_HEADS: tl.constexpr, NUM_K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):
    # fmt: on
    # one program = all heads of one token
    t = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    cos = tl.load(cos_ptr + t * HALF + offs_d, mask=offs_d < HALF, other=0.0)[None, :]  # [1, BD]
    sin = tl.load(sin_ptr + t * HALF + offs_d, mask=offs_d < HALF, other=0.0)[None, :]  # [1, BD]
    yq_ptr += t * (NUM_Q_HEADS * HEAD_DIM)
    yk_ptr += t * (NUM_K_HEADS * HEAD_DIM)
    q_ptr += t * stride_qt
    k_ptr += t * stride_kt
    _rotate_heads(
        q_ptr, yq_ptr, cos, sin, NUM_Q_HEADS, HEAD_DIM, HALF, BLOCK_Q, BLOCK_D, BLOCK_R
    )
    _rotate_heads(
        k_ptr, yk_ptr, cos, sin, NUM_K_HEADS, HEAD_DIM, HALF, BLOCK_K, BLOCK_D, BLOCK_R
    )


def rotary_triton(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton `rotary`; shapes and contract in the module docstring, ValueError if broken."""
    check_tensor("q", q, shape=(None, None, None), dtypes=FLOAT_DTYPES)
    num_tokens, num_q_heads, head_dim = q.shape
    check_tensor("k", k, shape=(num_tokens, None, head_dim), dtypes=(q.dtype,))
    if head_dim % 2:
        raise ValueError(f"q must have an even head_dim, got {head_dim}")
    half = cos.shape[-1]
    if not 0 < 2 * half <= head_dim:
        raise ValueError(f"cos must have 1 to {head_dim // 2} columns, got {half}")
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, shape=(num_tokens, half), dtypes=(torch.float32,))
    check_rows("q", q)
    check_rows("k", k)
    yq, yk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if num_tokens:
        constexprs, num_warps = _variant(num_q_heads, k.shape[1], head_dim, half)
        args = (q, k, cos.contiguous(), sin.contiguous(), yq, yk, q.stride(0), k.stride(0))
        _rotary_kernel[(num_tokens,)](*args, **constexprs, num_warps=num_warps)
    return yq, yk


def _variant(
    num_q_heads: int, num_k_heads: int, head_dim: int, half: int
) -> tuple[dict[str, int], int]:
    """Compile-time constants and num_warps for these heads; ValueError if they are too many."""
    sizes = (num_q_heads, num_k_heads, half, max(head_dim - 2 * half, 1))
    block_q, block_k, block_d, block_r = map(triton.next_power_of_2, sizes)
    values = max(block_q, block_k) * max(block_d, block_r)
    if values > _TILES[-1][0]:
        raise ValueError(f"q is too wide: {num_q_heads} heads of {head_dim}")
    num_warps = next(warps for largest, warps in _TILES if values <= largest)
    constexprs = {
        "NUM_Q_HEADS": num_q_heads,
        "NUM_K_HEADS": num_k_heads,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "BLOCK_Q": block_q,
        "BLOCK_K": block_k,
        "BLOCK_D": block_d,
        "BLOCK_R": block_r,
    }
    return constexprs, num_warps


def rotary_torch(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch `rotary`: queries and keys in one pass; the results are views of one tensor."""
    heads, half = torch.cat((q, k), dim=1), cos.shape[1]
    a, b = heads[..., : 2 * half].float().chunk(2, dim=-1)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)  # (T, 1, R / 2)
    rotated_a = torch.addcmul(a * c, b, s, value=-1)
    rotated_b = torch.addcmul(b * c, a, s)
    rotated = torch.cat((rotated_a, rotated_b), dim=-1).to(q.dtype)
    if 2 * half < q.shape[2]:
        rotated = torch.cat((rotated, heads[..., 2 * half :]), dim=-1)
    return rotated[:, : q.shape[1]], rotated[:, q.shape[1] :]


def compile_cases() -> list[CompileCase]:
    """Every row of the tile table: 9 heads over 3 of 64, 32 over 8 of 128, 256 over 256 of 256; and
    24 over 8 of 128, three quarters of which are rotated.
    """
    types = dict.fromkeys(("q_ptr", "k_ptr", "yq_ptr", "yk_ptr"), "*bf16")
    types |= dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32")
    cases = []
    whole, partial = ((9, 3, 64, 32), (32, 8, 128, 64), (256, 256, 256, 128)), (24, 8, 128, 48)
    for num_q_heads, num_k_heads, head_dim, half in (*whole, partial):
        constexprs, num_warps = _variant(num_q_heads, num_k_heads, head_dim, half)
        cases.append(
            CompileCase(
                kernel=_rotary_kernel,
                label=f"heads={num_q_heads}/{num_k_heads},head_dim={head_dim},half={half}",
                types=types,
                constexprs=constexprs,
                divisible=("stride_qt", "stride_kt"),
                num_warps=num_warps,
                meant=("load16",),
            )
        )
    return cases
