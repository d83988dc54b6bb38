"""The family records describe the models that transformers builds."""

import pytest
import torch
from torch import nn

from compress.models.checkpoint import open_checkpoint
from compress.models.family import FAMILIES, family_of
from compress.models.load import build_skeleton, materialize
from tests.factory import tiny_model


@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_family_of_names_every_linear_of_a_block(architecture: str, tmp_path) -> None:
    checkpoint = open_checkpoint(tiny_model(architecture, tmp_path / "m"))
    family = family_of(checkpoint.config)
    block = build_skeleton(checkpoint).get_submodule(f"{family.blocks}.1")
    linears = {name for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    assert set(family.block_linears) == linears
    assert ("self_attn.q_norm" in dict(block.named_modules())) == family.qk_norm


@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_shared_inputs_are_what_the_block_computes(architecture: str, tmp_path) -> None:
    """Hooks see the Linears in the order listed, fed with one tensor, which the norm made."""
    checkpoint = open_checkpoint(tiny_model(architecture, tmp_path / "m", num_layers=1))
    family = family_of(checkpoint.config)
    model = build_skeleton(checkpoint)
    materialize(model, checkpoint, "", device="cpu", dtype=torch.float32)
    block = model.get_submodule(f"{family.blocks}.0")
    inputs: dict[str, torch.Tensor] = {}
    outputs: dict[str, torch.Tensor] = {}

    def record(name: str):
        def hook(_, args, output):
            inputs[name], outputs[name] = args[0], output

        return hook

    norms = [shared.norm for shared in family.shared_inputs if shared.norm]
    for name in [*family.block_linears, *norms]:
        block.get_submodule(name).register_forward_hook(record(name))
    with torch.no_grad():
        model(torch.arange(17)[None])
    assert [name for name in inputs if name not in norms] == list(family.block_linears)
    for shared in family.shared_inputs:
        first = inputs[shared.linears[0]]
        assert all(inputs[name] is first for name in shared.linears)
        assert shared.norm is None or outputs[shared.norm] is first


@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_smoothing_sites_and_residual_writers_are_modules_of_the_block(
    architecture: str, tmp_path
) -> None:
    checkpoint = open_checkpoint(tiny_model(architecture, tmp_path / "m"))
    family = family_of(checkpoint.config)
    block = build_skeleton(checkpoint).get_submodule(f"{family.blocks}.0")
    consumers = [name for site in family.smoothing_sites for name in site.consumers]
    assert sorted(consumers) == sorted(family.block_linears)  # each Linear in one site
    for site in family.smoothing_sites:
        rows = block.get_parameter(f"{site.producer}.weight").shape[0]
        channels = rows - site.first_row(rows, block.get_submodule(site.consumers[0]).in_features)
        for name in site.consumers:
            assert f"{name}.".startswith(f"{site.parent}.")
            width = block.get_submodule(name).in_features
            assert width % channels == 0
            assert width == channels or site.heads is not None
        if site.heads is not None:
            assert channels % block.get_submodule(site.heads).head_dim == 0
    hidden = checkpoint.config["hidden_size"]
    for name in family.residual_writers:
        assert block.get_submodule(name).out_features == hidden


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["Qwen3ForCausal"]}, "did you mean 'Qwen3ForCausalLM'"),
        ({"architectures": ["BertModel"]}, "BertModel.*LlamaForCausalLM"),
        ({}, "none named in config.json"),
        ({"architectures": []}, "none named in config.json"),
    ],
    ids=["misspelt", "unsupported", "absent", "empty"],
)
def test_family_of_lists_what_is_supported(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family_of(config)
