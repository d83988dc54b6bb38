"""The pack-quantized format: tensors, config, and what the compressed-tensors package reads."""

import json
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig

from compress.export.compressed_tensors import (
    pack_linear,
    quantization_config,
    read_linear,
    read_scheme,
    tensor_layout,
    unpack_linear,
)
from compress.export.writer import write_json, write_safetensors
from compress.models.checkpoint import open_checkpoint
from compress.scheme import PER_CHANNEL, QuantScheme, WeightScheme, dequantize
from tests.export.samples import random_linear

SCHEMES = [
    pytest.param(WeightScheme(bits=bits, group_size=group, symmetric=symmetric), id=label)
    for bits in (2, 3, 4, 8)
    for group, group_label in ((12, "g12"), (PER_CHANNEL, "channel"))
    for symmetric, sym_label in ((True, "sym"), (False, "asym"))
    for label in [f"w{bits}-{group_label}-{sym_label}"]
]
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


@DTYPES
@pytest.mark.parametrize("scheme", SCHEMES)
def test_pack_linear_round_trips_through_unpack_linear(scheme, dtype):
    linear = random_linear(scheme, dtype=dtype)
    tensors = pack_linear(linear)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == tensor_layout(17, 36, scheme)
    assert ("weight_zero_point" in tensors) is not scheme.symmetric
    again = unpack_linear(tensors, scheme)
    assert torch.equal(again.codes, linear.codes)
    assert torch.equal(again.scale, linear.scale) and again.scale.dtype == dtype
    if not scheme.symmetric:
        assert torch.equal(again.zero_point, linear.zero_point)
    assert (again.bits, again.group_size) == (linear.bits, linear.group_size)


@DTYPES
@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_linear_is_what_the_package_decompresses(scheme, dtype):
    linear = random_linear(scheme, dtype=dtype)
    config = QuantizationConfig(**quantization_config(QuantScheme(weights=scheme), ["lm_head"]))
    state = PackedQuantizationCompressor.decompress(
        pack_linear(linear), config.config_groups["group_0"]
    )
    assert torch.equal(state["weight"], dequantize(linear, dtype))


def test_tensor_layout_of_the_documented_example():
    assert tensor_layout(64, 256, WeightScheme(bits=4, group_size=128, symmetric=False)) == {
        "weight_packed": (64, 32),
        "weight_scale": (64, 2),
        "weight_shape": (2,),
        "weight_zero_point": (8, 2),
    }
    assert tensor_layout(64, 256, WeightScheme(bits=3))["weight_packed"] == (64, 24)
    assert tensor_layout(64, 256, WeightScheme(bits=8))["weight_packed"] == (64, 64)


def test_quantization_config_is_the_short_form():
    assert json.dumps(
        quantization_config(QuantScheme(weights=WeightScheme(group_size=128)), ["lm_head"])
    ) == (
        '{"quant_method": "compressed-tensors", "version": "0.20.1", "format": "pack-quantized", '
        '"quantization_status": "compressed", "global_compression_ratio": null, '
        '"ignore": ["lm_head"], "kv_cache_scheme": null, "sparsity_config": {}, '
        '"transform_config": {}, "config_groups": {"group_0": {"targets": ["Linear"], '
        '"format": "pack-quantized", "weights": {"num_bits": 4, "type": "int", "symmetric": true, '
        '"strategy": "group", "group_size": 128, "dynamic": false}, "input_activations": null, '
        '"output_activations": null}}}'
    )


def test_quantization_config_per_channel_has_no_group_size():
    scheme = QuantScheme(weights=WeightScheme(bits=8, group_size=PER_CHANNEL, symmetric=False))
    weights = quantization_config(scheme, [])["config_groups"]["group_0"]["weights"]
    assert weights["strategy"] == "channel"
    assert weights["group_size"] is None
    assert weights["symmetric"] is False


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantization_config_is_parsed_by_the_package(scheme):
    config = QuantizationConfig(**quantization_config(QuantScheme(weights=scheme), ["lm_head"]))
    weights = config.config_groups["group_0"].weights
    assert (weights.num_bits, weights.symmetric) == (scheme.bits, scheme.symmetric)
    assert weights.strategy == ("channel" if scheme.group_size == PER_CHANNEL else "group")
    assert config.ignore == ["lm_head"]
    assert config.quantization_status == "compressed"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_read_scheme_returns_what_quantization_config_wrote(scheme):
    written = quantization_config(QuantScheme(weights=scheme), ["lm_head"])
    scheme_for = read_scheme({"quantization_config": written})
    assert scheme_for("model.layers.0.mlp.up_proj") == scheme
    assert scheme_for("lm_head") is None


def test_read_scheme_of_a_float_checkpoint_is_none():
    assert read_scheme({"hidden_size": 64})("model.layers.0.mlp.up_proj") is None


def _config(**weights: Any) -> dict[str, Any]:
    config = quantization_config(QuantScheme(), ["lm_head"])
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


def test_read_scheme_prefers_names_to_expressions_to_classes():
    config = quantization_config(QuantScheme(), ["re:.*down_proj$", "lm_head"])
    groups = config["config_groups"]
    for name, bits, target in (("a", 8, r"re:.*\.up_proj"), ("b", 2, "model.layers.1.mlp.up_proj")):
        weights = groups["group_0"]["weights"] | {"num_bits": bits}
        groups[name] = groups["group_0"] | {"targets": [target], "weights": weights}
    scheme_for = read_scheme({"quantization_config": config})
    bits = {
        name: scheme and scheme.bits
        for name in ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "layers.1.mlp.up_proj",
                     "layers.1.mlp.up_proj_2", "layers.1.mlp.down_proj")
        for scheme in [scheme_for(f"model.{name}")]
    }  # fmt: skip
    assert bits == {
        "layers.0.mlp.gate_proj": 4,
        "layers.0.mlp.up_proj": 8,
        "layers.1.mlp.up_proj": 2,
        "layers.1.mlp.up_proj_2": 8,  # an expression matches at the start, like the package's
        "layers.1.mlp.down_proj": None,
    }


@pytest.mark.parametrize(
    "config, message",
    [
        pytest.param(_config() | {"quant_method": "gptq"}, "quant_method 'gptq'", id="method"),
        pytest.param(_config() | {"format": "int-quantized"}, "'int-quantized'", id="format"),
        pytest.param(_config() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme", id="kv"),
        pytest.param(_config() | {"transform_config": {"a": 1}}, "transform_config", id="rotation"),
        pytest.param(_config() | {"ignore": ["re:("]}, r"bad expression 're:\('", id="expression"),
        pytest.param(_config() | {"config_groups": {"W4A16": ["Linear"]}}, "W4A16", id="preset"),
        pytest.param(_config(num_bits=5), "num_bits 5", id="bits"),
        pytest.param(_config(type="float"), "type 'float'", id="float"),
        pytest.param(_config(strategy="tensor", group_size=None), "strategy 'tensor'", id="tensor"),
        pytest.param(_config(strategy=None, group_size=None), "strategy 'tensor'", id="inferred"),
        pytest.param(_config(group_size=0), "group_size must be positive", id="group-size"),
        pytest.param(_config(dynamic=True), "dynamic True", id="dynamic"),
        pytest.param(_config(actorder="group"), "actorder 'group'", id="act-order"),
        pytest.param(_config(num_bits=3) | {"version": "0.16.1"}, "0.16.1", id="old-3bit"),
        pytest.param(_config(num_bits=3) | {"version": None}, "no version", id="unversioned-3bit"),
    ],
)
def test_read_scheme_rejects_what_it_does_not_read(config, message):
    with pytest.raises(ValueError, match=message):
        read_scheme({"quantization_config": config})


def test_read_scheme_rejects_quantized_activations():
    config = _config()
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(ValueError, match="input_activations are not supported"):
        read_scheme({"quantization_config": config})


def test_read_scheme_takes_old_versions_of_bits_that_divide_a_word():
    scheme_for = read_scheme({"quantization_config": _config() | {"version": "0.9.1"}})
    assert scheme_for("model.layers.0.mlp.up_proj") == WeightScheme()


@pytest.mark.parametrize(
    "change, message",
    [
        pytest.param({"weight_scale": None}, "missing weight_scale", id="no-scale"),
        pytest.param({"weight_zero_point": None}, "missing weight_zero_point", id="no-zero-point"),
        pytest.param({"weight_shape": torch.tensor([17, 48])}, "weight_packed must", id="shape"),
        pytest.param({"weight_shape": torch.tensor([17, 35])}, "does not divide", id="groups"),
        pytest.param({"weight_shape": torch.tensor([17.0, 36.0])}, "int64", id="float-shape"),
        pytest.param({"weight_packed": torch.zeros(17, 5)}, "torch.int32", id="packed-dtype"),
        pytest.param({"weight_scale": torch.ones(17, 3).long()}, "16 or 32 bit", id="scale-dtype"),
        pytest.param({"weight_scale": torch.ones(17, 1)}, r"\(17, 3\)", id="scale-shape"),
    ],
)
def test_unpack_linear_names_the_tensor_that_does_not_fit(change, message):
    scheme = WeightScheme(bits=4, group_size=12, symmetric=False)
    tensors = pack_linear(random_linear(scheme)) | change
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        unpack_linear(present, scheme)


def test_unpack_linear_rejects_a_zero_point_in_a_symmetric_linear():
    scheme = WeightScheme(bits=4, group_size=12)
    tensors = pack_linear(random_linear(scheme)) | {"weight_zero_point": torch.zeros(3, 3).int()}
    with pytest.raises(ValueError, match="weight_zero_point in a symmetric Linear"):
        unpack_linear(tensors, scheme)


def test_read_linear_reads_from_a_checkpoint_and_names_the_linear_in_errors(tmp_path):
    scheme = WeightScheme(bits=3, group_size=12, symmetric=False)
    linear = random_linear(scheme)
    tensors = {f"block.proj.{name}": tensor for name, tensor in pack_linear(linear).items()}
    write_safetensors(tmp_path / "model.safetensors", tensors | {"block.proj.bias": torch.ones(17)})
    write_json(tmp_path / "config.json", {})
    checkpoint = open_checkpoint(tmp_path)
    again = read_linear(checkpoint, "block.proj", scheme)
    assert torch.equal(dequantize(again), dequantize(linear))
    with pytest.raises(ValueError, match=r"block\.proj \(W4A16 g12 asym\): weight_packed must"):
        read_linear(checkpoint, "block.proj", WeightScheme(bits=4, group_size=12, symmetric=False))
    with pytest.raises(ValueError, match=r"block\.other .*: missing weight_shape"):
        read_linear(checkpoint, "block.other", scheme)
