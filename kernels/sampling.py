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

from typing import NamedTuple

import torch

from compress.kernels.jit import BenchCase, CompileCase, check_rows, check_tensor, triton
from compress.kernels.noise import gumbels, noise_states, salt_key
from compress.kernels.sampling_kernels import draw_kernel, probs_kernel, row_kernel

_MAX_VOCAB = 262144
# Not yet timed on a card. A row is long: its program has 16 warps and 8 logits per thread.
_ROW_BLOCK, _ROW_WARPS = 4096, 16
_DRAW_BLOCK, _DRAW_SPAN, _DRAW_WARPS = 2048, 16384, 8
_PROBS_BLOCK, _PROBS_WARPS = 4096, 8
_NARROW = 1024  # largest top_k that torch selects for all rows at once
_SMALL = 4096  # candidates that are few enough to sort

Optional = torch.Tensor | None


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


class _Rows(NamedTuple):
    """What both backends derive from the parameters: (R,) each. Inverse 0 is greedy."""

    inverse: torch.Tensor
    top_k: Optional
    top_p: Optional
    log_min_p: torch.Tensor


def _parameters(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: Optional,
    top_p: Optional,
    min_p: Optional,
    **keys: torch.Tensor,
) -> _Rows:
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
    return _Rows(inverse.masked_fill(greedy, 0.0), top_k, top_p, log_min_p)


def _launch_rows(logits: torch.Tensor, rows: _Rows, wants_mass: bool) -> list[torch.Tensor]:
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


class _Kept(NamedTuple):
    """The kept tokens of some rows, most likely first or in any order: (n, K); rows are (n,).

    `scaled` is s of the module docstring, -inf in the places of a row that keeps fewer.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    scaled: torch.Tensor


def _kept_sets(logits: torch.Tensor, best: torch.Tensor, rows: _Rows) -> list[_Kept]:
    """The kept sets of the rows that draw: those with a small top_k together, the others alone."""
    draws = ((rows.inverse > 0) & best.isfinite()).nonzero().flatten()
    vocab, sets = logits.shape[1], []
    wide = draws
    if rows.top_k is not None and len(draws):
        top_k = rows.top_k[draws]
        is_narrow = (top_k > 0) & (top_k <= _NARROW) & (top_k < vocab)
        narrow = draws[is_narrow]
        if len(narrow):
            kept, has_room = _narrow_sets(logits, best, rows, narrow)
            sets.append(kept)
            wide = torch.cat((draws[~is_narrow], narrow[~has_room]))
    return sets + [_wide_set(logits[r], best[r], rows, r) for r in wide]


def _narrow_sets(
    logits: torch.Tensor, best: torch.Tensor, rows: _Rows, narrow: torch.Tensor
) -> tuple[_Kept, torch.Tensor]:
    """Kept sets of the rows in `narrow`, and which of them (bool) hold all ties with the k-th."""
    assert rows.top_k is not None
    top_k = rows.top_k[narrow].long()
    chosen = logits if len(narrow) == len(logits) else logits[narrow]
    values, tokens = chosen.topk(int(top_k.max()) + 1, dim=1)
    inverse = rows.inverse[narrow, None]
    last = values.gather(1, top_k[:, None] - 1)
    has_room = values[:, -1:] < last  # else there may be more ties than were selected
    scaled = ((values - best[narrow, None]) * inverse).masked_fill_(values < last, float("-inf"))
    if rows.top_p is not None:
        mass = scaled.double().exp_().cumsum(1)  # in order, whatever the width
        enough = mass >= rows.top_p[narrow, None].double() * mass[:, -1:]
        last = values.gather(1, enough.int().argmax(1, keepdim=True))
        top_p = rows.top_p[narrow, None]
        scaled.masked_fill_((values < last) & (top_p < 1), float("-inf"))
    scaled.masked_fill_(scaled < rows.log_min_p[narrow, None], float("-inf"))
    ready = has_room.flatten()
    return _Kept(narrow[ready], tokens[ready], scaled[ready]), ready


def _wide_set(row: torch.Tensor, best: torch.Tensor, rows: _Rows, r: torch.Tensor) -> _Kept:
    """The kept set of row `r`, whose logits are `row` (V,)."""
    tokens = torch.arange(len(row), device=row.device)
    values = row
    if rows.top_k is not None and 0 < (top_k := int(rows.top_k[r])) < len(row):
        tokens = (row >= row.kthvalue(len(row) - top_k + 1).values).nonzero().flatten()
        values = row[tokens]
    scaled = (values - best) * rows.inverse[r]
    if rows.top_p is not None and (top_p := float(rows.top_p[r])) < 1:
        kept = values >= _nucleus(values, scaled, top_p)
        tokens, scaled = tokens[kept], scaled[kept]
    if rows.log_min_p[r] > float("-inf"):
        kept = scaled >= rows.log_min_p[r]
        tokens, scaled = tokens[kept], scaled[kept]
    return _Kept(r[None], tokens[None], scaled[None])


def _nucleus(values: torch.Tensor, scaled: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest of the fewest largest `values` (n,) whose probability reaches `top_p`: ().

    Splits the candidates at the middle of their range until few are left, and sorts those.
    """
    weights = scaled.double().exp_()
    total, above = float(weights.sum()), 0.0
    target = top_p * total
    # All tokens of at most this weight are together less than what may be left out.
    candidates = (weights >= (1 - top_p) * total / len(values) * (1 - 1e-6)).nonzero().flatten()
    values, weights, scaled = values[candidates], weights[candidates], scaled[candidates]
    while len(values) > _SMALL:
        middle = (float(scaled.min()) + float(scaled.max())) / 2
        upper = scaled > middle
        mass = float(weights[upper].sum())
        if upper.all() or not upper.any():
            break  # equal up to rounding
        if above + mass >= target:
            keep = upper
        else:
            keep, above = ~upper, above + mass
        values, weights, scaled = values[keep], weights[keep], scaled[keep]
    ordered, order = values.sort(descending=True)
    reached = above + weights[order].cumsum(0) >= target
    # Rounding may leave even the whole below the target.
    return ordered[int(reached.int().argmax()) if bool(reached.any()) else -1]


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
    for kept in _kept_sets(logits, best, rows):
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
    for kept in _kept_sets(logits, best, rows):
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
        def make(device: torch.device, dtype: torch.dtype):
            def full(value, kind):
                return None if value is None else torch.full((num_rows,), value, dtype=kind).to(device)

            logits = torch.randn(num_rows, vocab).mul_(3).to(device)
            numbers = full(temperature, torch.float32), full(top_k, torch.int32)
            seed = torch.randint(0, 2**31, (num_rows,)).to(device)
            return logits, *numbers, full(top_p, torch.float32), seed, full(100, torch.int64)

        def run(function):
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
