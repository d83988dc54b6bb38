import pytest
import torch

from compress.calib.collectors import InputStatistics
from compress.calib.methods.gptq import GPTQ
from compress.calib.methods.rtn import RTN
from compress.scheme import ActivationScheme, LinearScheme, WeightScheme, dequantize
from compress.solve import solve_shared

CPU = torch.device("cpu")


def statistics_of(x: torch.Tensor, *, full: bool = True) -> InputStatistics:
    stats = InputStatistics(in_features=x.shape[1], full=full, tokens_per_batch=64, device=CPU)
    if len(x):
        stats.add(x)
    return stats


def pair(rows: int = 3, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: scale * torch.randn(size, 16, generator=generator)
        for name, size in (("a.q", rows), ("a.k", 5))
    }


def test_linears_solved_together_are_those_solved_alone() -> None:
    weights = pair()
    stats = statistics_of(torch.randn(80, 16, generator=torch.Generator().manual_seed(1)))
    scheme = LinearScheme(weights=WeightScheme(group_size=8))
    together = solve_shared(weights, stats, scheme, GPTQ(), torch.float32)
    assert [row.name for row in together.rows] == list(weights)
    for name, weight in weights.items():
        alone = solve_shared({name: weight}, stats, scheme, GPTQ(), torch.float32)
        assert torch.equal(together.linears[name].codes, alone.linears[name].codes)
        assert torch.equal(together.linears[name].scale, alone.linears[name].scale)


def test_blocks_of_float8_do_not_span_linears() -> None:
    weights = pair()
    weights["a.q"] *= 100
    scheme = LinearScheme(weights=WeightScheme(type="float", bits=8, group_size=-1, block_size=128))
    stats = statistics_of(torch.randn(9, 16), full=False)
    linears = solve_shared(weights, stats, scheme, RTN(), torch.float32).linears
    assert linears["a.k"].scale.shape == (1, 1)
    assert float(linears["a.k"].scale) == pytest.approx(float(weights["a.k"].abs().max()) / 448)


@pytest.mark.parametrize("method", [RTN(), GPTQ()], ids=["rtn", "gptq"])
def test_scales_below_float16_are_counted(method: RTN | GPTQ) -> None:
    weights = pair()
    weights["a.k"][2, :8] = 1e-8
    weights["a.k"][3, :8] = 0
    stats = statistics_of(torch.randn(80, 16, generator=torch.Generator().manual_seed(1)))
    scheme = LinearScheme(weights=WeightScheme(group_size=8))
    rows = solve_shared(weights, stats, scheme, method, torch.float16).rows
    notes = {row.name: row.fallback for row in rows}
    assert notes == {"a.q": None, "a.k": "1 groups of weights too small for a float16 scale"}


def test_scales_beyond_float16_are_an_error_that_names_the_linears() -> None:
    scheme = LinearScheme(weights=WeightScheme(group_size=8))
    stats = statistics_of(torch.randn(80, 16))
    with pytest.raises(ValueError, match=r"a\.q, a\.k: a scale of .* does not fit float16"):
        solve_shared(pair(scale=1e6), stats, scheme, GPTQ(), torch.float16)


def test_a_linear_that_no_token_reached_is_rounded_to_nearest_and_says_so() -> None:
    scheme = LinearScheme(weights=WeightScheme(group_size=8))
    weights, stats = pair(), statistics_of(torch.empty(0, 16))
    stats._sample.append(torch.zeros(1, 16))
    solved = solve_shared(weights, stats, scheme, GPTQ(), torch.float32)
    assert {row.fallback for row in solved.rows} == {"rtn: no token reached it"}
    nearest = solve_shared(weights, stats, scheme, RTN(), torch.float32)
    assert torch.equal(solved.linears["a.q"].codes, nearest.linears["a.q"].codes)


def test_static_input_scale_fills_the_codes_with_the_largest_input() -> None:
    x = torch.randn(80, 16, generator=torch.Generator().manual_seed(1))
    scheme = LinearScheme(
        weights=WeightScheme(bits=8, group_size=-1), activations=ActivationScheme(dynamic=False)
    )
    solved = solve_shared(pair(), statistics_of(x), scheme, RTN(), torch.float32)
    for linear in solved.linears.values():
        assert linear.input_scale is not None
        assert float(linear.input_scale) == pytest.approx(float(x.abs().max()) / 127.5)


def test_relative_error_counts_what_rounding_the_inputs_costs() -> None:
    weights = {"a": pair()["a.q"]}
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    x[:, 3] *= 100  # an outlier channel: the others fall on few codes
    stats, eight = statistics_of(x), WeightScheme(bits=8, group_size=-1)
    float_inputs = solve_shared(weights, stats, LinearScheme(weights=eight), RTN(), torch.float32)
    quantized_inputs = solve_shared(
        weights,
        stats,
        LinearScheme(weights=eight, activations=ActivationScheme()),
        RTN(),
        torch.float32,
    )
    expected = torch.linalg.norm(
        x @ (weights["a"] - dequantize(float_inputs.linears["a"])).T
    ) / torch.linalg.norm(x @ weights["a"].T)
    assert float_inputs.rows[0].relative_error == pytest.approx(float(expected), rel=1e-4)
    assert quantized_inputs.rows[0].relative_error > 2 * float_inputs.rows[0].relative_error
