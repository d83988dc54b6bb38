"""The block manager against a plain model of it, and its edges."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from compress.runtime.blocks import BlockManager

BLOCK_SIZE = 4
NUM_BLOCKS = 12


class BlockMachine(RuleBasedStateMachine):
    """Writes tagged tokens through block tables and checks that every sequence reads its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.pool: dict[int, int] = {}  # slot -> tag
        self.expected: dict[str, list[int]] = {}
        self.num_named = 0
        self.next_tag = 0

    def name(self) -> str:
        self.num_named += 1
        return f"s{self.num_named}"

    @rule()
    def start(self) -> None:
        self.expected[self.name()] = []

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), count=st.integers(1, 9))
    def write(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        start = len(self.expected[name])
        self.write_at(name, start, count)

    @precondition(lambda self: any(self.expected.values()))
    @rule(data=st.data(), back=st.integers(1, 5))
    def overwrite(self, data: st.DataObject, back: int) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, t in self.expected.items() if t)))
        start = max(len(self.expected[name]) - back, 0)
        self.write_at(name, start, 1)

    def write_at(self, name: str, start: int, count: int) -> None:
        before = (self.blocks.num_free_blocks, list(self.blocks.table(name)))
        copies = self.blocks.reserve(name, start, start + count)
        if copies is None:
            assert before == (self.blocks.num_free_blocks, list(self.blocks.table(name)))
            return
        for source, destination in copies:
            for offset in range(BLOCK_SIZE):
                tag = self.pool.get(source * BLOCK_SIZE + offset, -1)
                self.pool[destination * BLOCK_SIZE + offset] = tag
        tokens = self.expected[name]
        for i in range(start, start + count):
            self.pool[self.slot(name, i)] = self.next_tag
            tokens[i : i + 1] = [self.next_tag]
            self.next_tag += 1

    def slot(self, name: str, i: int) -> int:
        return self.blocks.table(name)[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(sorted(self.expected)))
        child = self.name()
        self.blocks.fork(parent, child)
        self.expected[child] = list(self.expected[parent])

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        self.blocks.free(name)
        del self.expected[name]

    @invariant()
    def counts_add_up(self) -> None:
        self.blocks.check()

    @invariant()
    def everyone_reads_their_own_tokens(self) -> None:
        for name, tokens in self.expected.items():
            assert [self.pool[self.slot(name, i)] for i in range(len(tokens))] == tokens


BlockMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlockMachine = BlockMachine.TestCase


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
