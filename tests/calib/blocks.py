"""A block of a tiny model on its calibration inputs, for testing what runs on one block."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.calib.capture import BlockCalls, record_block_calls
from compress.calib.collectors import InputStatistics
from compress.calib.scene import BlockScene
from compress.models.family import SharedInput, family_of
from compress.scheme import LinearScheme, WeightScheme
from tests.factory import tiny_model

CPU = torch.device("cpu")
W4 = LinearScheme(weights=WeightScheme(bits=4, group_size=32))
Weights = dict[str, torch.Tensor]
Statistics = dict[SharedInput, InputStatistics]


def make_scene(
    folder: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    scheme: LinearScheme = W4,
    outliers: float = 1.0,
    **fields: Any,
) -> BlockScene:
    """Block 1 of a tiny model on 6 samples of 16 tokens; five channels of both of its norms are
    `outliers` times larger, as are as many rows of its value and up projections.
    """
    from transformers import AutoModelForCausalLM

    path = tiny_model(architecture, folder, num_layers=2)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    model.requires_grad_(False)
    block = model.model.layers[1]
    family = family_of(model.config.to_dict())
    for site in family.smoothing_sites:
        weight = block.get_parameter(f"{site.producer}.weight")
        first = site.first_row(len(weight), block.get_submodule(site.consumers[0]).in_features)
        offset = family.norm_offset if weight.dim() == 1 else 0
        weight[first:][3:25:5] = (weight[first:][3:25:5] + offset) * outliers - offset
    tokens = torch.randint(0, 331, (6, 16), generator=torch.Generator().manual_seed(0))
    inputs = torch.empty(6, 16, 96)

    def store(samples: slice, hidden: torch.Tensor) -> None:
        inputs[samples] = hidden

    calls = record_block_calls(model.model, model.model.layers, tokens, 4, CPU, store)
    with torch.no_grad():
        for samples in (slice(0, 4), slice(4, 6)):
            inputs[samples] = calls.call(model.model.layers[0], 0, inputs[samples])
    values = {"schemes": dict.fromkeys(family.block_linears, scheme), "family": family}
    return scene_of(block, calls, inputs, **(values | fields))


def scene_of(
    block: nn.Module, calls: BlockCalls, inputs: torch.Tensor, **fields: Any
) -> BlockScene:
    values = {"index": 1, "device": CPU}
    return BlockScene(module=block, calls=calls, inputs=inputs, **(values | fields))


def weights_of(scene: BlockScene) -> Weights:
    return {name: tensor.clone().float() for name, tensor in scene.module.state_dict().items()}


@torch.no_grad()
def statistics_of(scene: BlockScene, *, full: bool = True) -> Statistics:
    statistics = {
        shared: InputStatistics(
            in_features=scene.module.get_submodule(shared.linears[0]).in_features,
            full=full,
            tokens_per_batch=1000,
            device=CPU,
        )
        for shared in scene.family.shared_inputs
    }
    handles = [
        scene.module.get_submodule(shared.linears[0]).register_forward_pre_hook(
            lambda _, args, stats=stats: stats.add(args[0])
        )
        for shared, stats in statistics.items()
    ]
    for samples in (slice(0, 4), slice(4, 6)):
        scene.calls.call(scene.module, scene.index, scene.inputs[samples])
    for handle in handles:
        handle.remove()
    return statistics


def parts(scene: BlockScene) -> tuple[Weights, Statistics, BlockScene]:
    """What a transform is called with."""
    return weights_of(scene), statistics_of(scene), scene


def load(scene: BlockScene, changed: Weights) -> None:
    """Put changed tensors into the block."""
    with torch.no_grad():
        for name, tensor in changed.items():
            scene.module.get_parameter(name).copy_(tensor)
