import pytest
import torch

from compress.calib.collectors import InputStatistics

CPU = torch.device("cpu")


def statistics(in_features: int, full: bool = True) -> InputStatistics:
    return InputStatistics(in_features=in_features, full=full, tokens_per_batch=5, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("in_features", [1, 17, 384, 1000])
def test_add_sums_outer_products_over_batches(in_features: int, dtype: torch.dtype) -> None:
    stats = statistics(in_features)
    x = torch.randn(3, 7, in_features, generator=torch.Generator().manual_seed(0)).to(dtype)
    for batch in x:
        stats.add(batch[None])
    rows = x.view(-1, in_features).double()
    assert stats.num_tokens == 21
    torch.testing.assert_close(stats.second_moment.double(), rows.T @ rows, atol=1e-3, rtol=1e-4)
    assert torch.equal(stats.second_moment, stats.second_moment.T)


def test_bf16_inputs_give_a_positive_definite_moment() -> None:
    stats = statistics(64)
    base = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
    stats.add((base + 3 * base[:, :1]).to(torch.bfloat16))
    assert torch.linalg.eigvalsh(stats.second_moment.double()).min() > 0


@pytest.mark.parametrize("full", [True, False], ids=["full", "diagonal"])
def test_mean_square_is_the_diagonal_per_token(full: bool) -> None:
    stats = statistics(9, full)
    x = torch.randn(2, 11, 9, generator=torch.Generator().manual_seed(2))
    stats.add(x)
    torch.testing.assert_close(stats.mean_square, x.view(-1, 9).square().mean(0))


def test_sample_keeps_some_rows_of_every_batch() -> None:
    stats = statistics(4, full=False)
    batches = [torch.randn(3, 4, 4), torch.randn(1, 2, 4)]
    for batch in batches:
        stats.add(batch)
    assert stats.sample.shape == (5 + 2, 4)
    rows = {tuple(row.tolist()) for batch in batches for row in batch.view(-1, 4)}
    assert {tuple(row.tolist()) for row in stats.sample} <= rows


@pytest.mark.parametrize("full", [True, False], ids=["full", "diagonal"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_add_names_the_column_that_is_not_finite(value: float, full: bool) -> None:
    x = torch.zeros(2, 6)
    x[1, 4] = value
    with pytest.raises(ValueError, match="not finite in column 4"):
        statistics(6, full).add(x)


def test_sample_is_drawn_from_all_rows() -> None:
    stats = InputStatistics(in_features=1, full=False, tokens_per_batch=100, device=CPU)
    stats.add(torch.arange(1000.0).view(2, 500, 1))
    rows = stats.sample[:, 0]
    assert len(rows.unique()) == 100
    in_tenths = torch.histc(rows, bins=10, min=0, max=1000)
    assert in_tenths.min() >= 3  # 10 expected


@pytest.mark.parametrize("full", [True, False], ids=["full", "diagonal"])
def test_mean_abs_and_absmax_are_those_of_every_batch(full: bool) -> None:
    stats = statistics(9, full)
    x = torch.randn(3, 11, 9, generator=torch.Generator().manual_seed(3))
    for batch in x:
        stats.add(batch)
    rows = x.view(-1, 9)
    torch.testing.assert_close(stats.mean_abs, rows.abs().mean(0))
    assert torch.equal(stats.absmax, rows.abs().amax(0))
    assert statistics(9, full).mean_abs.equal(torch.zeros(9))


@pytest.mark.parametrize("full", [True, False], ids=["full", "diagonal"])
def test_divide_gives_the_statistics_of_the_divided_inputs(full: bool) -> None:
    x = torch.randn(3, 11, 9, generator=torch.Generator().manual_seed(4))
    scale = torch.linspace(0.2, 5, 9)
    divided, expected = statistics(9, full), statistics(9, full)
    for batch in x:
        divided.add(batch)
        expected.add(batch / scale)
    divided.divide(scale)
    for name in ("mean_square", "mean_abs", "absmax", "sample"):
        torch.testing.assert_close(getattr(divided, name), getattr(expected, name))
    if full:
        torch.testing.assert_close(divided.second_moment, expected.second_moment)
    assert divided.num_tokens == expected.num_tokens


def test_absmax_is_not_a_view_of_the_running_value() -> None:
    stats = statistics(2)
    stats.add(torch.ones(1, 2))
    before = stats.absmax
    stats.add(2 * torch.ones(1, 2))
    assert before.equal(torch.ones(2))
