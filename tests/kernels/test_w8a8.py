"""The integer product against exact arithmetic."""

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from compress.artifacts import QuantizedLinear
from compress.kernels.w8a8 import (
    has_int8_product,
    pack_int8_cpu,
    to_uint8,
    w8a8_cpu,
    w8a8_ref,
    w8a8_torch,
    w8a8_triton,
)
from tests.kernels.tolerance import DTYPES, dtype_id

on_cpu = pytest.mark.skipif(not has_int8_product(), reason="this CPU saturates int8 products")


def linear(out: int, width: int, **fields: object) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(out)
    values: dict[str, object] = {
        "codes": torch.randint(-128, 128, (out, width), generator=generator, dtype=torch.int8),
        "scale": torch.rand(out, 1, generator=generator) - 0.5,
        "zero_point": None,
        "bits": 8,
    }
    return QuantizedLinear(**(values | fields))  # type: ignore[arg-type]


def codes(rows: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(-128, 128, (rows, width), generator=generator, dtype=torch.int8)


def unsigned(x: torch.Tensor) -> torch.Tensor:
    return to_uint8(x.float())


def exact(x: torch.Tensor, part: QuantizedLinear) -> torch.Tensor:
    """What `w8a8_cpu` stands for: the tokens have no scales yet."""
    return w8a8_ref(x, torch.ones(len(x)), part.codes, part.scale.flatten(), None, torch.float32)


def arguments(
    rows: int, out: int, width: int, device: torch.device, *, biased: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(rows)
    part, x_scale = linear(out, width), torch.rand(rows, generator=generator) / 100
    bias = torch.randn(out, generator=generator).to(device) if biased else None
    x = codes(rows, width).to(device)
    return x, x_scale.to(device), part.codes.to(device), part.scale.flatten().to(device), bias


@pytest.mark.parametrize("run", [w8a8_triton, w8a8_torch])
@pytest.mark.parametrize("rows", [1, 17, 33, 130], ids=lambda n: f"M{n}")
@pytest.mark.parametrize(("out", "width"), [(33, 24), (96, 576), (130, 264)])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_w8a8_is_the_exact_product_rounded_once(
    run, out, width, rows, dtype, device, poisoned_empty
) -> None:
    if run is w8a8_torch and device.type == "cuda" and rows <= 16:
        pytest.skip("torch._int_mm on a GPU needs more than 16 rows")
    given = arguments(rows, out, width, device, biased=rows > 17)
    got, expected = run(*given, dtype), w8a8_ref(*given, dtype)
    assert got.dtype == dtype
    scale = expected.abs().amax().float()
    last_place = torch.finfo(dtype).eps
    torch.testing.assert_close(got, expected, rtol=last_place, atol=float(2e-7 * scale))


@settings(max_examples=25, deadline=None, derandomize=True)
@drawn(rows=st.integers(1, 140), out=st.integers(1, 140), width=st.integers(1, 300))
def test_w8a8_triton_sums_exactly_at_any_size(rows, out, width) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, _, weight, _, _ = arguments(rows, out, width, device, biased=False)
    ones = torch.ones(rows, device=device), torch.ones(out, device=device)
    y = w8a8_triton(x, ones[0], weight, ones[1], None, torch.float32)
    assert torch.equal(y.double(), x.double() @ weight.double().T)


def test_w8a8_triton_gives_a_row_the_same_bits_in_any_batch(device) -> None:
    x, x_scale, *rest = arguments(130, 96, 576, device, biased=True)
    whole = w8a8_triton(x, x_scale, *rest, torch.float16)
    for rows in (1, 2, 5, 16, 64):
        part = w8a8_triton(x[:rows], x_scale[:rows], *rest, torch.float16)
        assert torch.equal(part, whole[:rows])


def test_w8a8_triton_survives_the_largest_codes(device) -> None:
    x = torch.full((2, 65536), -128, dtype=torch.int8, device=device)
    ones = torch.ones(2, device=device)
    y = w8a8_triton(x, ones, x, ones, None, torch.float32)
    assert y.tolist() == [[float(2**30)] * 2] * 2


def test_w8a8_triton_of_nothing_is_empty(device) -> None:
    x, x_scale, *rest = arguments(3, 8, 16, device, biased=False)
    assert w8a8_triton(x[:0], x_scale[:0], *rest, torch.float32).shape == (0, 8)


def test_w8a8_triton_names_the_bad_argument(device) -> None:
    x, x_scale, weight, scale, _ = arguments(3, 8, 16, device, biased=False)
    fp32 = torch.float32
    with pytest.raises(ValueError, match="x_codes must be int8"):
        w8a8_triton(x.to(torch.uint8), x_scale, weight, scale, None, fp32)
    with pytest.raises(ValueError, match=r"codes must be int8 of shape \(any, 16\)"):
        w8a8_triton(x, x_scale, weight[:, :15], scale, None, fp32)
    with pytest.raises(ValueError, match=r"x_scale must be float32 of shape \(3\)"):
        w8a8_triton(x, x_scale[:2], weight, scale, None, fp32)
    with pytest.raises(ValueError, match=r"scale must be float32 of shape \(8\)"):
        w8a8_triton(x, x_scale, weight, scale.half(), None, fp32)
    with pytest.raises(ValueError, match=r"bias must be float32 of shape \(8\)"):
        w8a8_triton(x, x_scale, weight, scale, scale[:7], fp32)
    with pytest.raises(ValueError, match="codes must be contiguous"):
        w8a8_triton(x, x_scale, weight.T.contiguous().T, scale, None, fp32)
    with pytest.raises(ValueError, match="dtype must be float16, bfloat16 or float32, got"):
        w8a8_triton(x, x_scale, weight, scale, None, torch.float64)
    wide = torch.zeros(1, 65537, dtype=torch.int8, device=device)
    with pytest.raises(ValueError, match="1 to 65536 columns, got 65537"):
        w8a8_triton(wide, x_scale[:1], wide, scale[:1], None, fp32)


@on_cpu
@pytest.mark.parametrize("rows", [1, 2, 17, 130], ids=lambda n: f"M{n}")
@pytest.mark.parametrize(("out", "width"), [(33, 17), (96, 576), (1, 1), (130, 1536)])
def test_w8a8_cpu_is_the_exact_product(out: int, width: int, rows: int) -> None:
    part, x = linear(out, width), codes(rows, width)
    got = w8a8_cpu(unsigned(x), pack_int8_cpu(part))
    torch.testing.assert_close(got, exact(x, part), rtol=3e-7, atol=0)


@on_cpu
def test_w8a8_cpu_gives_a_row_the_same_bits_in_any_batch() -> None:
    packed, x = pack_int8_cpu(linear(96, 576)), unsigned(codes(130, 576))
    whole = w8a8_cpu(x, packed)
    for rows in (1, 3, 16, 33):
        assert torch.equal(w8a8_cpu(x[:rows], packed), whole[:rows])


@on_cpu
def test_w8a8_cpu_survives_the_largest_codes() -> None:
    extreme = linear(4, 4096, codes=torch.full((4, 4096), -128, dtype=torch.int8))
    x = torch.full((3, 4096), 255, dtype=torch.uint8)
    expected = (127 * -128 * 4096) * extreme.scale.T.expand(3, 4)
    torch.testing.assert_close(w8a8_cpu(x, pack_int8_cpu(extreme)), expected, rtol=3e-7, atol=0)


def test_to_uint8_adds_the_offset() -> None:
    assert to_uint8(torch.tensor([-128.0, -1.0, 0.0, 127.0])).tolist() == [0, 127, 128, 255]


@pytest.mark.parametrize(
    "wrong",
    [
        linear(4, 32, zero_point=torch.zeros(4, 1, dtype=torch.int8)),
        linear(4, 32, scale=torch.ones(4, 2)),
        linear(4, 32, codes=torch.zeros(4, 32).to(torch.float8_e4m3fn)),
    ],
    ids=["asym", "groups", "float8"],
)
def test_pack_int8_cpu_refuses_other_schemes(wrong: QuantizedLinear) -> None:
    with pytest.raises(ValueError, match="symmetric int8 codes, one scale per row"):
        pack_int8_cpu(wrong)


def test_pack_int8_cpu_refuses_sums_that_could_overflow() -> None:
    wide = linear(1, 65537, codes=torch.zeros(1, 65537, dtype=torch.int8))
    with pytest.raises(ValueError, match="K <= 65536, got 65537"):
        pack_int8_cpu(wide)


def test_w8a8_cpu_refuses_signed_input() -> None:
    with pytest.raises(ValueError, match=r"must be uint8 .* got torch.int8"):
        w8a8_cpu(torch.zeros(1, 32, dtype=torch.int8), pack_int8_cpu(linear(4, 32)))


def test_w8a8_triton_refuses_tensors_of_two_devices(device) -> None:
    x, x_scale, weight, scale, _ = arguments(3, 5, 7, device, biased=False)
    with pytest.raises(ValueError, match="as x_codes is, got meta"):
        w8a8_triton(x, x_scale, weight.to("meta"), scale, None, torch.float32)
