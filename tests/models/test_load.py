"""Piecewise loading gives the model that transformers loads whole, and names what does not fit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.models.checkpoint import open_checkpoint
from compress.models.family import FAMILIES
from compress.models.load import build_skeleton, dematerialize, load_tokenizer, materialize
from tests.factory import tiny_model

_TOKENS = torch.arange(2, 35)[None]


def _edit_weights(folder: Path, edit) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def _edit_config(folder: Path, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def _logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(_TOKENS).logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_materialize_gives_the_model_of_transformers(architecture, tied, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_model(architecture, tmp_path / "m", tied=tied)
    checkpoint = open_checkpoint(path)
    model = build_skeleton(checkpoint)
    materialize(model, checkpoint, "", device="cpu", dtype=torch.float32)
    expected = AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(_logits(model), _logits(expected))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 2.0},
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=["linear", "dynamic", "llama3"],
)
def test_build_skeleton_computes_scaled_rotary_frequencies(rope, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_model("LlamaForCausalLM", tmp_path / "m", rope_parameters=rope)
    checkpoint = open_checkpoint(path)
    model = build_skeleton(checkpoint)
    expected = AutoModelForCausalLM.from_pretrained(path).model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_materialize_by_parts_gives_the_whole(tied, tmp_path) -> None:
    """Embedding, blocks, norm and head on their own, each emptied before the next is loaded."""
    checkpoint = open_checkpoint(tiny_model("Qwen2ForCausalLM", tmp_path / "m", tied=tied))
    whole, parts = build_skeleton(checkpoint), build_skeleton(checkpoint)
    materialize(whole, checkpoint, "", device="cpu", dtype=torch.float32)

    def run(name: str, *args, **kwargs):
        module = parts.get_submodule(name)
        materialize(module, checkpoint, f"{name}.", device="cpu", dtype=torch.float32)
        with torch.no_grad():
            output = module(*args, **kwargs)
        dematerialize(module)
        assert all(parameter.is_meta for parameter in parts.parameters())
        return output

    hidden = run("model.embed_tokens", _TOKENS)
    positions = torch.arange(_TOKENS.shape[1])[None]
    rotary = run("model.rotary_emb", hidden, positions)
    for index in range(2):
        hidden = run(f"model.layers.{index}", hidden, position_embeddings=rotary)
    logits = run("lm_head", run("model.norm", hidden))
    torch.testing.assert_close(logits, _logits(whole))


def test_build_skeleton_takes_no_memory_for_weights_and_uses_sdpa(tmp_path) -> None:
    model = build_skeleton(open_checkpoint(tiny_model("LlamaForCausalLM", tmp_path / "m")))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.training
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_materialize_converts_weights_but_not_rotary_frequencies(dtype, tmp_path) -> None:
    checkpoint = open_checkpoint(tiny_model("LlamaForCausalLM", tmp_path / "m"))
    model = build_skeleton(checkpoint)
    frequencies = model.model.rotary_emb.inv_freq.clone()
    materialize(model, checkpoint, "", device="cpu", dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert torch.equal(model.model.norm.weight, checkpoint.read("model.norm.weight").to(dtype))
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, frequencies)


def test_dematerialize_keeps_rotary_frequencies_and_can_be_undone(tmp_path) -> None:
    checkpoint = open_checkpoint(tiny_model("Qwen3ForCausalLM", tmp_path / "m"))
    model = build_skeleton(checkpoint)
    materialize(model, checkpoint, "", device="cpu", dtype=torch.float32)
    before = _logits(model)
    dematerialize(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    materialize(model, checkpoint, "", device="cpu", dtype=torch.float32)
    assert torch.equal(_logits(model), before)


def test_materialize_takes_the_head_that_is_stored_although_config_ties_it(tmp_path) -> None:
    path = tiny_model("LlamaForCausalLM", tmp_path / "m", tied=True)
    _edit_weights(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    checkpoint = open_checkpoint(path)
    model = build_skeleton(checkpoint)
    materialize(model, checkpoint, "", device="cpu", dtype=torch.float32)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight + 1)


def test_materialize_finds_a_tied_embedding_under_the_name_of_the_head(tmp_path) -> None:
    path = tiny_model("LlamaForCausalLM", tmp_path / "m", tied=True)
    embedding = open_checkpoint(path).read("model.embed_tokens.weight")
    _edit_weights(path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    checkpoint = open_checkpoint(path)
    part = build_skeleton(checkpoint).get_submodule("model.embed_tokens")
    materialize(part, checkpoint, "model.embed_tokens.", device="cpu", dtype=torch.float32)
    assert torch.equal(part.weight, embedding)


_LOAD_MANY_BLOCKS = """
import sys
from pathlib import Path
import psutil, torch
from compress.models.checkpoint import open_checkpoint
from compress.models.load import dematerialize, materialize

checkpoint = open_checkpoint(Path(sys.argv[1]))
shapes = [(192, 576), (192, 576), (576, 576), (576, 576), (1152, 576)]
resident = []
for index in range(24):
    with torch.device("meta"):
        block = torch.nn.ModuleList(torch.nn.Linear(k, n, bias=False) for n, k in shapes)
    materialize(block, checkpoint, f"blocks.{index % 2}.", device="cpu", dtype=torch.float32)
    resident.append(psutil.Process().memory_info().rss)
    dematerialize(block)
print(resident[-1] - resident[0])
"""


def test_dematerialize_keeps_resident_memory_flat_over_many_blocks(tmp_path) -> None:
    """In a process of its own, whose heap is as at the start of a run; sizes that fragment it."""
    shapes = [(192, 576), (192, 576), (576, 576), (576, 576), (1152, 576)]
    weights = {
        f"blocks.{block}.{index}.weight": torch.zeros(shape)
        for block in range(2)
        for index, shape in enumerate(shapes)
    }
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    growth = subprocess.check_output([sys.executable, "-c", _LOAD_MANY_BLOCKS, str(tmp_path)])
    block_bytes = sum(tensor.nbytes for tensor in weights.values()) // 2
    assert int(growth) < block_bytes / 2  # one hole per block would be several times that


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
            r"missing tensors: model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        (lambda t: t.pop("lm_head.weight"), r"missing tensors: lm_head\.weight"),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": torch.zeros(159, 96)}),
            r"up_proj\.weight has shape \(159, 96\), config\.json asks for \(160, 96\)",
        ),
        (
            lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(96)}),
            r"without a place in the model: model\.layers\.1\.self_attn\.q_proj\.bias",
        ),
    ],
    ids=["missing", "missing-head", "shape", "unexpected"],
)
def test_materialize_names_what_does_not_fit_and_loads_nothing(edit, message, tmp_path) -> None:
    path = tiny_model("LlamaForCausalLM", tmp_path / "m")
    _edit_weights(path, edit)
    checkpoint = open_checkpoint(path)
    model = build_skeleton(checkpoint)
    with pytest.raises(ValueError, match=message):
        materialize(model, checkpoint, "", device="cpu", dtype=torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_materialize_of_one_block_ignores_damage_in_another(tmp_path) -> None:
    path = tiny_model("LlamaForCausalLM", tmp_path / "m")
    _edit_weights(path, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    checkpoint = open_checkpoint(path)
    block = build_skeleton(checkpoint).get_submodule("model.layers.0")
    materialize(block, checkpoint, "model.layers.0.", device="cpu", dtype=torch.float32)
    assert not any(parameter.is_meta for parameter in block.parameters())


def test_materialize_ignores_rotary_frequencies_that_old_exporters_stored(tmp_path) -> None:
    path = tiny_model("LlamaForCausalLM", tmp_path / "m")
    stale = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _edit_weights(path, lambda t: t.update({stale: torch.zeros(8)}))
    checkpoint = open_checkpoint(path)
    model = build_skeleton(checkpoint)
    materialize(model, checkpoint, "", device="cpu", dtype=torch.float32)
    assert model.model.rotary_emb.inv_freq[0] == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["OPTForCausalLM"]}, "unknown model architecture 'OPTForCausalLM'"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"already quantized \(gptq\)"),
        ({"hidden_size": "wide"}, r"config\.json: unusable"),
        ({"model_type": "lama"}, r"config\.json: unusable"),
        ({"hidden_act": "silo"}, r"config\.json: unusable"),
        ({"num_attention_heads": 0, "head_dim": None}, r"config\.json: unusable"),
    ],
    ids=["architecture", "quantized", "type", "model-type", "activation", "no-heads"],
)
def test_build_skeleton_names_a_bad_config(fields, message, tmp_path) -> None:
    path = tiny_model("LlamaForCausalLM", tmp_path / "m")
    _edit_config(path, **fields)
    with pytest.raises(ValueError, match=message):
        build_skeleton(open_checkpoint(path))


def test_load_tokenizer_round_trips_text(tmp_path) -> None:
    tokenizer = load_tokenizer(tiny_model("LlamaForCausalLM", tmp_path / "m"))
    text = "def f(x):\n    return x  # 17"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text


def test_load_tokenizer_names_a_folder_without_one(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_load_tokenizer_names_a_damaged_one(tmp_path) -> None:
    path = tiny_model("LlamaForCausalLM", tmp_path / "m")
    (path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match="cannot load the tokenizer"):
        load_tokenizer(path)
