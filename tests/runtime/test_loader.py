"""Loading: packed weights compute what their dequantized ones do, broken ones are named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.artifacts import QuantizedLinear
from compress.export.compressed_tensors import pack_linear, quantization_config
from compress.runtime.engine import Engine, EngineConfig
from compress.scheme import (
    QuantScheme,
    WeightScheme,
    code_range,
    dequantize,
    group_width,
    round_to_codes,
)

SEQUENCE = torch.randint(2, 331, (70,), generator=torch.Generator().manual_seed(0)).tolist()


def quantize(weight: torch.Tensor, scheme: WeightScheme) -> QuantizedLinear:
    """Round to nearest, asymmetric where the scheme says so."""
    grouped = weight.view(len(weight), -1, group_width(scheme, weight.shape[1]))
    low, high = code_range(scheme.bits)
    if scheme.symmetric:
        scale, zero = grouped.abs().amax(-1) / high, None
    else:
        least, most = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scale = (most - least) / (high - low)
        zero = torch.round(low - least / scale).clamp(low, high).to(torch.int8)
    codes = round_to_codes(weight, scale, zero, scheme.bits)
    return QuantizedLinear(codes=codes, scale=scale, zero_point=zero, bits=scheme.bits)


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


def pack_all(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], scheme: WeightScheme
) -> None:
    """Replace every Linear of the blocks by its packed tensors."""
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        packed = pack_linear(quantize(tensors.pop(name), scheme))
        tensors.update((f"{module}.{local}", tensor) for local, tensor in packed.items())
    config["quantization_config"] = quantization_config(QuantScheme(weights=scheme), ["lm_head"])


def dequantize_all(tensors: dict[str, torch.Tensor], scheme: WeightScheme) -> None:
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        tensors[name] = dequantize(quantize(tensors[name], scheme))


def score(path: Path, dtype: str = "float32") -> torch.Tensor:
    engine = Engine.load(path, dtype=dtype, config=EngineConfig(num_blocks=64, block_size=16))
    return engine.score([SEQUENCE])[0]


@pytest.mark.parametrize(
    "scheme",
    [
        WeightScheme(bits=4, group_size=32),
        WeightScheme(bits=4, group_size=16, symmetric=False),
        WeightScheme(bits=3, group_size=-1),
        WeightScheme(bits=8, group_size=-1, symmetric=False),
    ],
    ids=lambda scheme: scheme.label,
)
def test_load_packed_equals_loading_the_dequantized_weights(
    scheme: WeightScheme, model_name: str, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    source = model_path(model_name)
    packed = rewrite(source, tmp_path / "packed", lambda t, c: pack_all(t, c, scheme))
    plain = rewrite(source, tmp_path / "plain", lambda t, c: dequantize_all(t, scheme))
    torch.testing.assert_close(score(packed), score(plain), rtol=0, atol=1e-4)
    assert (score(plain) - score(source)).abs().max() > 1e-3


def test_load_packed_in_bfloat16_stays_close_to_fp32(llama: Path, tmp_path: Path) -> None:
    scheme = WeightScheme(bits=4, group_size=32)
    packed = rewrite(llama, tmp_path / "packed", lambda t, c: pack_all(t, c, scheme))
    assert float((score(packed, "bfloat16") - score(packed)).abs().mean()) < 0.02


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
