import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.block_copy import copy_blocks_ref, copy_blocks_torch, copy_blocks_triton
from tests.kernels.tolerance import dtype_id

RUNS = pytest.mark.parametrize("run", [copy_blocks_torch, copy_blocks_triton])
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8)


def make(shape, dtype, device, seed=0):
    """A pool of random bytes, NaN among them: what is copied is bits, not values."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (*shape, dtype.itemsize)
    raw = torch.randint(0, 256, sizes, generator=generator, dtype=torch.uint8)
    return raw.to(device).view(dtype).squeeze(-1)


def bits(pool):
    return pool.contiguous().view(-1).view(torch.uint8)


def random_pairs(num_blocks, num_pairs, device, seed=0):
    """Pairs without a block on both sides; sources repeat."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_blocks, generator=generator)
    destinations, sources = order[:num_pairs], order[num_pairs:]
    chosen = torch.randint(0, len(sources), (num_pairs,), generator=generator)
    return torch.stack((sources[chosen], destinations), dim=1).to(device)


@RUNS
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize(
    "shape, num_pairs",
    [
        pytest.param((3, 17, 2, 16, 64), 5, id="keys"),
        pytest.param((1, 2, 3, 64, 33), 1, id="D33"),
        pytest.param((2, 130, 3, 64), 33, id="scales"),
        pytest.param((5, 33, 1), 17, id="one-value-each"),
    ],
)
def test_blocks_are_copied_bit_by_bit(run, shape, num_pairs, dtype, device):
    pool = make(shape, dtype, device)
    pairs = random_pairs(shape[1], num_pairs, device)
    expected = pool.clone()
    copy_blocks_ref(expected, pairs)
    assert not torch.equal(bits(expected), bits(pool))
    run(pool, pairs)
    assert torch.equal(bits(pool), bits(expected))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    num_layers=st.integers(1, 3),
    num_blocks=st.integers(2, 20),
    size=st.integers(1, 3000),
    fraction=st.floats(0, 1),
    dtype=st.sampled_from(DTYPES),
)
def test_any_pool_is_copied_bit_by_bit(num_layers, num_blocks, size, fraction, dtype):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pool = make((num_layers, num_blocks, size), dtype, device, seed=size)
    pairs = random_pairs(num_blocks, int(fraction * (num_blocks - 1)), device, seed=size)
    expected, other = pool.clone(), pool.clone()
    copy_blocks_ref(expected, pairs)
    copy_blocks_torch(pool, pairs)
    copy_blocks_triton(other, pairs)
    assert torch.equal(bits(pool), bits(expected)) and torch.equal(bits(other), bits(expected))


@RUNS
def test_a_pool_that_starts_at_an_odd_address_is_copied(run, device):
    raw = make((1 + 2 * 3 * 16,), torch.uint8, device)
    pool = raw[1:].view(2, 3, 16)
    pairs = torch.tensor([[0, 2]], device=device)
    run(pool, pairs)
    assert torch.equal(pool[:, 2], pool[:, 0]) and not torch.equal(pool[:, 1], pool[:, 0])


@RUNS
@pytest.mark.parametrize("shape", [(2, 5, 8), (0, 5, 8), (2, 0, 8), (2, 5, 0)], ids=str)
def test_no_pairs_change_nothing(run, shape, device):
    pool = make(shape, torch.float32, device)
    before = pool.clone()
    run(pool, torch.empty(0, 2, dtype=torch.int64, device=device))
    assert torch.equal(bits(pool), bits(before))


@RUNS
def test_a_block_may_be_copied_to_itself(run, device):
    pool = make((2, 5, 96), torch.int8, device)
    before = pool.clone()
    run(pool, torch.tensor([[3, 3]], device=device))
    assert torch.equal(pool, before)


@pytest.mark.parametrize(
    "pairs, message",
    [
        ([[0, 5]], r"blocks 0 to 4, got \(0, 5\)"),
        ([[-1, 2]], r"blocks 0 to 4, got \(-1, 2\)"),
        ([[0, 2], [1, 2]], "distinct destinations"),
        ([[0, 2], [2, 3]], "a block that one copies to: 2"),
    ],
)
def test_torch_refuses_pairs_before_it_copies(pairs, message):
    pool = make((2, 5, 8), torch.float32, "cpu")
    before = pool.clone()
    with pytest.raises(ValueError, match=message):
        copy_blocks_torch(pool, torch.tensor([[4, 1], *pairs]))
    assert torch.equal(bits(pool), bits(before))


@pytest.mark.parametrize("block", [-1, 5, 2**40])
def test_triton_leaves_out_a_pair_with_a_block_outside_the_pool(block, device):
    pool = make((2, 5, 96), torch.float32, device)
    expected = pool.clone()
    copy_blocks_ref(expected, torch.tensor([[4, 1]]))
    copy_blocks_triton(pool, torch.tensor([[block, 0], [4, 1], [2, block]], device=device))
    assert torch.equal(bits(pool), bits(expected))


@RUNS
def test_the_bad_argument_is_named(run, device):
    pool = make((2, 5, 8), torch.float32, device)
    pairs = torch.tensor([[0, 1]], device=device)
    with pytest.raises(ValueError, match=r"pairs must be int64 of shape \(any, 2\)"):
        run(pool, pairs.int())
    with pytest.raises(ValueError, match=r"pairs must be int64 of shape \(any, 2\)"):
        run(pool, pairs[:, :1])
    with pytest.raises(ValueError, match="pool must be contiguous"):
        run(pool.transpose(0, 1), pairs)
    with pytest.raises(ValueError, match=r"pool must be of shape \(layers, blocks, ...\)"):
        run(pool.view(-1), pairs)


def test_triton_wants_pairs_beside_the_pool(device):
    pool = make((2, 5, 8), torch.float32, device)
    with pytest.raises(ValueError, match=r"pairs must be on .*, as pool is, got meta"):
        copy_blocks_triton(pool, torch.empty(1, 2, dtype=torch.int64, device="meta"))
