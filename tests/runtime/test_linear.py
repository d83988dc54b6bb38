"""Every implementation of a Linear against the plain product."""

import pytest
import torch
import torch.nn.functional as F

from compress.artifacts import QuantizedLinear
from compress.kernels.ops import select
from compress.runtime.linear import Int4Linear, PackedLinear, PrepackedLinear, make_linear
from compress.scheme import dequantize

CPU = torch.device("cpu")
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
