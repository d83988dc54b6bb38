"""Choosing the next token.

Greedy takes the most likely token, the lowest id among equals. Sampling is the Gumbel-max trick:

    token = argmax over v of  logit[v] / temperature + g(seed, position, v)

with g standard Gumbel noise from a hash of its three arguments, so a token depends on its own
request alone: not on its neighbours in the batch, on chunking, or on how often it is recomputed.

`top_k` and `top_p` keep the tokens at or above a threshold (ties are kept), found without sorting
the vocabulary: top_k by partial selection, top_p by bisection over the bit patterns of the
probabilities, which for positive floats are ordered like the floats.

R rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import torch

from compress.errors import CheckFailed
from compress.runtime.request import SamplingParams

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class SampledRow:
    """What row r of the logits is for: the token at `position`, chosen as `params` say."""

    params: SamplingParams
    position: int


def sample(logits: torch.Tensor, rows: Sequence[SampledRow]) -> list[int]:
    """One token id per row of `logits` (R, V) fp32.

    Raises CheckFailed for logits that are not a number, +inf, or all -inf.
    """
    best, indices = logits.max(dim=-1)  # a NaN is larger than everything
    for row, value in zip(rows, best.tolist(), strict=True):
        if not isfinite(value):
            raise CheckFailed(f"the logits of the token at position {row.position} are not finite")
    tokens: list[int] = indices.tolist()
    for i, row in enumerate(rows):
        if not row.params.is_greedy:
            tokens[i] = _sample_row(logits[i], row)
    return tokens


def gumbel_noise(seed: int, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise (n,) fp64 for `tokens` (n,) int64, a pure function of the arguments."""
    state = _mix(tokens ^ _mix_int(_mix_int(seed & _MASK) ^ (seed >> 32 & _MASK)))
    state = _mix(state ^ _mix_int(position + 0x9E3779B9))
    uniform = (state.double() + 0.5) / 2.0**32
    return -torch.log(-torch.log(uniform))


def _sample_row(logits: torch.Tensor, row: SampledRow) -> int:
    params = row.params
    scaled = logits / params.temperature
    kept = torch.ones_like(scaled, dtype=torch.bool)
    if 0 < params.top_k < len(scaled):
        kept &= scaled >= torch.topk(scaled, params.top_k).values[-1]
    if params.top_p < 1.0:
        masked = scaled.masked_fill(~kept, float("-inf"))
        kept &= _nucleus(torch.softmax(masked, dim=-1), params.top_p)
    tokens = kept.nonzero().flatten()
    perturbed = scaled[tokens].double() + gumbel_noise(params.seed, row.position, tokens)
    return int(tokens[torch.argmax(perturbed)])


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The fewest most likely tokens with total probability >= top_p, and ties: (V,) bool."""
    bits = probs.view(torch.int32)
    low, high = 0, int(bits.max())  # the mass at or above `low` is always enough
    while low < high:
        middle = (low + high + 1) // 2
        if float(probs[bits >= middle].double().sum()) >= top_p:
            low = middle
        else:
            high = middle - 1
    return bits >= low


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of MurmurHash3 on 32-bit values held in int64."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def _mix_int(x: int) -> int:
    """`_mix` of one Python integer."""
    x &= _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)
