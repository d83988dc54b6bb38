from pathlib import Path

import pytest
import torch

from compress.models.checkpoint import Checkpoint, open_checkpoint
from compress.models.family import family_of
from compress.plan import Plan, make_plan
from compress.recipe import load_recipe
from tests.factory import tiny_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("plan") / "m"))


def plan(checkpoint: Checkpoint, *overrides: str, calibration_tokens: int = 1024) -> Plan:
    recipe = load_recipe("rtn-w4a16", ["scheme.weights.group_size=32", *overrides])
    family = family_of(checkpoint.config)
    return make_plan(checkpoint, family, recipe, calibration_tokens=calibration_tokens)


def test_plan_lists_every_linear(llama: Checkpoint) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama.path)
    linears = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    made = plan(llama)
    planned = {row.name for row in made.linears}
    left = {row.name: row.reason for row in made.left_in_float}
    assert planned | left.keys() == linears
    assert left == {"lm_head": "output head"}


def test_plan_says_that_a_tied_head_is_tied(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_model("Qwen2ForCausalLM", tmp_path / "m", tied=True))
    (row,) = plan(checkpoint).left_in_float
    assert (row.name, row.reason) == ("lm_head", "output head, tied to the embedding")


@pytest.mark.parametrize(
    ("overrides", "bits"),
    [
        ([], 4 + 32 / 32),
        (["dtype=bfloat16"], 4 + 16 / 32),
        (["scheme.weights.bits=3", "dtype=float16"], 3 + 16 / 32),
        (["scheme.weights.symmetric=false", "dtype=float16"], 4 + (16 + 4) / 32),
    ],
)
def test_bits_per_weight_counts_scales_and_zeros(
    llama: Checkpoint, overrides: list[str], bits: float
) -> None:
    assert plan(llama, *overrides).bits_per_weight == pytest.approx(bits)


def test_group_that_does_not_divide_names_every_linear(llama: Checkpoint) -> None:
    with pytest.raises(ValueError) as caught:
        plan(llama, "scheme.weights.group_size=64")
    message = str(caught.value)
    assert "group_size 64 does not divide the inputs of 14 Linears" in message
    assert "group_size 32 divides all" in message
    for block in (0, 1):
        assert f"model.layers.{block}.self_attn.q_proj (96 inputs)" in message
        assert f"model.layers.{block}.mlp.down_proj (160 inputs)" in message


def test_ignored_linears_are_listed_with_the_pattern(llama: Checkpoint) -> None:
    made = plan(llama, r"ignore=['re:model\.layers\.0\..*', model.layers.1.mlp.down_proj]")
    reasons = {row.name: row.reason for row in made.left_in_float}
    assert reasons["model.layers.1.mlp.down_proj"] == "ignored by 'model.layers.1.mlp.down_proj'"
    assert "model.layers.0.self_attn.q_proj" in reasons
    assert len(made.linears) == 6


@pytest.mark.parametrize(
    ("ignore", "message"),
    [
        ("[model.layers.9.mlp.down_proj]", "'model.layers.9.mlp.down_proj' matches no Linear"),
        ("['re:nothing']", "'re:nothing' matches no Linear"),
        ("['re:(']", "is not a regular expression"),
        ("['re:.*']", "nothing would be quantized"),
        ("[model.layers.0.self_attn.k_proj]", "so ignore all or none"),
    ],
)
def test_bad_ignore_is_an_error(llama: Checkpoint, ignore: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(llama, f"ignore={ignore}")


def test_already_quantized_source_is_refused(llama: Checkpoint) -> None:
    packed = Checkpoint(
        path=llama.path,
        config=llama.config | {"quantization_config": {"quant_method": "gptq"}},
        tensors=llama.tensors,
    )
    with pytest.raises(ValueError, match="already quantized"):
        plan(packed)


def test_missing_linear_is_named(llama: Checkpoint) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = {key: info for key, info in llama.tensors.items() if key != name}
    broken = Checkpoint(path=llama.path, config=llama.config, tensors=tensors)
    with pytest.raises(ValueError, match=f"no tensor {name}"):
        plan(broken)


def test_peak_memory_grows_with_calibration_and_width_but_not_with_depth(
    llama: Checkpoint, tmp_path: Path
) -> None:
    def peak(checkpoint: Checkpoint, calibration_tokens: int = 1024) -> int:
        return plan(checkpoint, calibration_tokens=calibration_tokens).peak_memory_bytes

    activations = 2 * 2 * 1000 * 96  # bf16 inputs and outputs of one block
    assert peak(llama, 2024) - peak(llama) == activations
    deep = tiny_model("LlamaForCausalLM", tmp_path / "deep", num_layers=5)
    assert peak(open_checkpoint(deep)) == peak(llama)
    wide = tiny_model("LlamaForCausalLM", tmp_path / "wide", intermediate_size=4096)
    batch = 4 * 3 * (4096 - 160) * 1024  # fp32 outputs of the three Linears, for 1024 tokens
    assert peak(open_checkpoint(wide)) - peak(llama) > batch / 2
