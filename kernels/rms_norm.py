"""RMS normalisation: y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

Shapes (T tokens, H hidden):
  x, residual  (T, H)  fp16 | bf16 | fp32   contiguous rows, which may lie apart
  weight       (H,)    dtype of x
  y, summed    (T, H)  dtype of x, contiguous
Mathematics: the mean of squares and the division are in fp32.
  rms_norm      The quotient is rounded to the dtype of x *before* it is multiplied by the weight,
                as Llama does. Multiplying first, as a fused `torch.nn.functional.rms_norm` does,
                differs in the last bit of about a quarter of the elements.
                With `unit_offset`, Gemma's form: y = quotient * (1 + weight) in fp32, rounded once.
  add_rms_norm  summed = x + residual, rounded to the dtype of x: the new residual stream;
                y = rms_norm(summed). Both in one pass over memory.
Contract: a row's result depends on that row only, to the bit. H <= 32768 on Triton.

The sum of squares has the order that the register layout of a tile gives it. A tile is therefore
chosen by H alone, and what else the compiler lays registers out by, the alignment of pointers and
strides, is made the same for every batch by `aligned_rows`. `quantize_tokens` normalises with the
same functions in the same layout.

Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from functools import cache
from itertools import product
from typing import NamedTuple

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

MAX_HIDDEN = 32768


class RowTile(NamedTuple):
    """How many rows one program holds, in how many columns each."""

    rows: int
    columns: int
    num_warps: int


# (largest hidden size, values in a tile, num_warps): one program holds whole rows in registers, at
# most 64 values per thread. Rows of up to 256 values, the heads of queries and keys, would leave
# lanes idle alone and are taken together. Set from the compiler's register counts for sm_90, not
# yet timed on a card.
_TILES: tuple[tuple[int, int, int], ...] = (
    (256, 2048, 4),
    (1024, 1024, 4),
    (4096, 4096, 8),
    (MAX_HIDDEN, MAX_HIDDEN, 16),
)
_MAX_ROWS = 64


def row_tile(hidden: int) -> RowTile:
    """The tile of rows of 1 <= `hidden` <= MAX_HIDDEN values: a function of `hidden` alone."""
    largest, values, num_warps = next(tile for tile in _TILES if hidden <= tile[0])
    columns = triton.next_power_of_2(hidden)
    rows = min(values // columns, _MAX_ROWS) if largest == _TILES[0][0] else 1
    return RowTile(rows, columns, num_warps)


def aligned_rows(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`x` (T, H), copied if it is not aligned as a new tensor of rows of H would be; its stride.

    The compiler then sees one alignment for every H: 16 bytes where 16 divides H, else one value.
    """
    num_rows, hidden = x.shape
    stride = x.stride(0) if num_rows > 1 else hidden
    if hidden % 16:
        return x.contiguous(), hidden
    if stride % 16 == 0 and x.data_ptr() % 16 == 0:
        return x, stride
    return x.clone(memory_format=torch.contiguous_format), hidden


def rms_norm_ref(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False
) -> torch.Tensor:
    """Oracle: `rms_norm` in float64, including the rounding before the weight."""
    exact = x.double()
    normed = exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt()
    if unit_offset:
        return (normed * (1 + weight.double())).to(x.dtype)
    return (normed.to(x.dtype).double() * weight.double()).to(x.dtype)


def add_rms_norm_ref(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Oracle: `add_rms_norm` in float64, including the rounding of the sum."""
    summed = (x.double() + residual.double()).to(x.dtype)
    return rms_norm_ref(summed, weight, eps, unit_offset=unit_offset), summed


@triton.jit
def normalise(x, weight_ptr, offs, hidden, eps, dtype: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """Rows `x` [R, C], fp32, zero past `hidden`, after the norm: in fp32, rounded to `dtype`."""
    weight = tl.load(weight_ptr + offs, mask=offs < hidden, other=0.0).to(tl.float32)  # [1, C]
    mean = tl.sum(x * x, axis=1, keep_dims=True) / hidden  # [R, 1]
    normed = x * tl.rsqrt(mean + eps)
    y = normed * (1.0 + weight) if UNIT_OFFSET else normed.to(dtype).to(tl.float32) * weight
    return y.to(dtype).to(tl.float32)


# fmt: off
@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, summed_ptr,
    num_rows, hidden, eps,
    stride_xt, stride_rt,
    HAS_RESIDUAL: tl.constexpr, UNIT_OFFSET: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    # one program = ROWS rows
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offs = tl.arange(0, COLUMNS)[None, :]
    mask = (rows < num_rows) & (offs < hidden)
    x = tl.load(x_ptr + rows * stride_xt + offs, mask=mask, other=0.0).to(tl.float32)  # [R, C]
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + rows * stride_rt + offs, mask=mask, other=0.0)
        summed = (x + residual.to(tl.float32)).to(dtype)
        tl.store(summed_ptr + rows * hidden + offs, summed, mask=mask)
        x = summed.to(tl.float32)
    y = normalise(x, weight_ptr, offs, hidden, eps, dtype, UNIT_OFFSET)
    tl.store(y_ptr + rows * hidden + offs, y.to(dtype), mask=mask)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    unit_offset: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_norm(x, residual, weight)
    num_rows, hidden = x.shape
    y = torch.empty((num_rows, hidden), dtype=x.dtype, device=x.device)
    summed = y if residual is None else torch.empty_like(y)
    if num_rows:
        tile = row_tile(hidden)
        x, stride_x = aligned_rows(x)
        residual, stride_r = (x, stride_x) if residual is None else aligned_rows(residual)
        grid = (triton.cdiv(num_rows, tile.rows),)
        _rms_norm_kernel[grid](
            x, residual, weight.contiguous(), y, summed,
            num_rows, hidden, eps, stride_x, stride_r,
            HAS_RESIDUAL=summed is not y, UNIT_OFFSET=unit_offset,
            ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.num_warps,
        )  # fmt: skip
    return y, summed


def check_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None
) -> None:
    """Raise ValueError unless these are rows of a size that Triton has a tile for."""
    check_tensor("x", x, shape=(None, None), dtypes=FLOAT_DTYPES)
    check_rows("x", x)
    if not 0 < x.shape[1] <= MAX_HIDDEN:
        raise ValueError(f"x must have 1 to {MAX_HIDDEN} columns, got {x.shape[1]}")
    if residual is not None:
        check_tensor("residual", residual, shape=tuple(x.shape), dtypes=(x.dtype,))
        check_rows("residual", residual)
    if weight is not None:
        check_tensor("weight", weight, shape=(x.shape[1],), dtypes=(x.dtype,))
    check_one_device(x=x, residual=residual, weight=weight)


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False
) -> torch.Tensor:
    """Triton `rms_norm`; shapes and contract in the module docstring, ValueError if broken."""
    return _launch(x, None, weight, eps, unit_offset)[0]


def add_rms_norm_triton(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton `add_rms_norm`, (y, summed); ValueError if the contract is broken."""
    return _launch(x, residual, weight, eps, unit_offset)


def rms_norm_torch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, unit_offset: bool = False
) -> torch.Tensor:
    """Torch `rms_norm`: six times faster on 512 bfloat16 rows of 576 than torch's own.

    torch composes it of squares, means and quotients of whole rows; here the norms of rows, one
    pass, make all but one multiplication a matter of one value per row.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = torch.addcmul(_scalar(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    if unit_offset:
        return torch.mul(x, inverse).mul_(1 + weight.float()).to(x.dtype)
    return torch.mul(x, inverse, out=torch.empty_like(x)).mul_(weight)


@cache
def _scalar(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor([[value]], device=device)


def add_rms_norm_torch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch `add_rms_norm`, (y, summed): the sum, then the norm."""
    summed = x + residual
    return rms_norm_torch(summed, weight, eps, unit_offset=unit_offset), summed


def compile_cases() -> list[CompileCase]:
    """Every row of the tile table at its largest size, and heads of 128, with every option."""
    pointers = ("x_ptr", "residual_ptr", "weight_ptr", "y_ptr", "summed_ptr")
    cases = []
    for hidden in (128, *(largest for largest, _, _ in _TILES)):
        tile = row_tile(hidden)
        for has_residual, unit_offset in product((False, True), repeat=2):
            name = "add_rms_norm" if has_residual else "rms_norm"
            cases.append(
                CompileCase(
                    kernel=_rms_norm_kernel,
                    label=f"{name},hidden<={hidden},{'1+w' if unit_offset else 'w'}",
                    types=dict.fromkeys(pointers, "*bf16") | {"eps": "fp32"},
                    constexprs={
                        "HAS_RESIDUAL": has_residual,
                        "UNIT_OFFSET": unit_offset,
                        "ROWS": tile.rows,
                        "COLUMNS": tile.columns,
                    },
                    divisible=("hidden", "stride_xt", "stride_rt"),
                    num_warps=tile.num_warps,
                    meant=("load16",),
                )
            )
    return cases


def bench_cases() -> list[BenchCase]:
    """The norms of an 8B Llama, and the head norms of a Qwen3 of its size."""

    def make(num_rows, hidden, num_inputs):
        def inputs(device, dtype):
            xs = (torch.randn(num_rows, hidden, device=device) for _ in range(num_inputs))
            weight = torch.rand(hidden, device=device) + 0.5
            return *(x.to(dtype) for x in xs), weight.to(dtype)

        return inputs

    def plain(x, weight):
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
        return normed.to(x.dtype) * weight

    def plain_add(x, residual, weight):
        summed = x + residual
        return plain(summed, weight), summed

    sizes = ((16384, 4096, 0.85), (64, 4096, None), (32 * 16384, 128, 0.85))
    cases = []
    for num_rows, hidden, goal in sizes:
        shape = f"{num_rows}x{hidden}"
        cases.append(
            BenchCase(
                label=f"rms_norm {shape}",
                make=make(num_rows, hidden, 1),
                triton=lambda x, weight: rms_norm_triton(x, weight, 1e-5),
                plain=plain,
                exact=lambda x, weight: rms_norm_ref(x.double(), weight.double(), 1e-5),
                num_bytes=2 * 2 * num_rows * hidden,
                num_flops=4 * num_rows * hidden,
                ceiling="memory",
                goal=goal,
            )
        )
        if hidden == 4096:
            cases.append(
                BenchCase(
                    label=f"add_rms_norm {shape}",
                    make=make(num_rows, hidden, 2),
                    triton=lambda x, r, weight: add_rms_norm_triton(x, r, weight, 1e-5),
                    plain=plain_add,
                    exact=lambda x, r, weight: add_rms_norm_ref(
                        x.double(), r.double(), weight.double(), 1e-5
                    ),
                    num_bytes=4 * 2 * num_rows * hidden,
                    num_flops=5 * num_rows * hidden,
                    ceiling="memory",
                    goal=goal,
                )
            )
    return cases
