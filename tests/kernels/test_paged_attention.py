from dataclasses import dataclass

import pytest
import torch

from compress.kernels.paged_attention import (
    paged_attention_ref,
    paged_attention_torch,
    paged_attention_triton,
)
from tests.kernels.tolerance import DTYPES, assert_as_exact_as, dtype_id

BLOCK_SIZE = 64
UNUSED = -1  # fills the parts of a block table that must never be read


@dataclass
class Batch:
    """The positional arguments of one call, and its keyword arguments."""

    args: tuple
    options: dict

    def double(self):
        return Batch((*(pool.double() for pool in self.args[:3]), *self.args[3:]), self.options)

    def run(self, function):
        return function(*self.args, **self.options)


def make(query_lens, context_lens, *, heads=(9, 3), head_dim=64, dtype, device, window=0):
    """Sequences whose blocks lie shuffled in a pool; what they do not own holds NaN.

    Keys, values and the query at a position depend on the contexts only, not on query_lens.
    """
    num_q_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(0)
    num_blocks = [-(-context // BLOCK_SIZE) for context in context_lens]
    order = torch.randperm(sum(num_blocks) + 3, generator=generator)
    shape = (len(order), num_kv_heads, BLOCK_SIZE, head_dim)
    k_pool, v_pool = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
    tables = torch.full((len(context_lens), max(num_blocks) + 1), UNUSED, dtype=torch.int32)
    queries, taken = [], 0
    for s, (query_len, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        blocks = order[taken : taken + num_blocks[s]]
        taken += num_blocks[s]
        tables[s, : num_blocks[s]] = blocks
        for pool in (k_pool, v_pool):
            values = torch.randn(context, num_kv_heads, head_dim, generator=generator)
            positions = torch.arange(context)
            pool[blocks[positions // BLOCK_SIZE], :, positions % BLOCK_SIZE] = values
        rows = torch.randn(context, num_q_heads, head_dim, generator=generator)
        queries.append(rows[context - query_len :])
        if window:
            tables[s, : max(0, context - query_len - window + 1) // BLOCK_SIZE] = UNUSED
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    tensors = (torch.cat(queries), k_pool, v_pool)
    integers = (tables, torch.tensor(context_lens), starts)
    return Batch(
        (
            *(tensor.to(device, dtype) for tensor in tensors),
            *(tensor.to(device, torch.int32) for tensor in integers),
        ),
        {"scale": head_dim**-0.5, "window": window, "max_query_len": max(query_lens)},
    )


CONTEXTS = [1, 63, 64, 65, 200]
BATCHES = {
    "decode": ([1, 1, 1, 1, 1], CONTEXTS),
    "decode-two-segments": ([1, 1], [513, 70]),
    "verify-5": ([1, 5, 5, 5, 5], CONTEXTS),
    "prefill": ([1, 63, 64, 65], [1, 63, 64, 65]),
    "chunk-33-of-130": ([33], [130]),
    "mixed": ([1, 17, 3, 0, 70], [64, 65, 200, 1, 130]),
}


@pytest.mark.parametrize("window", [0, 1, 70], ids="window{}".format)
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_paged_attention_triton_matches_reference(name, dtype, window, device, poisoned_empty):
    batch = make(*BATCHES[name], dtype=dtype, device=device, window=window)
    exact = batch.double().run(paged_attention_ref)
    got = batch.run(paged_attention_triton)
    assert_as_exact_as(got, batch.run(paged_attention_torch), exact)


def in_float8(batch):
    """The batch with its pools in float8, what was never written still NaN."""
    q, *pools = batch.args[:3]
    return Batch(
        (q, *(pool.to(torch.float8_e4m3fn) for pool in pools), *batch.args[3:]), batch.options
    )


@pytest.mark.parametrize("name", ["decode", "decode-two-segments", "mixed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_paged_attention_triton_reads_float8_pools(name, dtype, device, poisoned_empty):
    batch = in_float8(make(*BATCHES[name], dtype=dtype, device=device))
    exact = batch.double().run(paged_attention_ref)
    got = batch.run(paged_attention_triton)
    assert_as_exact_as(got, batch.run(paged_attention_torch), exact)


def test_paged_attention_triton_reads_every_float8_value(device):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    codes[codes % 128 == 127] = 0  # NaN
    values = codes.view(torch.float8_e4m3fn).view(4, 1, 1, 64).to(device)
    k_pool = torch.zeros(4, 1, 64, 64, device=device).to(torch.float8_e4m3fn)
    v_pool = k_pool.clone()
    v_pool[:, :, :1] = values
    args = (
        torch.ones(4, 1, 64, device=device),
        k_pool,
        v_pool,
        torch.arange(4, dtype=torch.int32, device=device)[:, None],
        torch.ones(4, dtype=torch.int32, device=device),
        torch.arange(5, dtype=torch.int32, device=device),
    )
    got = paged_attention_triton(*args, scale=1.0, max_query_len=1)
    assert torch.equal(got.flatten(), values.float().flatten())


@pytest.mark.parametrize("window", [0, 70], ids="window{}".format)
@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_paged_attention_torch_reads_float8_pools(name, window):
    batch = in_float8(make(*BATCHES[name], dtype=torch.float32, device="cpu", window=window))
    exact = batch.double().run(paged_attention_ref)
    torch.testing.assert_close(
        batch.run(paged_attention_torch).double(), exact, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "heads, head_dim",
    [
        pytest.param((4, 4), 16, id="4over4-D16"),
        pytest.param((7, 1), 96, id="7over1-D96"),
        pytest.param((34, 2), 32, id="34over2-D32"),
        pytest.param((8, 2), 128, id="8over2-D128"),
    ],
)
@pytest.mark.parametrize("query_lens", [[1, 2], [20, 3]], ids=["short", "long"])
def test_paged_attention_triton_serves_any_group_and_head_dim(
    heads, head_dim, query_lens, device, poisoned_empty
):
    batch = make(
        query_lens, [70, 65], heads=heads, head_dim=head_dim, dtype=torch.float32, device=device
    )
    exact = batch.double().run(paged_attention_ref)
    got = batch.run(paged_attention_triton)
    assert_as_exact_as(got, batch.run(paged_attention_torch), exact)


@pytest.mark.parametrize("window", [0, 70], ids="window{}".format)
@pytest.mark.parametrize("name", BATCHES)
def test_paged_attention_torch_matches_reference(name, window):
    batch = make(*BATCHES[name], dtype=torch.float32, device="cpu", window=window)
    exact = batch.double().run(paged_attention_ref)
    torch.testing.assert_close(
        batch.run(paged_attention_torch).double(), exact, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "query_lens",
    [
        pytest.param([5, 1, 1], id="verification-pass"),
        pytest.param([1, 1, 40], id="beside-a-prefill"),
        pytest.param([64, 9, 64], id="longest-short-query"),
    ],
)
def test_paged_attention_triton_last_row_does_not_depend_on_its_batch(query_lens, device):
    contexts = [520, 65, 64]
    alone = make([1, 1, 1], contexts, dtype=torch.float16, device=device)
    batch = make(query_lens, contexts, dtype=torch.float16, device=device)
    want, got = alone.run(paged_attention_triton), batch.run(paged_attention_triton)
    for s in range(2):
        assert torch.equal(got[sum(query_lens[: s + 1]) - 1], want[s])


def test_paged_attention_triton_of_no_tokens_is_empty(device):
    batch = make([1], [1], dtype=torch.float32, device=device)
    q, k_pool, v_pool, tables, contexts, starts = batch.args
    empty = Batch((q[:0], k_pool, v_pool, tables[:0], contexts[:0], starts[:1]), batch.options)
    assert empty.run(paged_attention_triton).shape == (0, 9, 64)
    assert empty.run(paged_attention_torch).shape == (0, 9, 64)


@pytest.mark.parametrize(
    "index, change, message",
    [
        pytest.param(0, lambda q: q[:, :8], "q has 8 heads, no multiple of 3", id="heads"),
        pytest.param(0, lambda q: q.half(), "k_pool must be float16", id="pool-dtype"),
        pytest.param(2, lambda v: v.to(torch.float8_e4m3fn), "v_pool must be float32", id="mixed"),
        pytest.param(2, lambda v: v[:1], "v_pool must be float32 of shape", id="pool-shape"),
        pytest.param(3, lambda t: t[0], "block_tables must be int32 of shape", id="table-shape"),
        pytest.param(3, lambda t: t.long(), "block_tables must be int32", id="table-dtype"),
        pytest.param(4, lambda c: c.long(), "context_lens must be int32", id="context-dtype"),
        pytest.param(5, lambda s: s[:1], r"query_starts must be int32 of shape \(3\)", id="starts"),
    ],
)
def test_paged_attention_triton_names_the_bad_argument(index, change, message, device):
    batch = make([1, 2], [3, 4], dtype=torch.float32, device=device)
    args = list(batch.args)
    args[index] = change(args[index])
    with pytest.raises(ValueError, match=message):
        Batch(tuple(args), batch.options).run(paged_attention_triton)


def test_paged_attention_triton_refuses_odd_blocks_and_windows(device):
    q, k_pool, v_pool, *rest = make([1], [3], dtype=torch.float32, device=device).args
    options = {"scale": 1.0, "max_query_len": 1}
    odd = k_pool[:, :, :48].contiguous()
    with pytest.raises(ValueError, match="blocks of 48 tokens"):
        paged_attention_triton(q, odd, odd, *rest, **options)
    with pytest.raises(ValueError, match=r"window must be 0 .* got -1"):
        paged_attention_triton(q, k_pool, v_pool, *rest, window=-1, **options)
