"""The block manager against a plain model of it, and its edges."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from compress.runtime.blocks import BlockHash, BlockManager, ContiguousBlocks, chain_hash

BLOCK_SIZE = 4
NUM_BLOCKS = 8
Prefix = tuple[int, ...]


def constant_hash(parent: int, token_ids: tuple[int, ...]) -> int:
    """Every block collides with every other."""
    return 5


def parentless_hash(parent: int, token_ids: tuple[int, ...]) -> int:
    """Blocks with the same tokens collide, whatever came before."""
    return hash(token_ids)


HASHES: list[BlockHash] = [chain_hash, parentless_hash, constant_hash]


# Often whole blocks, and the same ones.
TOKENS = st.lists(st.sampled_from([(0,), (1,), (0,) * BLOCK_SIZE, (1,) * BLOCK_SIZE]), max_size=4)


def joined(parts: list[Prefix]) -> list[int]:
    return [token for part in parts for token in part]


class BlockMachine(RuleBasedStateMachine):
    """Writes through block tables, and checks that every sequence reads what is its own.

    As with keys and values, what a slot holds depends on all tokens up to it: here it is that
    prefix itself. A sequence that was given a wrong block reads another prefix.
    """

    @initialize(block_hash=st.sampled_from(HASHES))
    def start_manager(self, block_hash: BlockHash) -> None:
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE, block_hash=block_hash)
        self.is_exact = block_hash is chain_hash
        self.pool: dict[int, Prefix] = {}  # slot -> what it holds
        self.expected: dict[str, list[int]] = {}  # sequence -> its tokens
        self.registered: set[Prefix] = set()
        self.num_named = 0

    def name(self) -> str:
        self.num_named += 1
        return f"s{self.num_named}"

    def some_sequence(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.expected)))

    @rule(data=st.data(), more=TOKENS.map(joined))
    def start(self, data: st.DataObject, more: list[int]) -> None:
        known = data.draw(st.sampled_from([(), *sorted(self.registered)]))
        tokens = [*known, *more] or [1]
        name = self.name()
        before = self.blocks.num_free_blocks
        num_shared = self.blocks.share_prefix(name, tokens)
        assert num_shared % BLOCK_SIZE == 0
        assert num_shared < len(tokens)
        assert num_shared == 0 or tuple(tokens[:num_shared]) in self.registered
        if self.is_exact and self.blocks.num_evictions == 0:
            whole = range(0, len(tokens), BLOCK_SIZE)
            hits = [n for n in whole if n == 0 or tuple(tokens[:n]) in self.registered]
            assert num_shared == max(hits)
        self.expected[name] = tokens[:num_shared]
        self.everyone_reads_their_own_tokens()
        if not self.write_at(name, num_shared, tokens[num_shared:]):
            self.free_sequence(name)
            assert self.blocks.num_free_blocks == before

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), tokens=TOKENS.map(joined), is_certain=st.booleans())
    def write(self, data: st.DataObject, tokens: list[int], is_certain: bool) -> None:
        name = self.some_sequence(data)
        if self.write_at(name, len(self.expected[name]), tokens or [1]) and is_certain:
            self.register_certain(name, 0)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), back=st.integers(1, 6), token=st.integers(0, 1))
    def roll_back(self, data: st.DataObject, back: int, token: int) -> None:
        """As after refused drafts: what was written is written again."""
        name = self.some_sequence(data)
        start = max(len(self.expected[name]) - back, 0)
        self.write_at(name, start, [token])

    def write_at(self, name: str, start: int, tokens: list[int]) -> bool:
        before = (self.blocks.num_free_blocks, list(self.blocks.table(name)))
        copies = self.blocks.reserve(name, start, start + len(tokens))
        if copies is None:
            assert before == (self.blocks.num_free_blocks, list(self.blocks.table(name)))
            return False
        sources = {
            block: [self.slot_of(block, j) for j in range(BLOCK_SIZE)] for block, _ in copies
        }
        held = {block: [self.pool.get(slot, ()) for slot in s] for block, s in sources.items()}
        for source, destination in copies:
            for j, prefix in enumerate(held[source]):
                self.pool[self.slot_of(destination, j)] = prefix
        known = self.expected[name] = self.expected[name][:start] + tokens
        for i in range(start, len(known)):
            self.pool[self.slot(name, i)] = tuple(known[: i + 1])
        return True

    def slot_of(self, block: int, offset: int) -> int:
        return block * BLOCK_SIZE + offset

    def slot(self, name: str, i: int) -> int:
        return self.slot_of(self.blocks.table(name)[i // BLOCK_SIZE], i % BLOCK_SIZE)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), unsure=st.integers(0, 3))
    def register(self, data: st.DataObject, unsure: int) -> None:
        self.register_certain(self.some_sequence(data), unsure)

    def register_certain(self, name: str, unsure: int) -> None:
        tokens = self.expected[name]
        num_certain = max(len(tokens) - unsure, 0)
        self.blocks.register(name, tokens, num_certain)
        whole = range(BLOCK_SIZE, num_certain + 1, BLOCK_SIZE)
        self.registered |= {tuple(tokens[:end]) for end in whole}

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = self.some_sequence(data), self.name()
        before = self.blocks.num_free_blocks
        self.blocks.fork(parent, child)
        assert self.blocks.num_free_blocks == before
        self.expected[child] = list(self.expected[parent])

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.free_sequence(self.some_sequence(data))

    def free_sequence(self, name: str) -> None:
        self.blocks.free(name)
        del self.expected[name]

    @precondition(lambda self: self.expected)
    @rule()
    def free_all(self) -> None:
        for name in list(self.expected):
            self.free_sequence(name)
        assert self.blocks.num_free_blocks == NUM_BLOCKS

    @invariant()
    def counts_add_up(self) -> None:
        self.blocks.check()

    @invariant()
    def everyone_reads_their_own_tokens(self) -> None:
        for name, tokens in self.expected.items():
            for i in range(len(tokens)):
                assert self.pool[self.slot(name, i)] == tuple(tokens[: i + 1])


BlockMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockMachine = BlockMachine.TestCase


@pytest.mark.slow
class TestBlockMachineLong(BlockMachine.TestCase):  # type: ignore[misc, name-defined]
    settings = settings(max_examples=250, stateful_step_count=60, deadline=None)


def test_reserve_takes_the_lowest_free_blocks() -> None:
    blocks = BlockManager(8, 4)
    for name in ("a", "b", "c"):
        blocks.reserve(name, 0, 8)
    blocks.free("a")
    blocks.reserve("d", 0, 12)
    assert blocks.table("d") == [0, 1, 6]


def test_reserve_grows_only_by_whole_blocks() -> None:
    blocks = BlockManager(8, 4)
    lengths = []
    for end in (1, 4, 5, 8, 9):
        blocks.reserve("a", end - 1, end)
        lengths.append(len(blocks.table("a")))
    assert lengths == [1, 1, 2, 2, 3]


def test_reserve_copies_only_the_shared_blocks_it_writes() -> None:
    blocks = BlockManager(8, 4)
    blocks.reserve("parent", 0, 10)
    blocks.fork("parent", "child")
    assert blocks.reserve("child", 10, 11) == [(2, 3)]
    assert blocks.table("parent")[:2] == blocks.table("child")[:2]
    assert blocks.reserve("parent", 10, 11) == []  # its last block is its own again


def test_fork_refuses_a_sequence_that_owns_blocks() -> None:
    blocks = BlockManager(4, 4)
    blocks.reserve("a", 0, 4)
    blocks.reserve("b", 0, 4)
    with pytest.raises(ValueError, match="'b' already owns"):
        blocks.fork("a", "b")


def filled(blocks: BlockManager, name: str, tokens: list[int]) -> None:
    """A sequence with all its tokens computed and registered."""
    start = blocks.share_prefix(name, tokens)
    assert blocks.reserve(name, start, len(tokens)) is not None
    blocks.register(name, tokens, len(tokens))


@pytest.mark.parametrize(
    ("length", "shared"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (30, 12)]
)
def test_share_prefix_leaves_at_least_one_token(length: int, shared: int) -> None:
    blocks = BlockManager(16, 4)
    filled(blocks, "a", list(range(14)))  # 3 full blocks
    assert blocks.share_prefix("b", list(range(length))) == shared
    assert blocks.table("b") == blocks.table("a")[: shared // 4]


def test_share_prefix_revives_blocks_that_nobody_refers_to() -> None:
    blocks = BlockManager(4, 4)
    filled(blocks, "a", list(range(12)))
    table = list(blocks.table("a"))
    blocks.free("a")
    assert (blocks.num_free_blocks, blocks.num_cached_blocks) == (4, 3)
    assert blocks.share_prefix("b", list(range(12))) == 8
    assert blocks.table("b") == table[:2]
    assert (blocks.num_free_blocks, blocks.num_cached_blocks) == (2, 1)
    blocks.check()


@pytest.mark.parametrize("block_hash", HASHES)
def test_cached_prefix_compares_tokens_and_parents_not_only_hashes(block_hash: BlockHash) -> None:
    blocks = BlockManager(16, 4, block_hash=block_hash)
    filled(blocks, "a", [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert len(blocks.cached_prefix([1, 1, 1, 1, 9])) == 1
    for other in ([2, 2, 2, 2, 9], [7, 7, 7, 7, 9]):  # the tokens of a second block, of none
        assert blocks.cached_prefix(other) == []
    # The same tokens as the second block, behind another first one.
    filled(blocks, "b", [5, 5, 5, 5, 2, 2, 2, 2, 3])
    assert not set(blocks.table("a")) & set(blocks.table("b"))
    blocks.check()


def test_register_takes_the_block_that_is_there_already() -> None:
    blocks = BlockManager(16, 4)
    tokens = list(range(10))
    for name in ("a", "b"):  # both computed at once: neither found the other's
        blocks.reserve(name, 0, 10)
    for name in ("a", "b"):
        blocks.register(name, tokens, 10)
    assert blocks.table("b")[:2] == blocks.table("a")[:2]
    assert blocks.table("b")[2] != blocks.table("a")[2]
    assert blocks.num_free_blocks == 16 - 4
    blocks.check()


def test_register_leaves_a_forked_duplicate_where_it_is() -> None:
    """Else the other owner would hold the registered third block without its parent."""
    blocks = BlockManager(16, 4)
    filled(blocks, "a", list(range(8)))
    blocks.reserve("parent", 0, 12)
    blocks.fork("parent", "child")
    blocks.register("parent", list(range(12)), 12)
    blocks.free("a")
    blocks.check()
    assert blocks.table("parent") == blocks.table("child")


def test_register_leaves_out_tokens_that_are_not_certain() -> None:
    blocks = BlockManager(8, 4)
    blocks.reserve("a", 0, 8)
    blocks.register("a", list(range(8)), 7)
    assert len(blocks.cached_prefix(list(range(9)))) == 1


def test_registered_block_is_copied_before_it_is_written() -> None:
    blocks = BlockManager(8, 4)
    filled(blocks, "a", list(range(8)))
    assert blocks.reserve("a", 6, 7) == [(1, 2)]
    assert blocks.cached_prefix(list(range(9))) == [0, 1]
    blocks.check()


def test_take_evicts_the_least_recently_used_and_the_tail_first() -> None:
    blocks = BlockManager(6, 4)
    old, new = [1] * 12, [2] * 12
    filled(blocks, "old", old)
    filled(blocks, "new", new)
    blocks.free("old")
    blocks.free("new")
    left = []
    for end in (4, 8, 12, 16):
        assert blocks.reserve("x", end - 4, end) == []
        left.append([len(blocks.cached_prefix([*tokens, 0])) for tokens in (old, new)])
    assert left == [[2, 3], [1, 3], [0, 3], [0, 2]]
    assert blocks.num_evictions == 4


def test_take_prefers_the_lowest_empty_block_to_a_cached_one() -> None:
    blocks = BlockManager(6, 4)
    filled(blocks, "a", [1] * 9)  # blocks 0 and 1 cached, 2 not
    blocks.free("a")
    blocks.reserve("b", 0, 16)
    assert blocks.table("b") == [2, 3, 4, 5]
    assert blocks.num_evictions == 0


@pytest.mark.parametrize("length", [7, 8, 9])
def test_beams_at_a_block_boundary_share_and_free(length: int) -> None:
    """Two beams of one parent: the parent goes, then one beam, then the other forks again."""
    blocks = BlockManager(8, 4)
    blocks.reserve("parent", 0, length)
    for beam in ("one", "two"):
        blocks.fork("parent", beam)
        assert blocks.reserve(beam, length, length + 1) is not None
    blocks.free("parent")
    shared = set(blocks.table("one")) & set(blocks.table("two"))
    assert len(shared) == length // 4
    blocks.free("one")
    blocks.fork("two", "three")
    blocks.free("two")
    assert blocks.num_free_blocks == 8 - len(blocks.table("three"))
    blocks.free("three")
    assert blocks.num_free_blocks == 8
    blocks.check()


def test_contiguous_gives_the_first_free_run_of_the_longest_length() -> None:
    blocks = ContiguousBlocks(11, 4, max_len=10)  # runs of 3
    for name in ("a", "b", "c"):
        assert blocks.reserve(name, 0, 1) == []
    assert blocks.reserve("d", 0, 1) is None, "two blocks are left, none of them a run"
    assert blocks.table("b") == [3, 4, 5]
    blocks.free("b")
    assert blocks.reserve("e", 0, 10) == []
    assert blocks.table("e") == [3, 4, 5]
    assert blocks.reserve("e", 9, 10) == []
    blocks.check()
    assert [blocks.footprint(n) for n in (1, 4, 10)] == [3, 3, 3]


def test_contiguous_refuses_to_share() -> None:
    blocks = ContiguousBlocks(6, 4, max_len=10)
    blocks.reserve("a", 0, 5)
    with pytest.raises(ValueError, match="cannot fork"):
        blocks.fork("a", "b")
    with pytest.raises(ValueError, match="prefix_cache=False"):
        blocks.share_prefix("b", [1, 2])
    with pytest.raises(ValueError, match="prefix_cache=False"):
        blocks.register("a", [1, 2], 2)


def test_check_finds_a_leaked_block() -> None:
    blocks = BlockManager(4, 4)
    blocks.reserve("a", 0, 4)
    del blocks._tables["a"]
    with pytest.raises(AssertionError, match="reference counts"):
        blocks.check()


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)], ids=["no-blocks", "no-slots"])
def test_block_manager_refuses_empty_sizes(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        BlockManager(*sizes)
