"""GPTQ, both versions: documented words, round trips, config, and what is refused."""

import re

import pytest
import torch

from compress.artifacts import QuantizedLinear
from compress.export.formats import FORMATS, pack_linear, read_scheme
from compress.export.gptq import layout, pack_v1, pack_v2, unpack_v1, unpack_v2
from compress.export.gptq_config import read_config
from compress.scheme import (
    PER_CHANNEL,
    ActivationScheme,
    KVCacheScheme,
    LinearScheme,
    WeightScheme,
    dequantize,
)
from tests.export.samples import random_linear

SHAPE = (64, 96)
SYMMETRIC = [
    pytest.param(LinearScheme(weights=WeightScheme(bits=bits, group_size=group)), id=label)
    for bits in (2, 3, 4, 8)
    for group, name in ((32, "g32"), (12, "g12"), (PER_CHANNEL, "channel"))
    for label in [f"w{bits}-{name}"]
]
ASYMMETRIC = [
    pytest.param(
        LinearScheme(weights=WeightScheme(bits=bits, group_size=32, symmetric=False)),
        id=f"w{bits}-asym",
    )
    for bits in (2, 3, 4, 8)
]


def _linear(scheme: LinearScheme, shape: tuple[int, int] = SHAPE) -> QuantizedLinear:
    return random_linear(scheme, shape, dtype=torch.float16)


def _u32(words: torch.Tensor) -> list[int]:
    return [int(word) & 0xFFFFFFFF for word in words.flatten()]


def _column(codes: list[int], bits: int) -> QuantizedLinear:
    """A Linear of 32 equal rows with the unsigned `codes`, one group."""
    signed = torch.tensor(codes, dtype=torch.int8) - (1 << (bits - 1))
    scale = torch.ones(32, 1, dtype=torch.float16)
    return QuantizedLinear(codes=signed.repeat(32, 1), scale=scale, zero_point=None, bits=bits)


def test_qweight_holds_the_documented_words():
    four = LinearScheme(weights=WeightScheme(bits=4, group_size=PER_CHANNEL))
    words = pack_v1(_column([0, 1, 2, 3, 8, 9, 14, 15] * 4, 4), four)["qweight"]
    assert words.shape == (4, 32)
    assert set(_u32(words)) == {0xFE983210}
    three = LinearScheme(weights=WeightScheme(bits=3, group_size=PER_CHANNEL))
    words = pack_v1(_column([i % 8 for i in range(32)], 3), three)["qweight"]
    assert _u32(words[:, 7]) == [0x88FAC688, 0xC688FAC6, 0xFAC688FA]


@pytest.mark.parametrize(
    "bits, first, second",
    [(4, 0x77777777, 0x88888888), (8, 0x7F7F7F7F, 0x80808080), (2, 0x55555555, 0xAAAAAAAA)],
)
def test_qzeros_of_a_symmetric_linear_are_the_documented_words(bits, first, second):
    scheme = LinearScheme(weights=WeightScheme(bits=bits, group_size=32))
    linear = _linear(scheme)
    assert set(_u32(pack_v1(linear, scheme)["qzeros"])) == {first}
    assert set(_u32(pack_v2(linear, scheme)["qzeros"])) == {second}


def test_unpack_by_the_textbook():
    """W = (q - zero) * scale from words taken apart bit by bit, not by the packer's own code."""
    scheme = LinearScheme(weights=WeightScheme(bits=3, group_size=32, symmetric=False))
    linear = _linear(scheme)
    tensors = pack_v2(linear, scheme)

    def stream(words: torch.Tensor, count: int) -> list[int]:
        bits = "".join(f"{word:032b}"[::-1] for word in _u32(words))
        return [int(bits[3 * i : 3 * i + 3][::-1], 2) for i in range(count)]

    for o, i in ((0, 0), (5, 10), (63, 95), (17, 42)):
        group = int(tensors["g_idx"][i])
        code = stream(tensors["qweight"][:, o], 96)[i]
        zero = stream(tensors["qzeros"][group], 64)[o]
        value = (code - zero) * float(tensors["scales"][group, o])
        assert value == pytest.approx(float(dequantize(linear)[o, i]), abs=1e-6)


@pytest.mark.parametrize("scheme", SYMMETRIC)
@pytest.mark.parametrize("pack, unpack", [(pack_v1, unpack_v1), (pack_v2, unpack_v2)])
def test_symmetric_linears_round_trip_in_both_versions(scheme, pack, unpack):
    _check_round_trip(scheme, pack, unpack)


@pytest.mark.parametrize("scheme", ASYMMETRIC)
def test_asymmetric_linears_round_trip_in_version_2(scheme):
    _check_round_trip(scheme, pack_v2, unpack_v2)


def _check_round_trip(scheme, pack, unpack):
    linear = _linear(scheme)
    tensors = pack(linear, scheme)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == layout(*SHAPE, scheme)
    assert tensors["scales"].dtype == torch.float16
    again = unpack(tensors, scheme)
    assert torch.equal(again.codes, linear.codes)
    assert torch.equal(again.scale, linear.scale)
    assert (again.zero_point is None) is scheme.weights.symmetric
    if linear.zero_point is not None:
        assert torch.equal(again.zero_point, linear.zero_point)
    assert again.group_size == linear.group_size


def test_negative_scales_round_trip():
    scheme = LinearScheme(weights=WeightScheme(group_size=32))
    linear = _linear(scheme)
    negative = QuantizedLinear(codes=linear.codes, scale=-linear.scale, zero_point=None, bits=4)
    assert torch.equal(unpack_v1(pack_v1(negative, scheme), scheme).scale, negative.scale)


@pytest.mark.parametrize(
    "scale, message",
    [
        (1e-9, "scale 1e-09 of row 3, group 1 underflows float16"),
        (1e5, "scale 100000 of row 3, group 1 overflows float16"),
        (0.1, "scale 0.1 of row 3, group 1 is not exact in float16"),
        (float("nan"), "scale nan of row 3, group 1 is not exact in float16"),
        (0.0, "underflows float16"),
    ],
)
@pytest.mark.parametrize("format_name", ["gptq", "gptq_v2", "awq"])
def test_a_scale_that_float16_cannot_hold_is_an_error_that_names_the_linear(
    format_name, scale, message
):
    scheme = LinearScheme(weights=WeightScheme(group_size=32))
    scales = torch.full((64, 3), 0.125)
    scales[3, 1] = scale
    linear = QuantizedLinear(
        codes=torch.zeros(64, 96, dtype=torch.int8), scale=scales, zero_point=None, bits=4
    )
    with pytest.raises(ValueError, match=re.escape("a.proj") + f".*{re.escape(message)}"):
        pack_linear("a.proj", linear, scheme, FORMATS[format_name])


def test_a_scale_that_an_earlier_cast_made_infinite_is_an_error():
    scheme = LinearScheme(weights=WeightScheme(group_size=32))
    linear = QuantizedLinear(
        codes=torch.zeros(64, 96, dtype=torch.int8),
        scale=torch.full((64, 3), float("inf"), dtype=torch.float16),
        zero_point=None,
        bits=4,
    )
    with pytest.raises(ValueError, match="overflows float16"):
        pack_v1(linear, scheme)


@pytest.mark.parametrize(
    "change, message",
    [
        pytest.param({"qweight": None}, "missing qweight", id="no-codes"),
        pytest.param({"g_idx": None}, "missing g_idx", id="no-index"),
        pytest.param({"qzeros": torch.full((3, 8), 0x11111111).int()}, "hold 1, .* has 7", id="v?"),
        pytest.param({"scales": torch.ones(64, 3).half()}, r"must have shape \(3, 64\)", id="axis"),
        pytest.param({"g_idx": torch.arange(96).int().flip(0) // 32}, "desc_act", id="act-order"),
    ],
)
def test_unpack_names_the_tensor_that_does_not_fit(change, message):
    scheme = LinearScheme(weights=WeightScheme(group_size=32))
    tensors = pack_v1(_linear(scheme), scheme) | change
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        unpack_v1(present, scheme)


def test_one_version_read_as_the_other_is_an_error():
    scheme = LinearScheme(weights=WeightScheme(group_size=32))
    with pytest.raises(ValueError, match=r"hold 8, .* version 1 has 7 \(is checkpoint_format"):
        unpack_v1(pack_v2(_linear(scheme), scheme), scheme)


def test_version_1_reads_asymmetric_zero_points_but_the_ambiguous_one():
    scheme = LinearScheme(weights=WeightScheme(group_size=32, symmetric=False))
    linear = _linear(scheme)
    tensors = pack_v2(linear, scheme)
    minus_one = tensors | {"qzeros": tensors["qzeros"] - 0x11111111}  # no borrow: zeros are 1..15
    assert int((linear.zero_point + 8).min()) >= 1
    assert torch.equal(unpack_v1(minus_one, scheme).zero_point, linear.zero_point)
    with pytest.raises(ValueError, match="version 1 cannot express"):
        unpack_v1(tensors | {"qzeros": torch.full((3, 8), -1).int()}, scheme)


@pytest.mark.parametrize(
    "scheme, shape, message",
    [
        (LinearScheme(weights=WeightScheme(bits=5, group_size=32)), SHAPE, "not 5"),
        (LinearScheme(weights=WeightScheme(group_size=32)), (33, 96), "multiples of 32"),
        (LinearScheme(weights=WeightScheme(group_size=16)), (32, 80), "multiples of 32"),
        (LinearScheme(weights=WeightScheme(group_size=64)), SHAPE, "does not divide"),
        (LinearScheme(weights=WeightScheme(group_size=32), activations=ActivationScheme()), SHAPE,
         "activations"),
        (LinearScheme(weights=WeightScheme(type="float", bits=8, group_size=-1)), SHAPE, "integer"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("format_name", ["gptq", "gptq_v2"])
def test_refusal_says_why(format_name, scheme, shape, message):
    assert message in FORMATS[format_name].refusal(scheme, shape)


def test_only_version_1_refuses_zero_points():
    scheme = LinearScheme(weights=WeightScheme(group_size=32, symmetric=False))
    assert "gptq_v2 can" in FORMATS["gptq"].refusal(scheme, SHAPE)
    assert FORMATS["gptq_v2"].refusal(scheme, SHAPE) is None


LOCAL = ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
BLOCK = [f"model.layers.{i}.{name}" for i in range(3) for name in LOCAL]
W4, W8 = (LinearScheme(weights=WeightScheme(bits=bits, group_size=32)) for bits in (4, 8))


def _dynamic_get(dynamic: dict, name: str):
    """The documented rule: False if the first match is negative, its keys if it is positive."""
    for pattern, keys in dynamic.items():
        if pattern.startswith("-:"):
            if re.match(pattern.removeprefix("-:"), name):
                return False
        elif re.match(pattern.removeprefix("+:"), name):
            return keys
    return None


@pytest.mark.parametrize("format_name", ["gptq", "gptq_v2"])
def test_config_is_the_portable_one(format_name):
    config = FORMATS[format_name].config(dict.fromkeys(BLOCK, W4), ["lm_head"], None)
    assert config.pop("meta")["quantizer"][0].startswith("compress:")
    assert config == {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False,
        "lm_head": False, "checkpoint_format": format_name, "pack_dtype": "int32",
    }  # fmt: skip


def test_transformers_parses_the_config():
    from transformers import GPTQConfig

    config = FORMATS["gptq_v2"].config(dict.fromkeys(BLOCK, W4), ["lm_head"], None)
    parsed = GPTQConfig.from_dict(config)
    assert (parsed.bits, parsed.group_size, parsed.sym) == (4, 32, True)
    assert parsed.format == "gptq_v2"


def test_mixed_bits_and_float_linears_are_exceptions_that_follow_the_documented_rule():
    schemes = {name: W8 if "down" in name else W4 for name in BLOCK}
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        del schemes[f"model.layers.1.{name}"]
    ignore = ["lm_head", "model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]
    config = FORMATS["gptq"].config(schemes, ignore, None)
    scheme_for = read_config(config)
    assert {name: scheme_for(name) for name in BLOCK} == {n: schemes.get(n) for n in BLOCK}
    found = {name: _dynamic_get(config["dynamic"], name) for name in BLOCK}
    for name, keys in found.items():
        expected = False if name in ignore else {"bits": 8} if "down" in name else None
        assert keys == expected, name
    # engines ask for the stacked matrix
    assert _dynamic_get(config["dynamic"], "model.layers.1.mlp.gate_up_proj") is False
    assert _dynamic_get(config["dynamic"], "model.layers.2.mlp.gate_up_proj") is None


def test_a_packed_head_is_announced():
    config = FORMATS["gptq"].config({BLOCK[0]: W4, "lm_head": W8}, [], None)
    assert config["lm_head"] is True
    assert read_config(config)("lm_head") == W8
    assert read_config(config | {"lm_head": False})("lm_head") is None
    assert read_config(config)("model.embed_tokens") is None


def test_other_programs_lists_of_modules_and_legacy_keys_are_read():
    config = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True,
        "damp_percent": 0.01, "static_groups": False, "model_file_base_name": "model",
        "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]],
    }  # fmt: skip
    scheme_for = read_scheme({"quantization_config": config})
    assert [scheme_for(name) for name in BLOCK[:4]] == [W4, None, W4, None]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"bits": 5}, "bits 5"),
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"pack_dtype": "int16"}, "pack_dtype"),
        ({"is_marlin_format": True}, "is_marlin_format"),
        ({"checkpoint_format": "marlin"}, "'marlin'"),
        ({"dynamic": {"+:x": {"surprise": 1}}}, "unknown key 'surprise'"),
        ({"dynamic": {"+:x": {"bits": 7}}}, "bits 7"),
        ({"dynamic": {"-:(": {}}}, "bad expression"),
        ({"sym": None}, "sym None"),
    ],
)
def test_what_is_not_read_is_an_error(change, message):
    config = FORMATS["gptq"].config(dict.fromkeys(BLOCK, W4), ["lm_head"], None) | change
    with pytest.raises(ValueError, match=message):
        read_scheme({"quantization_config": config})


def test_config_refuses_what_gptq_has_no_place_for():
    config = FORMATS["gptq"].config
    with pytest.raises(ValueError, match="KV cache"):
        config({BLOCK[0]: W4}, [], KVCacheScheme())
    with pytest.raises(ValueError, match="embedding"):
        config({"model.embed_tokens": W4}, [], None)
    with pytest.raises(ValueError, match="nothing"):
        config({}, [], None)
