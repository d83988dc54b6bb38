import math
from dataclasses import dataclass

import pytest
import torch

from compress.kernels.compare import compare

EXACT = torch.linspace(-4, 4, 130, dtype=torch.float64)
LAST_PLACE = 4 * torch.finfo(torch.float16).eps


def off_by(error, index=7):
    result = EXACT.clone()
    result[index] += error
    return result.float()  # float16 would round the error away


@pytest.mark.parametrize(("error", "passes"), [(0.1, True), (0.199, True), (0.21, False)])
def test_error_may_be_twice_that_of_plain_torch(error, passes):
    comparison = compare(off_by(error), off_by(0.1, index=9), EXACT)
    assert (comparison.problem is None) == passes
    assert comparison.error == pytest.approx(error / 4, rel=1e-4)
    assert comparison.plain_error == pytest.approx(0.1 / 4, rel=1e-4)


def test_one_unit_in_the_last_place_is_allowed_beyond_that():
    exact = torch.full((33,), 3.9, dtype=torch.float64)
    rounded = exact.half()
    assert compare(rounded + 2**-9, rounded, rounded.double()).problem is None
    problem = compare(rounded + 2**-7, rounded, rounded.double()).problem
    assert problem is not None and problem.startswith("output 0: error 0.00781, at most 0.00381")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_is_a_problem(bad):
    comparison = compare(off_by(bad), off_by(0.1), EXACT)
    assert comparison.problem and comparison.error is None


def test_an_infinite_error_of_plain_torch_allows_nothing():
    comparison = compare(off_by(0.1), off_by(math.inf), EXACT)
    assert comparison.problem and comparison.plain_error is None


def test_infinities_that_should_be_there_are_equal():
    exact = EXACT.clone()
    exact[3], exact[5] = math.inf, -math.inf
    assert compare(exact.float(), exact.float(), exact).problem is None
    assert compare(off_by(0.0), exact.float(), exact).problem


@pytest.mark.parametrize(("num_wrong", "passes"), [(0, True), (2, True), (3, False)])
def test_two_percent_of_integers_may_be_neighbours(num_wrong, passes):
    exact = torch.arange(130, dtype=torch.int32)
    got = exact.clone()
    got[:num_wrong] += 1000
    comparison = compare(got, exact, exact)
    assert (comparison.problem is None) == passes


def test_integers_may_differ_twice_as_often_as_those_of_plain_torch():
    exact = torch.arange(100)
    got, plain = exact.clone(), exact.clone()
    got[:22] += 1
    plain[50:60] += 1
    assert compare(got, plain, exact).problem is None
    got[22] += 1
    problem = compare(got, plain, exact).problem
    assert problem == "output 0: 23.0% of the elements differ, with plain torch 10.0%"


def test_codes_differ_by_one_at_most():
    exact = torch.zeros(100, dtype=torch.int8)
    got = exact.clone()
    got[0] = 1
    assert compare(got, exact, exact).problem is None
    got[0] = 2
    problem = compare(got, exact, exact).problem
    assert problem == "output 0: codes differ by 2, with plain torch by 0"


def test_every_output_is_compared():
    @dataclass
    class Output:
        codes: torch.Tensor
        scale: torch.Tensor | None

    ones = torch.ones(3)
    good = (Output(ones, None), [ones])
    assert compare(good, good, good).problem is None
    problem = compare((Output(ones, None), [2 * ones]), good, good).problem
    assert problem is not None and problem.startswith("output 1: error 1,")
    assert compare(ones, good, good).problem == "1 tensors, with plain torch 2, in the exact form 2"
    problem = compare((Output(ones, None), [ones[:2]]), good, good).problem
    assert problem == "output 1 is (2,), not (3,) or (3,)"


def test_nothing_is_as_exact_as_nothing():
    empty = torch.empty(0, 3)
    assert compare(empty, empty, empty).problem is None
