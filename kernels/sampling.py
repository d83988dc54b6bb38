"""Choosing the next token: greedy, or a draw from the truncated distribution, without sorting.

Shapes (R rows, V vocabulary):
  logits       (R, V)  fp32   contiguous rows, which may lie apart
  temperature  (R,)    fp32   0: greedy
  top_k        (R,)    int32  0: off, 1: greedy; None: off in every row
  top_p        (R,)    fp32   1: off; None: off in every row
  min_p        (R,)    fp32   0: off; None: off in every row
  seed         (R,)    int64
  position     (R,)    int64  of the token that is chosen
  tokens       (R,)    int64
  probs        (R, V)  fp32   the distribution that `sample` draws from
Mathematics, for a row with largest logit m, temperature t and s = (logit - m) / t:
  1. top_k keeps the logits not below the k-th largest,
  2. top_p, of those, the fewest largest whose probability among them reaches top_p,
  3. min_p, of those, the ones with s >= log(min_p): a probability of min_p times the largest.
  Ties with the last one kept are kept, so a set never depends on an order among equals.
  The token is argmax(s + g) over the kept, g Gumbel noise of (seed, position, token, salt), which
  is a draw from softmax(s) over the kept: see `noise.py`. `sampling_probs` gives that softmax.
  Greedy takes the largest logit, the lowest id among equals; its distribution is one-hot.
Contract: a row depends on that row only. A row that has a NaN or +inf, or nothing above -inf, gets
token -1, and probabilities that are NaN. Parameters are not checked against their ranges, which
would wait for the GPU.

Torch selects the top k first and makes noise for the survivors alone. Triton bisects: one program
per row finds the threshold, then the row is split over programs that draw, which need only that.

Gumbel-max: Maddison et al., A* Sampling, arXiv:1411.0030. min_p: Nguyen et al., arXiv:2407.01082.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Callable
from typing import Any

import torch

from compress.kernels.jit import BenchCase, CompileCase, check_rows, check_tensor, triton
from compress.kernels.kept_sets import Optional, RowParameters, kept_sets
from compress.kernels.noise import gumbels, noise_states, salt_key
from compress.kernels.sampling_kernels import draw_kernel, probs_kernel, row_kernel

_MAX_VOCAB = 262144
# Not yet timed on a card. A row is long: its program has 16 warps and 8 logits per thread.
_ROW_BLOCK, _ROW_WARPS = 4096, 16
_DRAW_BLOCK, _DRAW_SPAN, _DRAW_WARPS = 2048, 16384, 8
_PROBS_BLOCK, _PROBS_WARPS = 4096, 8


def sampling_probs_ref(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: Optional = None,
    top_p: Optional = None,
    min_p: Optional = None,
) -> torch.Tensor:
    """Oracle: `sampling_probs` row by row in float64, with a sort."""
    probs = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    for r, row in enumerate(logits):
        best = row.max()
        if not best.isfinite():
            probs[r] = float("nan")
        elif temperature[r] == 0 or (top_k is not None and top_k[r] == 1):
            probs[r, row.argmax()] = 1
        else:
            scaled = (row - best).double() / temperature[r].double()
            kept = torch.ones_like(row, dtype=torch.bool)
            if top_k is not None and 0 < top_k[r] < len(row):
                kept = row >= row.sort(descending=True).values[top_k[r] - 1]
            if top_p is not None and top_p[r] < 1:
                law = torch.softmax(scaled.masked_fill(~kept, float("-inf")), 0)
                ordered, tokens = row.sort(descending=True)
                reached = law[tokens].cumsum(0) >= top_p[r].double()
                kept &= row >= ordered[reached.nonzero()[0]]
            if min_p is not None and min_p[r] > 0:
                kept &= scaled >= min_p[r].double().log()
            probs[r] = torch.softmax(scaled.masked_fill(~kept, float("-inf")), 0)
    return probs


def sample_ref(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    top_k: Optional = None,
    top_p: Optional = None,
    min_p: Optional = None,
    salt: int = 0,
) -> torch.Tensor:
    """Oracle: `sample` from the probabilities of `sampling_probs_ref`."""
    probs = sampling_probs_ref(
        logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )
    tokens = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbels(noise_states(seed[:, None], position[:, None], tokens, salt))
    return torch.where(probs[:, 0].isnan(), -1, (probs.log() + noise).argmax(1))


def _parameters(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: Optional,
    top_p: Optional,
    min_p: Optional,
    **keys: torch.Tensor,
) -> RowParameters:
    """Check every argument and derive what both backends compute with."""
    check_tensor("logits", logits, shape=(None, None), dtypes=(torch.float32,))
    check_rows("logits", logits)
    if not 0 < logits.shape[1] <= _MAX_VOCAB:
        raise ValueError(f"logits must have 1 to {_MAX_VOCAB} columns, got {logits.shape[1]}")
    floats = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    found = {name: (tensor, torch.float32) for name, tensor in floats.items()}
    found["top_k"] = top_k, torch.int32
    found |= {name: (tensor, torch.int64) for name, tensor in keys.items()}
    for name, (tensor, dtype) in found.items():
        if tensor is not None:
            check_tensor(name, tensor, shape=(len(logits),), dtypes=(dtype,))
            if tensor.device != logits.device:
                raise ValueError(f"{name} must be on {logits.device}, got {tensor.device}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    greedy = temperature == 0
    if top_k is not None:
        greedy |= top_k == 1
    # The temperature may be so small that its inverse overflows: 0 * inf would be NaN.
    inverse = temperature.reciprocal().clamp(max=torch.finfo(torch.float32).max)
    minimum = torch.zeros_like(temperature) if min_p is None else min_p
    log_min_p = minimum.double().log().float()  # -inf where it is off
    return RowParameters(inverse.masked_fill(greedy, 0.0), top_k, top_p, log_min_p)


def _launch_rows(logits: torch.Tensor, rows: RowParameters, wants_mass: bool) -> list[torch.Tensor]:
    """[best, largest, threshold, mass] of every row."""
    best = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    largest, threshold, mass = (torch.empty_like(rows.inverse) for _ in range(3))
    top_k = rows.inverse if rows.top_k is None else rows.top_k
    top_p = rows.inverse if rows.top_p is None else rows.top_p
    row_kernel[(len(logits),)](
        logits, rows.inverse, top_k, top_p, rows.log_min_p, best, largest, threshold, mass,
        logits.shape[1], logits.stride(0),
        HAS_TOP_K=rows.top_k is not None, HAS_TOP_P=rows.top_p is not None,
        WANTS_MASS=wants_mass, BLOCK=_ROW_BLOCK, num_warps=_ROW_WARPS,
    )  # fmt: skip
    return [best, largest, threshold, mass]


def sample_triton(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    top_k: Optional = None,
    top_p: Optional = None,
    min_p: Optional = None,
    salt: int = 0,
) -> torch.Tensor:
    """Triton `sample`; shapes and contract in the module docstring, ValueError if broken."""
    rows = _parameters(logits, temperature, top_k, top_p, min_p, seed=seed, position=position)
    num_rows, vocab = logits.shape
    if not num_rows:
        return seed.new_empty(0)
    best, largest, threshold, _ = _launch_rows(logits, rows, wants_mass=False)
    num_parts = triton.cdiv(vocab, _DRAW_SPAN)
    scores = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((num_rows, num_parts), dtype=torch.int64, device=logits.device)
    draw_kernel[(num_rows, num_parts)](
        logits, rows.inverse, rows.log_min_p, seed, position, best, largest, threshold,
        scores, tokens, vocab, logits.stride(0),
        SALT_KEY=salt_key(salt), SPAN=_DRAW_SPAN, BLOCK=_DRAW_BLOCK, num_warps=_DRAW_WARPS,
    )  # fmt: skip
    return tokens.gather(1, scores.argmax(1, keepdim=True)).flatten()


def sampling_probs_triton(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: Optional = None,
    top_p: Optional = None,
    min_p: Optional = None,
) -> torch.Tensor:
    """Triton `sampling_probs`; contract in the module docstring, ValueError if broken."""
    rows = _parameters(logits, temperature, top_k, top_p, min_p)
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    num_rows, vocab = logits.shape
    if num_rows:
        found = _launch_rows(logits, rows, wants_mass=True)
        probs_kernel[(num_rows, triton.cdiv(vocab, _PROBS_BLOCK))](
            logits, rows.inverse, rows.log_min_p, *found, probs, vocab, logits.stride(0),
            BLOCK=_PROBS_BLOCK, num_warps=_PROBS_WARPS,
        )  # fmt: skip
    return probs


def sample_torch(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    top_k: Optional = None,
    top_p: Optional = None,
    min_p: Optional = None,
    salt: int = 0,
) -> torch.Tensor:
    """Torch `sample`: the kept sets, then noise for these alone."""
    rows = _parameters(logits, temperature, top_k, top_p, min_p, seed=seed, position=position)
    best, tokens = logits.max(dim=1)
    tokens = torch.where(best.isfinite(), tokens, -1)
    for kept in kept_sets(logits, best, rows):
        states = noise_states(seed[kept.rows, None], position[kept.rows, None], kept.tokens, salt)
        choice = gumbels(states).add_(kept.scaled).argmax(1, keepdim=True)
        tokens[kept.rows] = kept.tokens.gather(1, choice).flatten()
    return tokens


def sampling_probs_torch(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: Optional = None,
    top_p: Optional = None,
    min_p: Optional = None,
) -> torch.Tensor:
    """Torch `sampling_probs`: the softmax over each kept set."""
    rows = _parameters(logits, temperature, top_k, top_p, min_p)
    best, tokens = logits.max(dim=1)
    probs = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    probs.scatter_(1, tokens[:, None], 1.0)
    probs[~best.isfinite()] = float("nan")
    for kept in kept_sets(logits, best, rows):
        weights = kept.scaled.double().exp_()
        shares = (weights / weights.cumsum(1)[:, -1:]).float()  # in order, whatever the width
        probs[kept.rows[:, None], kept.tokens] = shares
    return probs


def compile_cases() -> list[CompileCase]:
    """Each kernel with every part on, and the row kernel with every part off."""
    types = dict.fromkeys(("seed_ptr", "position_ptr", "best_ptr", "tokens_ptr"), "*i64")
    floats = ("logits", "inverse", "top_p", "log_min_p", "largest", "threshold", "mass")
    types |= {f"{name}_ptr": "*fp32" for name in (*floats, "scores", "probs")}
    types["top_k_ptr"] = "*i32"
    flags = ("HAS_TOP_K", "HAS_TOP_P", "WANTS_MASS")
    draw = {"SALT_KEY": salt_key(0), "SPAN": _DRAW_SPAN, "BLOCK": _DRAW_BLOCK}
    variants = [
        (row_kernel, "row,all", dict.fromkeys(flags, True) | {"BLOCK": _ROW_BLOCK}, _ROW_WARPS),
        (row_kernel, "row,max", dict.fromkeys(flags, False) | {"BLOCK": _ROW_BLOCK}, _ROW_WARPS),
        (draw_kernel, "draw", draw, _DRAW_WARPS),
        (draw_kernel, "draw,salted", draw | {"SALT_KEY": salt_key(1)}, _DRAW_WARPS),
        (probs_kernel, "probs", {"BLOCK": _PROBS_BLOCK}, _PROBS_WARPS),
    ]
    return [
        CompileCase(
            kernel=kernel,
            label=label,
            types=types,
            constexprs=constexprs,
            divisible=("vocab", "stride_lr"),
            num_warps=num_warps,
            meant=("load16",),
        )
        for kernel, label, constexprs, num_warps in variants
    ]


def bench_cases() -> list[BenchCase]:
    """64 rows of 128256: greedy, the whole distribution, and top_k 50 with top_p 0.9."""
    num_rows, vocab = 64, 128256

    def case(label: str, temperature: float, top_k: int | None, top_p: float | None) -> BenchCase:
        def make(device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
            def full(value: float | None, kind: torch.dtype) -> torch.Tensor | None:
                return (
                    None if value is None else torch.full((num_rows,), value, dtype=kind).to(device)
                )

            logits = torch.randn(num_rows, vocab).mul_(3).to(device)
            numbers = full(temperature, torch.float32), full(top_k, torch.int32)
            seed = torch.randint(0, 2**31, (num_rows,)).to(device)
            return logits, *numbers, full(top_p, torch.float32), seed, full(100, torch.int64)

        def run(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(logits, temperature, top_k, top_p, seed, position):
                return function(
                    logits, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed,
                    position=position,
                )  # fmt: skip

            return call

        return BenchCase(
            label=f"{label},R={num_rows},V={vocab}",
            make=make,
            triton=run(sample_triton),
            plain=run(sample_torch),
            exact=run(sample_ref),
            num_bytes=num_rows * vocab * 4,
            num_flops=0,
            ceiling="memory",
        )

    return [
        case("greedy", 0.0, None, None),
        case("temperature 0.8", 0.8, None, None),
        case("top_k 50,top_p 0.9", 0.8, 50, 0.9),
        case("top_p 0.9", 0.8, None, 0.9),
    ]
