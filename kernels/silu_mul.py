"""Gated activation of a SwiGLU layer: y = silu(gate) * up, with silu(g) = g / (1 + exp(-g)).

Shapes (T tokens, I intermediate):
  gate_up  (T, 2I)  fp16 | bf16 | fp32   gate in the first I columns, up in the last I; contiguous
                                         rows, which may lie apart
  y        (T, I)   dtype of gate_up, contiguous
Mathematics: Triton works in fp32 and rounds once; torch rounds silu(gate) as well.
Contract: a row's result depends on that row only.

Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import torch.nn.functional as F

from compress.kernels.jit import FLOAT_DTYPES, CompileCase, check_rows, check_tensor, tl, triton

# 8 values per thread: 16-byte loads at 2 bytes per value. Not yet timed on a card.
_BLOCK, _NUM_WARPS = 1024, 4


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """Oracle: `silu_mul` in float64, one rounding."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


# fmt: off
@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, y_ptr,
    intermediate,
    stride_gt,
    BLOCK_I: tl.constexpr,
):
    # fmt: on
    # one program = BLOCK_I columns of one row
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask = offs < intermediate
    start = gate_up_ptr + row * stride_gt
    gate = tl.load(start + offs, mask=mask, other=0.0).to(tl.float32)  # [BI]
    up = tl.load(start + intermediate + offs, mask=mask, other=0.0).to(tl.float32)  # [BI]
    y = gate / (1 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * intermediate + offs, y.to(y_ptr.dtype.element_ty), mask=mask)


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """Triton `silu_mul`; shapes and contract in the module docstring, ValueError if broken."""
    check_tensor("gate_up", gate_up, shape=(None, None), dtypes=FLOAT_DTYPES)
    check_rows("gate_up", gate_up)
    num_tokens, width = gate_up.shape
    if width % 2:
        raise ValueError(f"gate_up must have an even number of columns, got {width}")
    intermediate = width // 2
    y = torch.empty((num_tokens, intermediate), dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        grid = (num_tokens, triton.cdiv(intermediate, _BLOCK))
        args = (gate_up, y, intermediate, gate_up.stride(0))
        _silu_mul_kernel[grid](*args, BLOCK_I=_BLOCK, num_warps=_NUM_WARPS)
    return y


def silu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """Torch `silu_mul`: two operations, no copy of the halves."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def compile_cases() -> list[CompileCase]:
    """The one tile."""
    return [
        CompileCase(
            kernel=_silu_mul_kernel,
            label=f"block={_BLOCK}",
            types={"gate_up_ptr": "*bf16", "y_ptr": "*bf16"},
            constexprs={"BLOCK_I": _BLOCK},
            divisible=("intermediate", "stride_gt"),
            num_warps=_NUM_WARPS,
            meant=("load16",),
        )
    ]
