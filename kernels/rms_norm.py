"""RMS normalisation: y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

Shapes (T tokens, H hidden):
  x       (T, H)  fp16 | bf16 | fp32   contiguous rows, which may lie apart (a slice of columns)
  weight  (H,)    dtype of x
  y       (T, H)  dtype of x, contiguous
Mathematics: the mean of squares and the division are in fp32; the quotient is rounded to the dtype
of x *before* it is multiplied by the weight, as Llama does. Multiplying first, as a fused
`torch.nn.functional.rms_norm` does, differs in the last bit of about a quarter of the elements.
With `unit_offset`, Gemma's: y = x / sqrt(mean(x^2) + eps) * (1 + weight) in fp32, rounded once.
Contract: a row's result depends on that row only. H <= 32768 on Triton.

Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import torch.nn.functional as F

from compress.kernels.jit import FLOAT_DTYPES, CompileCase, check_rows, check_tensor, tl, triton

# (largest hidden size, num_warps): one program holds a whole row in registers, at most 64 values
# of it per thread. Set from the compiler's register counts for sm_90, not yet timed on a card.
_TILES: tuple[tuple[int, int], ...] = ((1024, 4), (4096, 8), (32768, 16))


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    """Oracle: `rms_norm` in float64, including the rounding before the weight."""
    exact = x.double()
    normed = exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt()
    if unit_offset:
        return (normed * (1 + weight.double())).to(x.dtype)
    return (normed.to(x.dtype).double() * weight.double()).to(x.dtype)


# fmt: off
@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, y_ptr,
    hidden, eps,
    stride_xt,
    BLOCK_H: tl.constexpr, UNIT_OFFSET: tl.constexpr,
):
    # fmt: on
    # one program = one row
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_H)
    mask = offs < hidden
    x = tl.load(x_ptr + row * stride_xt + offs, mask=mask, other=0.0).to(tl.float32)  # [BH]
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)  # [BH]
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / hidden + eps)
    if UNIT_OFFSET:
        weight += 1.0
    else:
        normed = normed.to(y_ptr.dtype.element_ty).to(tl.float32)
    y = (normed * weight).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * hidden + offs, y, mask=mask)


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    """Triton `rms_norm`; shapes and contract in the module docstring, ValueError if broken."""
    check_tensor("x", x, shape=(None, None), dtypes=FLOAT_DTYPES)
    num_tokens, hidden = x.shape
    check_tensor("weight", weight, shape=(hidden,), dtypes=(x.dtype,))
    check_rows("x", x)
    if not 0 < hidden <= _TILES[-1][0]:
        raise ValueError(f"x must have 1 to {_TILES[-1][0]} columns, got {hidden}")
    y = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if num_tokens:
        num_warps = next(warps for largest, warps in _TILES if hidden <= largest)
        block = triton.next_power_of_2(hidden)
        args = (x, weight.contiguous(), y, hidden, eps, x.stride(0))
        constexprs = {"BLOCK_H": block, "UNIT_OFFSET": unit_offset}
        _rms_norm_kernel[(num_tokens,)](*args, **constexprs, num_warps=num_warps)
    return y


def rms_norm_torch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool = False
) -> torch.Tensor:
    """Torch `rms_norm`: the fused operation without its weight, whose rounding differs."""
    if unit_offset:
        normed = F.rms_norm(x.float(), x.shape[-1:], None, eps)
        return normed.mul_(weight.float() + 1).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)


def compile_cases() -> list[CompileCase]:
    """Every row of the tile table, at its largest hidden size, in both kinds."""
    types = dict.fromkeys(("x_ptr", "weight_ptr", "y_ptr"), "*bf16") | {"eps": "fp32"}
    return [
        CompileCase(
            kernel=_rms_norm_kernel,
            label=f"hidden<={hidden}" + ("+1" if unit_offset else ""),
            types=types,
            constexprs={"BLOCK_H": hidden, "UNIT_OFFSET": unit_offset},
            divisible=("hidden", "stride_xt"),
            num_warps=num_warps,
            meant=("load16",),
        )
        for hidden, num_warps in _TILES
        for unit_offset in (False, True)
    ]
