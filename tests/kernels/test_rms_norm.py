import pytest
import torch

from compress.kernels.rms_norm import rms_norm_ref, rms_norm_torch, rms_norm_triton
from tests.kernels.tolerance import DTYPES, assert_as_exact_as, dtype_id

EPS = 1e-5


def make(num_tokens, hidden, dtype, device):
    generator = torch.Generator().manual_seed(num_tokens * 1000 + hidden)
    x = torch.randn(num_tokens, hidden, generator=generator) * 3
    weight = torch.rand(hidden, generator=generator) + 0.5
    return x.to(device, dtype), weight.to(device, dtype)


@pytest.mark.parametrize(
    "num_tokens, hidden",
    [
        pytest.param(1, 576, id="T1-H576"),
        pytest.param(17, 33, id="T17-H33"),
        pytest.param(33, 1, id="T33-H1"),
        pytest.param(130, 1100, id="T130-H1100"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_rms_norm_triton_matches_reference(num_tokens, hidden, dtype, device, poisoned_empty):
    x, weight = make(num_tokens, hidden, dtype, device)
    exact = rms_norm_ref(x.double(), weight.double(), EPS)
    got = rms_norm_triton(x, weight, EPS)
    assert_as_exact_as(got, rms_norm_torch(x, weight, EPS), exact)


@pytest.mark.parametrize("num_tokens, hidden", [(1, 576), (17, 33), (130, 1100)])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_rms_norm_with_unit_offset_matches_gemma(num_tokens, hidden, dtype, device, poisoned_empty):
    """(x * (1 + w)) in fp32, rounded once, as transformers computes it."""
    x, weight = make(num_tokens, hidden, dtype, device)
    exact = rms_norm_ref(x.double(), weight.double(), EPS, unit_offset=True)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    gemma = (normed * (1 + weight.float())).to(dtype)
    for norm in (rms_norm_torch, rms_norm_triton):
        assert_as_exact_as(norm(x, weight, EPS, unit_offset=True), gemma, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_id)
def test_rms_norm_torch_rounds_before_the_weight(dtype):
    x, weight = make(33, 576, dtype, "cpu")
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    llama = normed.to(dtype) * weight
    got = rms_norm_torch(x, weight, EPS)
    if dtype == torch.float32:
        torch.testing.assert_close(got, llama, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(got, llama)


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=dtype_id)
def test_rms_norm_triton_rounds_before_the_weight(dtype, device):
    """Rounding once, after the weight, differs in about a quarter of the elements."""
    x, weight = make(33, 576, dtype, device)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    llama, fused = normed.to(dtype) * weight, (normed * weight.float()).to(dtype)
    got = rms_norm_triton(x, weight, EPS)
    assert (got != fused).float().mean() > 0.1
    assert (got != llama).float().mean() < 0.01  # the fp32 sum has another order


def test_rms_norm_triton_reads_rows_that_lie_apart(device):
    wide, weight = make(5, 96, torch.float32, device)
    x, weight = wide[:, 10:74], weight[:64]
    assert torch.equal(
        rms_norm_triton(x, weight, EPS), rms_norm_triton(x.contiguous(), weight, EPS)
    )


def test_rms_norm_triton_row_does_not_depend_on_its_batch(device):
    x, weight = make(17, 576, torch.float16, device)
    assert torch.equal(rms_norm_triton(x[5:6], weight, EPS), rms_norm_triton(x, weight, EPS)[5:6])


def test_rms_norm_triton_of_no_rows_is_empty(device):
    x, weight = make(0, 64, torch.float32, device)
    assert rms_norm_triton(x, weight, EPS).shape == (0, 64)


def test_rms_norm_triton_names_the_bad_argument(device):
    x, weight = make(2, 64, torch.float32, device)
    with pytest.raises(ValueError, match=r"weight must be float32 of shape \(64\)"):
        rms_norm_triton(x, weight[:63], EPS)
    with pytest.raises(ValueError, match="weight must be float32"):
        rms_norm_triton(x, weight.half(), EPS)
    with pytest.raises(ValueError, match="x must have contiguous rows"):
        rms_norm_triton(x.T.contiguous().T, weight, EPS)
    with pytest.raises(ValueError, match="x must have 1 to 32768 columns, got 40000"):
        rms_norm_triton(
            torch.zeros(1, 40000, device=device), torch.zeros(40000, device=device), EPS
        )
