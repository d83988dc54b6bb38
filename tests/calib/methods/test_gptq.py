import itertools
from typing import Any

import pytest
import torch

from compress.calib.collectors import InputStatistics
from compress.calib.methods.gptq import GPTQ, inverse_factor, round_gptq, visiting_order
from compress.calib.methods.rtn import RTN, round_rtn
from compress.calib.methods.scales import ScaleSearch, find_scales
from compress.scheme import WeightScheme, code_range, dequantize

CPU = torch.device("cpu")


def statistics_of(x: torch.Tensor) -> InputStatistics:
    stats = InputStatistics(in_features=x.shape[1], full=True, tokens_per_batch=1, device=CPU)
    stats.add(x)
    return stats


def correlated(tokens: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator)
    spread = torch.rand(columns, generator=generator) * 3
    return torch.randn(tokens, columns, generator=generator) @ mixing * spread


def output_error(x: torch.Tensor, weight: torch.Tensor, linear: Any) -> float:
    return float((x @ (weight - dequantize(linear)).T).square().sum())


def textbook(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    scheme: WeightScheme,
    method: GPTQ,
    mean_square: torch.Tensor,
) -> torch.Tensor:
    """Codes by the paper's Optimal Brain Quantization step on each remaining submatrix, in fp64.

    No Cholesky factor, no blocks: after each column the inverse of the rest is computed afresh.
    """
    scale, zero = find_scales(weight, mean_square, scheme, method.scale, torch.float32)
    group = weight.shape[1] // scale.shape[1]
    order = visiting_order(hessian.diagonal(), method.order, group)
    h = hessian.double()[order][:, order]
    h += method.damping * h.diagonal().mean() * torch.eye(len(h), dtype=torch.float64)
    w, codes = weight.double()[:, order].clone(), torch.empty_like(weight)
    for j in range(len(order)):
        s = scale[:, order[j] // group].double()
        z = 0 if zero is None else zero[:, order[j] // group].double()
        q = torch.round(w[:, j] / s + z).clamp(*code_range(scheme.bits))
        inverse = torch.linalg.inv(h[j:, j:])
        error = (w[:, j] - (q - z) * s) / inverse[0, 0]
        w[:, j:] -= error[:, None] * inverse[0][None]
        codes[:, order[j]] = q.float()
    return codes.to(torch.int8)


@pytest.mark.parametrize("order", ["activation", "group", "none"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize(("rows", "columns", "group", "block"), [(1, 12, 4, 5), (17, 33, 11, 8)])
def test_gptq_equals_the_textbook_step(
    rows: int, columns: int, group: int, block: int, symmetric: bool, order: Any
) -> None:
    x = correlated(200, columns)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(5))
    scheme = WeightScheme(bits=3, group_size=group, symmetric=symmetric)
    method = GPTQ(block_size=block, order=order)
    stats = statistics_of(x)
    linear, note = round_gptq(weight, stats, scheme, method, torch.float32)
    expected = textbook(weight, stats.second_moment, scheme, method, stats.mean_square)
    assert note is None
    assert torch.equal(linear.codes, expected)


@pytest.mark.parametrize("block_size", [1, 7, 64, 1000])
def test_gptq_result_does_not_depend_on_block_size(block_size: int) -> None:
    x = correlated(300, 96)
    weight = torch.randn(33, 96, generator=torch.Generator().manual_seed(6))
    scheme = WeightScheme(group_size=32)
    results = [
        round_gptq(weight, statistics_of(x), scheme, GPTQ(block_size=size), torch.float32)[0].codes
        for size in (block_size, 32)
    ]
    assert (results[0] != results[1]).float().mean() < 0.01  # sums in another order flip few ties


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_beats_rounding_to_nearest(bits: int) -> None:
    x = correlated(400, 64)
    weight = torch.randn(17, 64, generator=torch.Generator().manual_seed(7))
    scheme = WeightScheme(bits=bits, group_size=32)  # type: ignore[arg-type]
    solved, _ = round_gptq(weight, statistics_of(x), scheme, GPTQ(), torch.float32)
    nearest, _ = round_rtn(weight, statistics_of(x), scheme, RTN(), torch.float32)
    assert output_error(x, weight, solved) < 0.6 * output_error(x, weight, nearest)


def test_gptq_is_near_the_best_of_all_roundings() -> None:
    x = correlated(100, 6)
    weight = torch.randn(1, 6, generator=torch.Generator().manual_seed(8)) * 0.5
    scheme = WeightScheme(bits=2, group_size=-1)
    linear, _ = round_gptq(weight, statistics_of(x), scheme, GPTQ(), torch.float32)
    every = torch.tensor(list(itertools.product(range(-2, 2), repeat=6))).float() * linear.scale
    best = float((x @ (weight - every).T).square().sum(0).min())
    assert output_error(x, weight, linear) <= 2 * best


def test_dead_columns_are_rounded_to_nearest() -> None:
    x = correlated(200, 32)
    x[:, [3, 20]] = 0
    weight = torch.randn(5, 32, generator=torch.Generator().manual_seed(9))
    scheme = WeightScheme(group_size=16)
    solved, note = round_gptq(weight, statistics_of(x), scheme, GPTQ(), torch.float32)
    nearest, _ = round_rtn(weight, statistics_of(x), scheme, RTN(), torch.float32)
    assert note is None
    assert torch.equal(solved.codes[:, [3, 20]], nearest.codes[:, [3, 20]])


def test_damping_rises_until_the_factor_exists() -> None:
    hessian = torch.diag(torch.tensor([1.0, 1.0, -0.03]))  # indefinite by more than the damping
    factor, damping = inverse_factor(hessian, 0.01)
    assert factor is not None
    assert damping == pytest.approx(0.1)
    damped = hessian + damping * hessian.diagonal().mean() * torch.eye(3)
    torch.testing.assert_close(factor.T @ factor, torch.linalg.inv(damped))


def test_hopeless_hessian_falls_back_to_nearest_and_says_so() -> None:
    stats = statistics_of(torch.zeros(8, 16))
    weight = torch.randn(3, 16, generator=torch.Generator().manual_seed(10))
    scheme = WeightScheme(group_size=8)
    linear, note = round_gptq(weight, stats, scheme, GPTQ(), torch.float32)
    nearest, _ = round_rtn(weight, stats, scheme, RTN(), torch.float32)
    assert note is not None
    assert note.startswith("rtn: ")
    assert torch.equal(linear.codes, nearest.codes)


def test_group_order_visits_whole_groups_by_their_largest_column() -> None:
    diagonal = torch.tensor([1.0, 5.0, 2.0, 9.0, 3.0, 3.0])
    assert visiting_order(diagonal, "group", 2).tolist() == [3, 2, 1, 0, 4, 5]
    assert visiting_order(diagonal, "activation", 2).tolist() == [3, 1, 4, 5, 2, 0]


@pytest.mark.parametrize("order", ["group", "none"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_refound_groups_equal_the_textbook_step(order: Any, symmetric: bool) -> None:
    x = correlated(200, 24)
    weight = torch.randn(7, 24, generator=torch.Generator().manual_seed(12))
    scheme = WeightScheme(bits=3, group_size=8, symmetric=symmetric)
    method = GPTQ(order=order, groups="refound", block_size=5)
    stats = statistics_of(x)
    linear, _ = round_gptq(weight, stats, scheme, method, torch.float32)
    hessian, importance = stats.second_moment.double(), stats.mean_square
    order_ = visiting_order(stats.second_moment.diagonal(), order, 8)
    h = hessian[order_][:, order_]
    h += method.damping * h.diagonal().mean() * torch.eye(24, dtype=torch.float64)
    w, whole = (
        weight.double()[:, order_].clone(),
        WeightScheme(bits=3, group_size=-1, symmetric=symmetric),
    )
    for j in range(24):
        group, column = divmod(int(order_[j]), 8)
        if j % 8 == 0:
            inside = torch.argsort(order_[j : j + 8])
            scale, zero = find_scales(
                w[:, j : j + 8][:, inside].float().contiguous(),
                importance[group * 8 : group * 8 + 8],
                whole,
                method.scale,
                torch.float32,
            )
            torch.testing.assert_close(linear.scale[:, group : group + 1], scale)
        z = 0 if zero is None else zero[:, 0].double()
        s = scale[:, 0].double()
        q = torch.round(w[:, j] / s + z).clamp(-4, 3)
        inverse = torch.linalg.inv(h[j:, j:])
        w[:, j:] -= ((w[:, j] - (q - z) * s) / inverse[0, 0])[:, None] * inverse[0][None]
        assert torch.equal(linear.codes[:, group * 8 + column], q.to(torch.int8))


def test_refound_groups_need_an_order_that_keeps_groups_together() -> None:
    with pytest.raises(ValueError, match="order: group"):
        GPTQ(groups="refound")


def test_asymmetry_comes_nearer_to_the_outputs_of_the_float_model() -> None:
    ahead = correlated(600, 48)
    x = ahead + 0.3 * correlated(600, 48, seed=1) + 0.2 * ahead.roll(1, 1)
    weight = torch.randn(16, 48, generator=torch.Generator().manual_seed(13))
    stats = InputStatistics(
        in_features=48, full=True, tokens_per_batch=1, device=CPU, magnitudes=False, cross=True
    )
    stats.add(x, ahead)
    scheme = WeightScheme(bits=4, group_size=16)
    errors = []
    for asymmetry in (0.0, 0.5, 1.0):
        linear, _ = round_gptq(weight, stats, scheme, GPTQ(asymmetry=asymmetry), torch.float32)
        errors.append(float((ahead @ weight.T - x @ dequantize(linear).T).square().sum()))
    assert errors[2] < errors[1] < 0.9 * errors[0]


def test_scales_are_those_of_the_original_weight() -> None:
    x = correlated(200, 32)
    weight = torch.randn(9, 32, generator=torch.Generator().manual_seed(11))
    scheme = WeightScheme(group_size=8)
    stats = statistics_of(x)
    linear, _ = round_gptq(weight, stats, scheme, GPTQ(), torch.bfloat16)
    scale, _ = find_scales(weight, stats.mean_square, scheme, ScaleSearch(), torch.bfloat16)
    assert torch.equal(linear.scale, scale)
