from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from compress.calib.capture import BlockCalls
from compress.calib.scene import block_output, check_consumers, check_unchanged, record_calls
from compress.models.family import FAMILIES, SmoothingSite
from tests.calib.blocks import make_scene, scene_of, weights_of


@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_check_consumers_agrees_with_the_records(architecture: str, tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m", architecture)
    check_consumers(scene, scene.family.smoothing_sites)


def test_check_consumers_names_the_one_that_a_record_lacks(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m")
    site = scene.family.smoothing_sites[0]
    without = replace(site, consumers=("self_attn.q_proj", "self_attn.v_proj"))
    with pytest.raises(ValueError, match=r"block 1: self_attn.k_proj reads .* input_layernorm"):
        check_consumers(scene, [without])


class Router(nn.Module):
    """Reads its input by a plain function: no submodule of it shows in hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


class RoutedBlock(nn.Module):
    """A norm read by a Linear whole, and by a router as a view."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.router = nn.RMSNorm(8), nn.Linear(8, 8), Router()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = self.norm(hidden)
        gate = self.router(x.view(-1, 8)).amax(1).view(*x.shape[:-1], 1)
        return hidden + self.up(x) * gate


def test_check_consumers_sees_views_and_modules_without_parts(tmp_path: Path) -> None:
    block = RoutedBlock().requires_grad_(False)
    calls = BlockCalls(by_batch_size={2: [((), {})] * 2})
    scene = scene_of(block, calls, torch.randn(2, 5, 8), family=None, schemes={})
    site = SmoothingSite(producer="norm", consumers=("up",), parent="up")
    with pytest.raises(ValueError, match="router reads the output of norm too"):
        check_consumers(scene, [site])
    check_consumers(scene, [replace(site, consumers=("up", "router"))])


def test_check_consumers_leaves_no_hooks(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m")
    site = replace(scene.family.smoothing_sites[0], consumers=("self_attn.q_proj",))
    with pytest.raises(ValueError, match="reads the output"):
        check_consumers(scene, [site])
    record_calls(scene, ["mlp", ""], 100)
    for module in scene.module.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


@pytest.mark.parametrize(
    ("max_tokens", "sizes"),
    [(1, [2]), (33, [2]), (64, [4]), (96, [4]), (10_000, [4])],
    ids=["least", "two samples", "four", "all but two", "more than there is"],
)
def test_record_calls_takes_about_as_many_tokens_as_asked(
    max_tokens: int, sizes: list[int], tmp_path: Path
) -> None:
    records = record_calls(make_scene(tmp_path / "m"), ["mlp"], max_tokens)["mlp"]
    assert [call.output.shape[0] for call in records] == sizes


def test_record_calls_spreads_over_all_samples(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m")
    calls = BlockCalls(by_batch_size={2: scene.calls.by_batch_size[2]})
    records = record_calls(replace(scene, calls=calls), [""], 10_000)[""]
    assert torch.equal(torch.cat([call.args[0] for call in records]), scene.inputs)


@torch.no_grad()
@pytest.mark.parametrize("name", ["", "self_attn", "mlp", "self_attn.o_proj"])
def test_a_recorded_call_gives_its_output_again(name: str, tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m")
    (call,) = record_calls(scene, [name], 64)[name]
    output = scene.module.get_submodule(name)(*call.args, **call.kwargs)
    assert torch.equal(output[0] if isinstance(output, tuple) else output, call.output)


@torch.no_grad()
def test_block_output_is_fp32_with_the_given_weights(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "m")
    weights = weights_of(scene)
    expected = scene.calls.call(scene.module, 1, scene.inputs[:2])
    torch.testing.assert_close(block_output(scene, weights), expected)
    scene.module.to(torch.bfloat16)
    torch.testing.assert_close(block_output(scene, weights), expected)
    weights["mlp.down_proj.weight"] *= 2
    assert not torch.allclose(block_output(scene, weights), expected, atol=1e-3)


@pytest.mark.parametrize("value", [1.001, float("nan"), float("inf")], ids=["off", "nan", "inf"])
def test_check_unchanged_names_the_place(value: float) -> None:
    before = torch.randn(3, 4)
    check_unchanged(before, before * 1.00001, "here")
    with pytest.raises(ValueError, match="block 3: here changes the float output"):
        check_unchanged(before, before * value, "block 3: here")
