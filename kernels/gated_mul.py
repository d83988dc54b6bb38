"""Gated activation of a GLU layer, y = act(gate) * up, alone or with its int8 quantization.

Shapes (T tokens, I intermediate):
  gate_up  (T, 2I)  fp16 | bf16 | fp32   gate in the first I columns, up in the last I; contiguous
                                         rows, which may lie apart
  y        (T, I)   dtype of gate_up, contiguous
  codes    (T, I)   int8, contiguous
  scale    (T,)     fp32
Mathematics: act is
  silu       g / (1 + exp(-g))
  gelu_tanh  g / (1 + exp(-2u)), u = sqrt(2 / pi) (g + 0.044715 g^3): the same as
             g / 2 * (1 + tanh(u)), without its cancellation at negative g (Gemma)
  gelu       g / 2 * (1 + erf(g / sqrt(2)))
Triton works in fp32 and rounds once; torch rounds act(gate) as well.
  gated_mul           gives y.
  gated_mul_quantize  gives what `quantize_tokens(y)` gives, to the bit, in one pass over gate_up.
Contract: a row's result depends on that row only. For `gated_mul_quantize` on Triton, which holds a
row in registers, I <= 32768, or 16384 with gelu.

Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202. Hendrycks and Gimpel, Gaussian Error
Linear Units, arXiv:1606.08415.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F

from compress.kernels.jit import (
    FLOAT_DTYPES,
    BenchCase,
    CompileCase,
    check_rows,
    check_tensor,
    tl,
    triton,
)
from compress.kernels.quantize_tokens import (
    LEAST_SCALE,
    int8_rows,
    quantize_rows,
    quantize_tokens_ref,
)
from compress.kernels.rms_norm import MAX_HIDDEN, row_tile
from compress.lookup import lookup

Activation = Literal["silu", "gelu_tanh", "gelu"]
_SPLIT_ELEMENTS = 16384  # from which on torch may use several threads: GELU; others from twice that
_ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

# 8 values per thread: 16-byte loads at 2 bytes per value. Not yet timed on a card.
_BLOCK, _NUM_WARPS = 1024, 4

# Largest I that one program quantizes without spilling: the erf takes registers.
_MAX_QUANTIZED = {"silu": MAX_HIDDEN, "gelu_tanh": MAX_HIDDEN, "gelu": MAX_HIDDEN // 2}

_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}


def gated_mul_ref(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Oracle: `gated_mul` in float64, one rounding."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    if activation == "silu":
        activated = gate / (1 + torch.exp(-gate))
    elif activation == "gelu_tanh":
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        activated = gate / (1 + torch.exp(-2 * inner))
    else:
        activated = gate / 2 * torch.erfc(-gate / 2**0.5)
    return (activated * up).to(gate_up.dtype)


def gated_mul_quantize_ref(
    gate_up: torch.Tensor, activation: Activation = "silu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle: `gated_mul_quantize`, the activation in float64."""
    codes, scale = quantize_tokens_ref(gated_mul_ref(gate_up, activation))
    return codes, scale


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    # tl.fma by name, so that no kernel fuses what another does not
    if ACTIVATION == "silu":
        activated = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu_tanh":
        # sqrt(2 / pi) * 2 times 1 and 0.044715
        slope = tl.fma(gate * gate, 0.07135481627260025, 1.5957691216057308)
        activated = gate / (1.0 + tl.exp(-gate * slope))
    else:
        activated = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    return activated


# fmt: off
@triton.jit
def _gated_mul_kernel(
    gate_up_ptr, y_ptr,
    intermediate,
    stride_gt,
    ACTIVATION: tl.constexpr, BLOCK_I: tl.constexpr,
):
    # fmt: on
    # one program = BLOCK_I columns of one row
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = offs < intermediate
    start = gate_up_ptr + row * stride_gt
    gate = tl.load(start + offs, mask=mask, other=0.0).to(tl.float32)  # [BI]
    up = tl.load(start + intermediate + offs, mask=mask, other=0.0).to(tl.float32)  # [BI]
    y = _activate(gate, ACTIVATION) * up
    tl.store(y_ptr + row * intermediate + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


# fmt: off
@triton.jit
def _gated_mul_quantize_kernel(
    gate_up_ptr, codes_ptr, scale_ptr,
    num_rows, intermediate, least_scale,
    stride_gt,
    ACTIVATION: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    # one program = ROWS rows; codes are stored as many at a time as values are loaded
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offs = tl.arange(0, COLUMNS)[None, :]
    mask = (rows < num_rows) & (offs < intermediate)
    start = gate_up_ptr + rows * stride_gt  # [R, 1]
    gate = tl.load(start + offs, mask=mask, other=0.0).to(tl.float32)  # [R, C]
    up = tl.load(start + intermediate + offs, mask=mask, other=0.0).to(tl.float32)  # [R, C]
    y = (_activate(gate, ACTIVATION) * up).to(dtype).to(tl.float32)
    codes, scale = int8_rows(y, least_scale)
    tl.store(scale_ptr + rows, scale, mask=rows < num_rows)
    code_offs = tl.max_contiguous(rows * intermediate + offs, [1, VECTOR])
    tl.store(codes_ptr + code_offs, codes.to(tl.int8), mask=mask)


def _intermediate(gate_up: torch.Tensor, activation: str) -> int:
    """The number of columns of y; ValueError for bad input."""
    lookup(_TORCH, activation, "activation")
    check_tensor("gate_up", gate_up, shape=(None, None), dtypes=FLOAT_DTYPES)
    check_rows("gate_up", gate_up)
    width = gate_up.shape[1]
    if width % 2:
        raise ValueError(f"gate_up must have an even number of columns, got {width}")
    return width // 2


def gated_mul_triton(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Triton `gated_mul`; shapes and contract in the module docstring, ValueError if broken."""
    intermediate = _intermediate(gate_up, activation)
    num_rows = len(gate_up)
    y = torch.empty((num_rows, intermediate), dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        _gated_mul_kernel[(num_rows, triton.cdiv(intermediate, _BLOCK))](
            gate_up, y, intermediate, gate_up.stride(0),
            ACTIVATION=activation, BLOCK_I=_BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return y


def gated_mul_quantize_triton(
    gate_up: torch.Tensor, activation: Activation = "silu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton `gated_mul_quantize`, (codes, scale); ValueError if the contract is broken."""
    intermediate = _intermediate(gate_up, activation)
    most = _MAX_QUANTIZED[activation]
    if not 0 < intermediate <= most:
        raise ValueError(
            f"gate_up must have 2 to {2 * most} columns for {activation}, got {2 * intermediate}"
        )
    num_rows = len(gate_up)
    codes = torch.empty((num_rows, intermediate), dtype=torch.int8, device=gate_up.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=gate_up.device)
    if num_rows:
        tile = row_tile(intermediate)
        _gated_mul_quantize_kernel[(triton.cdiv(num_rows, tile.rows),)](
            gate_up, codes, scale, num_rows, intermediate, LEAST_SCALE, gate_up.stride(0),
            ACTIVATION=activation, VECTOR=16 // gate_up.dtype.itemsize,
            ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.num_warps,
        )  # fmt: skip
    return codes, scale


def gated_mul_torch(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Torch `gated_mul`: two operations, no copy of the halves."""
    activate = lookup(_TORCH, activation, "activation")
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate).mul_(up)


def gated_mul_by_rows(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """`gated_mul_torch` whose rows have the same bits whatever rows are beside them.

    torch splits a large operation over threads at any element, and rounds the activation of what is
    left of a vector at the end of a part in another way. Parts of whole rows are not split.
    """
    rows = max((_SPLIT_ELEMENTS - 1) // max(gate_up.shape[-1] // 2, 1), 1)
    parts = [gated_mul_torch(part, activation) for part in gate_up.split(rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def gated_mul_quantize_torch(
    gate_up: torch.Tensor, activation: Activation = "silu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch `gated_mul_quantize`: one operation after the other."""
    return quantize_rows(gated_mul_torch(gate_up, activation))


def compile_cases() -> list[CompileCase]:
    """Every activation at every tile."""
    types = {"gate_up_ptr": "*bf16", "y_ptr": "*bf16", "codes_ptr": "*i8", "scale_ptr": "*fp32"}
    cases = []
    for activation in _ACTIVATIONS:
        cases.append(
            CompileCase(
                kernel=_gated_mul_kernel,
                label=f"gated_mul,{activation},block={_BLOCK}",
                types=types,
                constexprs={"ACTIVATION": activation, "BLOCK_I": _BLOCK},
                divisible=("intermediate", "stride_gt"),
                num_warps=_NUM_WARPS,
                meant=("load16",),
            )
        )
        for intermediate in (256, 1024, 4096, _MAX_QUANTIZED[activation]):
            tile = row_tile(intermediate)
            cases.append(
                CompileCase(
                    kernel=_gated_mul_quantize_kernel,
                    label=f"gated_mul_quantize,{activation},intermediate<={intermediate}",
                    types=types | {"least_scale": "fp32"},
                    constexprs={
                        "ACTIVATION": activation,
                        "VECTOR": 8,
                        "ROWS": tile.rows,
                        "COLUMNS": tile.columns,
                    },
                    divisible=("intermediate", "stride_gt"),
                    num_warps=tile.num_warps,
                    meant=("load16",),
                )
            )
    return cases


def bench_cases() -> list[BenchCase]:
    """The gated layer of an 8B Llama, with each activation, and with the quantization."""

    def make(num_rows, device, dtype):
        return ((torch.randn(num_rows, 2 * 14336, device=device) * 2).to(dtype),)

    def plain(activation, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return _TORCH[activation](gate) * up

    def plain_quantize(gate_up):
        y = plain("silu", gate_up).float()
        scale = (y.abs().amax(-1) / 127.5).clamp(min=LEAST_SCALE)
        return (y / scale[:, None]).round().clamp(-128, 127).to(torch.int8), scale

    cases = []
    for num_rows, goal in ((8192, 0.85), (64, None)):
        for activation in _ACTIVATIONS:
            cases.append(
                BenchCase(
                    label=f"gated_mul {activation} {num_rows}x14336",
                    make=partial(make, num_rows),
                    triton=partial(gated_mul_triton, activation=activation),
                    plain=partial(plain, activation),
                    exact=lambda x, act=activation: gated_mul_ref(x.double(), act),
                    num_bytes=3 * 2 * num_rows * 14336,
                    num_flops=5 * num_rows * 14336,
                    ceiling="memory",
                    goal=goal,
                )
            )
        cases.append(
            BenchCase(
                label=f"gated_mul_quantize silu {num_rows}x14336",
                make=partial(make, num_rows),
                triton=gated_mul_quantize_triton,
                plain=plain_quantize,
                exact=gated_mul_quantize_ref,
                num_bytes=(2 * 2 + 1) * num_rows * 14336,
                num_flops=9 * num_rows * 14336,
                ceiling="memory",
                goal=goal,
            )
        )
    return cases
