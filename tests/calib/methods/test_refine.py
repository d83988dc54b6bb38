import pytest
import torch

from compress.artifacts import QuantizedLinear
from compress.calib.methods.refine import Refinement, descend, refine, refit_scales
from compress.calib.methods.scales import ScaleSearch, find_scales
from compress.scheme import WeightScheme, code_range, dequantize, round_to_codes


def layer_loss(linear: QuantizedLinear, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    difference = weight - dequantize(linear)
    return float(((difference @ hessian) * difference).sum())


def problem(
    rows: int, columns: int, group: int, symmetric: bool, bits: int = 3
) -> tuple[torch.Tensor, torch.Tensor, QuantizedLinear]:
    generator = torch.Generator().manual_seed(rows)
    mixing = torch.randn(columns, columns, generator=generator)
    x = torch.randn(300, columns, generator=generator) @ mixing
    hessian = x.T @ x + 0.1 * torch.eye(columns)
    weight = torch.randn(rows, columns, generator=generator)
    scheme = WeightScheme(bits=bits, group_size=group, symmetric=symmetric)
    scale, zero = find_scales(weight, x.square().mean(0), scheme, ScaleSearch(), torch.float32)
    codes = round_to_codes(weight, scale, zero, bits)
    return weight, hessian, QuantizedLinear(codes=codes, scale=scale, zero_point=zero, bits=bits)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(("rows", "columns", "group"), [(1, 12, 4), (17, 33, 11), (5, 130, 65)])
def test_each_step_lowers_the_loss(rows: int, columns: int, group: int, symmetric: bool) -> None:
    weight, hessian, linear = problem(rows, columns, group, symmetric)
    before = layer_loss(linear, weight, hessian)
    better = refine(linear, weight, hessian, Refinement(rounds=1, passes=0))
    rescaled = layer_loss(better, weight, hessian)
    assert rescaled < before
    twice = refine(linear, weight, hessian, Refinement(rounds=1, passes=2))
    assert layer_loss(twice, weight, hessian) <= rescaled
    assert layer_loss(twice, weight, hessian) < 0.9 * before
    low, high = code_range(linear.bits)
    assert twice.codes.min() >= low
    assert twice.codes.max() <= high


def test_refit_scales_solves_least_squares() -> None:
    weight, hessian, linear = problem(3, 24, 8, symmetric=True)
    scale = refit_scales(linear, weight, hessian)
    root = torch.linalg.cholesky(hessian.double())
    for row in range(3):
        parts = torch.zeros(24, 3, dtype=torch.float64)
        for group in range(3):
            span = slice(8 * group, 8 * group + 8)
            parts[span, group] = linear.codes[row, span].double()
        best = torch.linalg.lstsq(root.T @ parts, root.T @ weight[row].double()).solution
        torch.testing.assert_close(scale[row].double(), best, rtol=2e-2, atol=1e-3)


def test_descend_stops_where_no_single_code_can_improve() -> None:
    weight, hessian, linear = problem(4, 12, 6, symmetric=True)
    codes = descend(linear, weight, hessian, passes=50)
    settled = QuantizedLinear(codes=codes, scale=linear.scale, zero_point=None, bits=3)
    loss = layer_loss(settled, weight, hessian)
    for row in range(4):
        for column in range(12):
            for step in (-1, 1):
                moved = codes.clone()
                moved[row, column] += step
                if -4 <= moved[row, column] <= 3:
                    other = QuantizedLinear(
                        codes=moved, scale=linear.scale, zero_point=None, bits=3
                    )
                    assert layer_loss(other, weight, hessian) >= loss * (1 - 1e-5)


def test_a_group_of_zeros_keeps_its_scale() -> None:
    weight, hessian, linear = problem(2, 16, 8, symmetric=True)
    weight[:, :8] = 0
    linear.codes[:, :8] = 0
    scale = refit_scales(linear, weight, hessian)
    torch.testing.assert_close(scale[:, 0], linear.scale[:, 0], rtol=0.5, atol=1e-3)
    assert scale.isfinite().all()


def test_scales_that_the_dtype_cannot_hold_are_not_taken() -> None:
    weight, hessian, linear = problem(2, 16, 8, symmetric=True)
    half = QuantizedLinear(
        codes=linear.codes, scale=linear.scale.half(), zero_point=None, bits=linear.bits
    )
    assert torch.equal(refit_scales(half, weight * 1e6, hessian), half.scale)


def test_refinement_refuses_negative_counts() -> None:
    with pytest.raises(ValueError, match="-1"):
        Refinement(rounds=-1)
