"""Pack signed b-bit codes into int32 words as one dense bit stream, and back.

A code q in [-2^(b-1), 2^(b-1)-1] is stored unsigned as u = q + 2^(b-1). Along the packed dimension
code i occupies bits [i*b, (i+1)*b) of the stream, and bit j of the stream is bit j % 32 of word
j // 32 (least significant first). n codes take ceil(n*b / 32) words; bits past the last code are 0.
For b = 3, 5, 6 and 7 a code may straddle two words:

    b = 3      word 0                                   word 1
    bits       |0..2|3..5| ... |27..29|30..31           0|1..3| ...
    code       |  0 |  1 | ... |  9   |     10           |  11| ...

This is the layout of compressed-tensors >= 0.17 (`pack-quantized`); earlier releases kept
32 // b whole codes per word, which differs for every b that does not divide 32.

The stream repeats after lcm(b, 32) bits, so the code below walks over the few positions of one
period and handles all rows and periods of a position at once.
"""

from math import gcd

import torch

from compress.scheme import code_range

WORD_BITS = 32
PACKABLE_BITS = range(2, 9)


def num_words(num_codes: int, bits: int) -> int:
    """int32 words that hold `num_codes` codes of `bits` bits."""
    return -(-num_codes * bits // WORD_BITS)


def pack_to_int32(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack `codes` (rows, cols) int8 along `dim` (0 or 1) into int32 words.

    Returns (rows, num_words(cols)) for dim 1, (num_words(rows), cols) for dim 0, contiguous.
    Raises ValueError for another dtype, rank, dim or bit width, and for a code out of range.
    """
    _check(codes, torch.int8, bits, dim)
    low, high = code_range(bits)
    if codes.numel() and (codes.min() < low or codes.max() > high):
        raise ValueError(
            f"codes of {bits} bits must lie in [{low}, {high}], "
            f"got {int(codes.min())}..{int(codes.max())}"
        )
    rows, num_codes = codes.transpose(dim, 1).shape
    period_codes, period_words = _period(bits)
    num_periods = -(-num_codes // period_codes)

    unsigned = codes.new_zeros(rows, num_periods * period_codes, dtype=torch.int32)
    unsigned[:, :num_codes] = codes.transpose(dim, 1)
    unsigned[:, :num_codes] += 1 << (bits - 1)
    unsigned = unsigned.view(rows, num_periods, period_codes)
    words = unsigned.new_zeros(rows, num_periods, period_words)
    for i in range(period_codes):
        word, shift = divmod(i * bits, WORD_BITS)
        words[..., word] |= unsigned[..., i] << shift
        if shift + bits > WORD_BITS:
            words[..., word + 1] |= unsigned[..., i] >> (WORD_BITS - shift)
    packed = words.view(rows, num_periods * period_words)[:, : num_words(num_codes, bits)]
    return packed.transpose(dim, 1).contiguous()


def unpack_from_int32(words: torch.Tensor, bits: int, dim: int, size: int) -> torch.Tensor:
    """Inverse of `pack_to_int32`: the `size` codes along `dim` as int8, contiguous.

    `words` is int32 with num_words(size) entries along `dim`, else ValueError. Bits past the last
    code are not looked at.
    """
    _check(words, torch.int32, bits, dim)
    if words.shape[dim] != num_words(size, bits):
        raise ValueError(
            f"{size} codes of {bits} bits take {num_words(size, bits)} words along dim {dim}, "
            f"got words of shape {tuple(words.shape)}"
        )
    rows, length = words.transpose(dim, 1).shape
    period_codes, period_words = _period(bits)
    num_periods = -(-length // period_words)

    stream = words.new_zeros(rows, num_periods * period_words)
    stream[:, :length] = words.transpose(dim, 1)
    stream = stream.view(rows, num_periods, period_words)
    codes = stream.new_empty(rows, num_periods, period_codes, dtype=torch.int8)
    mask = (1 << bits) - 1
    for i in range(period_codes):
        word, shift = divmod(i * bits, WORD_BITS)
        taken = min(bits, WORD_BITS - shift)  # bits of the code that lie in its first word
        value = (stream[..., word] >> shift) & ((1 << taken) - 1)  # the shift extends the sign
        if taken < bits:
            value = value | ((stream[..., word + 1] << taken) & mask)
        codes[..., i] = value - (1 << (bits - 1))
    unpacked = codes.view(rows, num_periods * period_codes)[:, :size]
    return unpacked.transpose(dim, 1).contiguous()


def _period(bits: int) -> tuple[int, int]:
    """Codes and words after which codes start on a word boundary again."""
    shared = gcd(bits, WORD_BITS)
    return WORD_BITS // shared, bits // shared


def _check(tensor: torch.Tensor, dtype: torch.dtype, bits: int, dim: int) -> None:
    if bits not in PACKABLE_BITS:
        raise ValueError(f"bits must be 2..8, got {bits}")
    if dim not in (0, 1):
        raise ValueError(f"dim must be 0 or 1, got {dim}")
    if tensor.dtype != dtype or tensor.ndim != 2:
        raise ValueError(
            f"expected a 2-D tensor of {dtype}, got {tensor.dtype} {tuple(tensor.shape)}"
        )
