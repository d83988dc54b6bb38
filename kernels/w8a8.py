"""W8A8 linear: int8 weights by int8 activations, as a product of integers.

Shapes (M tokens, N out_features, K in_features):
  x_codes   (M, K)   int8     contiguous, with x_scale (M,) fp32: see `quantize_tokens.py`
  codes     (N, K)   int8     contiguous, symmetric weight codes
  scale     (N,)     fp32     one per weight row
  bias      (N,)     fp32     or None
  y         (M, N)   fp16 | bf16 | fp32
Mathematics: y[m, n] = x_scale[m] * scale[n] * sum_k x_codes[m, k] * codes[n, k] + bias[n], the sum
exact in int32, the rest in fp32 in this order, rounded once.
Contract: K at most 65536, so that the sum cannot overflow. A row has the same bits alone and in
every batch: integers have no order of summation.

On a CPU the product is oneDNN's, with the weight prepacked, x_codes as uint8 (code + 128), and y in
fp32, still to be multiplied by x_scale. Signed input falls to a path some hundred times slower.
Median microseconds on 2 cores of a Zen 4 (AVX512 VNNI) that others used as well, cold weights,
against `torch._int_mm` and the bfloat16 product, M = 1/4/16/64:

| K x N       | this product        | _int_mm             | bfloat16             |
|-------------|---------------------|---------------------|----------------------|
| 576 x 3072  | 352/326/409/792     | 352/463/546/905     | 630/683/888/1661     |
| 2048 x 8192 | 1418/1386/2000/5887 | 1419/4425/4581/8393 | 3387/3698/5321/12585 |

so it serves every number of rows. Where the CPU lacks the instruction, oneDNN saturates sums of
pairs at 16 bits and the result is wrong for large codes: `has_int8_product` therefore tries the
largest ones, once.

Xiao et al., SmoothQuant, arXiv:2211.10438, eq. 2 (scales outside the integer product).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from compress.artifacts import QuantizedLinear
from compress.kernels.jit import (
    FLOAT_DTYPES,
    BenchCase,
    CompileCase,
    check_one_device,
    check_tensor,
    tl,
    triton,
)

MAX_IN_FEATURES = 65536  # 65536 * 255 * 128 < 2^31
_OFFSET = 128  # zero point of the unsigned activations


class _Tile(NamedTuple):
    block_m: int  # tokens
    block_n: int  # weight rows
    block_k: int
    num_warps: int
    num_stages: int


# Largest number of tokens -> tile. Nothing spills on sm_80 to sm_100. Not yet timed on a card.
_TILES: tuple[tuple[int, _Tile], ...] = (
    (16, _Tile(16, 64, 256, 4, 3)),
    (64, _Tile(64, 64, 128, 4, 3)),
    (1 << 30, _Tile(128, 128, 128, 8, 3)),
)


def w8a8_ref(
    x_codes: torch.Tensor,
    x_scale: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Oracle: `w8a8` in float64, rounded once."""
    sums = x_codes.double() @ codes.double().T
    y = sums * x_scale.double()[:, None] * scale.double()
    return (y if bias is None else y + bias.double()).to(dtype)


# fmt: off
@triton.jit
def _w8a8_kernel(
    x_ptr, x_scale_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr,
    M, N, K,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    # fmt: on
    # one program = a (BLOCK_M, BLOCK_N) tile of y
    pid_m, pid_n = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    acc = tl.full((BLOCK_M, BLOCK_N), 0, dtype=tl.int32)
    for start in range(0, K, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_x, mask_w = mask_m[:, None], mask_n[:, None]
        if not EVEN_K:
            inside = (offs_k < K)[None, :]
            mask_x, mask_w = mask_x & inside, mask_w & inside
        x = tl.load(x_ptr + offs_m[:, None] * K + offs_k[None, :], mask=mask_x, other=0)  # [BM, BK]
        w = tl.load(w_ptr + offs_n[:, None] * K + offs_k[None, :], mask=mask_w, other=0)  # [BN, BK]
        acc = tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)
    x_scale = tl.load(x_scale_ptr + offs_m, mask=mask_m, other=0.0)  # [BM]
    scale = tl.load(scale_ptr + offs_n, mask=mask_n, other=0.0)  # [BN]
    y = acc.to(tl.float32) * x_scale[:, None] * scale[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0)[None, :]
    offs_y = offs_m[:, None] * N + offs_n[None, :]
    mask = mask_m[:, None] & mask_n[None, :]
    tl.store(y_ptr + offs_y, y.to(y_ptr.dtype.element_ty), mask=mask)


def w8a8_triton(
    x_codes: torch.Tensor,
    x_scale: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Triton `w8a8`; shapes and contract in the module docstring, ValueError if broken."""
    check_tensor("x_codes", x_codes, shape=(None, None), dtypes=(torch.int8,))
    num_tokens, in_features = x_codes.shape
    if not 0 < in_features <= MAX_IN_FEATURES:
        raise ValueError(f"x_codes must have 1 to {MAX_IN_FEATURES} columns, got {in_features}")
    check_tensor("codes", codes, shape=(None, in_features), dtypes=(torch.int8,))
    out_features = codes.shape[0]
    check_tensor("x_scale", x_scale, shape=(num_tokens,), dtypes=(torch.float32,))
    check_tensor("scale", scale, shape=(out_features,), dtypes=(torch.float32,))
    if bias is not None:
        check_tensor("bias", bias, shape=(out_features,), dtypes=(torch.float32,))
    check_one_device(x_codes=x_codes, x_scale=x_scale, codes=codes, scale=scale, bias=bias)
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"dtype must be float16, bfloat16 or float32, got {dtype}")
    tensors = {"x_codes": x_codes, "x_scale": x_scale, "codes": codes, "scale": scale, "bias": bias}
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    y = torch.empty((num_tokens, out_features), dtype=dtype, device=x_codes.device)
    if not y.numel():
        return y
    tile = next(tile for largest, tile in _TILES if num_tokens <= largest)
    constexprs, options = _variant(tile, in_features, biased=bias is not None)
    grid = (triton.cdiv(num_tokens, tile.block_m), triton.cdiv(out_features, tile.block_n))
    _w8a8_kernel[grid](
        x_codes, x_scale, codes, scale, scale if bias is None else bias, y,
        num_tokens, out_features, in_features, **constexprs, **options,
    )  # fmt: skip
    return y


def _variant(
    tile: _Tile, in_features: int, *, biased: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """Compile-time constants and launch options of one tile."""
    constexprs = {
        "HAS_BIAS": biased,
        "EVEN_K": in_features % tile.block_k == 0,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }
    return constexprs, {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def w8a8_torch(
    x_codes: torch.Tensor,
    x_scale: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Torch `w8a8` by `torch._int_mm`. Repeated calls on a CPU want `pack_int8_cpu` once."""
    sums = torch._int_mm(x_codes, codes.t())
    y = sums.float().mul_(x_scale[:, None]).mul_(scale)
    return (y if bias is None else y.add_(bias)).to(dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Cpu:
    """An int8 weight in the order of oneDNN: `packed` is private to it, `scale` (N,) fp32."""

    packed: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor  # (N,) int64, all 0


def is_int8_per_channel(linear: QuantizedLinear) -> bool:
    """Whether one scale serves each row of symmetric integer codes: what both products need."""
    return (
        linear.codes.dtype == torch.int8
        and linear.zero_point is None
        and linear.scale.shape == (linear.codes.shape[0], 1)
    )


def pack_int8_cpu(linear: QuantizedLinear) -> Int8Cpu:
    """Repack `linear` for `w8a8_cpu`; ValueError unless it is symmetric, per channel, narrow."""
    if not is_int8_per_channel(linear):
        raise ValueError("the int8 CPU kernel needs symmetric int8 codes, one scale per row")
    out_features, in_features = linear.codes.shape
    if in_features > MAX_IN_FEATURES:
        raise ValueError(f"the int8 CPU kernel takes K <= {MAX_IN_FEATURES}, got {in_features}")
    return Int8Cpu(
        packed=torch.ops.onednn.qlinear_prepack(linear.codes.contiguous(), None),
        scale=linear.scale.float().flatten(),
        zero_point=torch.zeros(out_features, dtype=torch.int64),
    )


def to_uint8(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes for `w8a8_cpu` of signed ones held in fp32, which are overwritten."""
    return codes.add_(_OFFSET).to(torch.uint8)


def w8a8_cpu(x_codes: torch.Tensor, weight: Int8Cpu) -> torch.Tensor:
    """y (M, N) fp32, see the module docstring; ValueError unless `x_codes` is uint8."""
    if x_codes.dtype != torch.uint8:
        raise ValueError(f"x_codes must be uint8 for the int8 CPU kernel, got {x_codes.dtype}")
    y: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        x_codes, 1.0, _OFFSET, weight.packed, weight.scale, weight.zero_point, None,
        1.0, 0, torch.float32, "none", [], "",
    )  # fmt: skip
    return y


@cache
def has_int8_product() -> bool:
    """Whether there is such a product, and this CPU multiplies the largest codes exactly."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return False
    codes = torch.full((4, 64), 127, dtype=torch.int8)
    codes[1::2] = -128
    linear = QuantizedLinear(codes=codes, scale=torch.ones(4, 1), zero_point=None, bits=8)
    x_codes = torch.tensor([[127], [-128]], dtype=torch.int8).expand(2, 64).contiguous()
    got = w8a8_cpu(to_uint8(x_codes.float()), pack_int8_cpu(linear))
    return torch.equal(
        got, w8a8_ref(x_codes, torch.ones(2), codes, torch.ones(4), None, torch.float32)
    )


def compile_cases() -> list[CompileCase]:
    """Every tile with K a multiple of its step and not, with and without a bias."""
    types = {"x_ptr": "*i8", "w_ptr": "*i8", "y_ptr": "*bf16"}
    types |= dict.fromkeys(("x_scale_ptr", "scale_ptr", "bias_ptr"), "*fp32")
    cases = []
    for _largest, tile in _TILES:
        for in_features, biased in ((4096, False), (576, True)):
            constexprs, options = _variant(tile, in_features, biased=biased)
            cases.append(
                CompileCase(
                    kernel=_w8a8_kernel,
                    label=f"tile={tile.block_m}x{tile.block_n},K={in_features}",
                    types=types,
                    constexprs=constexprs,
                    divisible=("N", "K"),
                    meant=("mma", "wgmma", "load16") if tile.block_m >= 64 else ("mma", "load16"),
                    **options,
                )
            )
    return cases


def bench_cases() -> list[BenchCase]:
    """A prefill of 4096 tokens, and a decoding step of 16."""
    return [_bench_case(4096), _bench_case(16)]


def _bench_case(num_tokens: int) -> BenchCase:
    out_features, in_features = 14336, 4096

    def make(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        def codes(rows: int) -> torch.Tensor:
            return torch.randint(-128, 128, (rows, in_features), device=device, dtype=torch.int8)

        x_scale, scale = (
            torch.rand(rows, device=device) / 1000 for rows in (num_tokens, out_features)
        )
        return codes(num_tokens), x_scale, codes(out_features), scale, None, dtype

    is_large = num_tokens > 64
    return BenchCase(
        label=f"M={num_tokens},N={out_features},K={in_features}",
        make=make,
        triton=w8a8_triton,
        plain=w8a8_torch if is_large else _w8a8_few_rows,
        exact=w8a8_ref,
        num_bytes=(num_tokens + out_features) * in_features + 2 * num_tokens * out_features,
        num_flops=2 * num_tokens * out_features * in_features,
        ceiling="matrix8" if is_large else "memory",
        goal=0.7,
    )


def _w8a8_few_rows(
    x_codes: torch.Tensor, x_scale: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """`w8a8_torch` of up to 16 rows: on a GPU `torch._int_mm` needs more than that."""
    padded = x_codes.new_zeros((32, x_codes.shape[1]))
    padded[: len(x_codes)] = x_codes
    x_scale = torch.cat((x_scale, x_scale.new_zeros(32 - len(x_scale))))
    return w8a8_torch(padded, x_scale, *rest)[: len(x_codes)]
