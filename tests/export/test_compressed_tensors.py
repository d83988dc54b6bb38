"""The tensors of compressed-tensors: round trips, and what the package makes of them and back."""

from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig

from compress.export.compressed_tensors import layout, pack, refusal, storage_of, unpack
from compress.export.ct_config import quantization_config
from compress.export.formats import FORMATS, pack_linear, read_linear
from compress.export.writer import write_json, write_safetensors
from compress.models.checkpoint import open_checkpoint
from compress.scheme import (
    PER_CHANNEL,
    ActivationScheme,
    LinearScheme,
    WeightScheme,
    dequantize,
)
from tests.export.samples import FP8, W8A8, random_linear

STATIC = ActivationScheme(dynamic=False)
FP8_WEIGHTS = WeightScheme(type="float", bits=8, group_size=PER_CHANNEL)
FP8_BLOCKS = WeightScheme(type="float", bits=8, group_size=PER_CHANNEL, block_size=12)
PACKED = [
    pytest.param(
        LinearScheme(weights=WeightScheme(bits=bits, group_size=group, symmetric=symmetric)),
        id=label,
    )
    for bits in (2, 3, 4, 5, 6, 7, 8)
    for group, group_label in ((12, "g12"), (PER_CHANNEL, "channel"))
    for symmetric, sym_label in ((True, "sym"), (False, "asym"))
    for label in [f"w{bits}-{group_label}-{sym_label}"]
]
SCHEMES = [
    *PACKED,
    pytest.param(W8A8, id="w8a8-token"),
    pytest.param(replace(W8A8, activations=STATIC), id="w8a8-static"),
    pytest.param(
        LinearScheme(
            weights=WeightScheme(bits=8, symmetric=False, group_size=PER_CHANNEL),
            activations=ActivationScheme(),
        ),
        id="w8a8-asym",
    ),
    pytest.param(
        LinearScheme(weights=WeightScheme(bits=4, group_size=12), activations=ActivationScheme()),
        id="w4a8-g12",
    ),
    pytest.param(FP8, id="fp8-token"),
    pytest.param(
        replace(FP8, activations=ActivationScheme(type="float", dynamic=False)), id="fp8-static"
    ),
    pytest.param(LinearScheme(weights=FP8_WEIGHTS), id="fp8-weights"),
    pytest.param(
        LinearScheme(weights=FP8_BLOCKS, activations=ActivationScheme(type="float", group_size=12)),
        id="fp8-blocks",
    ),
    pytest.param(LinearScheme(weights=FP8_BLOCKS), id="fp8-block-weights"),
]
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


@DTYPES
@pytest.mark.parametrize("scheme", SCHEMES)
def test_pack_round_trips_through_unpack(scheme, dtype):
    linear = random_linear(scheme, dtype=dtype)
    tensors = pack(linear, scheme)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == layout(17, 36, scheme)
    again = unpack(tensors, scheme)
    assert torch.equal(again.codes.float(), linear.codes.float())
    assert again.codes.dtype == linear.codes.dtype
    assert torch.equal(again.scale, linear.scale) and again.scale.dtype == dtype
    if not scheme.weights.symmetric:
        assert torch.equal(again.zero_point, linear.zero_point)
    assert (again.bits, again.group_size) == (linear.bits, linear.group_size)
    assert again.input_scale == linear.input_scale


def _package(scheme):
    """(compressor class, scheme) of the package for what our config says."""
    config = QuantizationConfig(**quantization_config({"a.proj": scheme}, ["lm_head"], None))
    group = config.config_groups["group_0"]
    return BaseCompressor.get_value_from_registry(group.format), group


@DTYPES
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_we_pack_is_what_the_package_decompresses(scheme, dtype):
    linear = random_linear(scheme, dtype=dtype)
    compressor, group = _package(scheme)
    state = compressor.decompress(pack(linear, scheme), group)
    assert torch.equal(state["weight"], dequantize(linear, dtype))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_the_package_compresses_is_what_we_unpack(scheme):
    """The dequantized weight is on the grid: its own rounding gives the codes back."""
    linear = random_linear(scheme)
    compressor, group = _package(scheme)
    state = {"weight": dequantize(linear), "weight_scale": linear.scale}
    if linear.zero_point is not None:
        state["weight_zero_point"] = linear.zero_point
    tensors = dict(compressor.compress(state, group))
    if linear.input_scale is not None:
        tensors["input_scale"] = linear.input_scale
    again = unpack(tensors, scheme)
    assert torch.equal(again.codes.float(), linear.codes.float())
    assert torch.equal(dequantize(again), dequantize(linear))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_storage_is_the_format_that_the_package_infers(scheme):
    from compressed_tensors.compressors.format import infer_module_format

    _, group = _package(scheme)
    assert infer_module_format(torch.nn.Linear, group).value == storage_of(scheme)


def test_layout_of_the_documented_examples():
    def packed(**weights):
        return layout(64, 256, LinearScheme(weights=WeightScheme(**weights)))

    assert packed(bits=4, group_size=128, symmetric=False) == {
        "weight_packed": (64, 32),
        "weight_scale": (64, 2),
        "weight_shape": (2,),
        "weight_zero_point": (8, 2),
    }
    assert packed(bits=3)["weight_packed"] == (64, 24)
    assert packed(bits=8)["weight_packed"] == (64, 64)
    blocks = replace(FP8_BLOCKS, block_size=128)
    assert layout(200, 300, LinearScheme(weights=blocks)) == {
        "weight": (200, 300),
        "weight_scale": (2, 3),
    }


@pytest.mark.parametrize(
    "weights, activations, reason",
    [
        pytest.param(WeightScheme(), ActivationScheme(type="float"), "int weights with float",
                     id="w4afp8"),
        pytest.param(FP8_WEIGHTS, ActivationScheme(), "float weights with int", id="wfp8a8"),
        pytest.param(WeightScheme(group_size=64), None, "does not divide", id="groups"),
        pytest.param(FP8_BLOCKS, ActivationScheme(type="float", group_size=64),
                     "activations.group_size 64", id="activation-groups"),
    ],
)  # fmt: skip
def test_refusal_says_why(weights, activations, reason):
    scheme = LinearScheme(weights=weights, activations=activations)
    assert reason in refusal(scheme, (64, 96))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_refusal_is_none_for_what_can_be_packed(scheme):
    assert refusal(scheme, (17, 36)) is None


@pytest.mark.parametrize(
    "change, message",
    [
        pytest.param({"weight_scale": None}, "missing weight_scale", id="no-scale"),
        pytest.param({"weight_zero_point": None}, "missing weight_zero_point", id="no-zero-point"),
        pytest.param({"weight_shape": torch.tensor([17, 48])}, "weight_packed must", id="shape"),
        pytest.param({"weight_shape": torch.tensor([17, 35])}, "does not divide", id="groups"),
        pytest.param({"weight_shape": torch.tensor([17.0, 36.0])}, "int64", id="float-shape"),
        pytest.param({"weight_packed": torch.zeros(17, 5)}, "must be int32", id="packed-dtype"),
        pytest.param(
            {"weight_scale": torch.ones(17, 3).long()},
            "must be float32 or float16",
            id="scale-dtype",
        ),
        pytest.param({"weight_scale": torch.ones(17, 1)}, r"\(17, 3\)", id="scale-shape"),
    ],
)
def test_unpack_names_the_tensor_that_does_not_fit(change, message):
    scheme = LinearScheme(weights=WeightScheme(group_size=12, symmetric=False))
    tensors = pack(random_linear(scheme), scheme) | change
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        unpack(present, scheme)


def test_unpack_rejects_a_zero_point_in_a_symmetric_linear():
    scheme = LinearScheme(weights=WeightScheme(group_size=12))
    tensors = pack(random_linear(scheme), scheme) | {"weight_zero_point": torch.zeros(3, 3).int()}
    with pytest.raises(ValueError, match="weight_zero_point in a symmetric Linear"):
        unpack(tensors, scheme)


def test_read_linear_reads_from_a_checkpoint_and_names_the_linear_in_errors(tmp_path):
    ct = FORMATS["compressed-tensors"]
    scheme = LinearScheme(weights=WeightScheme(bits=3, group_size=12, symmetric=False))
    linear = random_linear(scheme)
    tensors = pack_linear("block.proj", linear, scheme, ct)
    write_safetensors(tmp_path / "model.safetensors", tensors | {"block.proj.bias": torch.ones(17)})
    config = ct.config({"block.proj": scheme}, [], None)
    write_json(tmp_path / "config.json", {"quantization_config": config})
    checkpoint = open_checkpoint(tmp_path)
    again = read_linear(checkpoint, "block.proj", scheme)
    assert torch.equal(dequantize(again), dequantize(linear))
    other = LinearScheme(weights=WeightScheme(bits=4, group_size=12, symmetric=False))
    with pytest.raises(ValueError, match=r"block\.proj \(W4A16 g12 asym\): weight_packed must"):
        read_linear(checkpoint, "block.proj", other)
    with pytest.raises(ValueError, match=r"block\.other .*: missing weight_shape"):
        read_linear(checkpoint, "block.other", scheme)


@pytest.mark.parametrize(
    "change, message",
    [
        pytest.param({"weight": torch.zeros(17, 36)}, "weight must be int8", id="float-weight"),
        pytest.param({"weight": torch.zeros(17, dtype=torch.int8)}, "two dimensions", id="vector"),
        pytest.param({"input_scale": torch.ones(2)}, "input_scale must have shape", id="inputs"),
        pytest.param({"weight_zero_point": torch.zeros(17, 1).char()}, "in a symmetric", id="zero"),
    ],
)
def test_unpack_of_int8_names_the_tensor_that_does_not_fit(change, message):
    scheme = replace(W8A8, activations=STATIC)
    with pytest.raises(ValueError, match=message):
        unpack(pack(random_linear(scheme), scheme) | change, scheme)


def test_pack_refuses_a_linear_of_another_kind():
    scheme = LinearScheme(weights=WeightScheme(group_size=12))
    linear = random_linear(scheme)
    for other, what in (
        (LinearScheme(weights=WeightScheme(bits=8, group_size=12)), "bits"),
        (LinearScheme(weights=WeightScheme(group_size=12, symmetric=False)), "zero points"),
        (replace(scheme, activations=STATIC), "input_scale"),
        (LinearScheme(weights=FP8_BLOCKS), "bits"),
    ):
        with pytest.raises(ValueError, match=what):
            pack(linear, other)
