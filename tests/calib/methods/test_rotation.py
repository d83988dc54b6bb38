"""A rotated checkpoint is the same function, with every hidden state turned by Q."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from compress.calib.methods.rotation import RotatedCheckpoint, Rotation, rotate_checkpoint
from compress.models.checkpoint import Checkpoint, open_checkpoint
from compress.models.family import FAMILIES, family_of
from compress.models.load import build_skeleton, materialize
from tests.factory import tiny_model

TOKENS = torch.randint(0, 331, (2, 17), generator=torch.Generator().manual_seed(0))


def rotated(checkpoint: Checkpoint, **fields) -> RotatedCheckpoint:
    return rotate_checkpoint(checkpoint, family_of(checkpoint.config), Rotation(**fields))


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = build_skeleton(checkpoint)
    materialize(model, checkpoint, "", device="cpu", dtype=dtype)
    return model


@torch.no_grad()
def hidden_states(model: nn.Module) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Outputs of the embedding and of every block, and the logits."""
    seen: list[torch.Tensor] = []
    modules = [model.model.embed_tokens, *model.model.layers]
    handles = [m.register_forward_hook(lambda _, __, out: seen.append(out)) for m in modules]
    logits = model(input_ids=TOKENS, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return seen, logits


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("fields", [{}, {"r2": False}, {"r1": False}], ids=["both", "r1", "r2"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_rotation_keeps_logits_and_turns_hidden_states(
    architecture: str, tied: bool, fields: dict, tmp_path: Path
) -> None:
    biased = not architecture.startswith(("Qwen2", "Phi3"))
    options = {"attention_bias": True} if biased else {}
    if FAMILIES[architecture].output_norms and fields.get("r1", True):
        pytest.skip("r1 is refused")
    source = open_checkpoint(tiny_model(architecture, tmp_path / "m", tied=tied, **options))
    view = rotated(source, **fields)
    states, logits = hidden_states(load(source))
    new_states, new_logits = hidden_states(load(view))
    assert relative(new_logits, logits) < 1e-4
    Q = view.stream.dense().float() if fields.get("r1", True) else torch.eye(96)
    for state, new_state in zip(states, new_states, strict=True):
        assert relative(new_state, state @ Q) < 1e-4


@pytest.mark.parametrize("architecture", [n for n, f in FAMILIES.items() if not f.output_norms])
def test_each_rotation_changes_what_it_should(architecture: str, tmp_path: Path) -> None:
    source = open_checkpoint(tiny_model(architecture, tmp_path / "m"))

    def changed(**fields) -> set[str]:
        view = rotated(source, **fields)
        names = (n for n in source.tensors if n.startswith("model.layers.1."))
        same = {n for n in names if torch.equal(view.read(n), source.read(n))}
        locals_ = {n for n in source.tensors if n.startswith("model.layers.1.")} - same
        return {n.removeprefix("model.layers.1.") for n in locals_}

    linears = {f"{name}.weight" for name in family_of(source.config).block_linears}
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    values = {"self_attn.v_proj.weight", "self_attn.o_proj.weight"}
    if architecture == "Phi3ForCausalLM":
        values = {"self_attn.qkv_proj.weight", "self_attn.o_proj.weight"}
    if architecture == "Qwen2ForCausalLM":
        values |= {"self_attn.v_proj.bias"}
    assert changed(r2=False) == linears | norms
    assert changed(r1=False) == values
    assert changed() == linears | norms | values


def test_values_within_each_head_are_turned(tmp_path: Path) -> None:
    source = open_checkpoint(tiny_model("LlamaForCausalLM", tmp_path / "m"))
    view = rotated(source, r1=False)
    name, R2 = "model.layers.0.self_attn.v_proj.weight", view.head.dense().float()
    for head in range(2):
        rows = slice(16 * head, 16 * head + 16)
        torch.testing.assert_close(view.read(name)[rows], R2.T @ source.read(name)[rows])


def test_tied_head_is_untied_and_listed(tmp_path: Path) -> None:
    source = open_checkpoint(tiny_model("LlamaForCausalLM", tmp_path / "m", tied=True))
    view = rotated(source)
    assert "lm_head.weight" not in source.tensors
    assert view.tensors["lm_head.weight"].shape == (331, 96)
    assert view.num_bytes == source.num_bytes  # what there was before
    assert source.config["tie_word_embeddings"] and not view.config["tie_word_embeddings"]
    norm = source.read("model.norm.weight")
    expected = (source.read("model.embed_tokens.weight") * norm) @ view.stream.dense().float()
    torch.testing.assert_close(view.read("lm_head.weight"), expected, atol=1e-5, rtol=1e-5)
    assert rotated(source, r1=False).tensors == source.tensors


def test_norms_become_ones_or_zeros_around_an_offset(tmp_path: Path) -> None:
    """With (1 + w) norms the stored weight becomes 0, and 1 + w goes into the Linears."""
    from dataclasses import replace

    source = open_checkpoint(tiny_model("LlamaForCausalLM", tmp_path / "m"))
    norm, linear = "model.layers.0.input_layernorm.weight", "model.layers.0.self_attn.k_proj.weight"
    assert rotated(source).read(norm).equal(torch.ones(96))
    family = replace(family_of(source.config), norm_offset=1.0)
    view = rotate_checkpoint(source, family, Rotation(r2=False))
    assert view.read(norm).equal(torch.zeros(96))
    weight = source.read(linear) * (1 + source.read(norm))
    expected = weight @ view.stream.dense().float()
    torch.testing.assert_close(view.read(linear), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_reads_keep_the_stored_dtype_and_are_rounded_once(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    source = open_checkpoint(tiny_model("Qwen2ForCausalLM", tmp_path / "m", dtype=dtype))
    view = rotated(source)
    for name, info in view.tensors.items():
        tensor = view.read(name)
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, info.shape)
        assert tensor.is_contiguous()
    name = "model.layers.0.mlp.down_proj.weight"
    exact = view.stream.dense().T @ source.read(name).double()
    assert torch.equal(view.read(name), exact.float().to(dtype))


def test_rotation_spreads_an_outlier_channel(tmp_path: Path) -> None:
    source = open_checkpoint(tiny_model("LlamaForCausalLM", tmp_path / "m"))
    name = "model.layers.0.self_attn.o_proj.weight"
    file = source.tensors[name].file
    tensors = load_file(file)
    tensors[name][5] *= 100
    save_file(tensors, file, metadata={"format": "pt"})
    source = open_checkpoint(source.path)
    peak = [w.abs().amax(1) for w in (source.read(name), rotated(source, r2=False).read(name))]
    assert peak[0].amax() / peak[0].median() > 50
    assert peak[1].amax() / peak[1].median() < 3


def test_fingerprint_follows_source_and_rotation(tmp_path: Path) -> None:
    source = open_checkpoint(tiny_model("LlamaForCausalLM", tmp_path / "m"))
    other = open_checkpoint(tiny_model("LlamaForCausalLM", tmp_path / "n", seed=1))
    views = [rotated(source), rotated(source, seed=1), rotated(source, r2=False), rotated(other)]
    prints = {source.fingerprint, *(view.fingerprint for view in views)}
    assert len(prints) == 5
    assert rotated(source).fingerprint == views[0].fingerprint


def test_a_seed_gives_one_rotation(tmp_path: Path) -> None:
    source = open_checkpoint(tiny_model("LlamaForCausalLM", tmp_path / "m"))
    name = "model.embed_tokens.weight"
    assert torch.equal(rotated(source).read(name), rotated(source).read(name))
    assert not torch.equal(rotated(source).read(name), rotated(source, seed=1).read(name))


@pytest.mark.parametrize(
    "name",
    [
        "model.mtp.fc.weight",
        "model.layers.0.input_layernorm.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.x.mlp.up_proj.weight",
    ],
)
def test_rotation_refuses_a_tensor_that_it_does_not_know(name: str, tmp_path: Path) -> None:
    source = open_checkpoint(tiny_model("LlamaForCausalLM", tmp_path / "m"))
    file = source.path / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(96)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"what to do with {name}.*r1: false"):
        rotated(open_checkpoint(source.path))
    assert name in rotated(open_checkpoint(source.path), r1=False).tensors


def test_rotation_passes_over_stored_rotary_frequencies(tmp_path: Path) -> None:
    source = open_checkpoint(tiny_model("LlamaForCausalLM", tmp_path / "m"))
    file, name = source.path / "model.safetensors", "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(load_file(file) | {name: torch.ones(8)}, file, metadata={"format": "pt"})
    assert rotated(open_checkpoint(source.path)).read(name).equal(torch.ones(8))


def test_head_dim_may_be_left_to_the_other_sizes(tmp_path: Path) -> None:
    path = tiny_model("LlamaForCausalLM", tmp_path / "m")
    expected = hidden_states(load(open_checkpoint(path)))[1]
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "head_dim": None}))
    view = rotated(open_checkpoint(path))
    assert view.head.size == 16
    assert relative(hidden_states(load(view))[1], expected) < 1e-4


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"r1": False, "r2": False}, "both false"), ({"seed": -1}, "must not be negative, got -1")],
    ids=["nothing", "seed"],
)
def test_rotation_refuses_settings_without_sense(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rotation(**fields)


def test_read_names_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    view = rotated(open_checkpoint(tiny_model("LlamaForCausalLM", tmp_path / "m")))
    with pytest.raises(ValueError, match="no tensor named 'nothing'"):
        view.read("nothing")
