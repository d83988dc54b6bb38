"""Every implementation of a Linear against the plain product."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from compress.artifacts import QuantizedLinear
from compress.kernels.activations import fake_quantize
from compress.kernels.ops import select
from compress.kernels.w8a8 import has_int8_product
from compress.runtime.linear import make_linear
from compress.runtime.model import Linear
from compress.runtime.products import (
    Float8Linear,
    Int4Linear,
    Int8Linear,
    PackedLinear,
    PrepackedLinear,
    QuantizedInputs,
)
from compress.scheme import ActivationScheme, dequantize, round_to_float8

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPS = select("torch", CPU)
ROWS = [1, 2, 6, 7, 33]


def quantized(
    out: int, width: int, *, bits: int = 4, group: int = 32, symmetric: bool = True, seed: int = 0
) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(seed)
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    num_groups = width // group
    zero = torch.randint(low, high, (out, num_groups), generator=generator, dtype=torch.int8)
    return QuantizedLinear(
        codes=torch.randint(low, high, (out, width), generator=generator, dtype=torch.int8),
        scale=torch.rand(out, num_groups, generator=generator).bfloat16() / 64,
        zero_point=None if symmetric else zero,
        bits=bits,
    )


def float8(out: int, width: int, *, block: int | None = None, seed: int = 0) -> QuantizedLinear:
    """A float8 weight with one scale per row, or for each square block of edge `block`."""
    generator = torch.Generator().manual_seed(seed)
    edge = block or 1
    shape = (-(-out // edge), -(-width // edge) if block else 1)
    scale = torch.rand(shape, generator=generator) / 400 + 1e-3
    weight = torch.randn(out, width, generator=generator)
    codes = round_to_float8(weight, scale, block)
    return QuantizedLinear(codes=codes, scale=scale, zero_point=None, bits=8, block_size=block)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("rows", ROWS, ids=lambda n: f"T{n}")
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)],
    ids=["fp32", "bf16", "fp16"],
)
def test_make_linear_float_is_the_plain_product(
    dtype: torch.dtype, bound: float, biased: bool, rows: int
) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(33, 48), torch.randn(17, 48)]
    biases = [torch.randn(33), None] if biased else [None, None]
    linear = make_linear(weights, biases, dtype=dtype, device=CPU, ops=OPS)
    x = torch.randn(rows, 48).to(dtype)
    bias = torch.cat([torch.zeros(33) if biases[0] is None else biases[0], torch.zeros(17)])
    expected = F.linear(x.double(), torch.cat(weights).to(dtype).double(), bias.to(dtype).double())
    assert linear(x).dtype == dtype
    assert relative_error(linear(x), expected) < bound


@pytest.mark.parametrize("rows", ROWS, ids=lambda n: f"T{n}")
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_make_linear_int4_is_the_dequantized_product(
    symmetric: bool, biased: bool, rows: int
) -> None:
    torch.manual_seed(1)
    parts = [quantized(out, 96, symmetric=symmetric, seed=out) for out in (32, 16)]
    biases = [torch.randn(32), torch.randn(16)] if biased else [None, None]
    linear = make_linear(parts, biases, dtype=torch.bfloat16, device=CPU, ops=OPS)
    assert isinstance(linear, Int4Linear)
    x = torch.randn(rows, 96).bfloat16()
    weight = torch.cat([dequantize(part, torch.float64) for part in parts])
    bias = torch.cat([b.bfloat16().double() for b in biases if b is not None]) if biased else None
    assert relative_error(linear(x), F.linear(x.double(), weight, bias)) < 8e-3


@pytest.mark.parametrize("rows", [1, 17], ids=lambda n: f"T{n}")
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_packed_linear_is_the_dequantized_product(symmetric: bool, rows: int) -> None:
    torch.manual_seed(3)
    part, bias = quantized(33, 96, symmetric=symmetric), torch.randn(33)
    linear = PackedLinear(part, bias, dtype=torch.float32, device=CPU, ops=OPS)
    x = torch.randn(rows, 96)
    expected = F.linear(x.double(), dequantize(part, torch.float64), bias.double())
    assert relative_error(linear(x), expected) < 1e-6


@pytest.mark.parametrize(
    "part",
    [
        quantized(33, 96),
        quantized(32, 96, group=8),
        quantized(32, 96, bits=3),
        quantized(32, 96, bits=8, symmetric=False),
        quantized(32, 96, group=96),
    ],
    ids=["odd-out", "g8", "3-bit", "8-bit", "channel"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_make_linear_takes_every_packed_weight(part: QuantizedLinear, dtype: torch.dtype) -> None:
    linear = make_linear([part], [None], dtype=dtype, device=CPU, ops=OPS)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = F.linear(x.double(), dequantize(part, torch.float64))
    assert relative_error(linear(x), expected) < (1e-6 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize(
    "second",
    [torch.randn(16, 96), quantized(16, 96, group=96), quantized(16, 96, symmetric=False)],
    ids=["float", "other-group", "asym"],
)
def test_make_linear_keeps_parts_apart_that_are_packed_differently(
    second: torch.Tensor | QuantizedLinear,
) -> None:
    first = quantized(32, 96)
    linear = make_linear([first, second], [None, None], dtype=torch.float32, device=CPU, ops=OPS)
    x = torch.randn(3, 96)
    plain = second if isinstance(second, torch.Tensor) else dequantize(second)
    expected = F.linear(x, torch.cat([dequantize(first), plain]))
    torch.testing.assert_close(linear(x), expected, rtol=1e-4, atol=1e-4)


def test_prepacked_linear_leaves_the_global_switch_as_it_was() -> None:
    linear = PrepackedLinear(torch.randn(32, 32).bfloat16(), None)
    for enabled in (True, False):
        with torch.backends.mkldnn.flags(enabled=enabled, allow_tf32=None):
            linear(torch.randn(1, 32).bfloat16())
            assert torch._C._get_mkldnn_enabled() is enabled


STATIC = torch.tensor([0.021])
TOKEN8, STATIC8 = ActivationScheme(), ActivationScheme(dynamic=False)
FLOAT_TOKEN, FLOAT_STATIC = (
    ActivationScheme(type="float"),
    ActivationScheme(type="float", dynamic=False),
)
FLOAT_G32 = ActivationScheme(type="float", group_size=32)
NEGATIVE = replace(quantized(32, 96, bits=8, group=96), scale=-torch.rand(32, 1) / 64)
QUANTIZED_INPUTS = {
    "w8a8-token": (quantized(33, 96, bits=8, group=96), TOKEN8),
    "w8a8-static": (quantized(33, 96, bits=8, group=96), STATIC8),
    "w8a8-negative-scale": (NEGATIVE, TOKEN8),
    "w4a8-channel": (quantized(32, 96, group=96), TOKEN8),
    "w4a8-g32": (quantized(32, 96), TOKEN8),
    "w4a8-g32-asym": (quantized(32, 96, symmetric=False), STATIC8),
    "w8a8-channel-asym": (quantized(32, 96, bits=8, group=96, symmetric=False), TOKEN8),
    "w8a8-g32": (quantized(32, 96, bits=8), TOKEN8),
    "fp8-token": (float8(33, 96), FLOAT_TOKEN),
    "fp8-static": (float8(33, 96), FLOAT_STATIC),
    "fp8-block": (float8(33, 96, block=32), FLOAT_G32),
    "fp8-ragged-block": (float8(33, 96, block=36), FLOAT_TOKEN),
}
INTEGER = {"w8a8-token", "w8a8-static", "w8a8-negative-scale", "w4a8-channel"}


def with_input_scale(part: QuantizedLinear, scheme: ActivationScheme) -> QuantizedLinear:
    return part if scheme.dynamic else replace(part, input_scale=STATIC)


def meaning(
    x: torch.Tensor, part: QuantizedLinear, scheme: ActivationScheme, bias: torch.Tensor | None
) -> torch.Tensor:
    """Dequantized weight and fake-quantized inputs, multiplied in float64."""
    inputs = fake_quantize(x.float(), scheme, STATIC)
    y = inputs.double() @ dequantize(part, torch.float64).T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("rows", [1, 2, 6, 7, 33], ids=lambda n: f"T{n}")
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("name", QUANTIZED_INPUTS)
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)],
    ids=["fp32", "bf16", "fp16"],
)
def test_make_linear_quantizes_inputs_as_the_scheme_means(
    dtype: torch.dtype, bound: float, name: str, biased: bool, rows: int
) -> None:
    torch.manual_seed(4)
    part, scheme = QUANTIZED_INPUTS[name]
    bias = torch.randn(len(part.codes)).to(dtype) if biased else None
    linear = make_linear(
        [with_input_scale(part, scheme)],
        [bias],
        dtype=dtype,
        device=CPU,
        ops=OPS,
        activations=[scheme],
    )
    kind = Int8Linear if name in INTEGER and has_int8_product() else QuantizedInputs
    assert isinstance(linear, kind)
    x = torch.randn(rows, 96).to(dtype)
    assert linear(x).dtype == dtype
    expected = meaning(x, part, scheme, bias)
    assert relative_error(linear(x), expected) < bound
    unquantized = x.double() @ dequantize(part, torch.float64).T
    if dtype == torch.float32 and not biased:
        assert relative_error(expected, unquantized) > 1e-3


@pytest.mark.parametrize("name", sorted(INTEGER))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_int8_linear_gives_a_row_the_same_bits_in_any_batch(dtype: torch.dtype, name: str) -> None:
    part, scheme = QUANTIZED_INPUTS[name]
    part = with_input_scale(part, scheme)
    linear = make_linear([part], [None], dtype=dtype, device=CPU, ops=OPS, activations=[scheme])
    x = torch.randn(33, 96, generator=torch.Generator().manual_seed(5)).to(dtype)
    whole = linear(x)
    for rows in (1, 2, 7):
        assert torch.equal(linear(x[:rows]), whole[:rows])


@pytest.mark.parametrize("name", sorted(QUANTIZED_INPUTS))
def test_a_row_does_not_depend_on_how_large_the_others_are(name: str) -> None:
    part, scheme = QUANTIZED_INPUTS[name]
    linear = make_linear(
        [with_input_scale(part, scheme)],
        [None],
        dtype=torch.float32,
        device=CPU,
        ops=OPS,
        activations=[scheme],
    )
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(6))
    alone = linear(x[:1])
    x[1:] *= 1000
    torch.testing.assert_close(linear(x)[:1], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scales", "is_fused"),
    [((0.02, 0.02), True), ((0.02, 0.5), False)],
    ids=["one-input-scale", "two-input-scales"],
)
def test_make_linear_fuses_static_parts_only_with_one_input_scale(
    scales: tuple[float, float], is_fused: bool
) -> None:
    parts = [
        replace(quantized(out, 96, bits=8, group=96), input_scale=torch.tensor([scale]))
        for out, scale in zip((33, 17), scales, strict=True)
    ]
    linear = make_linear(
        parts, [None, None], dtype=torch.float32, device=CPU, ops=OPS, activations=[STATIC8] * 2
    )
    if has_int8_product():
        assert isinstance(linear, Int8Linear) is is_fused
    x = torch.randn(3, 96)
    expected = [
        fake_quantize(x, STATIC8, part.input_scale).double() @ dequantize(part, torch.float64).T
        for part in parts
    ]
    assert relative_error(linear(x), torch.cat(expected, dim=1)) < 1e-6


MIXED = {
    "float": (torch.randn(16, 96), None),
    "fp8": (float8(17, 96), FLOAT_TOKEN),
    "int4-float-inputs": (quantized(16, 96), None),
    "other-inputs": (quantized(16, 96, bits=8, group=96), None),
    "other-groups": (quantized(16, 96, bits=8), TOKEN8),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_make_linear_gives_every_part_its_own_inputs(dtype: torch.dtype, name: str) -> None:
    first, (second, scheme) = quantized(32, 96, bits=8, group=96), MIXED[name]
    linear = make_linear(
        [first, second],
        [None, None],
        dtype=dtype,
        device=CPU,
        ops=OPS,
        activations=[TOKEN8, scheme],
    )
    x = torch.randn(5, 96).to(dtype)
    inputs = x if scheme is None else fake_quantize(x.float(), scheme)
    plain = second if isinstance(second, torch.Tensor) else dequantize(second)
    expected = torch.cat([meaning(x, first, TOKEN8, None), inputs.double() @ plain.double().T], 1)
    assert relative_error(linear(x), expected) < (1e-6 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize(
    "parts",
    [
        [float8(33, 96), float8(17, 96)],
        [float8(33, 96, block=32), float8(20, 96, block=32)],
        [float8(33, 96), float8(20, 96, block=32)],
    ],
    ids=["rows", "blocks", "both"],
)
def test_make_linear_fuses_float8_parts(parts: list[QuantizedLinear]) -> None:
    linear = make_linear(
        parts, [None, None], dtype=torch.float32, device=CPU, ops=OPS, activations=[FLOAT_TOKEN] * 2
    )
    assert isinstance(linear, QuantizedInputs)
    x = torch.randn(3, 96)
    expected = torch.cat([meaning(x, part, FLOAT_TOKEN, None) for part in parts], dim=1)
    assert relative_error(linear(x), expected) < 1e-6


def test_make_linear_uses_the_int4_product_behind_quantized_inputs() -> None:
    linear = make_linear(
        [quantized(32, 96)], [None], dtype=torch.bfloat16, device=CPU, ops=OPS, activations=[TOKEN8]
    )
    assert isinstance(linear, QuantizedInputs)
    assert isinstance(linear.product, Int4Linear)


@pytest.mark.parametrize(
    ("part", "scheme", "message"),
    [
        (quantized(32, 96, bits=8, group=96), STATIC8, "need an input_scale"),
        (float8(33, 96), ActivationScheme(type="float", group_size=128), "128 does not divide"),
    ],
    ids=["no-input-scale", "group"],
)
def test_make_linear_refuses_inputs_that_cannot_be_quantized_so(
    part: QuantizedLinear, scheme: ActivationScheme, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_linear([part], [None], dtype=torch.float32, device=CPU, ops=OPS, activations=[scheme])


def test_make_linear_multiplies_as_float_where_the_integer_product_is_not_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("compress.runtime.linear.has_int8_product", lambda: False)
    part = quantized(33, 96, bits=8, group=96)
    linear = make_linear(
        [part], [None], dtype=torch.float32, device=CPU, ops=OPS, activations=[TOKEN8]
    )
    assert isinstance(linear, QuantizedInputs)
    x = torch.randn(5, 96)
    assert relative_error(linear(x), meaning(x, part, TOKEN8, None)) < 1e-6


FLOAT_G128 = ActivationScheme(type="float", group_size=128)
FLOAT8_PRODUCTS = {
    "channel": ([float8(33, 96)], FLOAT_TOKEN),
    "channels": ([float8(33, 96), float8(17, 96)], FLOAT_TOKEN),
    "block": ([float8(200, 256, block=128)], FLOAT_G128),
    "blocks": ([float8(128, 256, block=128), float8(70, 256, block=128)], FLOAT_G128),
}


def on_triton(
    parts: list[QuantizedLinear],
    scheme: ActivationScheme,
    dtype: torch.dtype,
    biases: list[torch.Tensor | None] | None = None,
) -> Linear:
    """The Linear of Triton's kernels, natively or in the interpreter."""
    return make_linear(
        parts,
        biases or [None] * len(parts),
        dtype=dtype,
        device=DEVICE,
        ops=select("triton", DEVICE),
        activations=[scheme] * len(parts),
    )


@pytest.mark.parametrize("rows", [1, 17, 70], ids=lambda n: f"T{n}")
@pytest.mark.parametrize("name", FLOAT8_PRODUCTS)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 5e-4)], ids=["fp32", "fp16"]
)
def test_float8_linear_is_the_product_of_what_the_codes_stand_for(
    dtype: torch.dtype, bound: float, name: str, rows: int
) -> None:
    torch.manual_seed(7)
    parts, scheme = FLOAT8_PRODUCTS[name]
    biases = [torch.randn(len(parts[0].codes)).to(dtype), *[None] * (len(parts) - 1)]
    linear = on_triton(parts, scheme, dtype, biases)
    assert isinstance(linear, Float8Linear)
    x = torch.randn(rows, parts[0].codes.shape[1]).to(dtype)
    got = linear(x.to(DEVICE)).cpu()
    assert got.dtype == dtype
    expected = [meaning(x, *pair) for pair in zip(parts, [scheme] * 2, biases, strict=False)]
    assert relative_error(got, torch.cat(expected, dim=1)) < bound


@pytest.mark.parametrize("name", ["channel", "block"])
def test_float8_linear_gives_a_row_the_same_bits_in_any_batch(name: str) -> None:
    parts, scheme = FLOAT8_PRODUCTS[name]
    linear = on_triton(parts, scheme, torch.float16)
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(66, parts[0].codes.shape[1], generator=generator).half().to(DEVICE)
    whole = linear(x)
    for rows in (1, 2, 16):
        assert torch.equal(linear(x[:rows]), whole[:rows])


def test_float8_parts_whose_blocks_do_not_stack_are_multiplied_one_by_one() -> None:
    parts = [float8(70, 256, block=128), float8(128, 256, block=128)]
    linear = on_triton(parts, FLOAT_G128, torch.float32)
    assert not isinstance(linear, Float8Linear | QuantizedInputs)
    x = torch.randn(3, 256)
    expected = torch.cat([meaning(x, part, FLOAT_G128, None) for part in parts], dim=1)
    assert relative_error(linear(x.to(DEVICE)).cpu(), expected) < 1e-6


@pytest.mark.parametrize(
    ("part", "scheme"),
    [
        (with_input_scale(float8(33, 96), FLOAT_STATIC), FLOAT_STATIC),
        (float8(33, 96), FLOAT_G32),
        (float8(33, 128), FLOAT_G128),
        (float8(33, 96, block=32), FLOAT_G32),
        (float8(200, 256, block=128), FLOAT_TOKEN),
        (float8(33, 96), TOKEN8),
    ],
    ids=["static", "groups", "groups-of-128", "block-32", "block-token", "int8-inputs"],
)
def test_float8_weights_with_other_inputs_are_dequantized(
    part: QuantizedLinear, scheme: ActivationScheme
) -> None:
    linear = on_triton([part], scheme, torch.float32)
    assert isinstance(linear, QuantizedInputs)
    x = torch.randn(5, part.codes.shape[1])
    got = linear(x.to(DEVICE)).cpu()
    assert relative_error(got, meaning(x, part, scheme, None)) < 1e-6
