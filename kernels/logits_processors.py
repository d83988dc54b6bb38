"""Penalties, biases and bans on the logits of the next token, touching only the tokens listed.

Shapes (R rows, V vocabulary, n, b, m listed tokens of all rows together):
  logits         (R, V)   fp32    contiguous rows; changed in place and returned
  repetition     (R,)     fp32    1 leaves the row as it is
  presence       (R,)     fp32    0 leaves the row as it is
  frequency      (R,)     fp32    0 leaves the row as it is
  token_ids      (n,)     int64   the distinct tokens of each row's prompt and output
  output_counts  (n,)     int32   how often each occurs in the output
  in_prompt      (n,)     bool    whether it occurs in the prompt
  row_starts     (R + 1,) int32   row r lists the tokens [row_starts[r], row_starts[r + 1])
  bias_ids       (b,)     int64   distinct within a row
  bias_values    (b,)     fp32
  bias_starts    (R + 1,) int32
  banned_ids     (m,)     int64
  banned_starts  (R + 1,) int32
Every part is optional and costs nothing when it is absent: the penalties are absent together with
their list, a bias and a ban each with its own.
Mathematics, for a listed token of logit l, in this order:
  1. in the prompt or the output:  l <- l / repetition if l > 0 else l * repetition
  2. in the output:                l <- l - frequency * count - presence
  3. biased:                       l <- l + bias
  4. banned:                       l <- -inf
The temperature is not here: `sample` divides as it reads, which saves a pass over the logits.
Contract: the lists hold what the table says and ids in [0, V); Triton does not check them, which
would wait for the GPU, and skips ids outside. A row's result depends on that row only.

One launch per part, one program per row: a launch ends before the next part reads what it wrote.

Keskar et al., CTRL, arXiv:1909.05858, section 4.1 (repetition; its sign rule is that of
transformers and vLLM); presence and frequency as in the OpenAI API.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from compress.kernels.jit import (
    BenchCase,
    CompileCase,
    check_rows,
    check_tensor,
    tl,
    triton,
)

# Tokens of a row that one iteration takes. Not yet timed on a card.
_BLOCK = 1024
_NUM_WARPS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalties:
    """The penalties of every row, and the tokens that they are for; shapes in the file's head."""

    token_ids: torch.Tensor
    output_counts: torch.Tensor
    in_prompt: torch.Tensor
    row_starts: torch.Tensor
    repetition: torch.Tensor | None = None
    presence: torch.Tensor | None = None
    frequency: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bias:
    """Values added to the logits of some tokens of each row."""

    ids: torch.Tensor
    values: torch.Tensor
    starts: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Bans:
    """Tokens that each row must not choose: bad words of one token, the end before `min_tokens`."""

    ids: torch.Tensor
    starts: torch.Tensor


def process_logits_ref(
    logits: torch.Tensor,
    *,
    penalties: Penalties | None = None,
    bias: Bias | None = None,
    bans: Bans | None = None,
) -> torch.Tensor:
    """Oracle: `process_logits` token by token in float64, a new tensor."""
    out = logits.double()
    for r in range(len(out)):
        if penalties is not None:
            start, end = penalties.row_starts[r : r + 2].tolist()
            for i in range(start, end):
                token, count = int(penalties.token_ids[i]), int(penalties.output_counts[i])
                out[r, token] = _penalized(float(out[r, token]), penalties, r, i, count)
        if bias is not None:
            for i in range(*bias.starts[r : r + 2].tolist()):
                out[r, int(bias.ids[i])] += float(bias.values[i])
        if bans is not None:
            for i in range(*bans.starts[r : r + 2].tolist()):
                out[r, int(bans.ids[i])] = float("-inf")
    return out


def _penalized(value: float, penalties: Penalties, r: int, i: int, count: int) -> float:
    if penalties.repetition is not None and (count or penalties.in_prompt[i]):
        repetition = float(penalties.repetition[r])
        value = value / repetition if value > 0 else value * repetition
    if penalties.frequency is not None:
        value -= float(penalties.frequency[r]) * count
    if penalties.presence is not None and count:
        value -= float(penalties.presence[r])
    return value


# fmt: off
@triton.jit
def _penalty_kernel(
    logits_ptr, ids_ptr, counts_ptr, in_prompt_ptr, starts_ptr,
    repetition_ptr, presence_ptr, frequency_ptr,
    vocab,
    stride_lr,
    HAS_REPETITION: tl.constexpr, HAS_PRESENCE: tl.constexpr, HAS_FREQUENCY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # fmt: on
    # one program = the listed tokens of one row
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    for first in range(start, end, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        listed = offs < end
        ids = tl.load(ids_ptr + offs, mask=listed, other=-1)  # [B]
        mask = (ids >= 0) & (ids < vocab)
        count = tl.load(counts_ptr + offs, mask=mask, other=0)
        values = tl.load(logits_ptr + row * stride_lr + ids, mask=mask, other=0.0)
        if HAS_REPETITION:
            repetition = tl.load(repetition_ptr + row)
            in_prompt = tl.load(in_prompt_ptr + offs, mask=mask, other=0)
            divided = tl.div_rn(values, tl.broadcast_to(repetition, values.shape))
            penalized = tl.where(values > 0, divided, values * repetition)
            values = tl.where((count > 0) | (in_prompt != 0), penalized, values)
        if HAS_FREQUENCY:
            values = values - tl.load(frequency_ptr + row) * count.to(tl.float32)
        if HAS_PRESENCE:
            values = tl.where(count > 0, values - tl.load(presence_ptr + row), values)
        tl.store(logits_ptr + row * stride_lr + ids, values, mask=mask)


# fmt: off
@triton.jit
def _bias_kernel(
    logits_ptr, ids_ptr, values_ptr, starts_ptr,
    vocab,
    stride_lr,
    IS_BAN: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    # one program = the listed tokens of one row
    row = tl.program_id(0).to(tl.int64)
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    for first in range(start, end, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + offs, mask=offs < end, other=-1)  # [B]
        mask = (ids >= 0) & (ids < vocab)
        where = logits_ptr + row * stride_lr + ids
        if IS_BAN:
            tl.store(where, tl.full((BLOCK,), float("-inf"), tl.float32), mask=mask)
        else:
            values = tl.load(values_ptr + offs, mask=mask, other=0.0)
            tl.store(where, tl.load(where, mask=mask, other=0.0) + values, mask=mask)


def process_logits_triton(
    logits: torch.Tensor,
    *,
    penalties: Penalties | None = None,
    bias: Bias | None = None,
    bans: Bans | None = None,
) -> torch.Tensor:
    """Triton `process_logits`; contract in the module docstring, ValueError if broken."""
    _check(logits, penalties, bias, bans)
    num_rows, vocab = logits.shape
    if not num_rows:
        return logits
    sizes, tile = (vocab, logits.stride(0)), {"BLOCK": _BLOCK, "num_warps": _NUM_WARPS}
    if penalties is not None and len(penalties.token_ids):
        given = (penalties.repetition, penalties.presence, penalties.frequency)
        _penalty_kernel[(num_rows,)](
            logits, penalties.token_ids, penalties.output_counts, penalties.in_prompt,
            penalties.row_starts, *(logits if x is None else x for x in given), *sizes,
            HAS_REPETITION=given[0] is not None, HAS_PRESENCE=given[1] is not None,
            HAS_FREQUENCY=given[2] is not None, **tile,
        )  # fmt: skip
    if bias is not None and len(bias.ids):
        args = (logits, bias.ids, bias.values, bias.starts)
        _bias_kernel[(num_rows,)](*args, *sizes, IS_BAN=False, **tile)
    if bans is not None and len(bans.ids):
        args = (logits, bans.ids, logits, bans.starts)
        _bias_kernel[(num_rows,)](*args, *sizes, IS_BAN=True, **tile)
    return logits


def process_logits_torch(
    logits: torch.Tensor,
    *,
    penalties: Penalties | None = None,
    bias: Bias | None = None,
    bans: Bans | None = None,
) -> torch.Tensor:
    """Torch `process_logits`: gather, change and scatter the listed tokens of all rows at once."""
    _check(logits, penalties, bias, bans)
    if penalties is not None and len(penalties.token_ids):
        rows, tokens = _rows(penalties.row_starts), penalties.token_ids
        values, counts = logits[rows, tokens], penalties.output_counts
        used = counts > 0
        if penalties.repetition is not None:
            factor = torch.where(used | penalties.in_prompt, penalties.repetition[rows], 1.0)
            values = torch.where(values > 0, values / factor, values * factor)
        if penalties.frequency is not None:
            values = values - penalties.frequency[rows] * counts
        if penalties.presence is not None:
            values = values - penalties.presence[rows] * used
        logits[rows, tokens] = values
    if bias is not None and len(bias.ids):
        logits[_rows(bias.starts), bias.ids] += bias.values
    if bans is not None and len(bans.ids):
        logits[_rows(bans.starts), bans.ids] = float("-inf")
    return logits


def _rows(starts: torch.Tensor) -> torch.Tensor:
    """The row of each listed token."""
    rows = torch.arange(len(starts) - 1, device=starts.device)
    return torch.repeat_interleave(rows, starts.diff())


def _check(
    logits: torch.Tensor, penalties: Penalties | None, bias: Bias | None, bans: Bans | None
) -> None:
    check_tensor("logits", logits, shape=(None, None), dtypes=(torch.float32,))
    check_rows("logits", logits)
    num_rows = len(logits)
    found: dict[str, tuple[torch.Tensor | None, int, torch.dtype]] = {}
    if penalties is not None:
        n = len(penalties.token_ids)
        found["token_ids"] = penalties.token_ids, n, torch.int64
        found["output_counts"] = penalties.output_counts, n, torch.int32
        found["in_prompt"] = penalties.in_prompt, n, torch.bool
        found["row_starts"] = penalties.row_starts, num_rows + 1, torch.int32
        for name in ("repetition", "presence", "frequency"):
            found[name] = getattr(penalties, name), num_rows, torch.float32
    if bias is not None:
        found["bias_ids"] = bias.ids, len(bias.ids), torch.int64
        found["bias_values"] = bias.values, len(bias.ids), torch.float32
        found["bias_starts"] = bias.starts, num_rows + 1, torch.int32
    if bans is not None:
        found["banned_ids"] = bans.ids, len(bans.ids), torch.int64
        found["banned_starts"] = bans.starts, num_rows + 1, torch.int32
    for name, (tensor, size, dtype) in found.items():
        if tensor is not None:
            check_tensor(name, tensor, shape=(size,), dtypes=(dtype,))
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
            if tensor.device != logits.device:
                raise ValueError(f"{name} must be on {logits.device}, got {tensor.device}")


def compile_cases() -> list[CompileCase]:
    """Each kernel with everything on. Logits are gathered, so only the lists load 16 bytes."""
    types = {"logits_ptr": "*fp32", "ids_ptr": "*i64", "starts_ptr": "*i32", "values_ptr": "*fp32"}
    penalty = {"counts_ptr": "*i32", "in_prompt_ptr": "*i1"}
    penalty |= dict.fromkeys(("repetition_ptr", "presence_ptr", "frequency_ptr"), "*fp32")
    flags = dict.fromkeys(("HAS_REPETITION", "HAS_PRESENCE", "HAS_FREQUENCY"), True)
    variants = [
        (_penalty_kernel, "penalties", flags),
        (_bias_kernel, "bias", {"IS_BAN": False}),
        (_bias_kernel, "bans", {"IS_BAN": True}),
    ]
    return [
        CompileCase(
            kernel=kernel,
            label=label,
            types=types | penalty,
            constexprs=constexprs | {"BLOCK": _BLOCK},
            divisible=("vocab", "stride_lr"),
            num_warps=_NUM_WARPS,
        )
        for kernel, label, constexprs in variants
    ]


def bench_cases() -> list[BenchCase]:
    """64 rows of 128256, each with 2000 penalized tokens, 16 biased and 4 banned."""
    num_rows, vocab, listed = 64, 128256, (2000, 16, 4)

    def make(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        ids = [torch.stack([torch.randperm(vocab)[:n] for _ in range(num_rows)]) for n in listed]
        flat = [x.flatten().to(device) for x in ids]
        starts = [torch.arange(num_rows + 1, dtype=torch.int32).mul(n).to(device) for n in listed]
        n = len(flat[0])
        penalties = Penalties(
            token_ids=flat[0],
            output_counts=torch.randint(0, 3, (n,), dtype=torch.int32, device=device),
            in_prompt=torch.rand(n, device=device) < 0.7,
            row_starts=starts[0],
            repetition=torch.full((num_rows,), 1.1, device=device),
            presence=torch.full((num_rows,), 0.5, device=device),
            frequency=torch.full((num_rows,), 0.25, device=device),
        )
        bias = Bias(ids=flat[1], values=torch.randn(len(flat[1]), device=device), starts=starts[1])
        bans = Bans(ids=flat[2], starts=starts[2])
        return torch.randn(num_rows, vocab, device=device), penalties, bias, bans

    def run(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(logits, penalties, bias, bans):
            return function(logits, penalties=penalties, bias=bias, bans=bans)

        return call

    # what is listed is read (8 + 4 + 1 bytes, bias 8 + 4, ban 8), its logits read and written
    num_bytes = num_rows * (listed[0] * (13 + 8) + listed[1] * (12 + 8) + listed[2] * (8 + 4))
    return [
        BenchCase(
            label=f"penalties+bias+bans,R={num_rows},V={vocab}",
            make=make,
            triton=run(process_logits_triton),
            plain=run(process_logits_torch),
            exact=run(process_logits_ref),
            num_bytes=num_bytes,
            num_flops=0,
            ceiling="memory",
        )
    ]
