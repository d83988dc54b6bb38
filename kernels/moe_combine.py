"""The outputs of a token's experts, added up: out[t] = sum_i weights[t, i] * y[t, i].

Shapes (T tokens, TOPK experts per token, N columns):
  y        (T, TOPK, N)  fp16 | bf16 | fp32, contiguous
  weights  (T, TOPK)     fp32, contiguous; None: all 1, for rows that are weighted already
  out      (T, N)        dtype of y, contiguous
Mathematics: in fp32, i = 0, 1, .. in this order, rounded once.
Contract: a row's result depends on that row only, and no sum is left to the order of threads.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch

from compress.kernels.jit import (
    FLOAT_DTYPES,
    BenchCase,
    CompileCase,
    check_one_device,
    check_tensor,
    tl,
    triton,
)

# 8 values per thread: 16-byte loads at 2 bytes per value. Not yet timed on a card.
_BLOCK, _NUM_WARPS = 1024, 4


def combine_ref(y: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Oracle: `combine` in float64, one rounding."""
    factors = torch.ones(y.shape[:2], device=y.device) if weights is None else weights
    return torch.einsum("tkn,tk->tn", y.double(), factors.double()).to(y.dtype)


# fmt: off
@triton.jit
def _combine_kernel(
    y_ptr, weights_ptr, out_ptr,
    N,
    TOP_K: tl.constexpr, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    # one program = BLOCK columns of one token
    t = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    total = tl.full((BLOCK,), 0.0, dtype=tl.float32)
    for i in tl.static_range(TOP_K):
        row = t * TOP_K + i
        y = tl.load(y_ptr + row * N + offs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK]
        if HAS_WEIGHTS:
            y *= tl.load(weights_ptr + row)
        total += y
    tl.store(out_ptr + t * N + offs, total.to(out_ptr.dtype.element_ty), mask=mask)


def combine_triton(y: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Triton `combine`; shapes and contract in the module docstring, ValueError if broken."""
    _check(y, weights)
    num_tokens, top_k, width = y.shape
    out = torch.empty((num_tokens, width), dtype=y.dtype, device=y.device)
    if out.numel():
        _combine_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
            y, y if weights is None else weights, out, width,
            TOP_K=top_k, HAS_WEIGHTS=weights is not None, BLOCK=_BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return out


def _check(y: torch.Tensor, weights: torch.Tensor | None) -> None:
    check_tensor("y", y, shape=(None, None, None), dtypes=FLOAT_DTYPES)
    if weights is not None:
        check_tensor("weights", weights, shape=tuple(y.shape[:2]), dtypes=(torch.float32,))
    check_one_device(y=y, weights=weights)
    for name, tensor in (("y", y), ("weights", weights)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def combine_torch(y: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Torch `combine`: one pass per expert of a token, in the order of the contract."""
    _check(y, weights)
    total = torch.zeros((y.shape[0], y.shape[2]), device=y.device)
    for i in range(y.shape[1]):
        if weights is None:
            total += y[:, i]
        else:
            total.addcmul_(y[:, i].float(), weights[:, i, None])
    return total.to(y.dtype)


def compile_cases() -> list[CompileCase]:
    """2 and 8 experts per token, with and without weights."""
    return [
        CompileCase(
            kernel=_combine_kernel,
            label=f"top {top_k},{'weighted' if weighted else 'plain'}",
            types={"y_ptr": "*bf16", "weights_ptr": "*fp32", "out_ptr": "*bf16"},
            constexprs={"TOP_K": top_k, "HAS_WEIGHTS": weighted, "BLOCK": _BLOCK},
            divisible=("N",),
            num_warps=_NUM_WARPS,
            meant=("load16",),
        )
        for top_k in (2, 8)
        for weighted in (True, False)
    ]


def bench_cases() -> list[BenchCase]:
    """Mixtral 8x7B: 2 experts per token, hidden size 4096."""

    def make(device, dtype):
        y = torch.randn(4096, 2, 4096, device=device, dtype=dtype)
        return y, torch.rand(4096, 2, device=device)

    return [
        BenchCase(
            label="T=4096,top 2,N=4096",
            make=make,
            triton=combine_triton,
            plain=combine_torch,
            exact=combine_ref,
            num_bytes=4096 * (3 * 4096 * 2 + 2 * 4),
            num_flops=4096 * 4096 * 4,
            ceiling="memory",
            goal=0.85,
        )
    ]
