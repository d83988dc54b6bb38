"""Bit packing: golden words, equality with the compressed-tensors package, bad input."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import helpers

from compress.export.packing import num_words, pack_to_int32, unpack_from_int32

SHAPES = [(1, 1), (1, 17), (17, 36), (33, 130), (5, 32), (3, 64), (130, 33)]
GOLDEN_4BIT = [-8, -7, -1, 0, 1, 2, 6, 7, 3, -3, 5, -5, 0, 0, 0, -8]
GOLDEN_3BIT = [i % 8 - 4 for i in range(32)]


def _random_codes(shape: tuple[int, int], bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits)
    low, high = -(1 << (bits - 1)), 1 << (bits - 1)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int8)


def _hex(words: torch.Tensor) -> list[str]:
    return [f"{word & 0xFFFFFFFF:08x}" for word in words.flatten().tolist()]


@pytest.mark.parametrize(
    "bits, codes, words",
    [
        pytest.param(4, GOLDEN_4BIT, ["fea98710", "08883d5b"], id="4bit"),
        pytest.param(8, [-128, -1, 0, 127, 1], ["ff807f00", "00000081"], id="8bit-ragged"),
        pytest.param(3, GOLDEN_3BIT, ["88fac688", "c688fac6", "fac688fa"], id="3bit-dense"),
        # 33 bits: the last one is the top bit of code 10, unsigned 2, so word 1 is all zero
        pytest.param(3, GOLDEN_3BIT[:11], ["88fac688", "00000000"], id="3bit-ragged"),
    ],
)
def test_pack_to_int32_gives_the_golden_words(bits, codes, words):
    codes = torch.tensor([codes], dtype=torch.int8)
    packed = pack_to_int32(codes, bits, 1)
    assert _hex(packed) == words
    assert torch.equal(unpack_from_int32(packed, bits, 1, codes.shape[1]), codes)


def test_pack_to_int32_gives_the_golden_zero_point_words_along_rows():
    zero_points = torch.tensor([[-8], [-7], [-1], [0], [1], [2], [6], [7], [3]], dtype=torch.int8)
    packed = pack_to_int32(zero_points, 4, 0)
    assert packed.shape == (2, 1)
    assert _hex(packed) == ["fea98710", "0000000b"]
    assert torch.equal(unpack_from_int32(packed, 4, 0, 9), zero_points)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("bits", range(2, 9))
def test_packing_equals_the_compressed_tensors_package(bits, shape, dim):
    codes = _random_codes(shape, bits)
    packed = pack_to_int32(codes, bits, dim)
    assert packed.is_contiguous()
    assert packed.shape[dim] == num_words(shape[dim], bits)
    assert torch.equal(packed, helpers.pack_to_int32(codes, bits, dim))
    unpacked = unpack_from_int32(packed, bits, dim, shape[dim])
    assert torch.equal(unpacked, codes)
    assert torch.equal(unpacked, helpers.unpack_from_int32(packed, bits, codes.shape, dim))


@pytest.mark.parametrize("bits", range(2, 9))
def test_pack_to_int32_leaves_its_input_alone_and_takes_views(bits):
    codes = _random_codes((36, 17), bits)
    before = codes.clone()
    assert torch.equal(
        pack_to_int32(codes.T, bits, 1), pack_to_int32(codes.T.contiguous(), bits, 1)
    )
    assert torch.equal(codes, before)


@pytest.mark.parametrize("bits", [3, 4])
def test_pack_to_int32_takes_no_codes(bits):
    empty = torch.empty(0, 8, dtype=torch.int8)
    packed = pack_to_int32(empty, bits, 0)
    assert packed.shape == (0, 8)
    assert unpack_from_int32(packed, bits, 0, 0).shape == (0, 8)


@pytest.mark.parametrize(
    "codes, bits, dim, message",
    [
        pytest.param(torch.zeros(1, 4), 4, 1, "torch.int8", id="dtype"),
        pytest.param(torch.zeros(4, dtype=torch.int8), 4, 1, "2-D", id="rank"),
        pytest.param(torch.zeros(1, 4, dtype=torch.int8), 9, 1, "got 9", id="too-many-bits"),
        pytest.param(torch.zeros(1, 4, dtype=torch.int8), 1, 1, "got 1", id="too-few-bits"),
        pytest.param(torch.zeros(1, 4, dtype=torch.int8), 4, 2, "got 2", id="dim"),
        pytest.param(torch.full((1, 4), 8, dtype=torch.int8), 4, 1, r"\[-8, 7\]", id="too-large"),
        pytest.param(torch.full((1, 4), -5, dtype=torch.int8), 3, 1, r"\[-4, 3\]", id="too-small"),
    ],
)
def test_pack_to_int32_rejects_bad_input(codes, bits, dim, message):
    with pytest.raises(ValueError, match=message):
        pack_to_int32(codes, bits, dim)


@pytest.mark.parametrize("size", [0, 16, 25])
def test_unpack_from_int32_rejects_a_size_that_does_not_fit_the_words(size):
    words = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"{size} codes of 4 bits"):
        unpack_from_int32(words, 4, 1, size)
