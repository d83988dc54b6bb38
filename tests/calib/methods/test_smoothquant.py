from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from compress.calib.methods.smoothquant import SmoothQuant, apply_smoothquant
from compress.models.family import FAMILIES
from compress.scheme import ActivationScheme, LinearScheme, WeightScheme
from tests.calib.blocks import W4, make_scene, parts, statistics_of, weights_of

W8A8 = LinearScheme(weights=WeightScheme(bits=8, group_size=-1), activations=ActivationScheme())
FP8 = LinearScheme(
    weights=WeightScheme(type="float", bits=8, group_size=-1),
    activations=ActivationScheme(type="float"),
)
STATIC = LinearScheme(
    weights=WeightScheme(bits=8, group_size=-1), activations=ActivationScheme(dynamic=False)
)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_scales_are_those_of_equation_4(alpha: float, tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", scheme=W8A8, outliers=20.0)
    weights, statistics, _ = parts(scene)
    x = next(iter(statistics_of(scene).values())).absmax
    names = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    w = torch.cat([weights[name] for name in names]).abs().amax(0)
    scale = x**alpha / w ** (1 - alpha)
    changed, reports = apply_smoothquant(weights, statistics, scene, SmoothQuant(alpha=alpha))
    norm = "input_layernorm.weight"
    torch.testing.assert_close(changed[norm], weights[norm] / scale, rtol=1e-4, atol=1e-6)
    for name in names:
        torch.testing.assert_close(changed[name], weights[name] * scale, rtol=1e-4, atol=1e-6)
    assert [report.chosen for report in reports] == [{"alpha": alpha}] * 2
    assert [report.producer for report in reports] == [
        "input_layernorm",
        "post_attention_layernorm",
    ]


@pytest.mark.parametrize("scheme", [W8A8, STATIC, FP8], ids=["int8", "static", "fp8"])
def test_search_is_as_good_as_every_alpha_of_the_grid(scheme: LinearScheme, tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", scheme=scheme, outliers=20.0)
    grid = (0.3, 0.6, 0.9)
    method = SmoothQuant(alpha="search", grid=grid)
    _, reports = apply_smoothquant(*parts(scene), method)
    fixed = [apply_smoothquant(*parts(scene), SmoothQuant(alpha=a))[1] for a in grid]
    for i, report in enumerate(reports):
        losses = [rows[i].loss_after for rows in fixed]
        if report.left_alone is None:
            assert report.loss_after == min(losses) < report.loss_before
            assert report.chosen == {"alpha": grid[losses.index(min(losses))]}
        else:
            assert min(losses) >= report.loss_before


def test_smoothing_outliers_helps_int8_inputs(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", scheme=W8A8, outliers=50.0)
    _, reports = apply_smoothquant(*parts(scene), SmoothQuant(alpha="search"))
    for report in reports:
        assert report.loss_after < 0.5 * report.loss_before


def test_inputs_are_rounded_only_if_the_scheme_says_so(tmp_path: Path) -> None:
    """With weights in 8 bits outliers of the inputs cost little until inputs are rounded too."""
    weight_only = LinearScheme(weights=W8A8.weights)
    losses = {}
    for scheme in (W8A8, weight_only):
        scene = make_scene(tmp_path / scheme.label, scheme=scheme, outliers=50.0)
        _, (report, _) = apply_smoothquant(*parts(scene), SmoothQuant())
        losses[scheme] = report.loss_before
    assert losses[W8A8] > 4 * losses[weight_only]


def test_weight_only_schemes_keep_their_inputs_in_float(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", scheme=W4, outliers=20.0)
    changed, reports = apply_smoothquant(*parts(scene), SmoothQuant(alpha="search", sites="all"))
    assert len(reports) == 4 and changed
    for report in reports:
        assert report.left_alone or report.loss_after < report.loss_before


def test_an_alpha_that_was_asked_for_is_taken_even_if_it_does_not_help(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", scheme=W4)
    changed, reports = apply_smoothquant(*parts(scene), SmoothQuant(alpha=0.0))
    assert any(report.loss_after > report.loss_before for report in reports)
    assert {report.left_alone for report in reports} == {None}
    assert "input_layernorm.weight" in changed


@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_all_sites_of_every_family_can_be_smoothed(architecture: str, tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", architecture, scheme=W8A8, outliers=20.0)
    changed, reports = apply_smoothquant(*parts(scene), SmoothQuant(sites="all"))
    assert [report.left_alone for report in reports] == [None] * 4
    assert {f"{name}.weight" for name in scene.family.block_linears} < changed.keys()


def test_a_fused_producer_is_scaled_in_its_last_rows_only(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", "Phi3ForCausalLM", scheme=W8A8, outliers=20.0)
    sites = scene.family.smoothing_sites
    scene = replace(scene, family=replace(scene.family, smoothing_sites=(sites[1], sites[3])))
    weights = weights_of(scene)
    changed, _ = apply_smoothquant(
        weights, statistics_of(scene), scene, SmoothQuant(sites="all", alpha=0.5)
    )
    for name, first in (("self_attn.qkv_proj.weight", 128), ("mlp.gate_up_proj.weight", 160)):
        same = (changed[name] == weights[name]).all(dim=1)
        assert same[:first].all() and not same[first:].any()


def test_channels_without_input_or_weights_keep_scale_one(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", scheme=W8A8, outliers=20.0)
    scene.module.post_attention_layernorm.weight[[1, 50]] = 0
    for name in ("gate_proj", "up_proj"):
        scene.module.mlp.get_submodule(name).weight[:, 9] = 0
    weights = weights_of(scene)
    changed, _ = apply_smoothquant(weights, statistics_of(scene), scene, SmoothQuant())
    same = [1, 9, 50]
    norm, up = "post_attention_layernorm.weight", "mlp.gate_proj.weight"
    assert torch.equal(changed[norm][same], weights[norm][same])
    assert torch.equal(changed[up][:, same], weights[up][:, same])
    assert all(bool(tensor.isfinite().all()) for tensor in changed.values())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alpha": 1.5}, "between 0 and 1, or search; got 1.5"),
        ({"alpha": "best"}, "alpha"),
        ({"grid": ()}, r"grid .* got \(\)"),
        ({"grid": (0.5, 2.0)}, "grid"),
        ({"max_tokens": 0}, "max_tokens must be positive, got 0"),
        ({"sites": "some"}, "sites"),
        ({"beta": 1}, "beta"),
    ],
    ids=["large", "word", "empty", "outside", "tokens", "sites", "unknown"],
)
def test_smoothquant_refuses_settings_without_sense(fields: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(SmoothQuant).validate_python(fields)


@pytest.mark.parametrize("alpha", [0.25, "search"])
def test_smoothquant_reads_its_own_fields_back(alpha) -> None:
    values = {"kind": "smoothquant", "alpha": alpha, "grid": [0.5, 1]}
    found = TypeAdapter(SmoothQuant).validate_python(values)
    assert found == SmoothQuant(alpha=alpha, grid=(0.5, 1.0))
