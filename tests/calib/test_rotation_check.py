from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress.calib.methods.rotation import Fold, Rotation, rotate_checkpoint
from compress.calib.rotation_check import check_rotation
from compress.models.checkpoint import open_checkpoint
from compress.models.family import FAMILIES, family_of
from compress.models.load import build_skeleton
from tests.factory import tiny_model

CPU = torch.device("cpu")
TOKENS = torch.arange(20).view(1, 20)


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("r1", "r2"), [(True, True), (True, False), (False, True)])
def test_a_rotated_model_computes_the_float_model(
    architecture: str, tied: bool, r1: bool, r2: bool, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(tiny_model(architecture, tmp_path / "m", tied=tied))
    family = family_of(checkpoint.config)
    if r1 and family.output_norms:
        with pytest.raises(ValueError, match=f"{architecture}: rotation r1 .* use r1: false"):
            rotate_checkpoint(checkpoint, family, Rotation(r1=r1, r2=r2))
        return
    rotated = rotate_checkpoint(checkpoint, family, Rotation(r1=r1, r2=r2))
    check_rotation(rotated, family, build_skeleton(rotated), TOKENS, CPU)


def _without(name: str) -> dict[str, Fold]:
    return {name: Fold(source=name)}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.1.mlp.down_proj.weight", "block 1: the rotation"),
        ("model.layers.0.post_attention_layernorm.weight", "block 0: the rotation"),
        ("model.layers.0.self_attn.v_proj.weight", "block 0: the rotation"),
        ("lm_head.weight", "the head: the rotation"),
        ("model.norm.weight", "the head: the rotation"),
    ],
)
def test_a_tensor_that_is_rotated_wrongly_is_found(name: str, place: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_model("LlamaForCausalLM", tmp_path / "m"))
    family = family_of(checkpoint.config)
    rotated = rotate_checkpoint(checkpoint, family, Rotation())
    broken = replace(rotated, folds=rotated.folds | _without(name))
    with pytest.raises(ValueError, match=f"^{place} changes the float output"):
        check_rotation(broken, family, build_skeleton(broken), TOKENS, CPU)


def test_a_wrong_norm_offset_is_found(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_model("LlamaForCausalLM", tmp_path / "m"))
    family = replace(family_of(checkpoint.config), norm_offset=1.0)
    rotated = rotate_checkpoint(checkpoint, family, Rotation())
    with pytest.raises(ValueError, match="block 0: the rotation changes"):
        check_rotation(rotated, family, build_skeleton(rotated), TOKENS, CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_source_of_16_bits_is_checked_before_it_is_rounded(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    path = tiny_model("Qwen2ForCausalLM", tmp_path / "m", tied=True, dtype=dtype)
    checkpoint = open_checkpoint(path)
    family = family_of(checkpoint.config)
    rotated = rotate_checkpoint(checkpoint, family, Rotation())
    check_rotation(rotated, family, build_skeleton(rotated), TOKENS, CPU)
    name = "model.layers.0.mlp.up_proj.weight"
    assert rotated.read(name).dtype == dtype
    assert not torch.equal(rotated.read(name).float(), rotated.read_float(name))


def test_derived_buffers_that_old_exporters_stored_are_no_trouble(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = tiny_model("LlamaForCausalLM", tmp_path / "m")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_checkpoint(path)
    family = family_of(checkpoint.config)
    rotated = rotate_checkpoint(checkpoint, family, Rotation())
    check_rotation(rotated, family, build_skeleton(rotated), TOKENS, CPU)
