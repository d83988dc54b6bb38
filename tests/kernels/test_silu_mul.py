import pytest
import torch

from compress.kernels.silu_mul import silu_mul_ref, silu_mul_torch, silu_mul_triton
from tests.kernels.tolerance import DTYPES, assert_as_exact_as, dtype_id


def make(num_tokens, intermediate, dtype, device):
    generator = torch.Generator().manual_seed(num_tokens + intermediate)
    return (torch.randn(num_tokens, 2 * intermediate, generator=generator) * 4).to(device, dtype)


@pytest.mark.parametrize(
    "num_tokens, intermediate",
    [
        pytest.param(1, 1536, id="T1-I1536"),
        pytest.param(17, 33, id="T17-I33"),
        pytest.param(33, 1, id="T33-I1"),
        pytest.param(130, 130, id="T130-I130"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_silu_mul_triton_matches_reference(num_tokens, intermediate, dtype, device, poisoned_empty):
    gate_up = make(num_tokens, intermediate, dtype, device)
    exact = silu_mul_ref(gate_up.double())
    assert_as_exact_as(silu_mul_triton(gate_up), silu_mul_torch(gate_up), exact)


def test_silu_mul_torch_matches_reference_in_bfloat16():
    gate_up = make(33, 96, torch.bfloat16, "cpu")
    exact = silu_mul_ref(gate_up.double())
    # Two roundings of half a unit in the last place each, 2^-9 relative.
    torch.testing.assert_close(silu_mul_torch(gate_up).double(), exact, rtol=2**-7, atol=1e-30)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of numpy, as meant
def test_silu_mul_triton_keeps_extreme_gates_finite(device):
    gate_up = torch.tensor([[-1e4, 1e4, -100.0, 0.0, 1.0, 1.0, 1.0, 1.0]], device=device)
    assert silu_mul_triton(gate_up).tolist() == [[0.0, 1e4, 0.0, 0.0]]


def test_silu_mul_triton_of_no_rows_is_empty(device):
    assert silu_mul_triton(torch.zeros(0, 8, device=device)).shape == (0, 4)


def test_silu_mul_triton_names_the_bad_argument(device):
    with pytest.raises(ValueError, match="gate_up must have an even number of columns, got 7"):
        silu_mul_triton(torch.zeros(2, 7, device=device))
    with pytest.raises(ValueError, match="gate_up must be float16 or bfloat16 or float32"):
        silu_mul_triton(torch.zeros(2, 8, dtype=torch.int32, device=device))
