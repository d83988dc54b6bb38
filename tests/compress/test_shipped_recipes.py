"""Every shipped recipe, and every option of one, from a tiny float model to logits."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compress import quantize as module
from compress.calib.data import CalibrationSpec
from compress.calib.replay import BlockReplay
from compress.export.formats import format_of, read_linear, read_scheme
from compress.export.verify import verify_checkpoint
from compress.kernels.activations import fake_quantize
from compress.models.checkpoint import open_checkpoint
from compress.recipe import load_recipe, shipped_recipes
from compress.run import QuantizeJob
from compress.runtime.engine import Engine
from compress.scheme import dequantize
from tests.compress.test_quantize import files
from tests.compress.test_quantize_ends import fail_at_call
from tests.factory import tiny_model

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
TEXT = Path(__file__).parents[2] / "LICENSE"
ROTATION = "transforms=[{kind: rotation}]"
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name, ()) for name in shipped_recipes()},
    "awq-then-gptq": ("awq-w4a16", ("method.kind=gptq",)),
    "awq-format": ("awq-w4a16", ("format=awq", "dtype=float16")),
    "gptq-format": ("gptq-w4a16", ("format=gptq", "dtype=float16")),
    "gptq-v2-asym": (
        "gptq-w4a16",
        ("format=gptq_v2", "scheme.weights.symmetric=false", "dtype=float16"),
    ),
    "w8a8-static": ("w8a8", ("scheme.activations.dynamic=false",)),
    "sequential": ("gptq-w4a16", ("true_sequential=true",)),
    "gptaq-sequential": ("gptq-w4a16", ("true_sequential=true", "method.asymmetry=0.5")),
    "refound": ("gptq-w4a16", ("method.order=group", "method.groups=refound")),
    "rotated": ("gptq-w4a16", (ROTATION,)),
    "rotated-awq-asymmetric": (
        "gptq-w4a16",
        ("transforms=[{kind: rotation}, {kind: awq}]", "method.asymmetry=1.0"),
    ),
    "rotated-values": ("gptq-w4a16", ("transforms=[{kind: rotation, r1: false}, {kind: awq}]",)),
    "mixed-by-hand": (
        "gptq-w4a16",
        ("scheme.overrides=[{targets: ['re:.*down_proj'], weights: {bits: 8, group_size: -1}}]",),
    ),
    "kv-per-head": ("gptq-w4a16", ("scheme.kv_cache.strategy=head",)),
    "embedding": ("rtn-w4a16", ("embedding={}",)),
    **{f"w{bits}": ("gptq-w4a16", (f"scheme.weights.bits={bits}",)) for bits in (2, 5, 6, 7, 8)},
}
# Where fused projections and norms around zero could go wrong; Gemma refuses rotation r1.
OTHER_FAMILIES = ("awq-then-gptq", "awq-format", "w8a8", "kv-per-head", "embedding",
                  "rotated-values")  # fmt: skip


def job(source: Path, out: Path, name: str) -> QuantizeJob:
    recipe, overrides = CASES[name]
    small = (
        ["scheme.weights.group_size=32"]
        if load_recipe(recipe).scheme.weights.group_size == 64
        else []
    )
    return QuantizeJob(
        model=str(source),
        output=out,
        recipe=load_recipe(recipe, [*small, *overrides]),
        calibration=CalibrationSpec(source=str(TEXT), num_samples=6, length=32, seed=0),
        offline=True,
        quiet=True,
    )


def reference(source: Path, packed: Path) -> nn.Module:
    """transformers' float model with the packed checkpoint's values, and its inputs quantized."""
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_checkpoint(packed)
    scheme_for = read_scheme(checkpoint.config)
    config = AutoConfig.from_pretrained(packed)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {}
    for name, parameter in model.named_parameters():
        module_name = name.removesuffix(".weight")
        is_matrix = name.endswith(".weight") and parameter.dim() == 2
        scheme = scheme_for(module_name) if is_matrix else None
        if scheme is None:
            state[name] = checkpoint.read(name).to(parameter.dtype)
            continue
        linear = read_linear(checkpoint, module_name, scheme)
        state[name] = dequantize(linear)
        if scheme.activations is not None:
            _quantize_inputs(model.get_submodule(module_name), scheme.activations, linear)
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model


def _quantize_inputs(linear: nn.Module, activations: Any, packed: Any) -> None:
    def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        rows = args[0].reshape(-1, args[0].shape[-1])
        return (fake_quantize(rows, activations, packed.input_scale).view(args[0].shape),)

    linear.register_forward_pre_hook(hook)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *product(("LlamaForCausalLM", "Qwen3ForCausalLM"), CASES),
        *product(("Phi3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"), OTHER_FAMILIES),
    ],
)
def test_recipe_gives_a_sound_checkpoint_that_the_engine_computes(
    architecture: str, name: str, tmp_path: Path
) -> None:
    tied = architecture == "LlamaForCausalLM"
    source = tiny_model(architecture, tmp_path / "float", tied=tied, **SIZES)
    out = tmp_path / "packed"
    report = module.quantize(job(source, out, name))
    assert verify_checkpoint(out, source).failures == []
    assert {row["fallback"] for row in report["layers"]} == {None}
    assert all(0 < row["relative_error"] < 0.7 for row in report["layers"])
    assert format_of(open_checkpoint(out).config).name == job(source, out, name).recipe.format

    tokens = torch.randint(0, 331, (1, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = torch.log_softmax(reference(source, out)(tokens).logits[0].float(), -1)
    engine = Engine.load(out, dtype="float32", kv_dtype="model")
    got = engine.score([tokens[0].tolist()])[0]
    picked = expected[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    # where inputs are quantized, a value on the edge of two codes may fall either way
    tolerance = 5e-2 if job(source, out, name).recipe.scheme.activations else 2e-3
    torch.testing.assert_close(got, picked, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["rotated", "awq-w4a16", "w8a8", "fp8-dynamic", "gptq-w4a16"])
def test_a_run_stopped_in_the_middle_resumes_to_the_same_bytes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny_model("LlamaForCausalLM", tmp_path / "float", num_layers=3, **SIZES)
    module.quantize(job(source, tmp_path / "whole", name))
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop = fail_at_call(2, KeyboardInterrupt(), BlockReplay.propagate)
        patch.setattr(BlockReplay, "propagate", stop)
        with pytest.raises(KeyboardInterrupt):
            module.quantize(job(source, out, name))
    module.quantize(replace(job(source, out, name), resume=True))
    assert files(out) == files(tmp_path / "whole")
