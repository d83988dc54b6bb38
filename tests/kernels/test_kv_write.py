import pytest
import torch

from compress.kernels.kv_write import kv_write_ref, kv_write_torch, kv_write_triton
from tests.kernels.tolerance import DTYPES, dtype_id

BLOCK_SIZE = 64


def make(num_tokens, num_heads, head_dim, dtype, device, num_blocks=5):
    """Keys and values as slices of one tensor, a pool full of sevens, shuffled slots with gaps."""
    generator = torch.Generator().manual_seed(num_tokens)
    kv = torch.randn(num_tokens, 2 * num_heads, head_dim, generator=generator).to(device, dtype)
    pool = torch.full((num_blocks, num_heads, BLOCK_SIZE, head_dim), 7.0)
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=generator)[:num_tokens]
    slots[1::3] = -1
    pools = (pool.clone().to(device, dtype) for _ in range(2))
    return kv[:, :num_heads], kv[:, num_heads:], *pools, slots.to(device)


@pytest.mark.parametrize(
    "num_tokens, num_heads, head_dim",
    [
        pytest.param(1, 3, 64, id="T1-Hk3-D64"),
        pytest.param(17, 1, 96, id="T17-Hk1-D96"),
        pytest.param(33, 5, 1, id="T33-Hk5-D1"),
        pytest.param(130, 2, 16, id="T130-Hk2-D16"),
    ],
)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float8_e4m3fn], ids=dtype_id)
@pytest.mark.parametrize("write", [kv_write_torch, kv_write_triton], ids=["torch", "triton"])
def test_kv_write_equals_reference(write, num_tokens, num_heads, head_dim, dtype, device):
    k, v, k_pool, v_pool, slots = make(num_tokens, num_heads, head_dim, dtype, device)
    want_k, want_v = k_pool.clone(), v_pool.clone()
    kv_write_ref(k, v, want_k, want_v, slots)
    write(k, v, k_pool, v_pool, slots)
    assert torch.equal(k_pool.float(), want_k.float())
    assert torch.equal(v_pool.float(), want_v.float())


@pytest.mark.parametrize("write", [kv_write_torch, kv_write_triton], ids=["torch", "triton"])
@pytest.mark.parametrize("num_tokens", [0, 4], ids=["no-tokens", "all-skipped"])
def test_kv_write_of_nothing_changes_nothing(write, num_tokens, device):
    k, v, k_pool, v_pool, slots = make(num_tokens, 2, 8, torch.float32, device)
    write(k, v, k_pool, v_pool, slots.fill_(-1))
    assert (k_pool == 7).all() and (v_pool == 7).all()


def test_kv_write_torch_refuses_a_slot_past_the_pool():
    k, v, k_pool, v_pool, slots = make(1, 2, 8, torch.float32, "cpu")
    with pytest.raises(IndexError):
        kv_write_torch(k, v, k_pool, v_pool, slots.fill_(5 * BLOCK_SIZE))


def test_kv_write_triton_names_the_bad_argument(device):
    k, v, k_pool, v_pool, slots = make(4, 2, 8, torch.float32, device)
    with pytest.raises(ValueError, match=r"v must be float32 of shape \(4, 2, 8\)"):
        kv_write_triton(k, v[:3], k_pool, v_pool, slots)
    with pytest.raises(ValueError, match=r"k_pool must be float32 of shape \(any, 2, any, 8\)"):
        kv_write_triton(k, v, k_pool.half(), v_pool, slots)
    with pytest.raises(ValueError, match="slots must be int64"):
        kv_write_triton(k, v, k_pool, v_pool, slots.int())
    with pytest.raises(ValueError, match="v_pool must be contiguous"):
        kv_write_triton(k, v, k_pool, v_pool.transpose(2, 3).contiguous().transpose(2, 3), slots)
