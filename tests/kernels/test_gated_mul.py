import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.gated_mul import (
    gated_mul_by_rows,
    gated_mul_quantize_ref,
    gated_mul_quantize_torch,
    gated_mul_quantize_triton,
    gated_mul_ref,
    gated_mul_torch,
    gated_mul_triton,
)
from compress.kernels.quantize_tokens import quantize_tokens_torch, quantize_tokens_triton
from tests.kernels.tolerance import DTYPES, assert_as_exact_as, dtype_id

ACTIVATIONS = ["silu", "gelu_tanh", "gelu"]
# of numpy, as meant: x / inf is 0
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def make(num_tokens, intermediate, dtype, device):
    generator = torch.Generator().manual_seed(num_tokens + intermediate)
    return (torch.randn(num_tokens, 2 * intermediate, generator=generator) * 4).to(device, dtype)


SHAPES = [
    pytest.param(1, 1536, id="T1-I1536"),
    pytest.param(17, 33, id="T17-I33"),
    pytest.param(33, 1, id="T33-I1"),
    pytest.param(130, 130, id="T130-I130"),
]


@pytest.mark.parametrize("num_tokens, intermediate", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_mul_triton_matches_reference(
    activation, num_tokens, intermediate, dtype, device, poisoned_empty
):
    gate_up = make(num_tokens, intermediate, dtype, device)
    exact = gated_mul_ref(gate_up.double(), activation)
    got = gated_mul_triton(gate_up, activation)
    assert_as_exact_as(got, gated_mul_torch(gate_up, activation), exact)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_mul_torch_matches_reference_in_bfloat16(activation):
    gate_up = make(33, 96, torch.bfloat16, "cpu")
    exact = gated_mul_ref(gate_up.double(), activation)
    # Two roundings of half a unit in the last place each, 2^-9 relative; the tanh form of torch
    # cancels at negative gates, in fp32, and is multiplied by an up of at most 16.
    got = gated_mul_torch(gate_up, activation).double()
    torch.testing.assert_close(got, exact, rtol=2**-7, atol=1e-30 if activation == "silu" else 2e-5)


def test_activations_differ_as_they_should(device):
    """Against values from the literature: silu(1), gelu(1) and its tanh form."""
    gate_up = torch.tensor([[1.0, 1.0]], device=device)
    values = {"silu": 0.7310586, "gelu_tanh": 0.8411920, "gelu": 0.8413447}
    for run in (gated_mul_triton, gated_mul_torch, gated_mul_ref):
        for activation, value in values.items():
            assert run(gate_up, activation).item() == pytest.approx(value, abs=3e-7)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_mul_triton_keeps_extreme_gates_finite(activation, device):
    gate_up = torch.tensor([[-1e4, 1e4, -100.0, 0.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    assert gated_mul_triton(gate_up, activation).tolist() == [[0.0, 1e4, 0.0, 0.0]]


@pytest.mark.parametrize("run", ["triton", "torch"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("num_tokens, intermediate", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_fused_quantization_has_the_bits_of_two_steps(
    num_tokens, intermediate, activation, run, dtype, device, poisoned_empty
):
    gate_up = make(num_tokens, intermediate, dtype, device)
    if run == "triton":
        codes, scale = gated_mul_quantize_triton(gate_up, activation)
        expected = quantize_tokens_triton(gated_mul_triton(gate_up, activation))
    else:
        codes, scale = gated_mul_quantize_torch(gate_up, activation)
        expected = quantize_tokens_torch(gated_mul_torch(gate_up, activation))
    assert codes.dtype == torch.int8 and scale.dtype == torch.float32
    assert torch.equal(codes, expected[0]) and torch.equal(scale, expected[1])


@pytest.mark.parametrize("run", [gated_mul_quantize_triton, gated_mul_quantize_torch])
def test_fused_quantization_is_near_the_oracle(run, device):
    gate_up = make(33, 576, torch.float32, device)
    codes, scale = run(gate_up, "gelu_tanh")
    expected_codes, expected_scale = gated_mul_quantize_ref(gate_up, "gelu_tanh")
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    difference = (codes.int() - expected_codes.int()).abs()
    assert difference.max() <= 1 and (difference > 0).float().mean() < 0.01


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 70),
    intermediate=st.integers(1, 300),
    gap=st.integers(0, 20),
    activation=st.sampled_from(ACTIVATIONS),
)
def test_a_row_has_the_same_bits_in_every_batch_and_layout(rows, intermediate, gap, activation):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wide = make(rows, intermediate + gap, torch.float16, device)
    gate_up = wide[:, gap : gap + 2 * intermediate]
    last = gate_up[-1:].clone()
    whole = gated_mul_triton(gate_up, activation), *gated_mul_quantize_triton(gate_up, activation)
    alone = gated_mul_triton(last, activation), *gated_mul_quantize_triton(last, activation)
    for many, one in zip(whole, alone, strict=True):
        assert torch.equal(many[-1:], one)


@pytest.mark.parametrize("num_rows", [2, 5, 16, 64])
@pytest.mark.parametrize("run", [gated_mul_quantize_triton, gated_mul_quantize_torch])
def test_row_does_not_depend_on_its_batch(run, num_rows, device):
    gate_up = make(64, 96, torch.float16, device)
    codes, scale = run(gate_up[:num_rows])
    for row in (0, num_rows - 1):
        alone = run(gate_up[row : row + 1])
        assert torch.equal(codes[row], alone[0][0]) and torch.equal(scale[row], alone[1][0])


def test_gated_mul_of_no_rows_is_empty(device):
    empty = torch.zeros(0, 8, device=device)
    assert gated_mul_triton(empty).shape == (0, 4)
    codes, scale = gated_mul_quantize_triton(empty)
    assert codes.shape == (0, 4) and scale.shape == (0,)


@pytest.mark.parametrize("run", [gated_mul_triton, gated_mul_quantize_triton])
def test_gated_mul_triton_names_the_bad_argument(run, device):
    with pytest.raises(ValueError, match="gate_up must have an even number of columns, got 7"):
        run(torch.zeros(2, 7, device=device))
    with pytest.raises(ValueError, match="gate_up must be float16 or bfloat16 or float32"):
        run(torch.zeros(2, 8, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=r"unknown activation 'swish' .*silu"):
        run(torch.zeros(2, 8, device=device), "swish")


@pytest.mark.parametrize("activation, most", [("silu", 65536), ("gelu", 32768)])
def test_gated_mul_quantize_triton_names_the_widest_row(activation, most, device):
    gate_up = torch.zeros(1, most + 2, device=device)
    with pytest.raises(ValueError, match=f"2 to {most} columns for {activation}, got {most + 2}"):
        gated_mul_quantize_triton(gate_up, activation)


def test_gated_mul_torch_refuses_an_unknown_activation():
    with pytest.raises(ValueError, match="unknown activation 'relu'"):
        gated_mul_torch(torch.zeros(2, 8), "relu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_mul_by_rows_gives_a_row_the_same_bits_in_every_batch(activation, dtype):
    """Of 333 rows of 160 torch gives half a row to each of two threads."""
    gate_up = torch.randn(700, 320, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = gated_mul_by_rows(gate_up, activation)
    torch.testing.assert_close(whole, gated_mul_torch(gate_up, activation), rtol=1e-2, atol=1e-3)
    for start, count in ((0, 1), (166, 1), (0, 333), (7, 333), (0, 205), (33, 411)):
        part = gated_mul_by_rows(gate_up[start : start + count].clone(), activation)
        assert torch.equal(part, whole[start : start + count])
