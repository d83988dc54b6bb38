"""The integer product against exact arithmetic."""

import pytest
import torch

from compress.artifacts import QuantizedLinear
from compress.kernels.w8a8 import has_int8_product, pack_int8_cpu, to_uint8, w8a8_cpu, w8a8_ref

pytestmark = pytest.mark.skipif(not has_int8_product(), reason="this CPU saturates int8 products")


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
    return torch.randint(0, 256, (rows, width), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("rows", [1, 2, 17, 130], ids=lambda n: f"M{n}")
@pytest.mark.parametrize(("out", "width"), [(33, 17), (96, 576), (1, 1), (130, 1536)])
def test_w8a8_cpu_is_the_exact_product(out: int, width: int, rows: int) -> None:
    part, x = linear(out, width), codes(rows, width)
    got = w8a8_cpu(x, pack_int8_cpu(part))
    torch.testing.assert_close(got, w8a8_ref(x, part.codes, part.scale), rtol=3e-7, atol=0)


def test_w8a8_cpu_gives_a_row_the_same_bits_in_any_batch() -> None:
    packed, x = pack_int8_cpu(linear(96, 576)), codes(130, 576)
    whole = w8a8_cpu(x, packed)
    for rows in (1, 3, 16, 33):
        assert torch.equal(w8a8_cpu(x[:rows], packed), whole[:rows])


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
