"""Float8 linear: float8_e4m3fn weights by float8_e4m3fn activations, scales outside the product.

Shapes (M tokens, N out_features, K in_features, B = 128, Kb = ceil(K / B), Nb = ceil(N / B)):
  x_codes   (M, K)    float8_e4m3fn   contiguous, with its scales: see `quantize_float8.py`
  x_scale   (M,)      fp32            one per token; in the block form (M, Kb), contiguous
  codes     (N, K)    float8_e4m3fn   contiguous
  scale     (N,)      fp32            one per weight row; in the block form (Nb, Kb), contiguous
  bias      (N,)      fp32            or None
  y         (M, N)    fp16 | bf16 | fp32
Mathematics, with P_b[m, n] = sum over the columns k of block b of x_codes[m, k] * codes[n, k]:
  per channel   y[m, n] = x_scale[m] * scale[n] * (P_0 + P_1 + ...) + bias[n]
  block form    y[m, n] = sum over b of P_b * (x_scale[m, b] * scale[n // B, b]) + bias[n]
in fp32, the blocks in order, rounded once. The last blocks may be partial.
Contract: a row has the same bits alone and in every batch. NaN codes stay in their row.

How Triton does it: from sm_89 on by the tensor cores' float8 product. Hopper's keeps about 14 bits
of a sum, so each block of 128 columns starts a new one, and the blocks are added in fp32 registers.
Its instruction is 64 tokens tall; a decoding step with fewer leaves rows unused, for with another
instruction its rows could have other bits. Older chips have no such product: there the kernel is
given the bytes and widens them to fp16, which holds all of them.

Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433; DeepSeek-AI, DeepSeek-V3,
arXiv:2412.19437, section 3.3.2 (blocks of 128 x 128, sums promoted every 128 columns).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import cache
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from compress.kernels.float8 import decode_float8
from compress.kernels.jit import FLOAT_DTYPES, BenchCase, CompileCase, check_tensor, tl, triton
from compress.kernels.kv_codes import decode_codes
from compress.scheme import FLOAT8, spread_scale

BLOCK = 128  # edge of the blocks that share a scale; columns per step


class _Tile(NamedTuple):
    block_m: int  # tokens
    block_n: int  # weight rows
    num_warps: int
    num_stages: int


# Largest number of tokens -> tile, for float8 products and for bytes widened to fp16. Nothing
# spills, and all fit the 99 KiB of shared memory of sm_89. Not yet timed on a card.
_Tiles = tuple[tuple[int, _Tile], ...]
_TILES_FLOAT8: _Tiles = (
    (64, _Tile(64, 64, 4, 5)),
    (256, _Tile(128, 64, 4, 4)),
    (1 << 30, _Tile(128, 128, 8, 3)),
)
_TILES_BYTES: _Tiles = (
    (16, _Tile(16, 64, 4, 4)),
    (64, _Tile(64, 64, 4, 3)),
    (1 << 30, _Tile(128, 64, 8, 3)),
)


def w8a8_float8_ref(
    x_codes: torch.Tensor,
    x_scale: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Oracle: `w8a8_float8` in float64, rounded once."""
    if scale.dim() == 1:
        x_scale, scale = x_scale[:, None], scale[:, None]
    else:
        x_scale = x_scale.repeat_interleave(BLOCK, 1)[:, : x_codes.shape[1]]
        scale = spread_scale(scale, codes.shape, BLOCK)
    y = (x_codes.double() * x_scale.double()) @ (codes.double() * scale.double()).T
    return (y if bias is None else y + bias.double()).to(dtype)


@triton.jit
def _operand(values):
    # A tile of codes as the tensor cores take it: float8, or float16 of the bytes, exactly.
    if values.dtype == tl.uint8:  # noqa: SIM108, one branch is compiled
        operand = decode_codes(values, tl.float16)
    else:
        operand = values
    return operand


# fmt: off
@triton.jit
def _w8a8_float8_kernel(
    x_ptr, x_scale_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr,
    M, N, K,
    BLOCKED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # fmt: on
    # one program = a (BLOCK_M, BLOCK_N) tile of y
    pid_m, pid_n = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    num_blocks = tl.cdiv(K, BLOCK_K)
    x_row = x_ptr + offs_m[:, None] * K  # [BM, 1]
    w_row = w_ptr + offs_n[:, None] * K  # [BN, 1]
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, dtype=tl.float32)
    for block in range(0, num_blocks):
        offs_k = block * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        mask_x, mask_w = mask_m[:, None], mask_n[:, None]
        if not EVEN_K:
            mask_x, mask_w = mask_x & (offs_k < K), mask_w & (offs_k < K)
        x = tl.load(x_row + offs_k, mask=mask_x, other=0.0)  # [BM, BK]
        w = tl.load(w_row + offs_k, mask=mask_w, other=0.0)  # [BN, BK]
        if BLOCKED:
            # The BLOCK_N weight rows of a tile lie within one block of 128.
            factor = tl.load(scale_ptr + (pid_n * BLOCK_N // BLOCK_K) * num_blocks + block)
            factor *= tl.load(x_scale_ptr + offs_m * num_blocks + block, mask=mask_m, other=0.0)
            acc += tl.dot(_operand(x), tl.trans(_operand(w))) * factor[:, None]  # [BM, BN]
        else:
            acc += tl.dot(_operand(x), tl.trans(_operand(w)))  # [BM, BN]
    if not BLOCKED:
        x_scale = tl.load(x_scale_ptr + offs_m, mask=mask_m, other=0.0)  # [BM]
        scale = tl.load(scale_ptr + offs_n, mask=mask_n, other=0.0)  # [BN]
        acc = acc * x_scale[:, None] * scale[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0)[None, :]
    offs_y = offs_m[:, None] * N + offs_n[None, :]
    mask = mask_m[:, None] & mask_n[None, :]
    tl.store(y_ptr + offs_y, acc.to(y_ptr.dtype.element_ty), mask=mask)


def w8a8_float8_triton(
    x_codes: torch.Tensor,
    x_scale: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Triton `w8a8_float8`; shapes and contract in the module docstring, ValueError if broken.

    The block form is the one whose `scale` has two dimensions.
    """
    _check(x_codes, x_scale, codes, scale, bias, dtype)
    (num_tokens, in_features), out_features = x_codes.shape, codes.shape[0]
    y = torch.empty((num_tokens, out_features), dtype=dtype, device=x_codes.device)
    if not y.numel():
        return y
    tiles = _TILES_FLOAT8
    if not _has_float8_product(x_codes.device):
        x_codes, codes = x_codes.view(torch.uint8), codes.view(torch.uint8)
        tiles = _TILES_BYTES
    tile = next(tile for largest, tile in tiles if num_tokens <= largest)
    constexprs, options = _variant(
        tile, in_features, blocked=scale.dim() == 2, biased=bias is not None
    )
    grid = (triton.cdiv(num_tokens, tile.block_m), triton.cdiv(out_features, tile.block_n))
    _w8a8_float8_kernel[grid](
        x_codes, x_scale, codes, scale, scale if bias is None else bias, y,
        num_tokens, out_features, in_features, **constexprs, **options,
    )  # fmt: skip
    return y


def _check(
    x_codes: torch.Tensor,
    x_scale: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> None:
    check_tensor("x_codes", x_codes, shape=(None, None), dtypes=(FLOAT8,))
    num_tokens, in_features = x_codes.shape
    if not in_features:
        raise ValueError("x_codes must have at least one column")
    check_tensor("codes", codes, shape=(None, in_features), dtypes=(FLOAT8,))
    out_features = codes.shape[0]
    if scale.dim() == 2:
        num_blocks = triton.cdiv(in_features, BLOCK)
        rows: tuple[int, ...] = (triton.cdiv(out_features, BLOCK), num_blocks)
        tokens: tuple[int, ...] = (num_tokens, num_blocks)
    else:
        rows, tokens = (out_features,), (num_tokens,)
    check_tensor("scale", scale, shape=rows, dtypes=(torch.float32,))
    check_tensor("x_scale", x_scale, shape=tokens, dtypes=(torch.float32,))
    if bias is not None:
        check_tensor("bias", bias, shape=(out_features,), dtypes=(torch.float32,))
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype must be float16, bfloat16 or float32, got {dtype}")
    tensors = {"x_codes": x_codes, "x_scale": x_scale, "codes": codes, "scale": scale, "bias": bias}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        if tensor.device != x_codes.device:
            raise ValueError(f"{name} must be on {x_codes.device} as x_codes is: {tensor.device}")


@cache
def _has_float8_product(device: torch.device) -> bool:
    """Whether the tensor cores of `device` multiply float8_e4m3fn; the interpreter has none."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _variant(
    tile: _Tile, in_features: int, *, blocked: bool, biased: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """Compile-time constants and launch options of one tile."""
    constexprs = {
        "BLOCKED": blocked,
        "HAS_BIAS": biased,
        "EVEN_K": in_features % BLOCK == 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": BLOCK,
    }
    return constexprs, {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def w8a8_float8_torch(
    x_codes: torch.Tensor,
    x_scale: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Torch `w8a8_float8`: dequantized, multiplied in fp32. On a CPU `_scaled_mm` is far slower."""
    x, weight = decode_float8(x_codes, torch.float32), decode_float8(codes, torch.float32)
    if scale.dim() == 1:
        y = F.linear(x, weight).mul_(x_scale[:, None]).mul_(scale)
        return (y if bias is None else y.add_(bias)).to(dtype)
    x = x * x_scale.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    return F.linear(x, weight * spread_scale(scale, weight.shape, BLOCK), bias).to(dtype)


def compile_cases() -> list[CompileCase]:
    """Every tile per channel and in blocks, with whole blocks of columns and with a partial one."""
    cases = []
    for codes, tiles, arches in (
        ("u8", _TILES_BYTES, (80,)),
        ("fp8e4nv", _TILES_FLOAT8, (90, 100)),
    ):
        types = {"x_ptr": f"*{codes}", "w_ptr": f"*{codes}", "y_ptr": "*bf16"}
        types |= dict.fromkeys(("x_scale_ptr", "scale_ptr", "bias_ptr"), "*fp32")
        for (_largest, tile), blocked, (in_features, biased) in product(
            tiles, (False, True), ((4096, False), (576, True))
        ):
            constexprs, options = _variant(tile, in_features, blocked=blocked, biased=biased)
            sizes = f"{tile.block_m}x{tile.block_n},K={in_features}"
            cases.append(
                CompileCase(
                    kernel=_w8a8_float8_kernel,
                    label=f"{codes},{'block' if blocked else 'channel'},{sizes}",
                    types=types,
                    constexprs=constexprs,
                    divisible=("N", "K"),
                    meant=("mma", "wgmma", "load16"),
                    arches=arches,
                    **options,
                )
            )
    return cases


def bench_cases() -> list[BenchCase]:
    """A prefill of 4096 tokens and a decoding step of 16, per channel and in blocks."""
    return [
        _bench_case(num_tokens, blocked=blocked)
        for num_tokens in (4096, 16)
        for blocked in (False, True)
    ]


def _bench_case(num_tokens: int, *, blocked: bool) -> BenchCase:
    out_features, in_features = 14336, 4096

    def make(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        def codes(rows: int) -> torch.Tensor:
            values = torch.randn(rows, in_features, device=device) * 100
            return values.clamp_(-448, 448).to(FLOAT8)

        columns = (in_features // BLOCK,) if blocked else ()
        scales = [
            torch.rand((rows, *columns), device=device) / 100
            for rows in (num_tokens, out_features // BLOCK if blocked else out_features)
        ]
        return codes(num_tokens), scales[0], codes(out_features), scales[1], None, dtype

    is_large, kind = num_tokens > 64, "block" if blocked else "channel"
    return BenchCase(
        label=f"M={num_tokens},N={out_features},K={in_features},{kind}",
        make=make,
        triton=w8a8_float8_triton,
        plain=w8a8_float8_torch,
        exact=w8a8_float8_ref,
        num_bytes=(num_tokens + out_features) * in_features + 2 * num_tokens * out_features,
        num_flops=2 * num_tokens * out_features * in_features,
        ceiling="matrix8" if is_large else "memory",
        goal=0.7,
    )
