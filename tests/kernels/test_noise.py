import math

import pytest
import torch

from compress.kernels.jit import tl, triton
from compress.kernels.noise import (
    coins,
    exponentials,
    gumbels,
    noise_states,
    salt_key,
    triton_coins,
    triton_exponentials,
    triton_states,
)

SEEDS = (0, 1, -1, 2**31, 2**32 + 5, -(2**63), 2**63 - 1)


# fmt: off
@triton.jit
def _noise_kernel(
    tokens_ptr, states_ptr, coins_ptr, times_ptr, seed_ptr, position_ptr,
    size,
    SALT_KEY: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    offs = tl.arange(0, BLOCK)
    tokens = tl.load(tokens_ptr + offs, mask=offs < size, other=0)
    states = triton_states(tl.load(seed_ptr), tl.load(position_ptr), tokens, SALT_KEY)
    tl.store(states_ptr + offs, states.to(tl.int64), mask=offs < size)
    tl.store(coins_ptr + offs, triton_coins(states), mask=offs < size)
    tl.store(times_ptr + offs, triton_exponentials(states), mask=offs < size)


@triton.jit
def _times_kernel(states_ptr, times_ptr, size, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    states = tl.load(states_ptr + offs, mask=offs < size, other=0).to(tl.uint32)
    tl.store(times_ptr + offs, triton_exponentials(states), mask=offs < size)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("position, salt", [(0, 0), (17, 1), (2**31, 2), (5000, 2**32 - 1)])
def test_states_and_coins_are_bit_identical_in_torch_and_triton(seed, position, salt, device):
    tokens = torch.cat((torch.arange(500), 2**18 - 1 - torch.arange(500))).to(device)
    args = torch.tensor([seed], device=device), torch.tensor([position], device=device)
    states = torch.empty_like(tokens)
    u, times = torch.empty(2, len(tokens), device=device)
    key = {"SALT_KEY": salt_key(salt), "BLOCK": 1024}
    _noise_kernel[(1,)](tokens, states, u, times, *args, len(tokens), **key)
    want = noise_states(*args, tokens, salt)
    assert torch.equal(states, want)
    assert torch.equal(u, coins(want))
    assert u.min() >= 0 and u.max() < 1
    torch.testing.assert_close(times.double(), exponentials(want), rtol=2**-21, atol=0)


def test_exponentials_are_right_at_the_ends_of_the_range(device):
    ends = [0, 1, 2, 100, 2**23, 2**24 + 1]
    states = [*ends, *(2**31 + i for i in (-300, -1, 0, 1, 300)), *(2**32 - 1 - i for i in ends)]
    states = torch.tensor(states, device=device)
    times = torch.empty(len(states), device=device)
    _times_kernel[(1,)](states, times, len(states), BLOCK=32)
    want = exponentials(states)
    assert (want > 0).all() and want.isfinite().all()
    torch.testing.assert_close(times.double(), want, rtol=2**-21, atol=0)


def test_noise_stays_what_it_was():
    """A seed must give the same text in every version: values of the first one."""
    states = noise_states(torch.tensor(17), torch.tensor(33), torch.arange(4))
    assert states.tolist() == [2320922498, 2080970662, 622350914, 550148269]
    expected = [0.4853541183911242, 0.32212240172585627, -0.6583979154065392, -0.7202813939906154]
    torch.testing.assert_close(gumbels(states), torch.tensor(expected, dtype=torch.float64))


def test_noise_has_the_moments_of_a_gumbel_and_changes_with_every_key():
    tokens = torch.arange(100_000)
    draws = [
        gumbels(noise_states(torch.tensor(seed), torch.tensor(position), tokens, salt))
        for seed, position, salt in ((1, 2, 0), (3, 2, 0), (1, 5, 0), (1, 2, 1), (1 + 2**32, 2, 0))
    ]
    for draw in draws:
        assert abs(float(draw.mean()) - 0.5772) < 0.02
        assert abs(float(draw.std()) - math.pi / math.sqrt(6)) < 0.02
    correlation = torch.corrcoef(torch.stack(draws)) - torch.eye(len(draws))
    assert correlation.abs().max() < 0.02


def test_salt_must_be_32_bits():
    with pytest.raises(ValueError, match=r"salt must be in \[0, 2\^32\), got -1"):
        salt_key(-1)
