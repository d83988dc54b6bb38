import pytest
import torch

from compress.kernels.activations import fake_quantize
from compress.kernels.quantize_tokens import (
    quantize_tokens_ref,
    quantize_tokens_torch,
    quantize_tokens_triton,
)
from compress.scheme import ActivationScheme
from tests.kernels.tolerance import DTYPES, dtype_id

EPS = 1e-5
PER_TOKEN = ActivationScheme(type="int", dynamic=True)


def make(num_tokens, width, dtype, device):
    generator = torch.Generator().manual_seed(num_tokens * 1000 + width)
    x = torch.randn(num_tokens, width, generator=generator) * 3
    weight = torch.rand(width, generator=generator) + 0.5
    return x.to(device, dtype), weight.to(device, dtype)


@pytest.mark.parametrize(
    "num_tokens, width",
    [
        pytest.param(1, 576, id="T1-K576"),
        pytest.param(17, 33, id="T17-K33"),
        pytest.param(33, 1, id="T33-K1"),
        pytest.param(130, 1100, id="T130-K1100"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_codes_and_scales_are_those_of_the_oracle(num_tokens, width, dtype, device, poisoned_empty):
    x, _ = make(num_tokens, width, dtype, device)
    for got, expected in zip(quantize_tokens_triton(x), quantize_tokens_ref(x), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_codes_times_scale_is_what_activations_stand_for(dtype, device):
    x, _ = make(33, 576, dtype, device)
    codes, scale = quantize_tokens_triton(x)
    meant = (codes.float() * scale[:, None]).to(dtype)
    assert torch.equal(meant, fake_quantize(x, PER_TOKEN))


@pytest.mark.parametrize("run", [quantize_tokens_triton, quantize_tokens_torch])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_norm_in_front_moves_few_codes_by_one(run, dtype, device):
    """A sum in another order may round a normed value the other way, and so its code."""
    x, weight = make(33, 576, dtype, device)
    codes, scale = run(x, weight, EPS)
    expected_codes, expected_scale = quantize_tokens_ref(x, weight, EPS)
    last_place = torch.finfo(dtype).eps
    torch.testing.assert_close(scale, expected_scale, rtol=2 * last_place, atol=0)
    difference = (codes.int() - expected_codes.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 0.02
    assert (codes != quantize_tokens_ref(x)[0]).float().mean() > 0.1  # the norm does something


def test_ties_go_to_the_even_code(device):
    x = torch.tensor([[127.5, 0.5, 1.5, 2.5, -0.5, -1.5, -127.5]], device=device)
    codes, scale = quantize_tokens_triton(x)
    assert scale.tolist() == [1.0]
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -128]]


def test_rows_of_zeros_and_of_what_is_not_finite_harm_no_other(device):
    x, _ = make(5, 96, torch.float32, device)
    alone = quantize_tokens_triton(x[4:])
    x[0], x[1, 3], x[2, 5], x[3, 7] = 0, float("nan"), float("inf"), float("-inf")
    codes, scale = quantize_tokens_triton(x)
    assert scale[0] == torch.finfo(torch.float32).tiny and not codes[0].any()
    assert scale[1].isnan() and scale[2].isinf() and scale[3].isinf()
    assert torch.equal(codes[4:], alone[0]) and torch.equal(scale[4:], alone[1])


def test_rows_may_lie_apart_and_do_not_depend_on_their_batch(device):
    wide, _ = make(17, 700, torch.float16, device)
    x = wide[:, 10:586]
    codes, scale = quantize_tokens_triton(x)
    for rows in (1, 2, 5, 16):
        part = quantize_tokens_triton(x[:rows].contiguous())
        assert torch.equal(part[0], codes[:rows]) and torch.equal(part[1], scale[:rows])


def test_no_rows_give_no_rows(device):
    codes, scale = quantize_tokens_triton(torch.zeros(0, 64, device=device))
    assert codes.shape == (0, 64) and scale.shape == (0,)


def test_the_bad_argument_is_named(device):
    x, weight = make(2, 64, torch.float32, device)
    with pytest.raises(ValueError, match=r"weight must be float32 of shape \(64\)"):
        quantize_tokens_triton(x, weight[:63], EPS)
    with pytest.raises(ValueError, match="x must have contiguous rows"):
        quantize_tokens_triton(x.T.contiguous().T)
    with pytest.raises(ValueError, match="x must be float16 or bfloat16 or float32"):
        quantize_tokens_triton(x.double())
    with pytest.raises(ValueError, match="x must have 1 to 32768 columns, got 40000"):
        quantize_tokens_triton(torch.zeros(1, 40000, device=device))
