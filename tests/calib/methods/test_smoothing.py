from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.calib.capture import BlockCalls
from compress.calib.methods.awq import AWQ
from compress.calib.methods.fake_quant import round_weight
from compress.calib.methods.scales import ScaleSearch
from compress.calib.methods.smoothing import Channels, fold_scale
from compress.calib.methods.smoothquant import SmoothQuant
from compress.calib.scene import block_output
from compress.calib.transforms import TRANSFORMS, apply_transform
from compress.models.family import FAMILIES, ModelFamily, SharedInput, SmoothingSite
from compress.scheme import LinearScheme, WeightScheme
from tests.calib.blocks import W4, load, make_scene, parts, scene_of, statistics_of, weights_of

BOTH = [AWQ(ratios=6), SmoothQuant(alpha=0.6, sites="all")]
IDS = ["awq", "smoothquant"]


def channels_of(scene, site: SmoothingSite) -> Channels:
    if site.heads is None:
        return Channels(head_dim=1, repeats=1)
    return Channels(head_dim=scene.module.self_attn.head_dim, repeats=3)


def changed_by(scene, site: SmoothingSite, drop: str = "") -> float:
    """Relative change of the block's output when a random scale is folded in at `site`."""
    weights = weights_of(scene)
    rows = weights[f"{site.producer}.weight"].shape[0]
    count = rows - site.first_row(rows, weights[f"{site.consumers[0]}.weight"].shape[1])
    scale = torch.exp(torch.randn(count, generator=torch.Generator().manual_seed(1)))
    channels, offset = channels_of(scene, site), scene.family.norm_offset
    folded = fold_scale(site, weights, scale, channels, offset)
    folded = {name: tensor for name, tensor in folded.items() if name != drop}
    before = block_output(scene, weights)
    return float((block_output(scene, weights | folded) - before).norm() / before.norm())


@pytest.mark.parametrize("site", range(4), ids=["qkv", "o", "gate-up", "down"])
@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_fold_scale_leaves_the_block_as_it_was(
    architecture: str, site: int, tmp_path: Path
) -> None:
    scene = make_scene(tmp_path / "m", architecture)
    assert changed_by(scene, scene.family.smoothing_sites[site]) < 1e-5


def test_fold_scale_scales_the_producers_bias(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", "Qwen2ForCausalLM")
    site = scene.family.smoothing_sites[1]
    assert changed_by(scene, site, drop="self_attn.v_proj.bias") > 1e-3


@pytest.mark.parametrize("method", BOTH, ids=IDS)
@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_statistics_become_those_of_the_new_inputs(
    architecture: str, method, tmp_path: Path
) -> None:
    scene = make_scene(tmp_path / "m", architecture, outliers=10.0)
    weights, statistics, _ = parts(scene)
    untouched = {name: tensor.clone() for name, tensor in weights.items()}
    changed, _ = apply_transform(method, weights, statistics, scene)
    assert {
        f"{site.producer}.weight" for site in scene.family.smoothing_sites[:2]
    } <= changed.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in untouched.items())
    load(scene, changed)
    for shared, stats in statistics_of(scene).items():
        for name in ("second_moment", "mean_square", "mean_abs", "absmax", "sample"):
            found = getattr(statistics[shared], name)
            torch.testing.assert_close(found, getattr(stats, name), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("method", BOTH, ids=IDS)
def test_the_block_computes_what_it_did(method, tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", "Qwen2ForCausalLM", outliers=10.0)
    weights, statistics, _ = parts(scene)
    changed, _ = apply_transform(method, weights, statistics, scene)
    assert changed.keys() < weights.keys()
    before, after = block_output(scene, weights), block_output(scene, weights | changed)
    assert float((after - before).norm() / before.norm()) < 1e-5


@pytest.mark.parametrize("method", BOTH, ids=IDS)
def test_apply_transform_is_reproducible(method, tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", outliers=10.0)
    first, second = (apply_transform(method, *parts(scene)) for _ in range(2))
    assert first[1] == second[1]
    assert all(torch.equal(first[0][name], second[0][name]) for name in second[0])


def test_sites_with_a_consumer_in_float_are_left_alone(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", outliers=10.0)
    schemes = {name: W4 for name in scene.schemes if name != "self_attn.k_proj"}
    changed, reports = apply_transform(AWQ(ratios=4), *parts(replace(scene, schemes=schemes)))
    (left,) = [report for report in reports if report.producer == "input_layernorm"]
    assert left.left_alone == "not quantized: self_attn.k_proj"
    assert not any(name.startswith(("input_layernorm", "self_attn.q")) for name in changed)
    assert "mlp.gate_proj.weight" in changed


def test_consumers_may_have_statistics_of_their_own(tmp_path: Path) -> None:
    """Linears of one input that are rounded apart: both entries follow the scale."""
    scene = make_scene(tmp_path / "m", outliers=10.0)
    weights, whole, _ = parts(scene)
    split = {}
    for shared, stats in statistics_of(scene).items():
        if "self_attn.k_proj" in shared.linears:
            split[replace(shared, linears=("self_attn.k_proj",))] = stats
        else:
            split[shared] = stats
    rest = SharedInput(linears=("self_attn.q_proj", "self_attn.v_proj"), norm="input_layernorm")
    split[rest] = next(iter(statistics_of(scene).values()))
    method = SmoothQuant()
    expected, _ = apply_transform(method, weights, whole, scene)
    found, _ = apply_transform(method, weights, split, scene)
    assert torch.equal(found["input_layernorm.weight"], expected["input_layernorm.weight"])
    new = next(iter(whole.values())).absmax
    for shared, stats in split.items():
        if shared.norm == "input_layernorm":
            assert torch.equal(stats.absmax, new)


class OffsetNorm(nn.Module):
    """RMS norm that multiplies by 1 + weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, (x.shape[-1],), eps=1e-6) * (1 + self.weight)


class OffsetBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = OffsetNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.relu(self.up(self.norm(hidden))))


@pytest.mark.parametrize("method", BOTH, ids=IDS)
def test_norms_around_an_offset_are_folded_with_it(method, tmp_path: Path) -> None:
    torch.manual_seed(0)
    block = OffsetBlock().requires_grad_(False)
    block.norm.weight[::7] += 4
    family = ModelFamily(
        architecture="Offset",
        shared_inputs=(SharedInput(linears=("up",), norm="norm"),),
        smoothing_sites=(SmoothingSite(producer="norm", consumers=("up",), parent="up"),),
        norm_offset=1.0,
    )
    calls = BlockCalls(by_batch_size={size: [((), {})] * 2 for size in (2, 4)})
    scene = scene_of(block, calls, torch.randn(6, 8, 32), family=family, schemes={"up": W4})
    changed, (report,) = apply_transform(method, *parts(scene))
    assert report.left_alone is None
    assert changed.keys() == {"norm.weight", "up.weight"}
    wrong = replace(scene, family=replace(family, norm_offset=0.0))
    with pytest.raises(ValueError, match="block 1: smoothing at norm changes the float output"):
        apply_transform(method, *parts(wrong))


def test_a_site_that_is_to_blame_is_named(tmp_path: Path) -> None:
    """Queries have as many channels as the output projection reads, but go through a softmax."""
    scene = make_scene(tmp_path / "m", outliers=10.0)
    norm, values, *rest = scene.family.smoothing_sites
    wrong = replace(values, producer="self_attn.q_proj")
    family = replace(scene.family, smoothing_sites=(norm, wrong, *rest))
    with pytest.raises(ValueError, match=r"block 1: smoothing at self_attn.q_proj changes"):
        apply_transform(SmoothQuant(sites="all"), *parts(replace(scene, family=family)))


def test_channels_that_do_not_fit_are_named(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m")
    sites = [replace(site, heads=None) for site in scene.family.smoothing_sites]
    family = replace(scene.family, smoothing_sites=tuple(sites))
    with pytest.raises(ValueError, match=r"self_attn.v_proj has 32 channels, but .* read 96"):
        apply_transform(AWQ(ratios=2), *parts(replace(scene, family=family)))


def test_scales_make_up_for_the_rounding_of_stored_norms(tmp_path: Path) -> None:
    """Norms come out as values of the stored dtype, and still nothing changes in float."""
    scene = replace(make_scene(tmp_path / "m", outliers=10.0), float_dtype=torch.bfloat16)
    weights, statistics, _ = parts(scene)
    changed, _ = apply_transform(SmoothQuant(), weights, statistics, scene)
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        stored = changed[name].bfloat16().float()
        torch.testing.assert_close(changed[name], stored, atol=0, rtol=3e-7)
        changed[name] = stored
    before, after = block_output(scene, weights), block_output(scene, weights | changed)
    assert float((after - before).norm() / before.norm()) < 1e-5


def test_a_scale_that_overflows_what_is_stored_is_given_up(tmp_path: Path) -> None:
    scene = replace(make_scene(tmp_path / "m", outliers=10.0), float_dtype=torch.float16)
    scene.module.mlp.down_proj.weight[0, 3] = 60_000.0
    changed, reports = apply_transform(SmoothQuant(alpha=1.0, sites="all"), *parts(scene))
    reasons = {report.producer: report.left_alone for report in reports}
    assert reasons["mlp.up_proj"] == "scaled weights overflow float16"
    assert reasons["input_layernorm"] is None
    assert "mlp.down_proj.weight" not in changed


def test_every_transform_is_in_the_table() -> None:
    assert {AWQ().kind, SmoothQuant().kind} == TRANSFORMS.keys()


@pytest.mark.parametrize(
    "scheme",
    [
        WeightScheme(bits=4, group_size=32),
        WeightScheme(bits=3, group_size=32, symmetric=False),
        WeightScheme(bits=8, group_size=-1),
        WeightScheme(type="float", bits=8, group_size=-1),
        WeightScheme(type="float", bits=8, group_size=-1, block_size=48),
    ],
    ids=["w4", "w3 asym", "w8 channel", "fp8", "fp8 block"],
)
@pytest.mark.parametrize("method", BOTH, ids=IDS)
def test_apply_transform_works_with_every_scheme(method, scheme, tmp_path: Path) -> None:
    linear = LinearScheme(weights=scheme)
    _, reports = apply_transform(
        method, *parts(make_scene(tmp_path / "m", scheme=linear, outliers=10.0))
    )
    assert len(reports) == 4
    for report in reports:
        assert report.left_alone is not None or report.loss_after is not None


def test_round_weight_errs_by_half_a_step_at_most() -> None:
    weight = torch.randn(5, 64)
    scheme, search = WeightScheme(bits=8, group_size=32), ScaleSearch(kind="minmax")
    rounded = round_weight(weight, torch.ones(64), scheme, search, torch.float32)
    step = weight.view(5, 2, 32).abs().amax(2, keepdim=True) / 127.5
    assert ((rounded - weight).view(5, 2, 32).abs() <= 0.51 * step).all()
    assert not torch.equal(rounded, weight)
