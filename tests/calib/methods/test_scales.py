import pytest
import torch

from compress.artifacts import QuantizedLinear
from compress.calib.methods.scales import ScaleSearch, find_scales
from compress.scheme import WeightScheme, dequantize, round_to_codes

GOLDEN = torch.tensor([[-1, -0.5, 0, 0.25, 0.5, 0.75, 1.5, 2]])


def weights(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def weighted_error(
    weight: torch.Tensor, importance: torch.Tensor, scheme: WeightScheme, search: ScaleSearch
) -> float:
    scale, zero = find_scales(weight, importance, scheme, search, torch.float32)
    codes = round_to_codes(weight, scale, zero, scheme.bits)
    linear = QuantizedLinear(codes=codes, scale=scale, zero_point=zero, bits=scheme.bits)
    return float(((dequantize(linear) - weight).square() * importance).sum())


def test_minmax_golden() -> None:
    search, importance = ScaleSearch(kind="minmax"), torch.ones(8)
    scheme = WeightScheme(group_size=8)
    scale, zero = find_scales(GOLDEN, importance, scheme, search, torch.float32)
    assert zero is None
    assert scale.item() == pytest.approx(2 / 7.5)
    asymmetric = WeightScheme(group_size=8, symmetric=False)
    scale, zero = find_scales(GOLDEN, importance, asymmetric, search, torch.float32)
    assert zero is not None
    assert (scale.item(), zero.item()) == (pytest.approx(0.2), -3)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 34, 17), (130, 66, 33), (33, 64, -1)])
def test_search_beats_minmax(
    rows: int, columns: int, group: int, bits: int, symmetric: bool
) -> None:
    weight, importance = weights(rows, columns), weights(1, columns, seed=1)[0].square()
    scheme = WeightScheme(bits=bits, group_size=group, symmetric=symmetric)
    searched = weighted_error(weight, importance, scheme, ScaleSearch())
    unweighted = weighted_error(weight, importance, scheme, ScaleSearch(weighted=False))
    minmax = weighted_error(weight, importance, scheme, ScaleSearch(kind="minmax"))
    assert searched <= min(minmax, unweighted) * 1.0001


def test_search_uses_the_full_signed_range() -> None:
    weight = torch.tensor([[1.0, 0.5, 0.25, -0.875]])  # multiples of 1/8 with the largest positive
    scheme = WeightScheme(group_size=4)
    scale, _ = find_scales(weight, torch.ones(4), scheme, ScaleSearch(), torch.float32)
    assert scale.item() == -0.125
    assert round_to_codes(weight, scale, None, 4).tolist() == [[-8, -4, -2, 7]]


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["minmax", "search"])
def test_constant_and_zero_groups_stay_finite(
    kind: str, dtype: torch.dtype, symmetric: bool
) -> None:
    weight = torch.zeros(2, 8)
    weight[0, :4] = 3.0
    scheme = WeightScheme(group_size=4, symmetric=symmetric)
    search = ScaleSearch(kind=kind)  # type: ignore[arg-type]
    scale, zero = find_scales(weight, torch.zeros(8), scheme, search, dtype)
    assert scale.dtype == dtype
    assert (scale != 0).all()
    codes = round_to_codes(weight, scale, zero, 4)
    linear = QuantizedLinear(codes=codes, scale=scale, zero_point=zero, bits=4)
    torch.testing.assert_close(dequantize(linear), weight, atol=0.21, rtol=0)
    assert (dequantize(linear)[1] == 0).all()


def test_scales_are_chosen_in_the_stored_dtype() -> None:
    weight = weights(17, 64)
    for dtype in (torch.bfloat16, torch.float16):
        scale, _ = find_scales(weight, torch.ones(64), WeightScheme(), ScaleSearch(), dtype)
        assert scale.dtype == dtype
        assert torch.isfinite(scale).all()


def test_tiny_weights_do_not_underflow_fp16_scales() -> None:
    scale, _ = find_scales(
        weights(3, 64) * 1e-9, torch.ones(64), WeightScheme(), ScaleSearch(), torch.float16
    )
    assert (scale.abs() >= torch.finfo(torch.float16).tiny).all()
