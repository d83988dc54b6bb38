"""Ownership of the blocks of the paged key-value cache.

The cache is a pool of `num_blocks` equal blocks of `block_size` token slots. A sequence owns an
ordered block table; token i lives in slot i % block_size of block table[i // block_size]. A block
may be shared by several tables (a forked sequence shares its parent's); it has one reference per
table and is copied before a sequence writes into it while shared (copy-on-write).

Invariant, checked by `check()`: every block is either free with zero references, or referenced
exactly as often as it occurs in tables; free + owned == total.

The lowest free block is handed out first, so that the live blocks stay a dense range at the start
of the pool, which a CPU attention kernel can read without gathering.
"""

import heapq
from collections import Counter
from collections.abc import Sequence


class BlockManager:
    """Block tables and reference counts; it never touches the tensors of the pool."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need positive sizes, got {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))
        self._references = [0] * num_blocks
        self._tables: dict[str, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table refers to."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def table(self, sequence: str) -> Sequence[int]:
        """The block ids of `sequence`, in token order; empty if it owns none."""
        return self._tables.get(sequence, ())

    def reserve(self, sequence: str, start: int, end: int) -> list[tuple[int, int]] | None:
        """Make tokens [start, end) of `sequence` writable: grow its table, unshare its blocks.

        Returns the (source, destination) blocks whose contents must be copied before writing, or
        None, changing nothing, if there are not enough free blocks.
        """
        table = self._tables.get(sequence, [])
        first = start // self.block_size
        shared = [i for i in range(first, len(table)) if self._references[table[i]] > 1]
        num_new = max(self.blocks_for(end) - len(table), 0)
        if num_new + len(shared) > len(self._free):
            return None
        copies = []
        for i in shared:
            source, table[i] = table[i], self._take()
            self._references[source] -= 1
            copies.append((source, table[i]))
        table.extend(self._take() for _ in range(num_new))
        self._tables[sequence] = table
        return copies

    def fork(self, parent: str, child: str) -> None:
        """Give the new sequence `child` a table that shares every block of `parent`."""
        if child in self._tables:
            raise ValueError(f"sequence {child!r} already owns blocks")
        self._tables[child] = list(self.table(parent))
        for block in self._tables[child]:
            self._references[block] += 1

    def free(self, sequence: str) -> None:
        """Drop the table of `sequence`; blocks that nobody else shares become free."""
        for block in self._tables.pop(sequence, ()):
            self._references[block] -= 1
            if self._references[block] == 0:
                heapq.heappush(self._free, block)

    def check(self) -> None:
        """Assert the invariant in the module docstring."""
        owned = Counter(block for table in self._tables.values() for block in table)
        counts = [owned[block] for block in range(self.num_blocks)]
        assert counts == self._references, "reference counts differ from the block tables"
        assert not owned.keys() & set(self._free), "a free block is in a block table"
        assert len(self._free) == len(set(self._free)), "a block was freed twice"
        total = len(self._free) + len(owned)
        assert total == self.num_blocks, f"free + owned is {total}, not {self.num_blocks}"

    def _take(self) -> int:
        block = heapq.heappop(self._free)
        self._references[block] = 1
        return block
