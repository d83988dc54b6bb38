"""Comparison with the source: equal where it must be, and no further off than rounding explains."""

from dataclasses import replace

import pytest
import torch

from compress.artifacts import QuantizedLinear
from compress.export.compare import relative_error_bound
from compress.export.formats import FORMATS, pack_linear
from compress.export.verify import verify_checkpoint
from compress.models.checkpoint import open_checkpoint
from compress.scheme import LinearScheme, WeightScheme, dequantize, round_to_codes
from tests.export.samples import (
    SCHEMES,
    edit_config,
    edit_tensors,
    failed_checks,
    quantize_min_max,
)

DOWN_PROJ = "model.layers.1.mlp.down_proj"


def test_verify_checkpoint_compares_side_files_with_the_source(packed, source):
    (packed / "tokenizer.json").write_text("{}")
    (packed / "generation_config.json").unlink()
    assert failed_checks(verify_checkpoint(packed, source)) == {
        "side files": "generation_config.json of the source is missing; "
        "tokenizer.json differs from the source"
    }


def test_verify_checkpoint_compares_the_config_with_the_source(packed, source):
    edit_config(packed, rope_theta=1.0, eos_token_id=7)
    detail = failed_checks(verify_checkpoint(packed, source))["config"]
    assert "eos_token_id is 7, the source has 1" in detail


def test_verify_checkpoint_finds_an_untouched_tensor_that_changed(packed, source):
    lm_head = open_checkpoint(packed).read("lm_head.weight")
    lm_head[5, 5] = 0
    edit_tensors(packed, **{"lm_head.weight": lm_head})
    assert failed_checks(verify_checkpoint(packed, source)) == {
        "untouched": "lm_head.weight differs from the source"
    }


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda w: w.roll(1, 1), id="shifted-columns"),
        pytest.param(lambda w: -w, id="sign"),
        pytest.param(lambda w: w.flip(0), id="reversed-rows"),
        pytest.param(lambda w: torch.zeros_like(w), id="zeros"),
    ],
)
@pytest.mark.parametrize("scheme", SCHEMES[2:])
def test_verify_checkpoint_finds_a_linear_that_is_not_its_source(pack, source, scheme, change):
    folder = pack(scheme)
    weight = open_checkpoint(source).read(f"{DOWN_PROJ}.weight")
    wrong = quantize_min_max(change(weight) + 1e-6, scheme)
    full = LinearScheme(weights=scheme)
    edit_tensors(folder, **pack_linear(DOWN_PROJ, wrong, full, FORMATS["compressed-tensors"]))
    failed = failed_checks(verify_checkpoint(folder, source))
    assert failed.keys() == {"weights"}
    assert DOWN_PROJ in failed["weights"]


def _error(linear: QuantizedLinear, weight: torch.Tensor) -> float:
    return float((weight - dequantize(linear)).norm() / weight.norm())


def _requantized(linear: QuantizedLinear, weight: torch.Tensor, factor: float) -> QuantizedLinear:
    """`weight` rounded with the scales of `linear` times `factor`."""
    scale = linear.scale * factor
    codes = round_to_codes(weight, scale, linear.zero_point, linear.bits)
    return replace(linear, codes=codes, scale=scale)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_relative_error_bound_separates_rounding_from_codes_off_by_one(scheme):
    weight = torch.randn(33, 96, generator=torch.Generator().manual_seed(0))
    linear = quantize_min_max(weight, scheme)
    bound = relative_error_bound(linear, weight)
    step = linear.scale.repeat_interleave(linear.group_size, 1)
    off_by_one = float((weight - dequantize(linear) - step).norm() / weight.norm())
    assert _error(linear, weight) < bound < off_by_one


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
@pytest.mark.parametrize("bits", [4, 8])
def test_relative_error_bound_allows_scales_that_clip_outliers(bits, sign):
    weight = torch.randn(33, 96, generator=torch.Generator().manual_seed(0))
    weight[::8, 5] = 12.0
    linear = quantize_min_max(weight, WeightScheme(bits=bits, group_size=32))
    clipping = _requantized(linear, weight, 0.9 * sign)
    unclipped_noise = 3 * float((clipping.scale.square().sum() * 32 / 12).sqrt() / weight.norm())
    assert _error(clipping, weight) < relative_error_bound(clipping, weight)
    assert bits == 4 or _error(clipping, weight) > unclipped_noise  # so the allowance matters


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_relative_error_bound_rejects_scales_that_are_far_too_small(bits):
    weight = torch.randn(33, 96, generator=torch.Generator().manual_seed(0))
    linear = quantize_min_max(weight, WeightScheme(bits=bits, group_size=32))
    shrunk = _requantized(linear, weight, 0.05)
    assert _error(shrunk, weight) > relative_error_bound(shrunk, weight)
