"""The float8 product against float64, by bytes widened to float16 and by float8 as it is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels import w8a8_float8
from compress.kernels.w8a8_float8 import (
    w8a8_float8_ref,
    w8a8_float8_torch,
    w8a8_float8_triton,
)
from compress.scheme import FLOAT8
from tests.kernels.conftest import HAS_GPU
from tests.kernels.tolerance import DTYPES, assert_as_exact_as, dtype_id

BLOCK = 128


@pytest.fixture(params=["bytes", "float8"])
def path(request, monkeypatch):
    """Both ways to multiply; the GPU has the one, the interpreter both."""
    if HAS_GPU:
        has_float8 = w8a8_float8._has_float8_product(torch.device("cuda"))
        if has_float8 != (request.param == "float8"):
            pytest.skip("this GPU multiplies the other way")
    monkeypatch.setattr(w8a8_float8, "_has_float8_product", lambda _: request.param == "float8")
    return request.param


def random_codes(shape, generator):
    """Values of every size the format has, subnormal ones too, without NaN."""
    codes = torch.randint(0, 254, shape, generator=generator)
    codes += codes >= 127  # 127 is NaN; 255 is not reached
    return codes.to(torch.uint8).view(FLOAT8)


def make(num_tokens, out_features, in_features, device, *, blocked, biased=False):
    generator = torch.Generator().manual_seed(num_tokens + in_features)
    x_shape, shape = (num_tokens,), (out_features,)
    if blocked:
        num_blocks = -(-in_features // BLOCK)
        x_shape, shape = (num_tokens, num_blocks), (-(-out_features // BLOCK), num_blocks)
    given = (
        random_codes((num_tokens, in_features), generator),
        torch.rand(x_shape, generator=generator) / 100 + 1e-3,
        random_codes((out_features, in_features), generator),
        torch.rand(shape, generator=generator) / 100 - 2e-3,
        torch.randn(out_features, generator=generator) if biased else None,
    )
    return [None if tensor is None else tensor.to(device) for tensor in given]


SHAPES = [
    pytest.param(1, 33, 48, id="M1-N33-K48"),
    pytest.param(17, 130, 384, id="M17-N130-K384"),
    pytest.param(33, 257, 200, id="M33-N257-K200"),
    pytest.param(130, 96, 576, id="M130-N96-K576"),
    pytest.param(300, 64, 130, id="M300-N64-K130"),
]


@pytest.mark.parametrize("num_tokens, out_features, in_features", SHAPES)
@pytest.mark.parametrize("blocked", [False, True], ids=["channel", "block"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_product_is_as_exact_as_in_fp32(
    num_tokens, out_features, in_features, blocked, dtype, device, path, poisoned_empty
):
    biased = num_tokens % 2 == 1
    given = make(num_tokens, out_features, in_features, device, blocked=blocked, biased=biased)
    got, plain = w8a8_float8_triton(*given, dtype), w8a8_float8_torch(*given, dtype)
    assert got.dtype == dtype
    assert_as_exact_as(got, plain, w8a8_float8_ref(*given, torch.float64))


@pytest.mark.parametrize("blocked", [False, True], ids=["channel", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_id)
def test_torch_product_is_rounded_once(blocked, dtype, device):
    given = make(17, 130, 384, device, blocked=blocked, biased=True)
    exact = w8a8_float8_ref(*given, torch.float64)
    got = w8a8_float8_torch(*given, dtype)
    atol = float(1e-6 * exact.abs().max())
    torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(dtype).eps / 2, atol=atol)


@pytest.mark.parametrize("blocked", [False, True], ids=["channel", "block"])
def test_small_integers_are_multiplied_exactly(blocked, device, path):
    """The sums are whole and small, and the scales powers of two: every order gives the same."""
    generator = torch.Generator().manual_seed(3)
    x, x_scale, codes, scale, _ = make(33, 257, 584, device, blocked=blocked)
    x = torch.randint(-8, 9, x.shape, generator=generator).to(device, FLOAT8)
    codes = torch.randint(-8, 9, codes.shape, generator=generator).to(device, FLOAT8)
    x_scale = 2.0 ** torch.randint(-2, 3, x_scale.shape, generator=generator).to(device)
    scale = 2.0 ** torch.randint(-2, 3, scale.shape, generator=generator).to(device)
    given = (x, x_scale, codes, scale, None, torch.float32)
    assert torch.equal(w8a8_float8_triton(*given), w8a8_float8_ref(*given))


def test_every_code_is_widened_exactly(device, path):
    """Rows of one code each, against the identity."""
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(FLOAT8)
    finite = codes[~codes.float().isnan()].to(device)
    x = torch.zeros(len(finite), 32, device=device)
    x[:, 5] = finite.float()
    eye = torch.eye(32, device=device).to(FLOAT8)
    ones = torch.ones(len(finite), device=device)
    y = w8a8_float8_triton(x.to(FLOAT8), ones, eye, ones[:32], None, torch.float32)
    assert torch.equal(y, x)


@pytest.mark.parametrize("blocked", [False, True], ids=["channel", "block"])
@pytest.mark.parametrize("in_features", [576, 640])
def test_row_has_the_same_bits_in_every_batch(in_features, blocked, device, path):
    """The batches use different tiles."""
    x, x_scale, *rest = make(300, 96, in_features, device, blocked=blocked, biased=True)
    whole = w8a8_float8_triton(x, x_scale, *rest, torch.float32)
    for rows in (1, 2, 5, 16, 64, 130):
        part = w8a8_float8_triton(x[:rows], x_scale[:rows], *rest, torch.float32)
        assert torch.equal(part, whole[:rows])


@pytest.mark.parametrize("blocked", [False, True], ids=["channel", "block"])
def test_nan_stays_in_its_row(blocked, device):
    x, x_scale, *rest = make(5, 64, 256, device, blocked=blocked)
    clean = w8a8_float8_triton(x, x_scale, *rest, torch.float32)
    x.view(torch.uint8)[1, 200], x.view(torch.uint8)[3, 7] = 0x7F, 0xFF
    y = w8a8_float8_triton(x, x_scale, *rest, torch.float32)
    assert y[[1, 3]].isnan().all()
    assert torch.equal(y[[0, 2, 4]], clean[[0, 2, 4]])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    num_tokens=st.integers(1, 80),
    out_features=st.integers(1, 200),
    in_features=st.integers(1, 300),
    blocked=st.booleans(),
    biased=st.booleans(),
)
def test_any_shape_is_as_exact_as_in_fp32(num_tokens, out_features, in_features, blocked, biased):
    device = torch.device("cuda" if HAS_GPU else "cpu")
    given = make(num_tokens, out_features, in_features, device, blocked=blocked, biased=biased)
    dtype = torch.float16
    got, plain = w8a8_float8_triton(*given, dtype), w8a8_float8_torch(*given, dtype)
    assert_as_exact_as(got, plain, w8a8_float8_ref(*given, torch.float64))


@pytest.mark.parametrize("blocked", [False, True], ids=["channel", "block"])
def test_nothing_gives_nothing(blocked, device):
    x, x_scale, *rest = make(3, 8, 128, device, blocked=blocked)
    assert w8a8_float8_triton(x[:0], x_scale[:0], *rest, torch.float32).shape == (0, 8)


def test_the_bad_argument_is_named(device):
    x, x_scale, codes, scale, _ = make(3, 130, 200, device, blocked=False)
    x_blocks, blocks = torch.ones(3, 2, device=device), torch.ones(2, 2, device=device)
    fp32 = torch.float32
    with pytest.raises(ValueError, match="x_codes must be float8_e4m3fn"):
        w8a8_float8_triton(x.half(), x_scale, codes, scale, None, fp32)
    with pytest.raises(ValueError, match="x_codes must have at least one column"):
        w8a8_float8_triton(x[:, :0], x_scale, codes[:, :0], scale, None, fp32)
    with pytest.raises(ValueError, match=r"codes must be float8_e4m3fn of shape \(any, 200\)"):
        w8a8_float8_triton(x, x_scale, codes[:, :199], scale, None, fp32)
    with pytest.raises(ValueError, match=r"x_scale must be float32 of shape \(3\)"):
        w8a8_float8_triton(x, x_blocks, codes, scale, None, fp32)
    with pytest.raises(ValueError, match=r"scale must be float32 of shape \(130\)"):
        w8a8_float8_triton(x, x_scale, codes, scale.half(), None, fp32)
    with pytest.raises(ValueError, match=r"x_scale must be float32 of shape \(3, 2\)"):
        w8a8_float8_triton(x, x_scale, codes, blocks, None, fp32)
    with pytest.raises(ValueError, match=r"scale must be float32 of shape \(2, 2\)"):
        w8a8_float8_triton(x, x_blocks, codes, blocks[:1], None, fp32)
    with pytest.raises(ValueError, match=r"bias must be float32 of shape \(130\)"):
        w8a8_float8_triton(x, x_scale, codes, scale, scale[:7], fp32)
    with pytest.raises(ValueError, match="codes must be contiguous"):
        w8a8_float8_triton(x, x_scale, codes.T.contiguous().T, scale, None, fp32)
    with pytest.raises(ValueError, match=r"scale must be on .* as x_codes is: meta"):
        w8a8_float8_triton(x, x_scale, codes, scale.to("meta"), None, fp32)
    with pytest.raises(ValueError, match="dtype must be float16, bfloat16 or float32, got"):
        w8a8_float8_triton(x, x_scale, codes, scale, None, torch.float64)
