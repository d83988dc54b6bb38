"""Linears as the engine makes them on the Triton backend."""

from dataclasses import replace

import pytest
import torch

from compress.artifacts import QuantizedLinear
from compress.kernels.activations import fake_quantize
from compress.kernels.ops import select
from compress.runtime.linear import make_linear
from compress.runtime.products import PackedLinear, QuantizedInputs, W8A8Linear
from compress.scheme import ActivationScheme, dequantize

STATIC = torch.tensor([0.021])


def quantized(*, bits: int, group: int) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(bits)
    half = 1 << (bits - 1)
    return QuantizedLinear(
        codes=torch.randint(-half, half, (33, 96), generator=generator, dtype=torch.int8),
        scale=(torch.rand(33, 96 // group, generator=generator) - 0.5) / 64,
        zero_point=None,
        bits=bits,
    )


@pytest.mark.parametrize(
    ("part", "scheme", "kind"),
    [
        (quantized(bits=8, group=96), ActivationScheme(), W8A8Linear),
        (quantized(bits=8, group=96), ActivationScheme(dynamic=False), W8A8Linear),
        (quantized(bits=4, group=96), ActivationScheme(), W8A8Linear),
        (quantized(bits=4, group=32), ActivationScheme(), QuantizedInputs),
        (quantized(bits=4, group=32), None, PackedLinear),
        (quantized(bits=3, group=32), None, PackedLinear),
        (quantized(bits=2, group=96), None, PackedLinear),
        (quantized(bits=8, group=32), None, PackedLinear),
    ],
    ids=[
        "w8a8",
        "w8a8-static",
        "w4a8-channel",
        "w4a8-g32",
        "w4a16-g32",
        "w3a16-g32",
        "w2a16",
        "w8a16-g32",
    ],
)
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
def test_make_linear_on_triton_computes_what_the_codes_mean(part, scheme, kind, biased, device):
    if scheme is not None and not scheme.dynamic:
        part = replace(part, input_scale=STATIC)
    generator = torch.Generator().manual_seed(7)
    bias = torch.randn(33, generator=generator).to(device) if biased else None
    linear = make_linear(
        [part],
        [bias],
        dtype=torch.float16,
        device=device,
        ops=select("triton", device),
        activations=[scheme],
    )
    assert isinstance(linear, kind)
    x = torch.randn(9, 96, generator=generator).to(device, torch.float16)
    inputs = x if scheme is None else fake_quantize(x.float(), scheme, STATIC.to(device))
    expected = inputs.double().cpu() @ dequantize(part, torch.float64).T
    if bias is not None:
        expected += bias.double().cpu()
    got = linear(x)
    assert got.dtype == torch.float16
    assert (got.double().cpu() - expected).norm() / expected.norm() < 1e-3
    assert torch.equal(linear(x[3:4]), got[3:4])
