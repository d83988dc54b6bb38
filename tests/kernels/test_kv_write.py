import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.jit import tl, triton
from compress.kernels.kv_codes import encode_float8
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


CODES = [torch.int8, torch.float8_e4m3fn]
WRITERS = pytest.mark.parametrize(
    "write", [kv_write_torch, kv_write_triton], ids=["torch", "triton"]
)


def make_coded(num_tokens, num_heads, head_dim, dtype, pool_dtype, device, block_size=BLOCK_SIZE):
    """As `make`, over pools of codes whose scales are NaN where nothing was written."""
    k, v, _, _, slots = make(num_tokens, num_heads, head_dim, dtype, device)
    num_blocks = 5 * BLOCK_SIZE // block_size
    pools = torch.full((2, num_blocks, num_heads, block_size, head_dim), 7.0)
    scales = torch.full(pools.shape[:-1], float("nan"), device=device)
    pools = pools.to(device, pool_dtype)
    return (k, v, *pools, slots), {"k_scale": scales[0], "v_scale": scales[1]}


def written(write, args, scales):
    """Bytes of the pools and the scales, after `write` has changed copies of them."""
    k, v, k_pool, v_pool, slots = args
    pools, scales = (k_pool.clone(), v_pool.clone()), {n: x.clone() for n, x in scales.items()}
    write(k, v, *pools, slots, **scales)
    return [pool.view(torch.uint8) for pool in pools] + [
        x.view(torch.int32) for x in scales.values()
    ]


@pytest.mark.parametrize(
    "num_tokens, num_heads, head_dim",
    [
        pytest.param(1, 3, 64, id="T1-Hk3-D64"),
        pytest.param(17, 1, 96, id="T17-Hk1-D96"),
        pytest.param(130, 2, 16, id="T130-Hk2-D16"),
    ],
)
@pytest.mark.parametrize("pool_dtype", CODES, ids=dtype_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@WRITERS
def test_kv_write_of_codes_equals_reference(
    write, num_tokens, num_heads, head_dim, dtype, pool_dtype, device
):
    args, scales = make_coded(num_tokens, num_heads, head_dim, dtype, pool_dtype, device)
    want, got = written(kv_write_ref, args, scales), written(write, args, scales)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    num_tokens=st.integers(1, 20),
    num_heads=st.integers(1, 9),
    head_dim=st.sampled_from([1, 8, 17, 64]),
    pool_dtype=st.sampled_from(CODES),
    magnitude=st.sampled_from([1e-30, 1e-6, 1.0, 1e4]),
    block_size=st.sampled_from([16, 32, 64]),
)
def test_kv_write_of_codes_equals_reference_at_any_shape(
    num_tokens, num_heads, head_dim, pool_dtype, magnitude, block_size
):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    args, scales = make_coded(
        num_tokens, num_heads, head_dim, torch.float32, pool_dtype, device, block_size
    )
    args = (args[0] * magnitude, args[1] / 3, *args[2:])
    want = written(kv_write_ref, args, scales)
    for write in (kv_write_torch, kv_write_triton):
        got = written(write, args, scales)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("pool_dtype", CODES, ids=dtype_id)
@WRITERS
def test_kv_write_uses_the_whole_range_of_codes(write, pool_dtype, device):
    (_, _, k_pool, v_pool, slots), scales = make_coded(2, 1, 8, torch.float32, pool_dtype, device)
    limit = 127 if pool_dtype == torch.int8 else 448
    k = torch.tensor([0.0, 0.5, 1.5, 2.5, -2.5, 64.0, -limit, limit], device=device) / 4
    k = torch.stack((k, torch.zeros_like(k)))[:, None]
    slots = torch.tensor([3, 70], device=device)
    write(k, k, k_pool, v_pool, slots, **scales)
    codes, scale = k_pool.float(), scales["k_scale"]
    assert scale[0, 0, 3] == 0.25
    halves = [0, 0, 2, 2, -2] if pool_dtype == torch.int8 else [0, 0.5, 1.5, 2.5, -2.5]
    assert codes[0, 0, 3].tolist() == [*halves, 64, -limit, limit]
    assert scale[1, 0, 6] == torch.finfo(torch.float32).tiny
    assert (codes[1, 0, 6] == 0).all()
    assert torch.isnan(scale).sum() == scale.numel() - 2


@pytest.mark.parametrize("num_tokens", [2, 5, 16, 64])
@pytest.mark.parametrize("pool_dtype", CODES, ids=dtype_id)
def test_kv_write_triton_of_a_token_does_not_depend_on_the_others(num_tokens, pool_dtype, device):
    (k, v, *pools, slots), scales = make_coded(num_tokens, 3, 64, torch.float16, pool_dtype, device)
    together = written(kv_write_triton, (k, v, *pools, slots), scales)
    for t in range(0, num_tokens, 3):
        alone = written(
            kv_write_triton, (k[t : t + 1], v[t : t + 1], *pools, slots[t : t + 1]), scales
        )
        block, offset = divmod(int(slots[t]), BLOCK_SIZE)
        for a, b in zip(alone, together, strict=True):
            assert torch.equal(a[block, :, offset], b[block, :, offset])


@triton.jit
def _encode_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + offs, encode_float8(tl.load(x_ptr + offs)))


def test_encode_float8_rounds_as_torch_and_saturates(device):
    # every upper half of an fp32, with lower halves at and beside ties of what is dropped
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    x = torch.cat([high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(
        torch.float32
    )
    ties = torch.arange(-1024, 1024) * 2.0**-11  # in the subnormal range
    x = torch.cat((x[~torch.isnan(x)], ties, torch.randn(2**16 - 2048) * 200))
    x = torch.cat((x, x.new_zeros(-len(x) % 1024))).to(device)
    y = torch.empty(len(x), dtype=torch.uint8, device=device)
    _encode_kernel[(len(x) // 1024,)](x, y, BLOCK=1024)
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(y, want)


def test_kv_write_triton_names_the_bad_scale(device):
    (k, v, k_pool, v_pool, slots), scales = make_coded(4, 2, 8, torch.float32, torch.int8, device)
    args = (k, v, k_pool, v_pool, slots)
    with pytest.raises(ValueError, match="k_scale and v_scale must be given together"):
        kv_write_triton(*args, k_scale=scales["k_scale"])
    with pytest.raises(ValueError, match=r"v_scale must be float32 of shape \(5, 2, 64\)"):
        kv_write_triton(*args, **scales | {"v_scale": scales["v_scale"][:4]})
    with pytest.raises(ValueError, match="k_pool must be int8 or float8_e4m3fn"):
        kv_write_triton(k, v, k_pool.float(), v_pool.float(), slots, **scales)
    with pytest.raises(ValueError, match="k_scale must be contiguous"):
        strided = torch.zeros(5, 2, 128, device=device)[:, :, ::2]
        kv_write_triton(*args, **scales | {"k_scale": strided})
    with pytest.raises(ValueError, match="slots must be on"):
        kv_write_triton(*args[:4], slots.to("meta"), **scales)
