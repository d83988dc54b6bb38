import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.artifacts import QuantizedLinear
from compress.scheme import WeightScheme, code_range, dequantize, group_width, round_to_codes


@pytest.mark.parametrize(
    ("bits", "low", "high"), [(2, -2, 1), (3, -4, 3), (4, -8, 7), (8, -128, 127)]
)
def test_code_range(bits: int, low: int, high: int) -> None:
    assert code_range(bits) == (low, high)


def test_round_to_codes_is_half_to_even_and_clamps() -> None:
    weight = torch.tensor([[0.5, 1.5, 2.5, -2.5, -7.5, -8.5, -9.0, 7.6]])
    codes = round_to_codes(weight, torch.ones(1, 1), None, 4)
    assert codes.tolist() == [[0, 2, 2, -2, -8, -8, -8, 7]]


def test_round_to_codes_golden_asymmetric() -> None:
    weight = torch.tensor([[-1, -0.5, 0, 0.25, 0.5, 0.75, 1.5, 2]])
    scale, zero = torch.tensor([[0.2]]), torch.tensor([[-3]], dtype=torch.int8)
    codes = round_to_codes(weight, scale, zero, 4)
    assert codes.tolist() == [[-8, -6, -3, -2, 0, 1, 4, 7]]


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("group", [3, 33], ids=["g3", "g33"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_dequantize_is_within_half_a_step(rows: int, group: int, bits: int) -> None:
    weight = torch.randn(rows, 33, generator=torch.Generator().manual_seed(bits))
    absmax = weight.view(rows, -1, group).abs().amax(2)
    scale = absmax / code_range(bits)[1]
    codes = round_to_codes(weight, scale, None, bits)
    linear = QuantizedLinear(codes=codes, scale=scale, zero_point=None, bits=bits)
    step = scale.repeat_interleave(group, 1)
    assert linear.group_size == group
    assert ((dequantize(linear) - weight).abs() <= step / 2 * 1.0001).all()


@given(st.integers(1, 6), st.integers(1, 8), st.sampled_from([2, 3, 4, 8]), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_codes_survive_a_round_trip(rows: int, columns: int, bits: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    low, high = code_range(bits)
    codes = torch.randint(low, high + 1, (rows, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(rows, 1, generator=generator) - 0.5
    scale[scale == 0] = 1.0
    zero = torch.randint(low, high + 1, (rows, 1), generator=generator, dtype=torch.int8)
    linear = QuantizedLinear(codes=codes, scale=scale, zero_point=zero, bits=bits)
    assert torch.equal(round_to_codes(dequantize(linear), scale, zero, bits), codes)


def test_group_width_names_what_does_not_divide() -> None:
    assert group_width(WeightScheme(group_size=-1), 130) == 130
    with pytest.raises(ValueError, match="group_size 64 does not divide in_features 130"):
        group_width(WeightScheme(group_size=64), 130)


@pytest.mark.parametrize("group_size", [0, -2])
def test_weight_scheme_rejects_group_size(group_size: int) -> None:
    with pytest.raises(ValueError, match=f"got {group_size}"):
        WeightScheme(group_size=group_size)
