"""The tensors of one step, built from the schedule.

Rows are tokens: the T tokens of all scheduled requests, request after request, without padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compress.runtime.blocks import BlockManager
from compress.runtime.scheduler import ScheduledRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What the decoder and the attention backend read. S sequences, T rows, MB blocks per table.

    token_ids      (T,) int64        row -> token
    positions      (T,) int64        row -> position in its sequence
    slots          (T,) int64        row -> cache slot, block * block_size + offset
    block_tables   (S, MB) int32     cache blocks in token order, padded with 0
    context_lens   (S,) int32        tokens in the cache once this step has written its rows
    query_starts   (S + 1,) int32    rows of sequence s are query_starts[s] : query_starts[s + 1]

    `host_*` are the same on the host, where plans are made without waiting for a device.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    query_starts: torch.Tensor
    host_block_tables: list[Sequence[int]]
    host_context_lens: list[int]
    host_query_lens: list[int]


def build_batch(
    scheduled: Sequence[ScheduledRequest], blocks: BlockManager, device: torch.device
) -> Batch:
    """The batch of a non-empty schedule whose cache slots have been reserved."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    tables: list[Sequence[int]] = []
    context_lens: list[int] = []
    query_starts = [0]
    size = blocks.block_size
    for item in scheduled:
        request, start, end = item.request, item.start, item.start + item.num_tokens
        table = blocks.table(request.request_id)[: blocks.blocks_for(end)]
        token_ids += request.tokens_between(start, end)
        positions += range(start, end)
        slots += [table[i // size] * size + i % size for i in range(start, end)]
        tables.append(table)
        context_lens.append(end)
        query_starts.append(len(token_ids))
    width = max(len(table) for table in tables)
    padded = [[*table, *[0] * (width - len(table))] for table in tables]
    return Batch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        block_tables=torch.tensor(padded, dtype=torch.int32, device=device),
        context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        query_starts=torch.tensor(query_starts, dtype=torch.int32, device=device),
        host_block_tables=tables,
        host_context_lens=context_lens,
        host_query_lens=[item.num_tokens for item in scheduled],
    )
