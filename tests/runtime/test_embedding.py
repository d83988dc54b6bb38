"""Looking tokens up in float and packed tables."""

import pytest
import torch

from compress.artifacts import QuantizedLinear
from compress.runtime.embedding import FloatEmbedding, PackedEmbedding, make_embedding
from compress.scheme import dequantize
from tests.runtime.test_linear import float8, quantized

CPU = torch.device("cpu")
IDS = torch.tensor([0, 32, 5, 5, 17])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_float_embedding_is_a_row_of_the_table(dtype: torch.dtype) -> None:
    table = torch.randn(33, 96)
    got = make_embedding(table, dtype=dtype, device=CPU)(IDS)
    assert torch.equal(got, table.to(dtype)[IDS])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("table", "stays_packed"),
    [
        (quantized(33, 96, bits=8, group=96), True),
        (quantized(33, 96, bits=8, group=32, symmetric=False), True),
        (quantized(33, 96, bits=4, group=32), True),
        (float8(33, 96), True),
        (float8(33, 96, block=32), False),
    ],
    ids=["int8-row", "int8-asym", "int4", "fp8-row", "fp8-block"],
)
def test_packed_embedding_is_a_row_of_the_dequantized_table(
    table: QuantizedLinear, stays_packed: bool, dtype: torch.dtype
) -> None:
    embedding = make_embedding(table, dtype=dtype, device=CPU)
    assert isinstance(embedding, PackedEmbedding if stays_packed else FloatEmbedding)
    assert torch.equal(embedding(IDS), dequantize(table, dtype)[IDS])
