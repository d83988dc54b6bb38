"""AWQ GEMM: the documented word, round trips, an independent decoder, config and refusals."""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

from compress.artifacts import QuantizedLinear
from compress.export.awq import layout, pack, read_config, refusal, unpack
from compress.export.formats import FORMATS
from compress.scheme import (
    PER_CHANNEL,
    ActivationScheme,
    KVCacheScheme,
    LinearScheme,
    WeightScheme,
    dequantize,
)
from tests.export.samples import random_linear

SHAPE = (40, 96)
SCHEMES = [
    pytest.param(
        LinearScheme(weights=WeightScheme(group_size=group, symmetric=symmetric)),
        id=f"{name}-{'sym' if symmetric else 'asym'}",
    )
    for group, name in ((32, "g32"), (12, "g12"), (PER_CHANNEL, "channel"))
    for symmetric in (True, False)
]
UP = "model.layers.0.mlp.up_proj"
W4 = LinearScheme(weights=WeightScheme(group_size=32))
ASYM = LinearScheme(weights=WeightScheme(group_size=32, symmetric=False))


def _linear(scheme: LinearScheme) -> QuantizedLinear:
    return random_linear(scheme, SHAPE, dtype=torch.float16)


def test_qweight_holds_the_documented_word():
    unsigned = torch.tensor([0, 1, 2, 3, 8, 9, 14, 15], dtype=torch.int8)
    linear = QuantizedLinear(
        codes=(unsigned - 8)[:, None].repeat(1, 32),
        scale=torch.ones(8, 1, dtype=torch.float16),
        zero_point=None,
        bits=4,
    )
    words = pack(linear, W4)["qweight"]
    assert words.shape == (32, 1)
    assert {int(word) & 0xFFFFFFFF for word in words} == {0xF931E820}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pack_round_trips_through_unpack(scheme):
    linear = _linear(scheme)
    tensors = pack(linear, scheme)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == layout(*SHAPE, scheme)
    again = unpack(tensors, scheme)
    assert torch.equal(again.codes, linear.codes)
    assert torch.equal(again.scale, linear.scale)
    assert (again.zero_point is None) is scheme.weights.symmetric
    assert torch.equal(dequantize(again), dequantize(linear))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_converter_of_compressed_tensors_decodes_what_we_pack(scheme):
    linear = _linear(scheme)
    config = FORMATS["awq"].config({UP: scheme}, ["lm_head"], None)
    if scheme.weights.group_size == PER_CHANNEL:  # which the converter does not know
        config["group_size"] = SHAPE[1]
    converter = AutoAWQConverter.from_autoawq_config(config)
    tensors = {f"{UP}.{local}": tensor for local, tensor in pack(linear, scheme).items()}
    converted = {
        name.rpartition(".")[2]: tensor for name, tensor in converter.process(tensors).items()
    }
    weights = converter.update_config(None).config_groups["config_group_0"]
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    decoded = compressor.decompress(converted, weights)["weight"]
    assert torch.equal(decoded, dequantize(linear, torch.float16))


def test_a_symmetric_linear_has_the_true_zero_point_everywhere():
    tensors = pack(_linear(W4), W4)
    assert {int(word) & 0xFFFFFFFF for word in tensors["qzeros"].flatten()} == {0x88888888}
    assert not unpack(tensors, ASYM).zero_point.any()
    tensors["qzeros"][0, 0] = 0
    with pytest.raises(ValueError, match="symmetric Linear must all be 8"):
        unpack(tensors, W4)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"qweight": None}, "missing qweight"),
        ({"qzeros": None}, "missing qzeros"),
        ({"scales": torch.ones(40, 3).half()}, r"scales must have shape \(3, 40\)"),
        ({"qweight": torch.zeros(96, 5)}, "qweight must be int32"),
    ],
)
def test_unpack_names_the_tensor_that_does_not_fit(change, message):
    tensors = pack(_linear(ASYM), ASYM) | change
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        unpack(present, ASYM)


@pytest.mark.parametrize(
    "scheme, shape, message",
    [
        (LinearScheme(weights=WeightScheme(bits=8, group_size=32)), SHAPE, "4-bit"),
        (W4, (36, 96), "multiple of 8 outputs, got 36"),
        (LinearScheme(weights=WeightScheme(group_size=64)), SHAPE, "does not divide"),
        (LinearScheme(weights=W4.weights, activations=ActivationScheme()), SHAPE, "activations"),
    ],
)
def test_refusal_says_why(scheme, shape, message):
    assert message in refusal(scheme, shape)
    with pytest.raises(ValueError, match=message):
        layout(*shape, scheme)


def test_config_is_the_documented_one_and_reads_back_asymmetric():
    config = FORMATS["awq"].config({UP: W4}, ["lm_head", "model.layers.1.mlp.up_proj"], None)
    assert config == {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.up_proj"],
    }  # fmt: skip
    scheme_for = read_config(config)
    assert scheme_for(UP) == ASYM
    assert scheme_for("model.layers.11.mlp.up_proj") == ASYM
    assert scheme_for("model.layers.1.mlp.up_proj") is None
    assert scheme_for("lm_head") is scheme_for("model.embed_tokens") is None


def test_transformers_parses_the_config():
    from transformers import AwqConfig

    parsed = AwqConfig.from_dict(FORMATS["awq"].config({UP: W4}, ["lm_head"], None))
    assert (parsed.bits, parsed.group_size, parsed.zero_point) == (4, 32, True)


def test_read_config_knows_the_aliases_of_older_files():
    scheme_for = read_config(
        {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}
    )
    assert scheme_for(UP).weights == WeightScheme(group_size=128, symmetric=False)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"bits": 8}, "bits 8"),
        ({"version": "gemv"}, "version 'gemv'"),
        ({"zero_point": False}, "zero_point False"),
        ({"surprise": 1}, "unknown key 'surprise'"),
    ],
)
def test_read_config_rejects_what_it_does_not_read(change, message):
    with pytest.raises(ValueError, match=message):
        read_config(FORMATS["awq"].config({UP: W4}, [], None) | change)


def test_read_config_needs_the_group_size():
    with pytest.raises(ValueError, match="needs group_size"):
        read_config({"bits": 4, "zero_point": True})


def test_config_refuses_what_awq_cannot_say():
    config = FORMATS["awq"].config
    eight = LinearScheme(weights=WeightScheme(bits=8, group_size=32))
    wide = LinearScheme(weights=WeightScheme(group_size=64))
    for schemes, ignore, kv_cache, message in (
        ({UP: W4}, [], KVCacheScheme(), "KV cache"),
        ({UP: W4, "x": eight}, [], None, "one 4-bit scheme"),
        ({UP: W4, "x": wide}, [], None, "one 4-bit scheme"),
        ({}, [], None, "got none"),
        ({UP: W4, "lm_head": W4}, [], None, "neither embedding nor head"),
        ({UP: W4}, ["mlp"], None, "part of its name"),
    ):
        with pytest.raises(ValueError, match=message):
            config(schemes, ignore, kv_cache)
