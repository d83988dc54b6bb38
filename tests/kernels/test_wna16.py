from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.artifacts import QuantizedLinear
from compress.kernels.wna16 import (
    CODES_PER_WORD,
    bench_cases,
    pack_weight,
    splits_of,
    unpack_codes,
    wna16_ref,
    wna16_torch,
    wna16_triton,
)
from tests.kernels.tolerance import DTYPES, assert_as_exact_as, dtype_id

# M tokens, N out_features, K in_features, group (0: one per channel)
SHAPES = [
    pytest.param(1, 64, 128, 128, id="M1-N64-K128-g128"),
    pytest.param(17, 96, 576, 64, id="M17-N96-K576-g64"),
    pytest.param(33, 200, 96, 32, id="M33-N200-K96-g32"),
    pytest.param(130, 130, 256, 128, id="M130-N130-K256-g128"),
    pytest.param(2, 33, 208, 0, id="M2-N33-K208-channel"),
    pytest.param(3, 17, 4096, 0, id="M3-N17-K4096-channel"),
    pytest.param(4, 16, 2304, 768, id="M4-N16-K2304-g768"),
    pytest.param(1, 1, 16, 16, id="M1-N1-K16-g16"),
]
SPLIT = (64, 2304, 256)  # N, K, group of a weight whose columns are split at every width


def make(N, K, group, *, bits=4, asymmetric=False):
    generator = torch.Generator().manual_seed(K + N)
    half, shape = 1 << (bits - 1), (N, K // (group or K))
    scale = torch.rand(shape, generator=generator) * 0.02 + 0.001
    scale[::2] *= -1  # scales may be negative
    zero_point = torch.randint(-half, half, shape, generator=generator, dtype=torch.int8)
    return QuantizedLinear(
        codes=torch.randint(-half, half, (N, K), generator=generator, dtype=torch.int8),
        scale=scale,
        zero_point=zero_point if asymmetric else None,
        bits=bits,
    )


def inputs(M, K, dtype, device):
    generator = torch.Generator().manual_seed(M * K)
    return torch.randn(M, K, generator=generator).to(device, dtype)


def oracle(x, weight):
    return wna16_ref(x.double(), replace(weight, scale=weight.scale.double()))


@pytest.mark.parametrize("M, N, K, group", SHAPES)
@pytest.mark.parametrize("asymmetric", [False, True], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", CODES_PER_WORD, ids=lambda bits: f"{bits}b")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_triton_matches_reference(M, N, K, group, bits, asymmetric, dtype, device, poisoned_empty):
    linear = make(N, K, group, bits=bits, asymmetric=asymmetric)
    weight, x = pack_weight(linear, dtype, device), inputs(M, K, dtype, device)
    exact = oracle(x, weight)
    assert_as_exact_as(wna16_triton(x, weight), wna16_torch(x, weight), exact)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    M=st.integers(1, 70),
    N=st.integers(1, 130),
    words=st.integers(1, 12),
    num_groups=st.integers(1, 5),
    bits=st.sampled_from(list(CODES_PER_WORD)),
    asymmetric=st.booleans(),
)
def test_triton_matches_reference_at_any_size(M, N, words, num_groups, bits, asymmetric):
    """Groups of any number of whole words, in fp32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    group = words * CODES_PER_WORD[bits]
    linear = make(N, group * num_groups, group, bits=bits, asymmetric=asymmetric)
    weight = pack_weight(linear, torch.float32, device)
    x = inputs(M, group * num_groups, torch.float32, device)
    assert_as_exact_as(wna16_triton(x, weight), wna16_torch(x, weight), oracle(x, weight))


@pytest.mark.parametrize("asymmetric", [False, True], ids=["sym", "asym"])
@pytest.mark.parametrize("bits", CODES_PER_WORD, ids=lambda bits: f"{bits}b")
def test_torch_matches_reference(bits, asymmetric):
    weight = pack_weight(make(33, 96, 32, bits=bits, asymmetric=asymmetric), torch.float32, "cpu")
    x = inputs(5, 96, torch.float32, "cpu")
    torch.testing.assert_close(
        wna16_torch(x, weight).double(), oracle(x, weight), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("bits", CODES_PER_WORD, ids=lambda bits: f"{bits}b")
def test_pack_and_unpack_are_inverse(bits):
    linear = make(5, 96, 32, bits=bits)
    weight = pack_weight(linear, torch.float16, "cpu")
    assert torch.equal(unpack_codes(weight), linear.codes)
    stored = weight.words.nbytes + (0 if weight.high is None else weight.high.nbytes)
    assert stored * 8 == linear.codes.numel() * bits


def test_words_are_those_of_compressed_tensors_at_4_bits():
    codes = torch.tensor([[-8, -7, -1, 0, 1, 2, 6, 7]], dtype=torch.int8)
    linear = QuantizedLinear(codes=codes, scale=torch.ones(1, 1), zero_point=None, bits=4)
    assert pack_weight(linear, torch.float16, "cpu").words.tolist() == [[0xFEA98710 - 2**32]]


@pytest.mark.parametrize("bits", CODES_PER_WORD, ids=lambda bits: f"{bits}b")
@pytest.mark.parametrize("shape", [(96, 576, 64), SPLIT], ids=["one-split", "splits"])
def test_row_has_the_same_bits_in_every_batch(shape, bits, device):
    """M 1 to 16 add the splits in a second kernel, 64 in the first; the tiles differ as well."""
    N, K, group = shape
    weight = pack_weight(make(N, K, group, bits=bits), torch.float16, device)
    assert (splits_of(weight)[0] > 1) == (shape == SPLIT)
    x = inputs(64, K, torch.float16, device)
    whole = wna16_triton(x, weight)
    for M in (1, 2, 5, 16, 20):
        assert torch.equal(wna16_triton(x[:M], weight), whole[:M])


def test_scales_may_be_stored_either_way(device):
    weight = pack_weight(make(96, 576, 64, asymmetric=True), torch.float32, device)
    by_row = replace(weight, scale=weight.scale.contiguous())
    assert by_row.scale.stride() != weight.scale.stride()
    x = inputs(3, 576, torch.float32, device)
    assert torch.equal(wna16_triton(x, by_row), wna16_triton(x, weight))


@pytest.mark.parametrize("M, N", [(0, 5), (5, 0)], ids=["no-tokens", "no-rows"])
def test_nothing_gives_nothing(M, N, device):
    weight = pack_weight(make(N, 64, 32), torch.float32, device)
    assert wna16_triton(inputs(M, 64, torch.float32, device), weight).shape == (M, N)


def test_the_bad_argument_is_named(device):
    linear = make(6, 64, 32, asymmetric=True)
    weight = pack_weight(linear, torch.float32, device)
    x = inputs(2, 64, torch.float32, device)
    ones = torch.ones(6, 5, device=device)
    for bad, message in [
        ({"bits": 5}, r"weight.bits must be 2, 3, 4 or 8, got 5"),
        ({"bits": 3}, r"x must be .* of shape \(any, 128\)"),
        ({"words": weight.words.long()}, r"weight.words must be int32"),
        ({"scale": weight.scale.half()}, r"weight.scale must be float32 of shape \(6, any\)"),
        ({"scale": ones}, "weight.scale has 5 groups"),
        ({"high": weight.words.short()}, "weight.high belongs to 3 bits"),
        ({"zero_point": weight.words}, r"weight.zero_point must be int8 of shape \(6, 2\)"),
        ({"words": weight.words.T.contiguous().T}, "weight.words must be contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            wna16_triton(x, replace(weight, **bad))
    with pytest.raises(ValueError, match=r"x must be .* \(any, 64\), got float32 \(2, 60\)"):
        wna16_triton(x[:, :60], weight)
    with pytest.raises(ValueError, match="x must have contiguous rows"):
        wna16_triton(x.T.contiguous().T, weight)


def test_pack_weight_refuses_what_the_product_cannot_read():
    with pytest.raises(ValueError, match="integer codes of 2, 3, 4 or 8 bits, got 5"):
        pack_weight(make(4, 64, 32, bits=5), torch.float16, "cpu")
    with pytest.raises(ValueError, match="3-bit products take groups of 16 n, got 8"):
        pack_weight(make(4, 64, 8, bits=3), torch.float16, "cpu")


def test_bench_cases_count_what_must_move():
    case = bench_cases()[0]  # one token; the others differ in their sizes only
    x, weight, dense = case.make(torch.device("cpu"), torch.float16)
    read = x.nbytes + weight.words.nbytes + weight.scale.nbytes
    assert case.num_bytes == read + 2 * len(dense)
    assert case.num_flops == 2 * dense.numel()
    exact = case.exact(x, weight, dense)
    assert exact.dtype == torch.float64
    assert (case.plain(x, weight, dense).double() - exact).norm() < 1e-2 * exact.norm()
