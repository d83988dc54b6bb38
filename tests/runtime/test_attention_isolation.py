"""What attention on a CPU must not mix up: a request that is not finite, and the size of blocks."""

from typing import Any

import pytest
import torch

from compress.kernels.ops import select
from compress.runtime.attention.choice import make_attention
from compress.runtime.attention.pool import KVPool, allocate_pool
from compress.runtime.batch import Batch
from compress.runtime.blocks import BlockManager
from tests.runtime.test_attention import CPU, SPEC, STEPS, Step, make_batch, random_qkv

MIXED: dict[str, Any] = {
    name: STEPS[name] for name in ("decodes", "uneven-verification", "mixed", "prompts")
}


def forward(
    batch: Batch, pool: KVPool, layer: int, name: str, *, deterministic: bool
) -> torch.Tensor:
    backend = make_attention(name, SPEC, pool, select("torch", CPU), deterministic=deterministic)
    backend.plan(batch)
    return backend.forward(*random_qkv(len(batch.token_ids), pool.dtype), layer)


def filled_pool(batch: Batch, block_size: int, num_blocks: int, dtype: torch.dtype) -> KVPool:
    """Keys and values that depend on sequence and position alone, wherever they are stored."""
    pool = allocate_pool(SPEC, num_blocks, block_size, dtype=dtype, device=CPU)
    for s, table in enumerate(batch.host_block_tables):
        generator = torch.Generator().manual_seed(s)
        shape = (batch.host_context_lens[s], SPEC.num_kv_heads, SPEC.head_dim)
        for layer in range(len(SPEC.windows)):
            for tensor in (pool.k, pool.v):
                rows = torch.randn(shape, generator=generator).to(dtype)
                for i, row in enumerate(rows):
                    tensor[layer, table[i // block_size], :, i % block_size] = row
    return pool


@pytest.mark.parametrize("mode", ["fast", "deterministic", "paged"])
@pytest.mark.parametrize("layer", [0, 1], ids=["full", "window"])
@pytest.mark.parametrize("step", MIXED.values(), ids=MIXED.keys())
def test_what_is_not_finite_stays_in_its_own_sequence(step: Step, layer: int, mode: str) -> None:
    deterministic, name = mode == "deterministic", "paged" if mode == "paged" else "blockwise"
    batch = make_batch(step, BlockManager(48, 16))
    expected = forward(
        batch,
        filled_pool(batch, 16, 48, torch.float32),
        layer,
        name,
        deterministic=deterministic,
    ).split(batch.host_query_lens)
    for bad, table in enumerate(batch.host_block_tables):
        pool = filled_pool(batch, 16, 48, torch.float32)
        pool.k[:, list(table)] = pool.v[:, list(table)] = float("nan")
        got = forward(batch, pool, layer, name, deterministic=deterministic)
        for s, rows in enumerate(got.split(batch.host_query_lens)):
            if s != bad:
                tolerance = 0 if deterministic else 1e-5
                torch.testing.assert_close(rows, expected[s], rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", [0, 1], ids=["full", "window"])
@pytest.mark.parametrize("step", MIXED.values(), ids=MIXED.keys())
def test_deterministic_attention_has_the_same_bits_for_blocks_of_every_size(
    step: Step, layer: int, dtype: torch.dtype
) -> None:
    found = []
    for block_size in (64, 1, 3, 16, 100, 128):
        num_blocks = 8 + 400 // block_size
        batch = make_batch(step, BlockManager(num_blocks, block_size))
        pool = filled_pool(batch, block_size, num_blocks, dtype)
        found.append(forward(batch, pool, layer, "blockwise", deterministic=True))
    for other in found[1:]:
        assert torch.equal(other, found[0])
