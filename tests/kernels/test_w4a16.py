import pytest
import torch

from compress.artifacts import QuantizedLinear
from compress.kernels.w4a16 import (
    pack_int4_cpu,
    unpack_codes,
    w4a16_cpu,
    w4a16_ref,
    w4a16_torch,
    w4a16_triton,
)
from compress.scheme import dequantize
from tests.kernels.tolerance import DTYPES, assert_as_exact_as, dtype_id

# M tokens, N out_features, K in_features, group (0: one per channel)
SHAPES = [
    pytest.param(1, 64, 128, 128, id="M1-N64-K128-g128"),
    pytest.param(17, 96, 576, 64, id="M17-N96-K576-g64"),
    pytest.param(33, 200, 96, 32, id="M33-N200-K96-g32"),
    pytest.param(130, 130, 256, 128, id="M130-N130-K256-g128"),
    pytest.param(2, 33, 200, 0, id="M2-N33-K200-channel"),
    pytest.param(3, 17, 1024, 0, id="M3-N17-K1024-channel"),
    pytest.param(4, 16, 1536, 768, id="M4-N16-K1536-g768"),
    pytest.param(1, 1, 8, 8, id="M1-N1-K8-g8"),
]


def make(M, N, K, group, dtype, device, *, asymmetric=False):
    generator = torch.Generator().manual_seed(M * K + N)
    num_groups = K // (group or K)
    x = torch.randn(M, K, generator=generator)
    words = torch.randint(-(2**31), 2**31, (N, K // 8), generator=generator).to(torch.int32)
    scale = torch.rand(N, num_groups, generator=generator) * 0.02 + 0.001
    scale[::2] *= -1  # scales may be negative
    zero_point = torch.randint(-8, 8, (N, num_groups), generator=generator).to(torch.int8)
    return (
        x.to(device, dtype),
        words.to(device),
        scale.to(device, dtype),
        zero_point.to(device) if asymmetric else None,
    )


def oracle(x, w_packed, scale, zero_point):
    return w4a16_ref(x.double(), w_packed, scale.double(), zero_point)


@pytest.mark.parametrize("M, N, K, group", SHAPES)
@pytest.mark.parametrize("asymmetric", [False, True], ids=["sym", "asym"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_w4a16_triton_matches_reference(M, N, K, group, asymmetric, dtype, device, poisoned_empty):
    args = make(M, N, K, group, dtype, device, asymmetric=asymmetric)
    assert_as_exact_as(w4a16_triton(*args), w4a16_torch(*args), oracle(*args))


@pytest.mark.parametrize("M, N, K, group", SHAPES)
@pytest.mark.parametrize("asymmetric", [False, True], ids=["sym", "asym"])
def test_w4a16_torch_matches_reference(M, N, K, group, asymmetric):
    args = make(M, N, K, group, torch.float32, "cpu", asymmetric=asymmetric)
    torch.testing.assert_close(w4a16_torch(*args).double(), oracle(*args), rtol=1e-5, atol=1e-5)


def test_w4a16_triton_row_does_not_depend_on_its_batch(device):
    x, *weight = make(16, 96, 576, 64, torch.float16, device)
    assert torch.equal(w4a16_triton(x[7:8], *weight), w4a16_triton(x, *weight)[7:8])


def test_w4a16_triton_takes_scales_stored_by_group(device):
    x, w_packed, scale, zero_point = make(3, 96, 576, 64, torch.float32, device, asymmetric=True)
    by_group = scale.T.contiguous().T
    assert by_group.stride() != scale.stride()
    want = w4a16_triton(x, w_packed, scale, zero_point)
    assert torch.equal(w4a16_triton(x, w_packed, by_group, zero_point), want)


@pytest.mark.parametrize("M, N", [(0, 5), (5, 0)], ids=["no-tokens", "no-rows"])
def test_w4a16_triton_of_nothing_is_empty(M, N, device):
    assert w4a16_triton(*make(M, N, 64, 32, torch.float32, device)).shape == (M, N)


def test_w4a16_triton_names_the_bad_argument(device):
    x, w_packed, scale, zero_point = make(2, 6, 64, 32, torch.float32, device, asymmetric=True)
    with pytest.raises(ValueError, match="x must have a positive multiple of 8 columns, got 60"):
        w4a16_triton(x[:, :60], w_packed, scale, zero_point)
    with pytest.raises(ValueError, match=r"w_packed must be int32 of shape \(any, 8\)"):
        w4a16_triton(x, w_packed[:, :7], scale, zero_point)
    with pytest.raises(ValueError, match=r"scale must be float32 of shape \(6, any\)"):
        w4a16_triton(x, w_packed, scale.half(), zero_point)
    with pytest.raises(ValueError, match="scale has 5 groups"):
        w4a16_triton(x, w_packed, torch.ones(6, 5, device=device), None)
    with pytest.raises(ValueError, match=r"zero_point must be int8 of shape \(6, 2\)"):
        w4a16_triton(x, w_packed, scale, zero_point.int())


def test_unpack_codes_reads_compressed_tensors_words():
    words = torch.tensor([[0xFEA98710 - 2**32, 0x08883D5B]], dtype=torch.int64).to(torch.int32)
    want = [-8, -7, -1, 0, 1, 2, 6, 7, 3, -3, 5, -5, 0, 0, 0, -8]
    assert unpack_codes(words).tolist() == [want]


def quantized(N, K, group, *, asymmetric):
    _, words, scale, zero_point = make(1, N, K, group, torch.bfloat16, "cpu", asymmetric=asymmetric)
    return QuantizedLinear(codes=unpack_codes(words), scale=scale, zero_point=zero_point, bits=4)


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
