import pytest
import torch

from compress.artifacts import QuantizedLinear
from compress.calib.methods.scales import ScaleSearch, find_scales
from compress.scheme import WeightScheme, code_range, dequantize, round_to_codes

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
    assert (scale.abs() >= 2.0**-24).all()  # the smallest subnormal


@pytest.mark.parametrize("flip", [1, -1], ids=["as-is", "mirrored"])
def test_search_tries_both_signs(flip: int) -> None:
    """Two weights at one end and one at the other: the end with two gets the code -8."""
    weight = flip * torch.tensor([[1.0, -1.0, -1.0, 0.5]])
    scale, _ = find_scales(
        weight, torch.ones(4), WeightScheme(group_size=4), ScaleSearch(), torch.float32
    )
    assert scale.item() == flip * 0.125
    assert round_to_codes(weight, scale, None, 4).tolist() == [[7, -8, -8, 4]]


def group_errors(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, norm: float
) -> torch.Tensor:
    """|w - w_hat|^norm (G, W) of groups (G, W), one scale and zero point (G,) each."""
    qmin, qmax = code_range(bits)
    codes = (weight / scale[:, None] + zero[:, None]).round().clamp(qmin, qmax)
    return (weight - (codes - zero[:, None]) * scale[:, None]).abs() ** norm


def least_errors(
    weight: torch.Tensor, importance: torch.Tensor, scheme: WeightScheme, search: ScaleSearch
) -> torch.Tensor:
    """Least error (G,) over the whole grid of candidates, for groups `weight` (G, W)."""
    qmin, qmax = code_range(scheme.bits)
    found = []
    for step in range(search.steps):
        shrink = 1 - search.max_shrink * step / search.steps
        if scheme.symmetric:
            extreme = weight.gather(1, weight.abs().argmax(1, keepdim=True))[:, 0]
            scales = [extreme * shrink / qmin, -extreme * shrink / qmin]
            zeros = [torch.zeros_like(extreme)] * 2
        else:
            low, high = weight.amin(1).clamp(max=0), weight.amax(1).clamp(min=0)
            scales = [(high - low) * shrink / (qmax - qmin)]
            zeros = [(qmin - low * shrink / scales[0]).round().clamp(qmin, qmax)]
        for scale, zero in zip(scales, zeros, strict=True):
            errors = group_errors(weight, scale, zero, scheme.bits, search.norm)
            found.append((errors * importance).sum(1))
    return torch.stack(found).amin(0)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("norm", [2.0, 1.0, 3.5], ids=lambda norm: f"norm{norm}")
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
def test_search_finds_the_least_error_of_its_grid(
    weighted: bool, norm: float, symmetric: bool
) -> None:
    weight, importance = weights(130, 17), weights(1, 17, seed=1)[0].square()
    scheme = WeightScheme(bits=3, group_size=17, symmetric=symmetric)
    search = ScaleSearch(weighted=weighted, norm=norm)
    scale, zero = find_scales(weight, importance, scheme, search, torch.float32)
    counted = importance if weighted else torch.ones(17)
    zeros = torch.zeros(130) if zero is None else zero[:, 0].float()
    errors = (group_errors(weight, scale[:, 0], zeros, 3, norm) * counted).sum(1)
    torch.testing.assert_close(
        errors, least_errors(weight, counted, scheme, search), rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(
    "other", [ScaleSearch(weighted=False), ScaleSearch(norm=4.0)], ids=["plain", "norm4"]
)
def test_importance_and_norm_change_what_is_chosen(other: ScaleSearch, symmetric: bool) -> None:
    weight, importance = weights(130, 64), weights(1, 64, seed=1)[0].square()
    scheme = WeightScheme(bits=3, symmetric=symmetric)
    first, second = (
        find_scales(weight, importance, scheme, search, torch.float32)[0]
        for search in (ScaleSearch(), other)
    )
    assert (first != second).float().mean() > 0.2


def test_asymmetric_range_is_shrunk_when_an_outlier_costs_more_than_clipping() -> None:
    generator = torch.Generator().manual_seed(0)
    even = 2 * torch.rand(1, 511, generator=generator) - 1
    weight = torch.cat([even, torch.tensor([[2.0]])], dim=1)
    scheme = WeightScheme(bits=2, group_size=-1, symmetric=False)
    search, minmax = ScaleSearch(), ScaleSearch(kind="minmax")
    shrunk, whole = (
        find_scales(weight, torch.ones(512), scheme, kind, torch.float32)[0].item()
        for kind in (search, minmax)
    )
    assert shrunk < 0.8 * whole
