"""Counter-based noise: a random number for each (seed, position, token, salt), held nowhere.

With mix the finalizer of MurmurHash3 on 32 bits,

    key   = mix(mix(low(seed)) ^ high(seed)) ^ mix(salt)
    state = mix(mix(token ^ key) ^ mix(position + 0x9E3779B9))

so a draw depends on its own request alone, not on the batch, the chunking or how often it is
recomputed. mix(0) = 0: salt 0 is no salt. A state is a 32-bit integer, bit for bit the same in
torch (int64 with masks) and in Triton (uint32), and becomes
  a coin         (state >> 8) / 2^24             in [0, 1), exact in fp32: equal in both
  an exponential -log(u), u = (state + 0.5) / 2^32
  Gumbel noise   -log(-log(u))
torch computes the last two in fp64. Triton uses fp32: for u > 1/2 from 1 - u, which keeps all 32
bits where the exponential is small, so that neither rounds to 0 or to infinity, and the relative
error of the exponential stays near 2^-22; this needs a logarithm that is accurate beside 1, as
`tl.log` is (not PTX's lg2.approx). Tokens then differ between the two only where the best
scores are closer than about 1e-6.

The salts of one position are apart, so that a draft, its verification and what replaces it are
independent.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch

from compress.kernels.jit import tl, triton

TARGET_SALT = 0  # the model's own draw: plain sampling, and what follows a rejection
DRAFT_SALT = 1  # the draws of a draft model
COIN_SALT = 2  # accepting or rejecting a draft

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def mix(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of MurmurHash3 on 32-bit values held in int64."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B).bitwise_and_(_MASK)
    x = ((x ^ (x >> 13)) * 0xC2B2AE35).bitwise_and_(_MASK)
    return x ^ (x >> 16)


def salt_key(salt: int) -> int:
    """`mix` of a salt; ValueError unless it has at most 32 bits."""
    if not 0 <= salt <= _MASK:
        raise ValueError(f"salt must be in [0, 2^32), got {salt}")
    return int(mix(torch.tensor(salt)))


def noise_states(
    seed: torch.Tensor, position: torch.Tensor, tokens: torch.Tensor, salt: int = 0
) -> torch.Tensor:
    """32-bit states, int64, of int64 arguments that broadcast against each other."""
    key = mix(mix(seed) ^ (seed >> 32 & _MASK)) ^ salt_key(salt)
    return mix(mix(tokens ^ key) ^ mix(position + _GOLDEN))


def coins(states: torch.Tensor) -> torch.Tensor:
    """Uniform fp32 numbers in [0, 1), multiples of 2^-24."""
    return (states >> 8).float() * 2.0**-24


def exponentials(states: torch.Tensor) -> torch.Tensor:
    """Standard exponential fp64 numbers, positive and finite."""
    return states.double().add_(0.5).mul_(2.0**-32).log_().neg_()


def gumbels(states: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel fp64 numbers, finite."""
    return exponentials(states).log_().neg_()


def weighted_draw(
    weights: torch.Tensor, laws: torch.Tensor, seed: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """A token (R,) for each row of `weights` (R, V) fp, whose noise has salt TARGET_SALT.

    A row of zeros is drawn from `laws` (R, V) instead; -1 where that has no mass or is not finite.
    """
    has_weight = (weights > 0).any(1)
    weights = torch.where(has_weight[:, None], weights, laws)
    rows, tokens = (weights > 0).nonzero(as_tuple=True)
    time = exponentials(noise_states(seed[rows], position[rows], tokens, TARGET_SALT))
    scores = weights[rows, tokens].double() / time
    best = scores.new_zeros(len(laws)).scatter_reduce_(0, rows, scores, "amax")
    is_best = scores == best[rows]
    choice = torch.full_like(seed, -1)
    choice[rows[is_best]] = tokens[is_best]
    return choice.masked_fill_(~laws.isfinite().all(1), -1)


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def triton_states(seed, position, tokens, SALT_KEY: tl.constexpr):
    """`noise_states` as uint32; `SALT_KEY` is `salt_key(salt)`."""
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    key = _mix(_mix(low) ^ high) ^ SALT_KEY
    where = _mix(((position + 0x9E3779B9) & 0xFFFFFFFF).to(tl.uint32))
    return _mix(_mix(tokens.to(tl.uint32) ^ key) ^ where)


@triton.jit
def triton_coins(states):
    """`coins`."""
    return (states >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def triton_exponentials(states):
    """`exponentials` in fp32."""
    scale: tl.constexpr = 2.3283064365386963e-10  # 2^-32
    u = (states.to(tl.float32) + 0.5) * scale
    rest = ((states ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * scale  # 1 - u
    is_high = rest < 0.5
    y = tl.where(is_high, 1.0 - rest, u)
    value = -tl.log(y)
    # log(1 - rest) is log(y) of the rounded y, put right by the share that rounding took or gave.
    exact = tl.where(y == 1.0, rest, value * (rest / tl.where(y == 1.0, 1.0, 1.0 - y)))
    return tl.where(is_high, exact, value)
