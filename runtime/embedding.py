"""Token embeddings: look up rows of a float table, or of one packed in 8 (or fewer) bits per value.

A packed table stays packed: a look-up gathers the codes of its rows and dequantizes those, three
small operations on (T, H), so the table takes a byte per value instead of two or four. The whole
table is dequantized only in square blocks of scales (float8), whose rows cannot be read alone.

T tokens, V vocab_size, H hidden_size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from compress.artifacts import QuantizedLinear
from compress.scheme import dequantize

Embedding = Callable[[torch.Tensor], torch.Tensor]  # token ids (T,) int64 -> (T, H)


@dataclass(frozen=True, kw_only=True, slots=True)
class FloatEmbedding:
    """Rows of `table` (V, H)."""

    table: torch.Tensor

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.table)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedEmbedding:
    """Rows of `table`, whose codes are (V, H) and whose scales belong to a row, in `dtype`."""

    table: QuantizedLinear
    dtype: torch.dtype

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        table = self.table
        zero_point = table.zero_point
        rows = QuantizedLinear(
            codes=table.codes.index_select(0, token_ids),
            scale=table.scale.index_select(0, token_ids),
            zero_point=None if zero_point is None else zero_point.index_select(0, token_ids),
            bits=table.bits,
        )
        return dequantize(rows, self.dtype)


def make_embedding(
    table: torch.Tensor | QuantizedLinear, *, dtype: torch.dtype, device: torch.device
) -> Embedding:
    """The look-up of a float or packed `table` (V, H), giving rows in `dtype` on `device`."""
    if isinstance(table, torch.Tensor):
        return FloatEmbedding(table=table.to(device=device, dtype=dtype))
    if table.block_size is not None:
        return FloatEmbedding(table=dequantize(table, dtype).to(device))
    on_device = QuantizedLinear(
        codes=table.codes.to(device),
        scale=table.scale.to(device),
        zero_point=None if table.zero_point is None else table.zero_point.to(device),
        bits=table.bits,
    )
    return PackedEmbedding(table=on_device, dtype=dtype)
