import pytest
import torch

from compress.artifacts import QuantizedLinear
from compress.kernels.int4_cpu import pack_int4_cpu, w4a16_cpu
from compress.scheme import dequantize
from tests.kernels.tolerance import assert_as_exact_as


def quantized(N, K, group, *, asymmetric):
    generator = torch.Generator().manual_seed(K + N)
    shape = (N, K // (group or K))
    zero_point = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    return QuantizedLinear(
        codes=torch.randint(-8, 8, (N, K), generator=generator, dtype=torch.int8),
        scale=(torch.rand(shape, generator=generator) * 0.02 + 0.001).bfloat16(),
        zero_point=zero_point if asymmetric else None,
        bits=4,
    )


@pytest.mark.parametrize("M", [1, 17, 33])
@pytest.mark.parametrize(
    "N, K, group, kernel_group",
    [
        pytest.param(16, 576, 64, 64, id="N16-K576-g64"),
        pytest.param(48, 96, 32, 32, id="N48-K96-g32"),
        pytest.param(32, 576, 0, 64, id="N32-K576-channel"),
        pytest.param(32, 1536, 768, 256, id="N32-K1536-g768"),
    ],
)
@pytest.mark.parametrize("asymmetric", [False, True], ids=["sym", "asym"])
def test_w4a16_cpu_matches_dequantized_weight(M, N, K, group, kernel_group, asymmetric):
    linear = quantized(N, K, group, asymmetric=asymmetric)
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(M)).bfloat16()
    packed = pack_int4_cpu(linear)
    assert packed.group_size == kernel_group
    exact = x.double() @ dequantize(linear).double().T
    plain = x @ dequantize(linear, torch.bfloat16).T
    assert_as_exact_as(w4a16_cpu(x, packed), plain, exact)


def test_w4a16_cpu_refuses_what_the_kernel_cannot_do():
    linear = quantized(16, 64, 32, asymmetric=False)
    with pytest.raises(ValueError, match=r"x must be bfloat16 .* got torch.float32"):
        w4a16_cpu(torch.zeros(1, 64), pack_int4_cpu(linear))
    with pytest.raises(ValueError, match="N a multiple of 16, got 20"):
        pack_int4_cpu(quantized(20, 64, 32, asymmetric=False))
    with pytest.raises(ValueError, match="groups of 32 n, got 16"):
        pack_int4_cpu(quantized(16, 64, 16, asymmetric=False))
    eight_bits = QuantizedLinear(codes=linear.codes, scale=linear.scale, zero_point=None, bits=8)
    with pytest.raises(ValueError, match="needs bits 4, got 8"):
        pack_int4_cpu(eight_bits)
