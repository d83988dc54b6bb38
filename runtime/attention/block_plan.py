"""Index tensors for `blockwise.py`: which blocks a batch reads, and how scores are regrouped.

Made once per step and window on the host. S queries, Q rows each (padded), N items, MB table
entries per query, B block size; a query is some consecutive rows of one sequence, an item one
(query, block) pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from compress.runtime.batch import Batch

MAX_SHORT_QUERY = 8  # beyond it, padding every query to the longest costs more than it saves
MIN_RANGE_FILL = 0.5  # below it, the dead blocks inside a range cost more than a gather


@dataclass(frozen=True, slots=True)
class Query:
    """Batch rows [first_row, first_row + length) of one sequence, whose positions end at `end`.

    `table` are the blocks of positions [0, end).
    """

    first_row: int
    length: int
    end: int
    table: Sequence[int]


@dataclass(frozen=True, slots=True)
class TileGather:
    """Keys of a pool in tiles of another size than its blocks: row i is (blocks[i], offsets[i])."""

    blocks: torch.Tensor
    offsets: torch.Tensor
    size: int

    def __call__(self, pool: torch.Tensor) -> torch.Tensor:
        """Tiles (N, H, size, D) of a pool (num_blocks, H, B, D)."""
        codes = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool  # of float8
        rows = codes[self.blocks, :, self.offsets].view(pool.dtype)
        tiles: torch.Tensor = rows.view(-1, self.size, *rows.shape[1:])
        return tiles.transpose(1, 2).contiguous()


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortPlan:
    """The short queries of a batch. Items are the blocks [first, last) of the pool, or `block_ids`.

    rows        (S * Q,) int64       padded query -> batch row
    is_real     (S * Q,) bool        False where a shorter query repeats its last row; None: all
    block_ids   (N,) int64 or None   blocks to gather, None if the pool range is read in place
    owner       (N,) int64           item -> query, any for an item that nobody owns
    item_of     (S * MB,) int64      table entry -> item, the query's first for one past the end
    entry_of    (N,) int64           item -> table entry, any for an item that nobody owns
    membership  (S, N) fp32          1 where the query owns the item, else 0
    entries     one per j < MB       (queries that have an entry j, or None: all; their items)
    mask        (S, 1, Q, 1, MB, B)  fp32: 0 where query sees key, else -inf
    """

    num_queries: int
    query_len: int
    num_entries: int
    first: int
    last: int
    rows: torch.Tensor
    is_real: torch.Tensor | None
    block_ids: torch.Tensor | None
    owner: torch.Tensor
    item_of: torch.Tensor
    entry_of: torch.Tensor
    membership: torch.Tensor
    entries: list[tuple[torch.Tensor | None, torch.Tensor]]
    mask: torch.Tensor
    in_order: bool  # items are the table entries, in order: nothing to regroup


@dataclass(frozen=True, kw_only=True, slots=True)
class LongPlan:
    """`count` long queries of `query_len` rows each, from batch row `start`.

    With `block_ids` None the rows are whole prompts, their own keys and values. Otherwise it is one
    query over the gathered blocks; `mask` (query_len, context_len) is True where query sees key.
    """

    start: int
    count: int
    query_len: int
    context_len: int
    block_ids: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def queries_of(
    batch: Batch, sequences: Sequence[int], block_size: int, *, tile: int | None = None
) -> list[Query]:
    """The new rows of `sequences`, given by their index in the batch; `tile` rows at most each."""
    starts = _row_starts(batch)
    queries = []
    for s in sequences:
        length, end = batch.host_query_lens[s], batch.host_context_lens[s]
        step = tile or length
        for done in range(0, length, step):
            rows = min(step, length - done)
            last = end - length + done + rows
            table = batch.host_block_tables[s][: -(-last // block_size)]
            queries.append(Query(starts[s] + done, rows, last, table))
    return queries


def in_tiles(
    queries: Sequence[Query], block_size: int, size: int
) -> tuple[list[Query], TileGather]:
    """The same queries over a pool whose blocks are tiles of `size` keys, and how to gather it.

    The places of the last tile that no key is for repeat the last key; they are hidden.
    """
    tiled, blocks, offsets = [], list[int](), list[int]()
    for query in queries:
        first, count = len(blocks) // size, -(-query.end // size)
        keys = [min(i, query.end - 1) for i in range(count * size)]
        blocks += [query.table[key // block_size] for key in keys]
        offsets += [key % block_size for key in keys]
        tiled.append(replace(query, table=range(first, first + count)))
    return tiled, TileGather(torch.tensor(blocks), torch.tensor(offsets), size)


def plan_short(
    queries: Sequence[Query], block_size: int, window: int, *, min_rows: int = 1
) -> ShortPlan:
    """Plan `queries` as one batch of `min_rows` rows or more each: short ones repeat their last."""
    starts = [query.end - query.length for query in queries]
    skipped = [max(start - window + 1, 0) // block_size if window else 0 for start in starts]
    tables = [query.table[skip:] for query, skip in zip(queries, skipped, strict=True)]
    num_entries = max(len(table) for table in tables)
    entries = [(block, s, j) for s, table in enumerate(tables) for j, block in enumerate(table)]
    first, last, block_ids, item_of_block = _choose_items([block for block, _, _ in entries])
    num_items = last - first if block_ids is None else len(block_ids)
    owner, entry_of = [0] * num_items, [0] * num_items
    item_of = [0] * (len(tables) * num_entries)
    membership = torch.zeros(len(tables), num_items)
    for i, (block, s, j) in enumerate(entries):
        item = i if item_of_block is None else block - item_of_block
        owner[item], entry_of[item] = s, s * num_entries + j
        item_of[s * num_entries + j] = item
        membership[s, item] = 1.0
        if j == 0:  # of its own: what is not finite must not be seen by others, even if hidden
            item_of[s * num_entries : (s + 1) * num_entries] = [item] * num_entries
    query_len = max(min_rows, *(query.length for query in queries))
    positions = [
        [min(start + i, query.end - 1) for i in range(query_len)]
        for start, query in zip(starts, queries, strict=True)
    ]
    return ShortPlan(
        num_queries=len(tables),
        query_len=query_len,
        num_entries=num_entries,
        first=first,
        last=last,
        rows=torch.tensor(
            [q.first_row + min(i, q.length - 1) for q in queries for i in range(query_len)]
        ),
        is_real=_real_rows([query.length for query in queries], query_len),
        block_ids=block_ids,
        owner=torch.tensor(owner),
        item_of=torch.tensor(item_of),
        entry_of=torch.tensor(entry_of),
        membership=membership,
        entries=_by_entry(tables, item_of, num_entries),
        mask=_short_mask(positions, skipped, num_entries, block_size, window),
        in_order=item_of == list(range(num_items)),
    )


def plan_long(batch: Batch, sequences: list[int], block_size: int, window: int) -> list[LongPlan]:
    """Plan the queries of `sequences`; neighbouring whole prompts of one length go together."""
    row_starts = _row_starts(batch)
    plans: list[LongPlan] = []
    for s in sequences:
        query_len, context_len = batch.host_query_lens[s], batch.host_context_lens[s]
        start, whole = row_starts[s], query_len == context_len
        if whole and (window == 0 or context_len <= window):
            count = 1
            if plans and plans[-1].block_ids is None and plans[-1].query_len == query_len:
                previous = plans[-1]
                if previous.start + previous.count * query_len == start:
                    start, count = previous.start, previous.count + 1
                    plans.pop()
            plans.append(
                LongPlan(start=start, count=count, query_len=query_len, context_len=context_len)
            )
            continue
        query = torch.arange(context_len - query_len, context_len)[:, None]
        key = torch.arange(context_len)
        mask = (key <= query) & (query - key < window) if window else key <= query
        plans.append(
            LongPlan(
                start=start,
                count=1,
                query_len=query_len,
                context_len=context_len,
                block_ids=torch.tensor(batch.host_block_tables[s]),
                mask=mask,
            )
        )
    return plans


def _choose_items(blocks: list[int]) -> tuple[int, int, torch.Tensor | None, int | None]:
    """Read a pool range in place, or gather? (first, last, ids to gather, base of the range)."""
    first, last = min(blocks), max(blocks) + 1
    is_shared = len(set(blocks)) < len(blocks)
    if is_shared or len(blocks) < MIN_RANGE_FILL * (last - first):
        return 0, len(blocks), torch.tensor(blocks), None
    return first, last, None, first


def _row_starts(batch: Batch) -> list[int]:
    return [0, *accumulate(batch.host_query_lens)]


def _by_entry(
    tables: Sequence[Sequence[int]], item_of: Sequence[int], num_entries: int
) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
    """For each j: the queries whose table has an entry j (None: all), and the items of those."""
    rows = []
    for j in range(num_entries):
        owners = [s for s, table in enumerate(tables) if j < len(table)]
        items = torch.tensor([item_of[s * num_entries + j] for s in owners])
        rows.append((None if len(owners) == len(tables) else torch.tensor(owners), items))
    return rows


def _real_rows(query_lens: Sequence[int], query_len: int) -> torch.Tensor | None:
    if min(query_lens) == query_len:
        return None
    return torch.tensor([i < length for length in query_lens for i in range(query_len)])


def _short_mask(
    positions: list[list[int]],
    skipped: list[int],
    num_entries: int,
    block_size: int,
    window: int,
) -> torch.Tensor:
    query = torch.tensor(positions)[:, :, None]  # (S, Q, 1)
    key = torch.tensor(skipped)[:, None] * block_size + torch.arange(num_entries * block_size)
    key = key[:, None, :]  # (S, 1, L)
    is_seen = (key <= query) & (query - key < window) if window else key <= query
    mask = torch.zeros(is_seen.shape).masked_fill_(~is_seen, float("-inf"))
    num_sequences, query_len, _ = mask.shape
    return mask.view(num_sequences, 1, query_len, 1, num_entries, block_size)
