import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.moe_combine import combine_ref, combine_torch, combine_triton
from tests.kernels.tolerance import DTYPES, assert_as_exact_as, dtype_id

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make(num_tokens, top_k, width, dtype):
    generator = torch.Generator().manual_seed(num_tokens + width)
    y = torch.randn(num_tokens, top_k, width, generator=generator).to(DEVICE, dtype)
    return y, torch.rand(num_tokens, top_k, generator=generator).to(DEVICE)


@pytest.mark.parametrize("num_tokens", [1, 17, 33, 130])
@pytest.mark.parametrize("top_k, width", [(1, 80), (2, 1030), (3, 1)])
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_combine_matches_reference(num_tokens, top_k, width, weighted, dtype, poisoned_empty):
    y, weights = make(num_tokens, top_k, width, dtype)
    weights = weights if weighted else None
    exact = combine_ref(y.double(), weights)
    assert_as_exact_as(combine_triton(y, weights), combine_torch(y, weights), exact)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(num_tokens=st.integers(1, 9), top_k=st.integers(1, 9), width=st.integers(1, 70))
def test_combine_adds_integers_exactly(num_tokens, top_k, width):
    y, weights = make(num_tokens, top_k, width, torch.float32)
    y, weights = (y * 50).round(), (weights * 50).round()
    exact = combine_ref(y, weights)
    assert torch.equal(combine_torch(y, weights), exact)
    assert torch.equal(combine_triton(y, weights), exact)


@pytest.mark.parametrize("combine", [combine_torch, combine_triton], ids=["torch", "triton"])
def test_combine_adds_the_experts_in_order(combine):
    """(1e8 + 1) - 1e8 is 0 in fp32, (1e8 - 1e8) + 1 is 1."""
    y = torch.tensor([[[1e8], [1.0], [-1e8]], [[1e8], [-1e8], [1.0]]], device=DEVICE)
    assert combine(y, None).tolist() == [[0.0], [1.0]]
    assert combine(y, torch.ones(2, 3, device=DEVICE)).tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize("combine", [combine_torch, combine_triton], ids=["torch", "triton"])
def test_combine_row_has_the_same_bits_in_every_batch(combine):
    y, weights = make(64, 3, 130, torch.float16)
    whole = combine(y, weights)
    for rows in (1, 2, 5, 16):
        assert torch.equal(combine(y[:rows], weights[:rows]), whole[:rows])


def test_combine_of_nothing_is_empty():
    assert combine_triton(*make(0, 2, 8, torch.float32)).shape == (0, 8)
    assert combine_triton(*make(3, 2, 0, torch.float32)).shape == (3, 0)


def test_combine_names_the_bad_argument():
    y, weights = make(3, 2, 8, torch.float32)
    with pytest.raises(ValueError, match="y must be float16 or"):
        combine_triton(y[0], weights)
    with pytest.raises(ValueError, match=r"weights must be float32 of shape \(3, 2\)"):
        combine_triton(y, weights[:2])
    with pytest.raises(ValueError, match="y must be contiguous"):
        combine_triton(y[..., ::2], weights)
    with pytest.raises(ValueError, match=r"weights must be on .*, as y is, got meta"):
        combine_triton(y, weights.to("meta"))
