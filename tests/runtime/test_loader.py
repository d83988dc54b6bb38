"""Loading: packed weights compute what their dequantized ones do, broken ones are named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.artifacts import QuantizedLinear
from compress.runtime import loader
from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.linear import make_linear
from compress.runtime.model import Linear
from compress.scheme import (
    PER_CHANNEL,
    ActivationScheme,
    KVCacheScheme,
    LinearScheme,
    WeightScheme,
    dequantize,
)
from tests.export.samples import FP8, LINEARS, W8A8, packed_model

SEQUENCE = torch.randint(2, 331, (70,), generator=torch.Generator().manual_seed(0)).tolist()
INT8, FLOAT8 = (
    WeightScheme(bits=8, group_size=PER_CHANNEL),
    WeightScheme(type="float", bits=8, group_size=PER_CHANNEL),
)
W8A8_STATIC = LinearScheme(weights=INT8, activations=ActivationScheme(dynamic=False))
FP8_STATIC = LinearScheme(weights=FLOAT8, activations=ActivationScheme(type="float", dynamic=False))
FP8_BLOCK = LinearScheme(
    weights=WeightScheme(type="float", bits=8, group_size=PER_CHANNEL, block_size=32),
    activations=ActivationScheme(type="float", group_size=32),
)
W4A8 = LinearScheme(weights=WeightScheme(bits=4, group_size=32), activations=ActivationScheme())
W4 = LinearScheme(weights=WeightScheme(bits=4, group_size=32))
W4_ASYM = LinearScheme(weights=WeightScheme(bits=4, group_size=16, symmetric=False))
W8 = LinearScheme(weights=INT8)


def rewrite(
    source: Path, target: Path, edit: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]
) -> Path:
    """Copy the checkpoint, with `edit` applied to its tensors and its config."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    edit(tensors, config)
    save_file({k: v.contiguous() for k, v in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    return target


def dequantized_model(source: Path, target: Path, linears: dict[str, QuantizedLinear]) -> Path:
    """`source` with the float weights that `linears` stand for."""

    def edit(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        for name, linear in linears.items():
            tensors[f"{name}.weight"] = dequantize(linear)

    return rewrite(source, target, edit)


def score(path: Path, dtype: str = "float32") -> torch.Tensor:
    engine = Engine.load(path, dtype=dtype, config=EngineConfig(num_blocks=64, block_size=16))
    return engine.score([SEQUENCE])[0]


@pytest.mark.parametrize(
    ("scheme", "format_name"),
    [
        (W4, "compressed-tensors"),
        (W4_ASYM, "compressed-tensors"),
        (LinearScheme(weights=WeightScheme(bits=3, group_size=PER_CHANNEL)), "compressed-tensors"),
        (W8, "compressed-tensors"),
        (LinearScheme(weights=FLOAT8), "compressed-tensors"),
        (W4, "gptq"),
        (W4_ASYM, "gptq_v2"),
        (LinearScheme(weights=WeightScheme(bits=4, group_size=32, symmetric=False)), "awq"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.label,
)
def test_load_packed_equals_loading_the_dequantized_weights(
    scheme: LinearScheme,
    format_name: str,
    model_name: str,
    model_path: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    source = model_path(model_name)
    linears = packed_model(source, tmp_path / "packed", scheme, format_name)
    plain = dequantized_model(source, tmp_path / "plain", linears)
    torch.testing.assert_close(score(tmp_path / "packed"), score(plain), rtol=0, atol=1e-4)
    assert (score(plain) - score(source)).abs().max() > 1e-3


def test_load_packed_in_bfloat16_stays_close_to_fp32(llama: Path, tmp_path: Path) -> None:
    packed_model(llama, tmp_path / "packed", W4)
    difference = score(tmp_path / "packed", "bfloat16") - score(tmp_path / "packed")
    assert float(difference.abs().mean()) < 0.02


def plain_fake_quantize(
    x: torch.Tensor, scheme: ActivationScheme | None, input_scale: torch.Tensor | None
) -> torch.Tensor:
    """The definition, in float64, group by group."""
    if scheme is None:
        return x.double()
    rows = []
    for row in x.float():
        parts = []
        for group in row.split(scheme.group_size or len(row)):
            limit = 127.5 if scheme.type == "int" else 448.0
            scale = group.abs().max() / limit if scheme.dynamic else input_scale
            scaled = group / scale
            if scheme.type == "int":
                codes = scaled.round().clamp(-128, 127)
            else:
                codes = scaled.clamp(-448, 448).to(torch.float8_e4m3fn)
            parts.append(codes.double() * scale)
        rows.append(torch.cat(parts))
    return torch.stack(rows)


QUANTIZED_INPUTS = {
    "w8a8": W8A8,
    "w8a8-static": W8A8_STATIC,
    "fp8": FP8,
    "fp8-static": FP8_STATIC,
    "fp8-block": FP8_BLOCK,
    "w4a8": W4A8,
}


def mixed(name: str) -> LinearScheme | None:
    """Every kind of scheme in one block, even among Linears that share an input."""
    leaves = {
        "q_proj": W8A8,
        "k_proj": W8,
        "v_proj": None,
        "o_proj": FP8_STATIC,
        "gate_proj": W8A8_STATIC,
        "up_proj": W4_ASYM,
        "qkv_proj": W8A8,
        "gate_up_proj": W4_ASYM,
        "down_proj": FP8_BLOCK,
    }
    return leaves.get(name.rpartition(".")[2])


@pytest.mark.parametrize(
    "architecture", ["llama-biased", "mistral", "qwen2", "qwen3", "phi3", "gemma2-biased", "gemma3"]
)
@pytest.mark.parametrize("name", [*QUANTIZED_INPUTS, "mixed"])
def test_every_linear_of_the_engine_computes_what_its_scheme_means(
    name: str,
    architecture: str,
    model_path: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = []

    def checked(weights: Any, biases: Any, *, activations: Any, **options: Any) -> Linear:
        linear = make_linear(weights, biases, activations=activations, **options)

        def call(x: torch.Tensor) -> torch.Tensor:
            got, parts = linear(x), []
            for weight, bias, scheme in zip(weights, biases, activations, strict=True):
                is_packed = isinstance(weight, QuantizedLinear)
                inputs = plain_fake_quantize(x, scheme, weight.input_scale if is_packed else None)
                dense = dequantize(weight) if is_packed else weight
                part = inputs @ dense.double().T
                parts.append(part if bias is None else part + bias.double())
            expected = torch.cat(parts, dim=1)
            errors.append(float((got.double() - expected).norm() / expected.norm()))
            return got

        return call

    monkeypatch.setattr(loader, "make_linear", checked)
    source = model_path(architecture)
    packed_model(source, tmp_path / "packed", QUANTIZED_INPUTS.get(name, mixed))
    scores = score(tmp_path / "packed")
    assert len(errors) == 2 * 4 + 1
    assert max(errors) < 1e-6
    monkeypatch.undo()
    assert torch.equal(scores, score(tmp_path / "packed"))
    assert 1e-3 < float((scores - score(source)).abs().max()) < 3


@pytest.mark.parametrize(
    "architecture", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3"]
)
@pytest.mark.parametrize("name", ["w8a8-static", "fp8", "fp8-static", "fp8-block"])
def test_load_computes_what_transformers_does_with_the_same_checkpoint(
    name: str, architecture: str, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    """Not for int8 per token: its largest negative input is a tie that the last bit decides.

    For other inputs ties are rare. One that falls the other way moves its position and, through
    attention, those after it, by little; most sequences have none.
    """
    from transformers import AutoModelForCausalLM

    packed_model(model_path(architecture), tmp_path / "packed", QUANTIZED_INPUTS[name])
    path = tmp_path / "packed"
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        log_probs = theirs(torch.tensor([SEQUENCE])).logits[0].double().log_softmax(-1)
    picked = log_probs[:-1].gather(1, torch.tensor(SEQUENCE[1:])[:, None])[:, 0]
    difference = (score(path).double() - picked).abs()
    ties = (difference > 2e-4).nonzero().flatten()
    assert len(ties) == 0 or int(ties[0]) >= 8
    assert float(difference.max()) < 0.05


@pytest.mark.parametrize("architecture", ["llama", "llama-tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "scheme", [W8, LinearScheme(weights=FLOAT8), W4_ASYM], ids=lambda scheme: scheme.label
)
def test_load_reads_a_packed_embedding_and_the_head_tied_to_it(
    scheme: LinearScheme,
    dtype: str,
    architecture: str,
    model_path: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    packed = tmp_path / "packed"

    def fill_padding(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["model.embed_tokens.weight"][1] = 0.1  # a row of zeros has no scale

    source = rewrite(model_path(architecture), tmp_path / "source", fill_padding)

    def scheme_for(name: str) -> LinearScheme | None:
        return scheme if name == "model.embed_tokens" else W4 if name.endswith(LINEARS) else None

    linears = packed_model(source, packed, scheme_for)
    assert "model.embed_tokens" in linears
    plain = dequantized_model(source, tmp_path / "plain", linears)
    bound = {"float32": 1e-4, "bfloat16": 0.3}[dtype]
    torch.testing.assert_close(score(packed, dtype), score(plain, dtype), rtol=0, atol=bound)


def test_load_reads_a_packed_head(llama: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    linears = packed_model(llama, packed, lambda name: W8A8 if name == "lm_head" else None)
    assert list(linears) == ["lm_head"]
    plain = dequantized_model(llama, tmp_path / "plain", linears)
    difference = (score(packed) - score(plain)).abs().max()
    assert 1e-4 < float(difference) < 0.1  # inputs of the head are quantized as well


def _drop(name: str) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    return lambda tensors, config: tensors.__delitem__(name)


def _add(name: str) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    return lambda tensors, config: tensors.__setitem__(name, torch.zeros(3))


def _reshape(name: str) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    return lambda tensors, config: tensors.__setitem__(name, tensors[name][:-1])


def _to_int(name: str) -> Callable[[dict[str, torch.Tensor], dict[str, Any]], None]:
    return lambda tensors, config: tensors.__setitem__(name, tensors[name].int())


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (_drop("model.layers.1.mlp.up_proj.weight"), "no tensor named .*1.mlp.up_proj.weight"),
        (_drop("lm_head.weight"), "no tensor named 'lm_head.weight'"),
        (_add("model.layers.0.self_attn.sinks"), "no place in .*self_attn.sinks"),
        (_reshape("model.norm.weight"), r"model.norm.weight has shape \(95,\), expected \(96,\)"),
        (_reshape("model.layers.0.self_attn.k_proj.weight"), r"k_proj has shape \(31, 96\)"),
        (_to_int("model.norm.weight"), "dtype torch.int32, not float"),
    ],
    ids=["no-weight", "no-head", "unknown-tensor", "norm-shape", "linear-shape", "int-norm"],
)
def test_load_names_what_is_wrong_with_a_checkpoint(
    edit: Callable[[dict[str, torch.Tensor], dict[str, Any]], None],
    named: str,
    llama: Path,
    tmp_path: Path,
) -> None:
    broken = rewrite(llama, tmp_path / "broken", edit)
    with pytest.raises(ValueError, match=named):
        Engine.load(broken, config=EngineConfig(num_blocks=4))


def test_load_ignores_stored_rotary_frequencies(llama: Path, tmp_path: Path) -> None:
    old = rewrite(llama, tmp_path / "old", _add("model.layers.0.self_attn.rotary_emb.inv_freq"))
    assert torch.equal(score(old), score(llama))


def test_load_names_the_linear_whose_inputs_cannot_be_quantized(
    llama: Path, tmp_path: Path
) -> None:
    packed_model(llama, tmp_path / "packed", W8A8_STATIC)

    def zero_scale(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["model.layers.1.mlp.down_proj.input_scale"] = torch.zeros(1)

    broken = rewrite(tmp_path / "packed", tmp_path / "broken", zero_scale)
    with pytest.raises(ValueError, match=r"1\.mlp\.down_proj.*one positive number"):
        Engine.load(broken, config=EngineConfig(num_blocks=4))


def test_load_does_not_take_float8_codes_without_a_scheme_for_weights(
    llama: Path, tmp_path: Path
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"

    def to_float8(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    broken = rewrite(llama, tmp_path / "broken", to_float8)
    with pytest.raises(ValueError, match=f"{name} has dtype torch.float8_e4m3fn, not float"):
        Engine.load(broken, config=EngineConfig(num_blocks=4))


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (_drop("model.layers.1.self_attn.k_scale"), "no tensor named .*1.self_attn.k_scale"),
        (_add("model.layers.0.self_attn.v_scale"), r"0.self_attn.v_scale must be .* \(1,\)"),
        (_add("model.layers.0.self_attn.q_scale"), "no place in .*self_attn.q_scale"),
    ],
    ids=["missing", "shape", "unknown"],
)
def test_load_names_a_wrong_scale_of_the_cache(
    edit: Callable[[dict[str, torch.Tensor], dict[str, Any]], None],
    named: str,
    llama: Path,
    tmp_path: Path,
) -> None:
    packed_model(llama, tmp_path / "packed", W8, kv_cache=KVCacheScheme())
    broken = rewrite(tmp_path / "packed", tmp_path / "broken", edit)
    with pytest.raises(ValueError, match=named):
        Engine.load(broken, config=EngineConfig(num_blocks=4))
