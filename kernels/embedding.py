"""Embedding of tokens: rows of a table, which Gemma scales.

Shapes (T tokens, V vocabulary, H hidden):
  token_ids  (T,)    int64 | int32, contiguous
  table      (V, H)  fp16 | bf16 | fp32, contiguous
  y          (T, H)  dtype of table, contiguous
Mathematics: y = table[token_ids] * scale. `scale` is rounded to the dtype of the table first, and
the product then, as transformers does; a scale of 1 copies.
Contract: a token's result depends on that token only. Ids outside 0 .. V - 1 are never read with:
torch on a CPU raises IndexError; Triton, which does not wait for the GPU to look, gives rows of
NaN.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import partial

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


def embed_tokens_ref(
    token_ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """Oracle: `embed_tokens`, the product in float64."""
    rounded = torch.tensor(scale, dtype=table.dtype, device=table.device)
    return (table[token_ids.long()].double() * rounded.double()).to(table.dtype)


# fmt: off
@triton.jit
def _embed_tokens_kernel(
    token_ids_ptr, table_ptr, y_ptr,
    vocabulary, hidden, scale,
    HAS_SCALE: tl.constexpr, BLOCK_H: tl.constexpr,
):
    # fmt: on
    # one program = BLOCK_H columns of one token
    t = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask = offs < hidden
    token = tl.load(token_ids_ptr + t).to(tl.int64)
    known = (token >= 0) & (token < vocabulary)
    y = tl.load(table_ptr + token * hidden + offs, mask=mask & known, other=float("nan"))  # [BH]
    if HAS_SCALE:
        y = (y.to(tl.float32) * scale).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + t * hidden + offs, y, mask=mask)


def embed_tokens_triton(
    token_ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """Triton `embed_tokens`; shapes and contract in the module docstring, ValueError if broken."""
    check_tensor("token_ids", token_ids, shape=(None,), dtypes=(torch.int64, torch.int32))
    check_tensor("table", table, shape=(None, None), dtypes=FLOAT_DTYPES)
    for name, tensor in (("token_ids", token_ids), ("table", table)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    check_one_device(table=table, token_ids=token_ids)
    num_tokens, (vocabulary, hidden) = len(token_ids), table.shape
    y = torch.empty((num_tokens, hidden), dtype=table.dtype, device=table.device)
    if y.numel():
        rounded = float(torch.tensor(scale, dtype=table.dtype))
        _embed_tokens_kernel[(num_tokens, triton.cdiv(hidden, _BLOCK))](
            token_ids, table, y, vocabulary, hidden, rounded,
            HAS_SCALE=rounded != 1.0, BLOCK_H=_BLOCK, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return y


def embed_tokens_torch(
    token_ids: torch.Tensor, table: torch.Tensor, scale: float = 1.0
) -> torch.Tensor:
    """Torch `embed_tokens`; IndexError for an id outside the table."""
    y = table.index_select(0, token_ids)
    rounded = torch.tensor(scale, dtype=table.dtype)
    return y if rounded == 1 else y.mul_(rounded.to(y.device))


def compile_cases() -> list[CompileCase]:
    """The one tile, with and without a scale."""
    types = {"table_ptr": "*bf16", "y_ptr": "*bf16", "scale": "fp32"}
    return [
        CompileCase(
            kernel=_embed_tokens_kernel,
            label=f"{ids},block={_BLOCK}{',scaled' if has_scale else ''}",
            types=types | {"token_ids_ptr": f"*{ids}"},
            constexprs={"HAS_SCALE": has_scale, "BLOCK_H": _BLOCK},
            divisible=("hidden",),
            num_warps=_NUM_WARPS,
            meant=("load16",),
        )
        for ids in ("i64", "i32")
        for has_scale in (False, True)
    ]


def bench_cases() -> list[BenchCase]:
    """The table of an 8B Llama, plain and scaled."""

    def make(num_tokens, device, dtype):
        table = torch.empty(128256, 4096, device=device, dtype=dtype).normal_()
        return torch.randint(0, 128256, (num_tokens,), device=device), table

    return [
        BenchCase(
            label=f"embed_tokens {num_tokens} of 128256x4096{'' if scale == 1 else ' scaled'}",
            make=partial(make, num_tokens),
            triton=partial(embed_tokens_triton, scale=scale),
            plain=lambda ids, table, scale=scale: table[ids] * scale,
            exact=lambda ids, table, scale=scale: table[ids].double() * scale,
            num_bytes=2 * 2 * num_tokens * 4096,
            num_flops=num_tokens * 4096,
            ceiling="memory",
            goal=goal,
        )
        for num_tokens, goal in ((16384, 0.85), (64, None))
        for scale in (1.0, 64.0)
    ]
