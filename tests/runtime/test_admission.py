"""The peak of future block use, against a simulation of it."""

from hypothesis import given
from hypothesis import strategies as st

from compress.runtime.admission import peak_blocks
from compress.runtime.blocks import BlockManager, ContiguousBlocks
from compress.runtime.request import Request, SamplingParams

BLOCK_SIZE = 4


def request(name: str, prompt: int, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    return Request(request_id=name, prompt_ids=list(range(prompt)), params=params)


def test_peak_blocks_counts_a_block_freed_before_another_grows() -> None:
    blocks = BlockManager(64, BLOCK_SIZE)
    short, long = request("short", 8, max_tokens=1), request("long", 4, max_tokens=9)
    assert peak_blocks([short], blocks) == 2
    assert peak_blocks([long], blocks) == 3
    assert peak_blocks([short, long], blocks) == 3  # 2 + 1 at once, then 3 alone


def test_peak_blocks_of_contiguous_runs_is_their_number() -> None:
    blocks = ContiguousBlocks(64, BLOCK_SIZE, max_len=20)
    assert peak_blocks([request(f"r{i}", 2, max_tokens=1) for i in range(3)], blocks) == 15


def simulated_peak(requests: list[Request], blocks: BlockManager) -> int:
    """Most blocks owned while every request takes one token per step and leaves at its end."""
    peak, step = 0, 0
    ends = {r.request_id: r.max_cached_tokens for r in requests}
    lengths = {r.request_id: len(r.token_ids) for r in requests}
    while lengths:
        for name, length in lengths.items():
            if step:
                assert blocks.reserve(name, length + step - 1, length + step) is not None
        peak = max(peak, blocks.num_blocks - blocks.num_free_blocks)
        for name in [name for name, length in lengths.items() if length + step == ends[name]]:
            blocks.free(name)
            del lengths[name]
        step += 1
    return peak


SHAPES = st.lists(st.tuples(st.integers(1, 14), st.integers(1, 12)), min_size=1, max_size=5)


@given(shapes=SHAPES)
def test_peak_blocks_is_exact_for_requests_that_decode(shapes: list[tuple[int, int]]) -> None:
    blocks = BlockManager(64, BLOCK_SIZE)
    requests = [request(f"r{i}", *shape) for i, shape in enumerate(shapes)]
    for each in requests:
        blocks.reserve(each.request_id, 0, len(each.token_ids))
    estimate = peak_blocks(requests, blocks)
    assert estimate == simulated_peak(requests, blocks)


@given(shapes=SHAPES, data=st.data())
def test_peak_blocks_counts_a_shared_prefix_once(
    shapes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """All prompts begin alike; the last request is a candidate that owns nothing yet."""
    blocks = BlockManager(64, BLOCK_SIZE)
    requests = [request(f"r{i}", *shape) for i, shape in enumerate(shapes)]
    for each in requests[:-1]:
        start = blocks.share_prefix(each.request_id, each.token_ids)
        blocks.reserve(each.request_id, start, len(each.token_ids))
        blocks.register(each.request_id, each.token_ids, len(each.token_ids))
    if data.draw(st.booleans()):  # one has left, and its blocks are cached
        blocks.free(requests[0].request_id)
        requests = requests[1:] or requests
    last = requests[-1]
    estimate = peak_blocks(requests, blocks, blocks.cached_prefix(last.token_ids))
    blocks.free(last.request_id)
    start = blocks.share_prefix(last.request_id, last.token_ids)
    blocks.reserve(last.request_id, start, len(last.token_ids))
    assert estimate == simulated_peak(requests, blocks)
