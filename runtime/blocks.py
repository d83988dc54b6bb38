"""Ownership of the blocks of the paged key-value cache.

The cache is a pool of `num_blocks` equal blocks of `block_size` token slots. A sequence owns an
ordered block table; token i lives in slot i % block_size of block table[i // block_size]. A block
may be shared by several tables; it has one reference per table and is copied before a sequence
writes into it while shared (copy-on-write).

Prefix cache. A full block whose tokens are certain can be registered under a hash chained from the
block before it (PagedAttention, Kwon et al. 2023). An entry keeps the token ids and the block of
its parent, and a hit compares both, so two prefixes with one hash are a miss and never a wrong hit.
A registered block is never written again. When its last reference goes it stays cached, until it is
evicted: the least recently used first, and of one sequence the tail first, so that the parent of an
entry is always there. A sequence that has computed what is registered already takes the registered
block and gives its own back.

Invariant, checked by `check()`: every block is free, or cached (registered, without references), or
owned (referenced exactly as often as it occurs in tables); free + cached + owned == total.

The lowest free block is handed out first, so that the live blocks stay a dense range at the start
of the pool, which a CPU attention kernel can read without gathering. Cached blocks are evicted only
when there is no free one.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ROOT = -1  # the parent of a sequence's first block

BlockHash = Callable[[int, tuple[int, ...]], int]


def chain_hash(parent: int, token_ids: tuple[int, ...]) -> int:
    """Hash of a block: of the hash of the block before it, and of its own tokens."""
    return hash((parent, token_ids))


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a registered block holds, and the block that holds what comes before it, or ROOT."""

    key: int
    parent: int
    token_ids: tuple[int, ...]


class BlockManager:
    """Block tables and reference counts; it never touches the tensors of the pool."""

    min_blocks = 0  # that a sequence holds however short it is
    can_share = True  # blocks, between sequences

    def __init__(
        self, num_blocks: int, block_size: int, *, block_hash: BlockHash = chain_hash
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need positive sizes, got {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        self._hash = block_hash
        self._free = list(range(num_blocks))  # a heap
        self._references = [0] * num_blocks
        self._tables: dict[str, list[int]] = {}
        self._num_registered: dict[str, int] = {}  # leading blocks of a table with entries
        self._entries: dict[int, _Entry] = {}  # by block
        self._by_key: dict[int, int] = {}  # hash -> block
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table refers to: the empty ones and those the prefix cache keeps."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that only the prefix cache keeps; they can be evicted at any time."""
        return len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def footprint(self, num_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` tokens takes of the pool if it shares none."""
        return max(self.blocks_for(num_tokens), self.min_blocks)

    def table(self, sequence: str) -> Sequence[int]:
        """The block ids of `sequence`, in token order; empty if it owns none."""
        return self._tables.get(sequence, ())

    def references(self, block: int) -> int:
        """How many tables `block` is in."""
        return self._references[block]

    def reserve(self, sequence: str, start: int, end: int) -> list[tuple[int, int]] | None:
        """Make tokens [start, end) of `sequence` writable: grow its table, unshare its blocks.

        Returns the (source, destination) blocks whose contents must be copied before writing, or
        None, changing nothing, if there are not enough free blocks.
        """
        table = self._tables.get(sequence, [])
        first = start // self.block_size
        kept = [i for i in range(first, len(table)) if self._must_copy(table[i])]
        num_new = max(self.blocks_for(end) - len(table), 0)
        if num_new + len(kept) > self.num_free_blocks:
            return None
        sources = [table[i] for i in kept]
        for i in kept:
            table[i] = self._take()
        table.extend(self._take() for _ in range(num_new))
        for source in reversed(sources):
            self._release(source)
        self._tables[sequence] = table
        self._num_registered[sequence] = min(self._num_registered.get(sequence, 0), first)
        return [(source, table[i]) for source, i in zip(sources, kept, strict=True)]

    def fork(self, parent: str, child: str) -> None:
        """Give the new sequence `child` a table that shares every block of `parent`."""
        self._check_new(child)
        self._tables[child] = list(self.table(parent))
        self._num_registered[child] = self._num_registered.get(parent, 0)
        for block in self._tables[child]:
            self._acquire(block)

    def free(self, sequence: str) -> None:
        """Drop the table of `sequence`; blocks that nobody else shares become free or cached."""
        for block in reversed(self._tables.pop(sequence, [])):
            self._release(block)
        self._num_registered.pop(sequence, None)

    def discard(self, sequence: str) -> list[int]:
        """`free` a sequence whose blocks hold something wrong; which of them nobody else holds.

        To be sure that no prefix of it is found again, the prefix cache forgets whatever no
        sequence holds.
        """
        table = list(self.table(sequence))
        self.free(sequence)
        while self._cached:
            heapq.heappush(self._free, self._evict())
        return [block for block in table if not self._references[block]]

    def cached_prefix(self, token_ids: Sequence[int]) -> list[int]:
        """Blocks that hold the longest registered prefix of `token_ids`, whole blocks only.

        The last token is never part of it: a model gives nothing for a sequence of which nothing is
        computed. So a prompt that is all in the cache computes its last block again rather than
        share it and copy it at once.
        """
        blocks: list[int] = []
        parent, key, size = ROOT, ROOT, self.block_size
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            tokens = tuple(token_ids[start : start + size])
            key = self._hash(key, tokens)
            block = self._by_key.get(key)
            if block is None or not self._holds(block, parent, tokens):
                break
            blocks.append(block)
            parent = block
        return blocks

    def share_prefix(self, sequence: str, token_ids: Sequence[int]) -> int:
        """Start the new `sequence` on the cached prefix of its tokens; how many tokens that is."""
        self._check_new(sequence)
        blocks = self.cached_prefix(token_ids)
        for block in blocks:
            self._acquire(block)
        self._tables[sequence] = blocks
        self._num_registered[sequence] = len(blocks)
        return len(blocks) * self.block_size

    def register(self, sequence: str, token_ids: Sequence[int], num_tokens: int) -> None:
        """Offer the full blocks of the first `num_tokens` tokens of `sequence` to the prefix cache.

        These tokens must be computed and certain: no drafts. A block with the hash of another
        prefix is not registered, nor is a forked one that another block is registered for; nor are
        those after it.
        """
        table, size = self._tables[sequence], self.block_size
        for i in range(self._num_registered.get(sequence, 0), num_tokens // size):
            parent = table[i - 1] if i else ROOT
            parent_key = self._entries[parent].key if i else ROOT
            tokens = tuple(token_ids[i * size : (i + 1) * size])
            key = self._hash(parent_key, tokens)
            block = self._by_key.setdefault(key, table[i])
            if block == table[i]:
                self._entries[block] = _Entry(key, parent, tokens)
            elif self._holds(block, parent, tokens) and self._references[table[i]] == 1:
                # Were it in two tables, one would go on without the parent of its next blocks.
                self._acquire(block)
                self._release(table[i])
                table[i] = block
            else:
                return
            self._num_registered[sequence] = i + 1

    def check(self) -> None:
        """Assert the invariants in the module docstring."""
        owned = Counter(block for table in self._tables.values() for block in table)
        counts = [owned[block] for block in range(self.num_blocks)]
        assert counts == self._references, "reference counts differ from the block tables"
        free, cached = set(self._free), set(self._cached)
        assert len(self._free) == len(free), "a block was freed twice"
        assert not owned.keys() & (free | cached), "a free block is in a block table"
        assert not free & self._entries.keys(), "a free block is in the prefix cache"
        assert cached == self._entries.keys() - owned.keys(), "a cached block has no entry"
        total = len(free) + len(cached) + len(owned)
        assert total == self.num_blocks, f"free + cached + owned is {total}, not {self.num_blocks}"
        assert self._by_key == {entry.key: block for block, entry in self._entries.items()}
        order = {block: i for i, block in enumerate(self._cached)}
        for block, entry in self._entries.items():
            if entry.parent != ROOT:
                assert entry.parent in self._entries, "an entry outlived its parent"
                assert owned[entry.parent] >= owned[block], "an entry is used without its parent"
                assert order.get(entry.parent, self.num_blocks) > order.get(block, -1), "LRU order"

    def _must_copy(self, block: int) -> bool:
        return self._references[block] > 1 or block in self._entries

    def _holds(self, block: int, parent: int, token_ids: tuple[int, ...]) -> bool:
        entry = self._entries[block]
        return entry.parent == parent and entry.token_ids == token_ids

    def _check_new(self, sequence: str) -> None:
        if sequence in self._tables:
            raise ValueError(f"sequence {sequence!r} already owns blocks")

    def _take(self) -> int:
        """A block with one reference, evicted from the prefix cache if none is free."""
        block = heapq.heappop(self._free) if self._free else self._evict()
        self._references[block] = 1
        return block

    def _evict(self) -> int:
        """Forget the least recently used block of the prefix cache."""
        block, _ = self._cached.popitem(last=False)
        del self._by_key[self._entries.pop(block).key]
        self.num_evictions += 1
        return block

    def _acquire(self, block: int) -> None:
        self._references[block] += 1
        self._cached.pop(block, None)

    def _release(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            if block in self._entries:
                self._cached[block] = None
            else:
                heapq.heappush(self._free, block)


class ContiguousBlocks(BlockManager):
    """What engines did before paging: a run of consecutive blocks for the longest length.

    A sequence takes the first run that is free when it starts, for `max_len` tokens however few it
    will have, and gives it back at its end. Nothing is shared: no prefix cache and no fork.
    """

    can_share = False

    def __init__(self, num_blocks: int, block_size: int, max_len: int) -> None:
        super().__init__(num_blocks, block_size)
        self.max_len = max_len
        self.min_blocks = self.blocks_for(max_len)

    def reserve(self, sequence: str, start: int, end: int) -> list[tuple[int, int]] | None:
        """Give a new `sequence` its run; [] or, changing nothing, None if no run is free."""
        assert end <= self.max_len, f"{end} tokens in a run for {self.max_len}"
        if sequence not in self._tables:
            run = self._first_run()
            if run is None:
                return None
            self._tables[sequence] = list(run)
            self._free = [block for block in self._free if block not in run]
            heapq.heapify(self._free)
            for block in run:
                self._references[block] = 1
        return []

    def fork(self, parent: str, child: str) -> None:
        """Refused: a run has one owner."""
        raise ValueError("contiguous allocation cannot fork; use allocation='paged'")

    def share_prefix(self, sequence: str, token_ids: Sequence[int]) -> int:
        """Refused: a run has one owner."""
        raise ValueError("contiguous allocation has no prefix cache; use prefix_cache=False")

    def register(self, sequence: str, token_ids: Sequence[int], num_tokens: int) -> None:
        """Refused: a run has one owner."""
        raise ValueError("contiguous allocation has no prefix cache; use prefix_cache=False")

    def check(self) -> None:
        """Assert that all is accounted for, and that tables are whole runs."""
        super().check()
        for table in self._tables.values():
            assert table == list(range(table[0], table[0] + self.min_blocks)), "a broken run"

    def _first_run(self) -> range | None:
        start, length = -1, 0
        for block in sorted(self._free):
            if block != start + length:
                start, length = block, 0
            length += 1
            if length == self.min_blocks:
                return range(start, start + length)
        return None
