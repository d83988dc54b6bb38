import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.rms_norm import (
    add_rms_norm_ref,
    add_rms_norm_torch,
    add_rms_norm_triton,
    rms_norm_ref,
    rms_norm_torch,
    rms_norm_triton,
    row_tile,
)
from tests.kernels.tolerance import DTYPES, assert_as_exact_as, dtype_id

EPS = 1e-5
UNIT_OFFSETS = pytest.mark.parametrize("unit_offset", [False, True], ids=["w", "1+w"])
FORMS = pytest.mark.parametrize("backend", ["torch", "triton"])
FUNCTIONS = {
    "torch": (rms_norm_torch, add_rms_norm_torch),
    "triton": (rms_norm_triton, add_rms_norm_triton),
}


def make(num_tokens, hidden, dtype, device):
    generator = torch.Generator().manual_seed(num_tokens * 1000 + hidden)
    x = torch.randn(num_tokens, hidden, generator=generator) * 3
    weight = torch.rand(hidden, generator=generator) + 0.5
    return x.to(device, dtype), weight.to(device, dtype)


def make_residual(x):
    generator = torch.Generator().manual_seed(x.numel())
    return (torch.randn(x.shape, generator=generator) * 5).to(x.device, x.dtype)


SHAPES = [
    pytest.param(1, 576, id="T1-H576"),
    pytest.param(17, 33, id="T17-H33"),
    pytest.param(33, 1, id="T33-H1"),
    pytest.param(130, 128, id="T130-H128"),
    pytest.param(16, 1100, id="T16-H1100"),
]


@pytest.mark.parametrize("num_tokens, hidden", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@UNIT_OFFSETS
def test_rms_norm_triton_matches_reference(
    unit_offset, num_tokens, hidden, dtype, device, poisoned_empty
):
    x, weight = make(num_tokens, hidden, dtype, device)
    exact = rms_norm_ref(x.double(), weight.double(), EPS, unit_offset=unit_offset)
    got = rms_norm_triton(x, weight, EPS, unit_offset=unit_offset)
    plain = rms_norm_torch(x, weight, EPS, unit_offset=unit_offset)
    assert_as_exact_as(got, plain, exact)


@pytest.mark.parametrize("num_tokens, hidden", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@FORMS
@UNIT_OFFSETS
def test_add_rms_norm_has_the_bits_of_two_steps(
    unit_offset, backend, num_tokens, hidden, dtype, device, poisoned_empty
):
    norm, add_norm = FUNCTIONS[backend]
    x, weight = make(num_tokens, hidden, dtype, device)
    residual = make_residual(x)
    y, summed = add_norm(x, residual, weight, EPS, unit_offset=unit_offset)
    assert summed.dtype == dtype and torch.equal(summed, x + residual)
    assert torch.equal(y, norm(x + residual, weight, EPS, unit_offset=unit_offset))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_add_rms_norm_triton_matches_reference(dtype, device):
    x, weight = make(33, 576, dtype, device)
    residual = make_residual(x)
    exact, summed = add_rms_norm_ref(x, residual, weight, EPS)
    assert torch.equal(summed, x + residual)
    exact = rms_norm_ref(summed.double(), weight.double(), EPS)
    got, _ = add_rms_norm_triton(x, residual, weight, EPS)
    assert_as_exact_as(got, add_rms_norm_torch(x, residual, weight, EPS)[0], exact)


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
        assert (got != llama).float().mean() < 0.002  # the wrong place: a quarter


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_id)
def test_unit_offset_in_torch_is_the_norm_of_gemma(dtype):
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm

    x, weight = make(33, 576, dtype, "cpu")
    module = Gemma2RMSNorm(576, eps=EPS)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    got, expected = rms_norm_torch(x, weight, EPS, unit_offset=True), module(x)
    if dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    else:
        assert (got != expected).float().mean() < 0.002


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d != torch.float32], ids=dtype_id)
def test_rms_norm_triton_rounds_where_its_form_says(dtype, device):
    """Rounding in the other place differs in about a quarter of the elements."""
    x, weight = make(33, 576, dtype, device)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + EPS)
    early, late = normed.to(dtype) * weight, (normed * weight.float()).to(dtype)
    llama = rms_norm_triton(x, weight, EPS)
    assert (llama != late).float().mean() > 0.1
    assert (llama != early).float().mean() < 0.01  # the fp32 sum has another order
    early, late = normed.to(dtype) * (1 + weight), (normed * (1 + weight.float())).to(dtype)
    gemma = rms_norm_triton(x, weight, EPS, unit_offset=True)
    assert (gemma != early).float().mean() > 0.1
    assert (gemma != late).float().mean() < 0.01


def test_rms_norm_triton_reads_rows_that_lie_apart(device):
    wide, weight = make(5, 96, torch.float32, device)
    x, weight = wide[:, 10:74], weight[:64]
    assert torch.equal(
        rms_norm_triton(x, weight, EPS), rms_norm_triton(x.contiguous(), weight, EPS)
    )
    together = add_rms_norm_triton(x.contiguous(), wide[:, :64].contiguous(), weight, EPS)
    apart = add_rms_norm_triton(x, wide[:, :64], weight, EPS)
    assert torch.equal(apart[0], together[0]) and torch.equal(apart[1], together[1])


@FORMS
@pytest.mark.parametrize(
    "hidden, dtype", [(33, torch.float16), (128, torch.float16), (576, torch.float32)], ids=str
)
def test_row_does_not_depend_on_its_batch(backend, hidden, dtype, device):
    norm, add_norm = FUNCTIONS[backend]
    x, weight = make(64, hidden, dtype, device)
    residual = make_residual(x)
    alone = norm(x[1:2], weight, EPS), *add_norm(x[1:2], residual[1:2], weight, EPS)
    for num_rows in (2, 5, 16, 64):
        rows = x[:num_rows], residual[:num_rows]
        together = norm(rows[0], weight, EPS), *add_norm(*rows, weight, EPS)
        for many, one in zip(together, alone, strict=True):
            assert torch.equal(many[1], one[0])


def test_tile_is_a_function_of_the_hidden_size_that_fills_lanes():
    """Every row of heads has 32 lanes or fewer, so that a warp holds whole rows."""
    assert [row_tile(hidden).rows for hidden in (64, 128, 256, 257, 4096)] == [32, 16, 8, 1, 1]
    for hidden in (1, 33, 128, 256, 1024, 4096, 32768):
        tile = row_tile(hidden)
        assert tile.columns >= hidden
        assert tile.rows * tile.columns <= 64 * 32 * tile.num_warps


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 20),
    hidden=st.integers(1, 700),
    gap=st.integers(0, 20),
    unit_offset=st.booleans(),
)
def test_any_rows_are_normalised_alike_alone_and_together(rows, hidden, gap, unit_offset):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wide, weight = make(rows, hidden + gap, torch.float32, device)
    x, weight = wide[:, gap:], weight[gap:]
    got = rms_norm_triton(x, weight, EPS, unit_offset=unit_offset)
    exact = rms_norm_ref(x.double(), weight.double(), EPS, unit_offset=unit_offset)
    torch.testing.assert_close(got.double(), exact, rtol=2e-6, atol=1e-7)
    alone = rms_norm_triton(x[-1:].clone(), weight, EPS, unit_offset=unit_offset)
    assert torch.equal(got[-1:], alone)


def test_norms_of_no_rows_are_empty(device):
    x, weight = make(0, 64, torch.float32, device)
    assert rms_norm_triton(x, weight, EPS).shape == (0, 64)
    y, summed = add_rms_norm_triton(x, x, weight, EPS)
    assert y.shape == summed.shape == (0, 64)


def test_rms_norm_triton_names_the_bad_argument(device):
    x, weight = make(2, 64, torch.float32, device)
    with pytest.raises(ValueError, match=r"weight must be float32 of shape \(64\)"):
        rms_norm_triton(x, weight[:63], EPS)
    with pytest.raises(ValueError, match="weight must be float32"):
        rms_norm_triton(x, weight.half(), EPS)
    with pytest.raises(ValueError, match=r"weight must be on .*, as x is, got meta"):
        rms_norm_triton(x, weight.to("meta"), EPS)
    with pytest.raises(ValueError, match="x must have contiguous rows"):
        rms_norm_triton(x.T.contiguous().T, weight, EPS)
    with pytest.raises(ValueError, match="x must have 1 to 32768 columns, got 40000"):
        rms_norm_triton(
            torch.zeros(1, 40000, device=device), torch.zeros(40000, device=device), EPS
        )


def test_add_rms_norm_triton_names_the_bad_residual(device):
    x, weight = make(2, 64, torch.float32, device)
    with pytest.raises(ValueError, match=r"residual must be float32 of shape \(2, 64\)"):
        add_rms_norm_triton(x, x[:1], weight, EPS)
    with pytest.raises(ValueError, match="residual must be float32"):
        add_rms_norm_triton(x, x.half(), weight, EPS)
    with pytest.raises(ValueError, match="residual must have contiguous rows"):
        add_rms_norm_triton(x, x.T.contiguous().T, weight, EPS)
