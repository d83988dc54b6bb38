import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.activations import fake_quantize
from compress.kernels.jit import tl, triton
from compress.kernels.quantize_float8 import (
    encode_float8,
    quantize_float8_ref,
    quantize_float8_torch,
    quantize_float8_triton,
)
from compress.scheme import FLOAT8, ActivationScheme
from tests.kernels.tolerance import DTYPES, dtype_id

EPS = 1e-5
SHAPES = [
    pytest.param(1, 576, None, id="T1-K576"),
    pytest.param(17, 33, None, id="T17-K33"),
    pytest.param(33, 1, None, id="T33-K1"),
    pytest.param(130, 1100, None, id="T130-K1100"),
    pytest.param(1, 128, 128, id="T1-K128-g128"),
    pytest.param(17, 384, 128, id="T17-K384-g128"),
    pytest.param(33, 2304, 128, id="T33-K2304-g128"),
    pytest.param(5, 72, 24, id="T5-K72-g24"),
]


@triton.jit
def _encode_kernel(x_ptr, codes_ptr, num_values, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_values
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(codes_ptr + offs, encode_float8(x).to(tl.uint8), mask=mask)


def encode(x):
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    _encode_kernel[(triton.cdiv(x.numel(), 4096),)](x, codes, x.numel(), BLOCK=4096)
    return codes.view(FLOAT8)


def make(num_tokens, width, dtype, device):
    """Rows of very different size, with an outlier channel."""
    generator = torch.Generator().manual_seed(num_tokens * 1000 + width)
    x = torch.randn(num_tokens, width, generator=generator)
    x *= torch.logspace(-2, 1, num_tokens)[:, None]
    x[:, width // 3] *= 20
    weight = torch.rand(width, generator=generator) + 0.5
    return x.to(device, dtype), weight.to(device, dtype)


def assert_same_codes(got, expected):
    """Equal bytes, but for the sign of NaN."""
    assert got.dtype == expected.dtype == FLOAT8
    is_nan = expected.float().isnan()
    assert torch.equal(got.float().isnan(), is_nan)
    assert torch.equal(got.view(torch.uint8)[~is_nan], expected.view(torch.uint8)[~is_nan])


def test_every_float16_becomes_the_byte_that_torch_makes(device):
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x.to(device)
    assert_same_codes(encode(x), x.float().clamp(-448, 448).to(FLOAT8))


def test_float32_beside_every_boundary_becomes_the_byte_that_torch_makes(device):
    """All float8 values and all ties between them, and the fp32 numbers around both."""
    values = torch.arange(127, dtype=torch.int32).to(torch.uint8).view(FLOAT8).float()
    points = torch.cat((values, (values[1:] + values[:-1]) / 2))
    bits = points.view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)
    x = bits.clamp(min=0).view(torch.float32).flatten()
    x = torch.cat((x, -x)).to(device)
    assert_same_codes(encode(x), x.clamp(-448, 448).to(FLOAT8))


def test_float32_of_every_exponent_becomes_the_byte_that_torch_makes(device):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=generator)
    x = bits.to(torch.int32).view(torch.float32).to(device)
    assert_same_codes(encode(x), x.clamp(-448, 448).to(FLOAT8))


def test_large_values_saturate_and_nan_stays(device):
    x = torch.tensor([449.0, -464.0, 480.0, 1e30, float("inf"), float("-inf"), float("nan")])
    got = encode(x.to(device)).float().tolist()
    assert got[:6] == [448.0, -448.0, 448.0, 448.0, 448.0, -448.0]
    assert got[6] != got[6]


@pytest.mark.parametrize("num_tokens, width, group_size", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_codes_and_scales_are_those_of_the_oracle(
    num_tokens, width, group_size, dtype, device, poisoned_empty
):
    x, _ = make(num_tokens, width, dtype, device)
    codes, scale = quantize_float8_triton(x, group_size=group_size)
    expected_codes, expected_scale = quantize_float8_ref(x, group_size=group_size)
    assert_same_codes(codes, expected_codes)
    assert scale.dtype == torch.float32
    assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("run", [quantize_float8_triton, quantize_float8_torch])
@pytest.mark.parametrize("group_size", [None, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_codes_times_scale_is_what_activations_stand_for(run, group_size, dtype, device):
    x, _ = make(33, 576, dtype, device)
    codes, scale = run(x, group_size=group_size)
    values = codes.float().view(33, -1, group_size or 576) * scale.view(33, -1, 1)
    scheme = ActivationScheme(type="float", group_size=group_size)
    assert torch.equal(values.view(33, 576).to(dtype), fake_quantize(x, scheme))


@pytest.mark.parametrize("run", [quantize_float8_triton, quantize_float8_torch])
@pytest.mark.parametrize("group_size", [None, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_norm_in_front_moves_few_codes_by_one(run, group_size, dtype, device):
    """A sum in another order may round a normed value the other way, and so its code."""
    x, weight = make(33, 576, dtype, device)
    codes, scale = run(x, weight, EPS, group_size=group_size)
    expected_codes, expected_scale = quantize_float8_ref(x, weight, EPS, group_size=group_size)
    last_place = torch.finfo(dtype).eps
    torch.testing.assert_close(scale, expected_scale, rtol=4 * last_place, atol=0)
    got, expected = codes.view(torch.uint8).int(), expected_codes.view(torch.uint8).int()
    assert (got - expected).abs().max() <= 1
    assert (got != expected).float().mean() < 0.02
    plain, _ = quantize_float8_ref(x, group_size=group_size)
    assert (codes.float() != plain.float()).float().mean() > 0.1  # the norm does something


@pytest.mark.parametrize("group_size", [None, 32])
def test_zeros_and_what_is_not_finite_harm_no_other_row(group_size, device):
    x, _ = make(5, 96, torch.float32, device)
    alone = quantize_float8_triton(x[4:], group_size=group_size)
    x[0], x[1, 3], x[2, 5], x[3, 7] = 0, float("nan"), float("inf"), float("-inf")
    codes, scale = quantize_float8_triton(x, group_size=group_size)
    expected_codes, expected_scale = quantize_float8_ref(x, group_size=group_size)
    assert_same_codes(codes, expected_codes)
    torch.testing.assert_close(scale, expected_scale, rtol=0, atol=0, equal_nan=True)
    first = scale.view(5, -1)[:, 0]
    assert first[0] == torch.finfo(torch.float32).tiny and not codes[0].float().any()
    assert first[1].isnan() and first[2].isinf() and first[3].isinf()
    assert_same_codes(codes[4:], alone[0])
    assert torch.equal(scale[4:], alone[1])


@pytest.mark.parametrize("group_size", [None, 64])
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "norm"])
def test_rows_may_lie_apart_and_do_not_depend_on_their_batch(has_norm, group_size, device):
    wide, _ = make(64, 700, torch.float16, device)
    x, weight = wide[:, 10:586], wide[0, :576].contiguous() if has_norm else None
    codes, scale = quantize_float8_triton(x, weight, EPS, group_size=group_size)
    for rows in (1, 2, 5, 16):
        part = quantize_float8_triton(x[:rows].contiguous(), weight, EPS, group_size=group_size)
        assert_same_codes(part[0], codes[:rows])
        assert torch.equal(part[1], scale[:rows])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    num_tokens=st.integers(1, 6),
    num_groups=st.integers(1, 20),
    group=st.integers(1, 150),
    exponent=st.integers(-140, 100),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_size_gives_the_codes_of_the_oracle(
    num_tokens, num_groups, group, exponent, seed
):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, num_groups * group, generator=generator).to(device)
    x = (x.double() * 2.0**exponent).float()
    for group_size in (None, group):
        codes, scale = quantize_float8_triton(x, group_size=group_size)
        expected_codes, expected_scale = quantize_float8_ref(x, group_size=group_size)
        assert_same_codes(codes, expected_codes)
        assert torch.equal(scale, expected_scale)


def test_groups_make_rows_of_any_width_possible(device):
    x, weight = make(1, 33024, torch.float16, device)
    codes, _ = quantize_float8_triton(x, group_size=128)
    assert_same_codes(codes, quantize_float8_ref(x, group_size=128)[0])
    with pytest.raises(ValueError, match="x must have 1 to 32768 columns, got 33024"):
        quantize_float8_triton(x, weight, EPS, group_size=128)


def test_no_rows_give_no_rows(device):
    codes, scale = quantize_float8_triton(torch.zeros(0, 64, device=device), group_size=None)
    assert codes.shape == (0, 64) and scale.shape == (0,)
    _, scale = quantize_float8_triton(torch.zeros(0, 64, device=device), group_size=32)
    assert scale.shape == (0, 2)


def test_the_bad_argument_is_named(device):
    x, weight = make(2, 64, torch.float32, device)
    with pytest.raises(ValueError, match=r"weight must be float32 of shape \(64\)"):
        quantize_float8_triton(x, weight[:63], EPS, group_size=None)
    with pytest.raises(ValueError, match=r"weight must be on .* got meta"):
        quantize_float8_triton(x, weight.to("meta"), EPS, group_size=None)
    with pytest.raises(ValueError, match="x must have contiguous rows"):
        quantize_float8_triton(x.T.contiguous().T, group_size=None)
    with pytest.raises(ValueError, match="x must be float16 or bfloat16 or float32"):
        quantize_float8_triton(x.double(), group_size=None)
    for group_size in (0, -1, 48, 128):
        with pytest.raises(ValueError, match=f"must divide the 64 columns of x, got {group_size}"):
            quantize_float8_triton(x, group_size=group_size)
    with pytest.raises(ValueError, match="x must have 1 to 32768 columns, got 40000"):
        quantize_float8_triton(torch.zeros(1, 40000, device=device), group_size=None)
    with pytest.raises(ValueError, match="x is too wide: 1100 groups of 24 columns"):
        wide = torch.zeros(1, 26400, device=device)
        quantize_float8_triton(wide, wide[0], EPS, group_size=24)
