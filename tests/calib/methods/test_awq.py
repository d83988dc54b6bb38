from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from compress.calib.methods.awq import AWQ, apply_awq
from compress.calib.methods.fake_quant import round_weight
from compress.calib.methods.scales import ScaleSearch
from compress.calib.scene import SiteReport
from compress.models.family import FAMILIES
from compress.scheme import LinearScheme, WeightScheme
from tests.calib.blocks import W4, load, make_scene, parts, statistics_of, weights_of


def by_producer(reports: list[SiteReport]) -> dict[str, SiteReport]:
    return {report.producer: report for report in reports}


@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_awq_lowers_the_loss_where_channels_differ(architecture: str, tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", architecture, outliers=10.0)
    _, reports = apply_awq(*parts(scene), AWQ(ratios=10))
    assert [report.producer for report in reports] == [
        site.producer for site in scene.family.smoothing_sites
    ]
    for report in reports:
        if report.left_alone is None:
            assert report.loss_after < report.loss_before
    norms = by_producer(reports)
    for site in scene.family.smoothing_sites[::2]:
        name = site.producer
        assert norms[name].loss_after < 0.92 * norms[name].loss_before
        assert 0 <= norms[name].chosen["ratio"] <= 1


@torch.no_grad()
def test_reported_losses_are_those_of_the_parents_output(tmp_path: Path) -> None:
    """Rounded before and after in a real block, with the scales that the rounder will find."""
    scene = make_scene(tmp_path / "m", outliers=10.0)

    def outputs(name: str) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        module = scene.module.get_submodule(name)
        handle = module.register_forward_hook(lambda _, __, output: seen.append(output))
        scene.calls.call(scene.module, 1, scene.inputs[:4])
        handle.remove()
        return seen[0]

    weights, statistics, _ = parts(scene)
    reference = {name: outputs(name) for name in ("mlp", "self_attn.o_proj")}
    method = AWQ(ratios=10, max_tokens=64)
    changed, reports = apply_awq(weights, statistics, scene, method)
    cases = [
        ("post_attention_layernorm", "mlp", ("mlp.gate_proj", "mlp.up_proj")),
        ("self_attn.v_proj", "self_attn.o_proj", ("self_attn.o_proj",)),
    ]
    for producer, parent, consumers in cases:
        for tensors, stats, kind in [
            (weights, statistics_of(scene), "loss_before"),
            (weights | changed, statistics, "loss_after"),
        ]:
            load(scene, tensors)
            for shared, entry in stats.items():
                for name in set(shared.linears) & set(consumers):
                    rounded = round_weight(
                        tensors[f"{name}.weight"],
                        entry.mean_square,
                        W4.weights,
                        ScaleSearch(),
                        torch.float32,
                    )
                    load(scene, {f"{name}.weight": rounded})
            error = (outputs(parent) - reference[parent]).square().mean()
            found = getattr(by_producer(reports)[producer], kind)
            assert found == pytest.approx(float(error), rel=2e-2)
        load(scene, weights)


def test_channels_without_input_keep_scale_one(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", outliers=10.0)
    dead = [0, 40, 95]
    scene.module.input_layernorm.weight[dead] = 0
    scene.module.mlp.up_proj.weight[7] = 0
    weights, statistics, _ = parts(scene)
    changed, reports = apply_awq(weights, statistics, scene, AWQ(ratios=10))
    assert by_producer(reports)["input_layernorm"].left_alone is None
    assert all(bool(tensor.isfinite().all()) for tensor in changed.values())
    assert changed["input_layernorm.weight"][dead].equal(torch.zeros(3))
    for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        assert torch.equal(changed[name][:, dead], weights[name][:, dead])
        assert not torch.equal(changed[name], weights[name])


def test_scales_are_shared_by_the_query_heads_of_a_value_head(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", outliers=10.0)
    weights, statistics, _ = parts(scene)
    changed, reports = apply_awq(weights, statistics, scene, AWQ(ratios=10))
    assert by_producer(reports)["self_attn.v_proj"].left_alone is None
    name = "self_attn.o_proj.weight"
    scale = (changed[name] / weights[name]).median(0).values.view(2, 3, 16)
    torch.testing.assert_close(scale, scale[:, :1].expand_as(scale))
    assert scale[:, 0].std() > 0.05


def test_a_loss_that_is_not_finite_leaves_the_site_alone(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", outliers=10.0)
    weights, statistics, _ = parts(scene)
    scene.module.mlp.down_proj.weight.mul_(1e30)
    changed, reports = apply_awq(weights, statistics, scene, AWQ(ratios=10))
    left = by_producer(reports)["post_attention_layernorm"]
    assert left.left_alone == "no scale with a finite loss"
    assert left.loss_before is None and left.loss_after is None and left.chosen == {}
    assert "post_attention_layernorm.weight" not in changed
    assert "input_layernorm.weight" in changed


def test_weights_that_lie_on_the_grid_are_left_alone(tmp_path: Path) -> None:
    """Without anything to gain no scale is better than none."""
    scheme = LinearScheme(weights=WeightScheme(bits=8, group_size=32, symmetric=False))
    scene = make_scene(tmp_path / "m", scheme=scheme)
    weights = weights_of(scene)
    for name in scene.schemes:
        codes = torch.randint(0, 256, weights[f"{name}.weight"].shape).float()
        codes[:, ::32], codes[:, 1::32] = 0.0, 255.0
        weights[f"{name}.weight"] = (codes - 128) * 2**-10
    load(scene, weights)
    method = AWQ(ratios=4, scale=ScaleSearch(steps=1, weighted=False))
    changed, reports = apply_awq(weights, statistics_of(scene), scene, method)
    assert changed == {}
    for report in reports:
        assert report.left_alone.startswith("no scale is better than none")
        assert report.loss_before < 1e-10


@pytest.mark.parametrize(("duo", "expected"), [(True, {True}), (False, {False})])
def test_duo_is_as_asked(duo: bool, expected: set[bool], tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", outliers=10.0)
    _, reports = apply_awq(*parts(scene), AWQ(ratios=4, duo=duo))
    assert {report.chosen["duo"] for report in reports if report.chosen} == expected


def test_duo_both_is_no_worse_than_either(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", outliers=10.0)
    losses = {}
    for duo in (True, False, "both"):
        _, reports = apply_awq(*parts(scene), AWQ(ratios=6, duo=duo))
        losses[duo] = by_producer(reports)["input_layernorm"].loss_after
    assert losses["both"] == min(losses[True], losses[False])


def group_error(
    candidate: torch.Tensor, target: torch.Tensor, x: torch.Tensor, *how: torch.Tensor
) -> float:
    """Squared error of the outputs group by group, x (G, T, W), summed over groups and a mean
    over the rest; `how` is what round_weight takes.
    """
    difference = round_weight(candidate, *how, torch.float32) - target
    groups = difference.view(len(target), *x.shape[::2]).transpose(0, 1)
    outputs = groups @ x.transpose(1, 2)
    return float(outputs.square().sum()) / (outputs.shape[1] * outputs.shape[2])


def test_clip_lowers_the_error_of_groups_and_passes_over_queries_and_keys(tmp_path: Path) -> None:
    scheme = LinearScheme(weights=WeightScheme(bits=3, group_size=32))
    scene = make_scene(tmp_path / "m", scheme=scheme)
    minmax = ScaleSearch(kind="minmax")
    weights = weights_of(scene)
    weights["mlp.gate_proj.weight"][:, 5] *= 6  # wide groups for the sake of one column
    load(scene, weights)
    plain, _ = apply_awq(weights, statistics_of(scene), scene, AWQ(ratios=4, scale=minmax))
    statistics = statistics_of(scene)
    changed, reports = apply_awq(weights, statistics, scene, AWQ(ratios=4, scale=minmax, clip=True))
    clips = {r.producer: r for r in reports if "clipped" in r.chosen}
    linears = {"self_attn.v_proj", "self_attn.o_proj"}
    assert clips.keys() == linears | {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        assert torch.equal(changed.get(name, weights[name]), plain.get(name, weights[name]))
    for name, report in clips.items():
        tensor = f"{name}.weight"
        before, after = plain.get(tensor, weights[tensor]), changed[tensor]
        assert ((after == before) | (after.abs() < before.abs())).all()
        (stats,) = [s for shared, s in statistics.items() if name in shared.linears]
        x = stats.sample.view(-1, before.shape[1] // 32, 32).transpose(0, 1)

        found = [
            group_error(candidate, before, x, stats.mean_square, scheme.weights, minmax)
            for candidate in (before, after)
        ]
        assert report.loss_before == pytest.approx(found[0], rel=1e-3)
        assert report.loss_after == pytest.approx(found[1], rel=1e-3)
        assert report.loss_after < report.loss_before
        assert 0 < report.chosen["clipped"] <= 1
    gate = clips["mlp.gate_proj"]
    assert gate.loss_after < 0.8 * gate.loss_before


def test_clip_has_nothing_to_do_for_float_codes(tmp_path: Path) -> None:
    scheme = LinearScheme(weights=WeightScheme(type="float", bits=8, group_size=-1))
    scene = make_scene(tmp_path / "m", scheme=scheme)
    _, reports = apply_awq(*parts(scene), AWQ(ratios=2, clip=True))
    assert by_producer(reports)["mlp.gate_proj"].left_alone == "float codes need no clipping"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ratios": 1}, "ratios must be at least 2, got 1"),
        ({"clip_steps": 0}, "clip_steps must be at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"clip_max_shrink": 1.0}, "clip_max_shrink must be between 0 and 1, got 1.0"),
        ({"ratio": 20}, "ratio"),
        ({"duo": "neither"}, "duo"),
    ],
    ids=["ratios", "steps", "tokens", "shrink", "unknown", "duo"],
)
def test_awq_refuses_settings_without_sense(fields: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(AWQ).validate_python(fields)


@pytest.mark.parametrize("duo", [True, False, "both"])
def test_awq_reads_its_own_fields_back(duo) -> None:
    assert TypeAdapter(AWQ).validate_python({"kind": "awq", "duo": duo}) == AWQ(duo=duo)
