"""The tensors of a step, row by row."""

import torch

from compress.runtime.batch import build_batch
from compress.runtime.blocks import BlockManager
from compress.runtime.request import Request, SamplingParams
from compress.runtime.scheduler import ScheduledRequest


def test_build_batch_lays_requests_out_one_after_another() -> None:
    blocks = BlockManager(8, 4)
    chunk = Request(request_id="chunk", prompt_ids=list(range(100, 110)), params=SamplingParams())
    decode = Request(request_id="decode", prompt_ids=[7, 8], params=SamplingParams())
    decode.token_ids.append(9)
    decode.draft_ids = [50, 51]
    blocks.reserve("chunk", 0, 7)
    blocks.reserve("decode", 0, 5)
    batch = build_batch(
        [
            ScheduledRequest(request=decode, start=2, num_tokens=3),
            ScheduledRequest(request=chunk, start=3, num_tokens=4),
        ],
        blocks,
        torch.device("cpu"),
    )
    assert batch.token_ids.tolist() == [9, 50, 51, 103, 104, 105, 106]
    assert batch.positions.tolist() == [2, 3, 4, 3, 4, 5, 6]
    assert batch.slots.tolist() == [10, 11, 12, 3, 4, 5, 6]  # decode owns blocks 2 and 3
    assert batch.block_tables.tolist() == [[2, 3], [0, 1]]
    assert batch.context_lens.tolist() == [5, 7]
    assert batch.query_starts.tolist() == [0, 3, 7]
    assert batch.host_query_lens == [3, 4]
    assert batch.block_tables.dtype == batch.query_starts.dtype == torch.int32


def test_build_batch_pads_block_tables_to_the_longest() -> None:
    blocks = BlockManager(8, 4)
    requests = []
    for name, length in (("long", 9), ("short", 2)):
        blocks.reserve(name, 0, length)
        request = Request(request_id=name, prompt_ids=[0] * length, params=SamplingParams())
        requests.append(ScheduledRequest(request=request, start=0, num_tokens=length))
    batch = build_batch(requests, blocks, torch.device("cpu"))
    assert batch.block_tables.tolist() == [[0, 1, 2], [3, 0, 0]]
    assert [list(table) for table in batch.host_block_tables] == [[0, 1, 2], [3]]
