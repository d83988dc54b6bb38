"""Soft caps on scores: the tiled computation, both paths of the CPU backend, the paged kernels."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compress.kernels.ops import select
from compress.runtime.attention import softcap
from compress.runtime.attention.choice import make_attention
from compress.runtime.attention.softcap import capped_attention
from compress.runtime.blocks import BlockManager
from tests.runtime.test_attention import (
    BLOCK_SIZE,
    CPU,
    NUM_BLOCKS,
    SPEC,
    STEPS,
    Step,
    attend,
    make_batch,
    random_pool,
    random_qkv,
)

CAPPED = replace(SPEC, soft_cap=0.7, scale_override=0.3)


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, *, cap: float, scale: float
) -> torch.Tensor:
    """In float64, all scores at once: q (N, Hq, Q, D), k and v (N, H, L, D)."""
    q, k, v = q.double(), k.double(), v.double()
    group, length = q.shape[1] // k.shape[1], k.shape[2]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = cap * torch.tanh(q @ k.transpose(2, 3) * scale / cap)
    query = torch.arange(length - q.shape[2], length)[:, None]
    distance = query - torch.arange(length)
    hidden = (distance < 0) | (distance >= (window or length))
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("window", [0, 1, 21, 1000])
@pytest.mark.parametrize(
    ("query_len", "context_len"), [(1, 1), (17, 17), (33, 130), (130, 130)], ids=str
)
@pytest.mark.parametrize("tile_bytes", [1, 40_000, 10**9], ids=["rows", "tiles", "whole"])
def test_capped_attention_is_that_of_the_definition(
    tile_bytes: int, query_len: int, context_len: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softcap, "_SCORES_BYTES", tile_bytes)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, query_len, 16, generator=generator)
    k, v = (torch.randn(2, 2, context_len, 16, generator=generator) for _ in "kv")
    got = capped_attention(q, k, v, scale=0.3, soft_cap=0.7, window=window)
    expected = naive(q, k, v, window, cap=0.7, scale=0.3)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_capped_attention_holds_the_scores_of_one_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softcap, "_SCORES_BYTES", 4 * 6 * 130 * 10)
    sizes: list[int] = []
    work = torch.matmul

    def noting(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = work(a, b)
        sizes.append(4 * product.numel())
        return product

    monkeypatch.setattr(torch, "matmul", noting)
    q, k = torch.randn(1, 6, 130, 16), torch.randn(1, 2, 130, 16)
    capped_attention(q, k, k, scale=0.3, soft_cap=0.7, window=0)
    assert max(sizes) <= 4 * 6 * 130 * 10
    assert len(sizes) == 2 * 13


def test_capped_attention_in_float16_survives_products_beyond_its_range() -> None:
    q = torch.full((1, 2, 9, 64), 60.0, dtype=torch.float16)
    k = torch.full((1, 1, 9, 64), 60.0, dtype=torch.float16)
    v = torch.randn(1, 1, 9, 64).half()
    got = capped_attention(q, k, v, scale=0.125, soft_cap=50.0, window=0)
    expected = naive(q, k, v, 0, cap=50.0, scale=0.125)
    torch.testing.assert_close(got.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("layer", [0, 1], ids=["full", "window"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_blockwise_attention_caps_its_scores(step: Step, layer: int) -> None:
    batch, pool = make_batch(step, BlockManager(NUM_BLOCKS, BLOCK_SIZE)), random_pool()
    q = random_qkv(len(batch.token_ids))[0]
    backend = make_attention("blockwise", CAPPED, pool, select("torch", CPU))
    got = attend(backend, batch, layer, torch.float32)
    row = 0
    for table, end, count in zip(
        batch.host_block_tables, batch.host_context_lens, batch.host_query_lens, strict=True
    ):
        keys, values = (  # the pools hold the new rows by now
            x[layer][list(table)].transpose(0, 1).flatten(1, 2)[None, :, :end]
            for x in (pool.k, pool.v)
        )
        queries = q[row : row + count].transpose(0, 1)[None]
        expected = naive(queries, keys, values, CAPPED.windows[layer], cap=0.7, scale=0.3)
        found = got[row : row + count].transpose(0, 1)[None]
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        row += count


@pytest.mark.parametrize("cap", [0.0, 50.0], ids=["none", "capped"])
def test_paged_attention_passes_the_cap_on(cap: float) -> None:
    seen: list[dict[str, Any]] = []

    def paged(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        seen.append(options)
        return q

    ops: Any = SimpleNamespace(kv_write=lambda *args, **scales: None, paged_attention=paged)
    batch = make_batch(STEPS["mixed"], BlockManager(NUM_BLOCKS, BLOCK_SIZE))
    spec = replace(SPEC, soft_cap=cap, scale_override=0.25)
    attend(make_attention("paged", spec, random_pool(), ops), batch, 0, torch.float32)
    (options,) = seen
    assert options["soft_cap"] == cap
    assert options["scale"] == 0.25
