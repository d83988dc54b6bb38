"""The config of compressed-tensors: written, read back, and what the package makes of it."""

import json
from dataclasses import replace
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig

from compress.export.ct_config import quantization_config, read_config, read_kv_cache
from compress.scheme import (
    PER_CHANNEL,
    ActivationScheme,
    KVCacheScheme,
    LinearScheme,
    WeightScheme,
)
from tests.export.samples import FP8, W8A8
from tests.export.test_compressed_tensors import SCHEMES

W4 = LinearScheme(weights=WeightScheme())
UP = "model.layers.0.mlp.up_proj"
BLOCK = [f"model.layers.{i}.mlp.{name}_proj" for i in range(2) for name in ("gate", "up", "down")]


def _written(scheme: LinearScheme, ignore: tuple[str, ...] = ("lm_head",)) -> dict[str, Any]:
    return quantization_config({UP: scheme}, ignore, None)


def test_quantization_config_is_the_short_form():
    assert json.dumps(_written(LinearScheme(weights=WeightScheme(group_size=128)))) == (
        '{"quant_method": "compressed-tensors", "version": "0.20.1", "format": "pack-quantized", '
        '"quantization_status": "compressed", "global_compression_ratio": null, '
        '"ignore": ["lm_head"], "kv_cache_scheme": null, "sparsity_config": {}, '
        '"transform_config": {}, "config_groups": {"group_0": {"targets": ["Linear"], '
        '"format": "pack-quantized", "weights": {"num_bits": 4, "type": "int", "symmetric": true, '
        '"strategy": "group", "group_size": 128, "dynamic": false}, "input_activations": null, '
        '"output_activations": null}}}'
    )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_read_config_returns_what_quantization_config_wrote(scheme):
    scheme_for = read_config(_written(scheme))
    assert scheme_for("model.layers.1.self_attn.q_proj") == scheme
    assert scheme_for("lm_head") is None
    assert scheme_for("model.embed_tokens") is None


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantization_config_is_parsed_by_the_package(scheme):
    config = QuantizationConfig(**_written(scheme))
    group = config.config_groups["group_0"]
    weights, inputs = group.weights, group.input_activations
    assert (weights.num_bits, weights.symmetric) == (scheme.weights.bits, scheme.weights.symmetric)
    assert (weights.type, weights.dynamic) == (scheme.weights.type, False)
    assert config.ignore == ["lm_head"]
    assert config.quantization_status == "compressed"
    if scheme.activations is None:
        assert inputs is None
    else:
        assert (inputs.num_bits, inputs.type) == (8, scheme.activations.type)
        assert inputs.dynamic is scheme.activations.dynamic
        assert inputs.group_size == scheme.activations.group_size


@pytest.mark.parametrize("scheme", SCHEMES)
def test_read_config_reads_what_the_package_serializes(scheme):
    config = QuantizationConfig(**_written(scheme)).model_dump()
    assert read_config({**config, "version": "0.20.1"})(UP) == scheme


def test_the_documented_variants():
    blocks = WeightScheme(type="float", bits=8, group_size=PER_CHANNEL, block_size=128)
    activations = ActivationScheme(type="float", group_size=128)
    group = _written(LinearScheme(weights=blocks, activations=activations))["config_groups"][
        "group_0"
    ]
    assert group["weights"]["strategy"] == "block"
    assert group["weights"]["block_structure"] == [128, 128]
    assert group["input_activations"]["strategy"] == "group"
    assert group["input_activations"]["group_size"] == 128
    static = _written(replace(FP8, activations=ActivationScheme(type="float", dynamic=False)))
    inputs = static["config_groups"]["group_0"]["input_activations"]
    assert (inputs["strategy"], inputs["dynamic"]) == ("tensor", False)
    token = _written(W8A8)["config_groups"]["group_0"]["input_activations"]
    assert (token["strategy"], token["dynamic"]) == ("token", True)
    assert [
        _written(scheme)["format"] for scheme in (W4, W8A8, FP8, replace(FP8, activations=None))
    ] == ["pack-quantized", "int-quantized", "float-quantized", "naive-quantized"]


def test_several_schemes_have_a_group_each_and_short_targets():
    down = {name: W8A8 for name in BLOCK if "down" in name}
    first = {"model.layers.0.mlp.up_proj": FP8, "model.layers.0.mlp.gate_proj": FP8}
    schemes = dict.fromkeys(BLOCK, W4) | down | first
    config = quantization_config(schemes, ["lm_head"], None)
    assert config["format"] == "mixed-precision"
    assert {g["format"]: g["targets"] for g in config["config_groups"].values()} == {
        "float-quantized": ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"],
        "int-quantized": [r"re:^model\.layers\.\d+\.mlp\.down_proj$"],
        "pack-quantized": ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"],
    }
    scheme_for = read_config(config)
    assert {name: scheme_for(name) for name in BLOCK} == schemes
    QuantizationConfig(**config)


def test_groups_of_one_format_keep_it_at_the_top():
    schemes = {BLOCK[0]: W4, BLOCK[1]: LinearScheme(weights=WeightScheme(bits=8))}
    assert quantization_config(schemes, [], None)["format"] == "pack-quantized"


def test_a_linear_whose_scheme_changes_between_blocks_is_named_block_by_block():
    ups = [f"model.layers.{block}.mlp.up_proj" for block in range(5)]
    eight = LinearScheme(weights=WeightScheme(bits=8))
    schemes = dict(zip(ups[:4], [W4, eight, W4, eight], strict=True))
    config = quantization_config(schemes, ["lm_head", ups[4]], None)
    assert [group["targets"] for group in config["config_groups"].values()] == [
        [ups[0], ups[2]],
        [ups[1], ups[3]],
    ]
    scheme_for = read_config(config)
    assert [scheme_for(name) for name in ups] == [*schemes.values(), None]


def test_ignore_outranks_an_expression_that_means_the_other_blocks():
    ups = [f"model.layers.{block}.mlp.up_proj" for block in range(3)]
    schemes = {ups[0]: W4, ups[1]: W4, "model.layers.0.mlp.down_proj": W8A8}
    config = quantization_config(schemes, ["lm_head", ups[2]], None)
    assert config["config_groups"]["group_0"]["targets"] == [
        r"re:^model\.layers\.\d+\.mlp\.up_proj$"
    ]
    scheme_for = read_config(config)
    assert [scheme_for(name) for name in ups] == [W4, W4, None]


def test_a_packed_embedding_is_a_target_by_name_beside_the_class():
    config = quantization_config({UP: W4, "model.embed_tokens": W4}, ["lm_head"], None)
    assert config["config_groups"]["group_0"]["targets"] == ["Linear", "model.embed_tokens"]
    scheme_for = read_config(config)
    assert scheme_for("model.embed_tokens") == scheme_for(UP) == W4
    assert scheme_for("lm_head") is None


@pytest.mark.parametrize("strategy, stored", [("tensor", "tensor"), ("head", "attn_head")])
def test_kv_cache_scheme_round_trips_and_is_parsed_by_the_package(strategy, stored):
    kv_cache = KVCacheScheme(strategy=strategy)
    config = quantization_config({UP: W4}, [], kv_cache)
    assert config["kv_cache_scheme"]["strategy"] == stored
    assert read_kv_cache(config) == kv_cache
    parsed = QuantizationConfig(**config)
    assert read_kv_cache(parsed.model_dump()) == kv_cache
    assert read_kv_cache(_written(W4)) is None


def _config(**weights: Any) -> dict[str, Any]:
    config = _written(W4)
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


def _group(**entries: Any) -> dict[str, Any]:
    config = _written(W8A8)
    config["config_groups"]["group_0"] |= entries
    return config


def _inputs(**entries: Any) -> dict[str, Any]:
    config = _written(W8A8)
    config["config_groups"]["group_0"]["input_activations"] |= entries
    return config


def _kv(**entries: Any) -> dict[str, Any]:
    config = quantization_config({UP: W4}, [], KVCacheScheme())
    config["kv_cache_scheme"] |= entries
    return config


def test_read_config_prefers_names_to_expressions_to_classes():
    config = _written(W4, ("re:.*down_proj$", "lm_head"))
    groups = config["config_groups"]
    for name, bits, target in (("a", 8, r"re:.*\.up_proj"), ("b", 2, "model.layers.1.mlp.up_proj")):
        weights = groups["group_0"]["weights"] | {"num_bits": bits}
        groups[name] = groups["group_0"] | {"targets": [target], "weights": weights}
    scheme_for = read_config(config)
    bits = {
        name: scheme and scheme.weights.bits
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
        pytest.param(_config() | {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack", id="format"),
        pytest.param(_config() | {"transform_config": {"a": 1}}, "transform_config", id="rotation"),
        pytest.param(_config() | {"surprise": 1}, "unknown key 'surprise'", id="top-key"),
        pytest.param(_config() | {"ignore": ["re:("]}, r"bad expression 're:\('", id="expression"),
        pytest.param(_config() | {"config_groups": {"W4A16": ["Linear"]}}, "W4A16", id="preset"),
        pytest.param(_config(num_bits=1), "num_bits 1", id="bits"),
        pytest.param(_config(type="float"), "bits 8", id="float4"),
        pytest.param(_config(strategy="tensor", group_size=None), "strategy 'tensor'", id="tensor"),
        pytest.param(_config(strategy=None, group_size=None), "strategy 'tensor'", id="inferred"),
        pytest.param(_config(strategy="block", group_size=None), "block_structure", id="blocks"),
        pytest.param(_config(block_structure=[1, 2]), "block_structure", id="no-blocks"),
        pytest.param(_config(group_size=0), "group_size must be positive", id="group-size"),
        pytest.param(_config(dynamic=True), "dynamic True", id="dynamic"),
        pytest.param(_config(actorder="group"), "actorder 'group'", id="act-order"),
        pytest.param(_config(surprise=1), "unknown key 'surprise'", id="weights-key"),
        pytest.param(_config(num_bits=3) | {"version": "0.16.1"}, "0.16.1", id="old-3bit"),
        pytest.param(_config(num_bits=3) | {"version": None}, "no version", id="unversioned-3bit"),
        pytest.param(_group(output_activations={"num_bits": 8}), "output_activations", id="out"),
        pytest.param(_group(surprise=1), "unknown key 'surprise'", id="group-key"),
        pytest.param(_group(format="pack-quantized"), "in format 'pack-quantized'", id="packed-a8"),
        pytest.param(_group(input_activations=None), "in format 'int-quantized'", id="int8-a16"),
        pytest.param(_inputs(symmetric=False), "input_activations.symmetric False", id="asym-in"),
        pytest.param(_inputs(num_bits=4), "input_activations.num_bits 4", id="a4"),
        pytest.param(_inputs(dynamic=False), "static input_activations", id="static-token"),
        pytest.param(_inputs(strategy="tensor"), "dynamic input_activations", id="dynamic-tensor"),
        pytest.param(_inputs(surprise=1), "unknown key 'surprise'", id="inputs-key"),
        pytest.param(_kv(num_bits=4), "kv_cache_scheme.num_bits 4", id="kv-bits"),
        pytest.param(_kv(type="int"), "kv_cache_scheme.type 'int'", id="kv-int"),
        pytest.param(_kv(dynamic=True), "kv_cache_scheme.dynamic True", id="kv-dynamic"),
        pytest.param(_kv(strategy="token"), "kv_cache_scheme.strategy 'token'", id="kv-token"),
    ],
)  # fmt: skip
def test_read_config_rejects_what_it_does_not_read(config, message):
    with pytest.raises(ValueError, match=message):
        read_config(config)


def test_read_config_takes_old_versions_of_bits_that_divide_a_word():
    assert read_config(_config() | {"version": "0.9.1"})(UP) == W4


def test_read_config_takes_what_leaves_no_trace_in_the_tensors():
    extra = {"actorder": "static", "observer": "mse", "observer_kwargs": {"p": 2},
             "scale_dtype": None, "zp_dtype": "torch.int8"}  # fmt: skip
    config = _config(**extra) | {"run_compressed": True, "moe_sparsity_config": None}
    assert read_config(config)(UP) == W4
    blocks = WeightScheme(type="float", bits=8, group_size=PER_CHANNEL, block_size=128)
    old = _written(LinearScheme(weights=blocks))
    old["config_groups"]["group_0"]["weights"]["block_structure"] = "128x128"
    assert read_config(old)(UP) == LinearScheme(weights=blocks)
