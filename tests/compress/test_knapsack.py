from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.knapsack import Option, choose_options

OPTIONS = st.lists(
    st.builds(Option, st.integers(0, 30), st.floats(0, 100, allow_nan=False)),
    min_size=1,
    max_size=4,
)


def _totals(items: list[list[Option]], choice: tuple[int, ...] | list[int]) -> tuple[int, float]:
    taken = [options[index] for options, index in zip(items, choice, strict=True)]
    return sum(option.cost for option in taken), sum(option.error for option in taken)


@settings(max_examples=200, deadline=None)
@given(st.lists(OPTIONS, min_size=1, max_size=5), st.integers(0, 120))
def test_choose_options_is_as_good_as_trying_all(items: list[list[Option]], limit: int) -> None:
    choices = product(*(range(len(options)) for options in items))
    fitting = [t for choice in choices if (t := _totals(items, choice))[0] <= limit]
    if not fitting:
        with pytest.raises(ValueError, match="more than the limit"):
            choose_options(items, limit)
        return
    cost, error = _totals(items, choose_options(items, limit))
    assert cost <= limit
    assert error == pytest.approx(min(error for _, error in fitting), abs=1e-9)


def test_choose_options_takes_the_cheapest_of_equals() -> None:
    assert choose_options([[Option(3, 1.0), Option(2, 1.0), Option(5, 1.0)]], 10) == [1]


def test_choose_options_of_a_large_model_is_fast_and_exact_at_the_limit() -> None:
    items = [[Option(b * size, size / 4**b) for b in (2, 3, 4, 8)] for size in (3, 5, 8, 16)] * 80
    limit = 80 * 32 * 3
    chosen = choose_options(items, limit)
    assert _totals(items, chosen) == (limit, pytest.approx(80 * 32 / 64))  # uniform 3 bits is best
