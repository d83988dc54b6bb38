import pytest
import torch

from compress.calib.methods.fp8 import round_fp8
from compress.scheme import WeightScheme, dequantize


@pytest.mark.parametrize("block_size", [None, 4, 128])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 9), (130, 257)])
def test_every_weight_is_within_half_a_float8_step(
    rows: int, columns: int, block_size: int | None
) -> None:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    scheme = WeightScheme(type="float", bits=8, group_size=-1, block_size=block_size)
    linear = round_fp8(weight, scheme, torch.float32)
    block = block_size or 1
    wide = -(-columns // block_size) if block_size else 1
    assert linear.scale.shape == (-(-rows // block), wide)
    error = (dequantize(linear) - weight).abs()
    # 3 bits of mantissa: half a step is 1/16 of the value; below 2**-6 steps are 2**-9
    steps = linear.scale.abs().amax() * 2**-9
    assert (error <= weight.abs() / 16 + steps / 2 + 1e-7).all()
    assert dequantize(linear).isfinite().all()


def test_the_largest_weight_of_each_scale_is_kept() -> None:
    weight = torch.zeros(8, 8)
    weight[1, 2], weight[6, 7], weight[2, 6] = 3.0, -1e-3, 500.0
    scheme = WeightScheme(type="float", bits=8, group_size=-1, block_size=4)
    linear = round_fp8(weight, scheme, torch.float32)
    for place in ((1, 2), (6, 7), (2, 6)):
        torch.testing.assert_close(dequantize(linear)[place], weight[place])


def test_scales_are_rounded_before_codes() -> None:
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    scheme = WeightScheme(type="float", bits=8, group_size=-1)
    linear = round_fp8(weight, scheme, torch.bfloat16)
    assert linear.scale.dtype == torch.bfloat16
    expected = (weight / linear.scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(linear.codes.float(), expected.float())
