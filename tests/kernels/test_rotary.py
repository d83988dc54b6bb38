import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.kv_write import kv_write_torch
from compress.kernels.rotary import (
    rotary_kv_write_ref,
    rotary_kv_write_torch,
    rotary_kv_write_triton,
    rotary_ref,
    rotary_torch,
    rotary_triton,
)
from tests.kernels.tolerance import DTYPES, assert_as_exact_as, dtype_id

BLOCK_SIZE = 16
WRITES = pytest.mark.parametrize("write", [rotary_kv_write_torch, rotary_kv_write_triton])


def make_qkv(num_tokens, num_q_heads, num_k_heads, head_dim, rotary_dim, dtype, device):
    """Queries, keys, values as slices of one fused projection; tables of scattered positions."""
    generator = torch.Generator().manual_seed(num_tokens + head_dim)
    num_heads = num_q_heads + 2 * num_k_heads
    qkv = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(device, dtype)
    q, k, v = qkv.split((num_q_heads, num_k_heads, num_k_heads), dim=1)
    positions = torch.randint(0, 4000, (num_tokens, 1), generator=generator)
    angles = positions * 10000.0 ** -(torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    return q, k, v, angles.cos().to(device), angles.sin().to(device)


def make(num_tokens, num_q_heads, num_k_heads, head_dim, dtype, device, rotary_dim=None):
    """The same without the values; all of a head rotates unless `rotary_dim` says less."""
    sizes = (num_tokens, num_q_heads, num_k_heads, head_dim, rotary_dim or head_dim)
    q, k, _, cos, sin = make_qkv(*sizes, dtype, device)
    return q, k, cos, sin


def make_pools(k, num_blocks=10):
    """Pools full of sevens, and shuffled slots, every third of them to be skipped."""
    num_tokens, num_heads, head_dim = k.shape
    pools = [k.new_full((num_blocks, num_heads, BLOCK_SIZE, head_dim), 7.0) for _ in range(2)]
    generator = torch.Generator().manual_seed(num_tokens)
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=generator)[:num_tokens]
    slots[1::3] = -1 - slots[1::3]
    return *pools, slots.to(k.device)


SHAPES = [
    pytest.param(1, 9, 3, 64, 64, id="T1-9over3-D64"),
    pytest.param(17, 4, 4, 96, 96, id="T17-4over4-D96"),
    pytest.param(33, 5, 1, 16, 16, id="T33-5over1-D16"),
    pytest.param(130, 3, 1, 2, 2, id="T130-3over1-D2"),
    pytest.param(5, 6, 2, 128, 96, id="T5-6over2-D128-R96"),
    pytest.param(17, 2, 1, 80, 32, id="T17-2over1-D80-R32"),
    pytest.param(5, 3, 3, 33, 2, id="T5-3over3-D33-R2"),
    pytest.param(2, 130, 17, 256, 256, id="T2-130over17-D256"),
]


@pytest.mark.parametrize("num_tokens, num_q_heads, num_k_heads, head_dim, rotary_dim", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_rotary_triton_matches_reference(
    num_tokens, num_q_heads, num_k_heads, head_dim, rotary_dim, dtype, device, poisoned_empty
):
    sizes = (num_tokens, num_q_heads, num_k_heads, head_dim)
    q, k, cos, sin = make(*sizes, dtype, device, rotary_dim)
    exact = rotary_ref(q.double(), k.double(), cos, sin)
    results = zip(rotary_triton(q, k, cos, sin), rotary_torch(q, k, cos, sin), exact, strict=True)
    for got, torch_result, want in results:
        assert_as_exact_as(got, torch_result, want)


@pytest.mark.parametrize("num_tokens, num_q_heads, num_k_heads, head_dim, rotary_dim", SHAPES)
def test_rotary_torch_rounds_once_in_bfloat16(
    num_tokens, num_q_heads, num_k_heads, head_dim, rotary_dim
):
    sizes = (num_tokens, num_q_heads, num_k_heads, head_dim)
    q, k, cos, sin = make(*sizes, torch.bfloat16, "cpu", rotary_dim)
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


def test_partial_rotary_is_that_of_phi():
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    q, k, cos, sin = make(17, 3, 1, 128, torch.float32, "cpu", rotary_dim=96)
    both = [torch.cat((table, table), dim=-1)[None] for table in (cos, sin)]
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *both)
    for rotate in (rotary_torch, rotary_triton):
        for got, want in zip(rotate(q, k, cos, sin), expected, strict=True):
            torch.testing.assert_close(got, want[0].transpose(0, 1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_tokens, num_q_heads, num_k_heads, head_dim, rotary_dim", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@WRITES
def test_fused_write_has_the_bits_of_two_steps(
    write, num_tokens, num_q_heads, num_k_heads, head_dim, rotary_dim, dtype, device, poisoned_empty
):
    sizes = (num_tokens, num_q_heads, num_k_heads, head_dim, rotary_dim)
    q, k, v, cos, sin = make_qkv(*sizes, dtype, device)
    k_pool, v_pool, slots = make_pools(k)
    want_k, want_v = k_pool.clone(), v_pool.clone()
    rotate = rotary_torch if write is rotary_kv_write_torch else rotary_triton
    want_q, rotated_k = rotate(q, k, cos, sin)
    kv_write_torch(rotated_k, v, want_k, want_v, slots)
    assert torch.equal(write(q, k, v, cos, sin, k_pool, v_pool, slots), want_q)
    assert torch.equal(k_pool, want_k) and torch.equal(v_pool, want_v)
    assert (v_pool != 7).any()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    num_tokens=st.integers(1, 17),
    num_k_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.integers(2, 70),
    fraction=st.floats(0, 1),
)
def test_any_heads_are_rotated_and_written(num_tokens, num_k_heads, group, head_dim, fraction):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rotary_dim = 2 * max(1, int(fraction * head_dim / 2))
    sizes = (num_tokens, num_k_heads * group, num_k_heads, head_dim, rotary_dim)
    inputs = make_qkv(*sizes, torch.float32, device)
    k_pool, v_pool, slots = make_pools(inputs[1])
    want_k, want_v = k_pool.clone(), v_pool.clone()
    want_q = rotary_kv_write_ref(*inputs, want_k, want_v, slots)
    for write in (rotary_kv_write_torch, rotary_kv_write_triton):
        pools = k_pool.clone(), v_pool.clone()
        got = write(*inputs, *pools, slots)
        torch.testing.assert_close(got, want_q, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(pools[0], want_k, rtol=1e-6, atol=1e-6)
        assert torch.equal(pools[1], want_v)


@pytest.mark.parametrize("num_tokens", [2, 5, 16, 64])
@WRITES
def test_token_does_not_depend_on_its_batch(write, num_tokens, device):
    inputs = make_qkv(num_tokens, 4, 2, 16, 8, torch.float16, device)
    *pools, slots = make_pools(inputs[1])
    slots[-1] = 5
    slots[:-1] = torch.where(slots[:-1] == 5, -1, slots[:-1])
    alone = [pool.clone() for pool in pools]
    together_q = write(*inputs, *pools, slots)
    alone_q = write(*(x[-1:].clone() for x in inputs), *alone, slots[-1:])
    assert torch.equal(together_q[-1:], alone_q)
    for many, one in zip(pools, alone, strict=True):
        assert torch.equal(many[0, :, 5], one[0, :, 5])


@WRITES
def test_all_slots_skipped_still_rotate_the_queries(write, device):
    q, k, v, cos, sin = make_qkv(5, 4, 2, 8, 8, torch.float32, device)
    k_pool, v_pool, slots = make_pools(k)
    got = write(q, k, v, cos, sin, k_pool, v_pool, slots.fill_(-1))
    torch.testing.assert_close(got, rotary_ref(q, k, cos, sin)[0], rtol=1e-6, atol=1e-6)
    assert (k_pool == 7).all() and (v_pool == 7).all()


@WRITES
def test_no_tokens_write_nothing(write, device):
    q, k, v, cos, sin = make_qkv(0, 4, 2, 8, 8, torch.float32, device)
    k_pool, v_pool, slots = make_pools(k)
    assert write(q, k, v, cos, sin, k_pool, v_pool, slots).shape == (0, 4, 8)
    assert (k_pool == 7).all() and (v_pool == 7).all()


def test_rotary_kv_write_triton_names_the_bad_argument(device):
    q, k, v, cos, sin = make_qkv(4, 4, 2, 8, 8, torch.float32, device)
    k_pool, v_pool, slots = make_pools(k)

    names = ("q", "k", "v", "cos", "sin", "k_pool", "v_pool", "slots")

    def refuses(message, **changes):
        arguments = dict(zip(names, good, strict=True))
        with pytest.raises(ValueError, match=message):
            rotary_kv_write_triton(**arguments | changes)

    good = (q, k, v, cos, sin, k_pool, v_pool, slots)
    refuses(r"v must be float32 of shape \(4, 2, 8\)", v=v[:3])
    refuses(r"k_pool must be float32 of shape \(any, 2, any, 8\)", k_pool=k_pool.half())
    refuses("v_pool must be float32", v_pool=v_pool[:3])
    refuses("slots must be int64", slots=slots.int())
    refuses("k_pool must be contiguous", k_pool=k_pool.mT.contiguous().mT)
    refuses("slots must be on", slots=slots.to("meta"))
    refuses("cos must have 1 to 4 columns", cos=cos[:, :0], sin=sin[:, :0])


def test_rotary_triton_names_the_bad_argument(device):
    q, k, cos, sin = make(3, 4, 2, 8, torch.float32, device)
    with pytest.raises(ValueError, match=r"k must be float32 of shape \(3, any, 8\)"):
        rotary_triton(q, k[:2], cos, sin)
    with pytest.raises(ValueError, match="cos must be float32"):
        rotary_triton(q, k, cos.half(), sin)
    with pytest.raises(ValueError, match=r"sin must be float32 of shape \(3, 4\)"):
        rotary_triton(q, k, cos, sin[:, :3])
    with pytest.raises(ValueError, match="cos must have 1 to 3 columns, half of head_dim 7"):
        rotary_triton(q[..., :7].contiguous(), k[..., :7].contiguous(), cos, sin)
