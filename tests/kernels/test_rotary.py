import pytest
import torch

from compress.kernels.rotary import rotary_ref, rotary_torch, rotary_triton
from tests.kernels.tolerance import DTYPES, assert_as_exact_as, dtype_id


def make(num_tokens, num_q_heads, num_k_heads, head_dim, dtype, device):
    """Queries and keys as slices of one fused projection, tables of scattered positions."""
    generator = torch.Generator().manual_seed(num_tokens + head_dim)
    num_heads = num_q_heads + 2 * num_k_heads
    qkv = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(device, dtype)
    q, k, _ = qkv.split((num_q_heads, num_k_heads, num_k_heads), dim=1)
    positions = torch.randint(0, 4000, (num_tokens, 1), generator=generator)
    angles = positions * 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    return q, k, angles.cos().to(device), angles.sin().to(device)


SHAPES = [
    pytest.param(1, 9, 3, 64, id="T1-9over3-D64"),
    pytest.param(17, 4, 4, 96, id="T17-4over4-D96"),
    pytest.param(33, 5, 1, 16, id="T33-5over1-D16"),
    pytest.param(130, 3, 1, 2, id="T130-3over1-D2"),
]


@pytest.mark.parametrize("num_tokens, num_q_heads, num_k_heads, head_dim", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_rotary_triton_matches_reference(
    num_tokens, num_q_heads, num_k_heads, head_dim, dtype, device, poisoned_empty
):
    q, k, cos, sin = make(num_tokens, num_q_heads, num_k_heads, head_dim, dtype, device)
    exact = rotary_ref(q.double(), k.double(), cos, sin)
    results = zip(rotary_triton(q, k, cos, sin), rotary_torch(q, k, cos, sin), exact, strict=True)
    for got, torch_result, want in results:
        assert_as_exact_as(got, torch_result, want)


@pytest.mark.parametrize("num_tokens, num_q_heads, num_k_heads, head_dim", SHAPES)
def test_rotary_torch_rounds_once_in_bfloat16(num_tokens, num_q_heads, num_k_heads, head_dim):
    q, k, cos, sin = make(num_tokens, num_q_heads, num_k_heads, head_dim, torch.bfloat16, "cpu")
    exact = rotary_ref(q.double(), k.double(), cos, sin)
    for got, want in zip(rotary_torch(q, k, cos, sin), exact, strict=True):
        # Half a unit in the last place, plus the fp32 rounding where the two products cancel.
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("rotate", [rotary_torch, rotary_triton], ids=["torch", "triton"])
def test_rotary_at_position_zero_is_the_identity(rotate, device):
    q, k, cos, sin = make(3, 4, 2, 8, torch.float32, device)
    yq, yk = rotate(q, k, torch.ones_like(cos), torch.zeros_like(sin))
    assert torch.equal(yq, q) and torch.equal(yk, k)


def test_rotary_leaves_its_inputs_unchanged(device):
    q, k, cos, sin = make(3, 4, 2, 8, torch.float32, device)
    before = q.clone(), k.clone()
    rotary_torch(q, k, cos, sin)
    rotary_triton(q, k, cos, sin)
    assert torch.equal(q, before[0]) and torch.equal(k, before[1])


def test_rotary_triton_of_no_tokens_is_empty(device):
    q, k, cos, sin = make(0, 4, 2, 8, torch.float32, device)
    yq, yk = rotary_triton(q, k, cos, sin)
    assert yq.shape == (0, 4, 8) and yk.shape == (0, 2, 8)


def test_rotary_triton_names_the_bad_argument(device):
    q, k, cos, sin = make(3, 4, 2, 8, torch.float32, device)
    with pytest.raises(ValueError, match=r"k must be float32 of shape \(3, any, 8\)"):
        rotary_triton(q, k[:2], cos, sin)
    with pytest.raises(ValueError, match="cos must be float32"):
        rotary_triton(q, k, cos.half(), sin)
    with pytest.raises(ValueError, match=r"sin must be float32 of shape \(3, 4\)"):
        rotary_triton(q, k, cos, sin[:, :3])
    with pytest.raises(
        ValueError, match="cos must have 1 to 3 columns, half of head_dim 7 .* got 4"
    ):
        rotary_triton(q[..., :7].contiguous(), k[..., :7].contiguous(), cos, sin)
