"""Both attention backends against the float64 oracle of the paged kernel."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from compress.kernels.ops import select
from compress.kernels.paged_attention import paged_attention_ref
from compress.runtime.attention.base import AttentionBackend, AttentionSpec
from compress.runtime.attention.choice import make_attention
from compress.runtime.attention.pool import (
    KVPool,
    KVScales,
    KVStorage,
    allocate_pool,
    choose_storage,
)
from compress.runtime.batch import Batch, build_batch
from compress.runtime.blocks import BlockManager
from compress.runtime.request import Request, SamplingParams
from compress.runtime.scheduler import ScheduledRequest

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_BLOCKS = 48
SPEC = AttentionSpec(num_heads=6, num_kv_heads=2, head_dim=32, windows=(0, 21, 0))
BACKENDS = ["blockwise", "paged"]


@dataclass(frozen=True)
class Step:
    """Requests that have `computed` tokens in the cache and compute `new` ones."""

    computed: tuple[int, ...]
    new: tuple[int, ...]


STEPS = {
    "one-decode": Step((33,), (1,)),
    "decodes": Step((1, 17, 33, 130), (1, 1, 1, 1)),
    "first-token": Step((0,), (1,)),
    "short-prompts": Step((0, 0, 0), (3, 8, 1)),
    "prompts-of-one-length": Step((0, 0, 0), (17, 17, 17)),
    "prompts": Step((0, 0), (33, 130)),
    "chunks": Step((16, 33), (17, 40)),
    "verification": Step((33, 17, 64), (5, 5, 5)),
    "uneven-verification": Step((33, 17, 64), (5, 1, 8)),
    "mixed": Step((40, 5, 0, 20), (1, 3, 17, 30)),
}


def make_batch(step: Step, blocks: BlockManager) -> Batch:
    scheduled = []
    for i, (computed, new) in enumerate(zip(step.computed, step.new, strict=True)):
        request = Request(
            request_id=f"r{i}", prompt_ids=[0] * (computed + new), params=SamplingParams()
        )
        if not blocks.table(request.request_id):
            assert blocks.reserve(request.request_id, 0, computed + new) is not None
        scheduled.append(ScheduledRequest(request=request, start=computed, num_tokens=new))
    return build_batch(scheduled, blocks, CPU)


def random_pool(dtype: torch.dtype = torch.float32) -> KVPool:
    pool = allocate_pool(SPEC, NUM_BLOCKS, BLOCK_SIZE, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(7)
    for tensor in (pool.k, pool.v):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pool


def random_qkv(rows: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    heads = (SPEC.num_heads, SPEC.num_kv_heads, SPEC.num_kv_heads)
    return [torch.randn(rows, num, SPEC.head_dim, generator=generator).to(dtype) for num in heads]


def attend(backend: AttentionBackend, batch: Batch, layer: int, dtype: torch.dtype) -> torch.Tensor:
    q, k, v = random_qkv(len(batch.token_ids), dtype)
    backend.plan(batch)
    return backend.forward(q, k, v, layer)


def oracle(batch: Batch, pool: KVPool, layer: int, dtype: torch.dtype) -> torch.Tensor:
    """Write the new rows into copies of the pools slot by slot, then attend in float64."""
    q, k, v = random_qkv(len(batch.token_ids), dtype)
    k_pool, v_pool = pool.k[layer].clone(), pool.v[layer].clone()
    for row, slot in enumerate(batch.slots.tolist()):
        k_pool[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = k[row]
        v_pool[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = v[row]
    return paged_attention_ref(
        q.double(),
        k_pool,
        v_pool,
        batch.block_tables,
        batch.context_lens,
        batch.query_starts,
        scale=SPEC.scale,
        window=SPEC.windows[layer],
        max_query_len=max(batch.host_query_lens),
    )


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("layer", [0, 1], ids=["full", "window"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_forward_matches_the_oracle(step: Step, layer: int, name: str) -> None:
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    batch, pool = make_batch(step, blocks), random_pool()
    expected = oracle(batch, pool, layer, torch.float32)
    backend = make_attention(name, SPEC, pool, select("torch", CPU))
    got = attend(backend, batch, layer, torch.float32)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
def test_forward_writes_only_the_slots_of_its_layer(name: str) -> None:
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    batch, pool = make_batch(STEPS["mixed"], blocks), random_pool()
    before = pool.k.clone()
    attend(make_attention(name, SPEC, pool, select("torch", CPU)), batch, 1, torch.float32)
    changed = (pool.k != before).any(-1).any(2)  # (layer, block, slot) of any head
    written = torch.zeros_like(changed)
    written[1].view(-1)[batch.slots] = True
    assert torch.equal(changed, written)


def float8_scales(shared: bool = False) -> KVScales:
    """Different for keys and values, layers and (unless `shared`) heads; some of them clip."""
    shape = (len(SPEC.windows), SPEC.num_kv_heads, 1)
    k = torch.linspace(0.003, 0.02, torch.Size(shape).numel()).view(shape)
    k = k[:, :1].expand(shape) if shared else k
    return KVScales(k=k, v=k.flip(0) / 3)


def float8_pool(scales: KVScales, dtype: torch.dtype = torch.float32) -> KVPool:
    storage = KVStorage(dtype=torch.float8_e4m3fn, scales=scales)
    pool = allocate_pool(SPEC, NUM_BLOCKS, BLOCK_SIZE, dtype=dtype, device=CPU, storage=storage)
    generator = torch.Generator().manual_seed(7)
    for tensor in (pool.k, pool.v):
        tensor.copy_(100 * torch.randn(tensor.shape, generator=generator))
    return pool


def float8_oracle(batch: Batch, pool: KVPool, layer: int, dtype: torch.dtype) -> torch.Tensor:
    """`oracle` over a float pool that holds what the codes stand for, the new rows rounded too."""
    scales = pool.storage.scales
    assert scales is not None
    q, k, v = random_qkv(len(batch.token_ids), dtype)
    pools = []
    for codes, new, scale in ((pool.k, k, scales.k[layer]), (pool.v, v, scales.v[layer])):
        values = codes[layer].double() * scale[:, :, None]
        rounded = (new.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).double() * scale
        for row, slot in enumerate(batch.slots.tolist()):
            values[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = rounded[row]
        pools.append(values)
    return paged_attention_ref(
        q.double(),
        *pools,
        batch.block_tables,
        batch.context_lens,
        batch.query_starts,
        scale=SPEC.scale,
        window=SPEC.windows[layer],
        max_query_len=max(batch.host_query_lens),
    )


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("shared", [True, False], ids=["per-tensor", "per-head"])
@pytest.mark.parametrize("layer", [0, 1], ids=["full", "window"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_forward_over_a_float8_pool_matches_the_oracle(
    step: Step, layer: int, shared: bool, name: str
) -> None:
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    batch, pool = make_batch(step, blocks), float8_pool(float8_scales(shared))
    expected = float8_oracle(batch, pool, layer, torch.float32)
    backend = make_attention(name, SPEC, pool, select("torch", CPU))
    got = attend(backend, batch, layer, torch.float32)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_forward_over_a_float8_pool_keeps_the_dtype_of_queries(
    dtype: torch.dtype, name: str
) -> None:
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    batch, pool = make_batch(STEPS["mixed"], blocks), float8_pool(float8_scales(), dtype)
    expected = float8_oracle(batch, pool, 0, dtype)
    got = attend(make_attention(name, SPEC, pool, select("torch", CPU)), batch, 0, dtype)
    assert got.dtype == dtype
    assert float((got.double() - expected).norm() / expected.norm()) < 2e-2


@pytest.mark.parametrize("name", BACKENDS)
def test_a_float8_pool_is_a_byte_per_value_and_holds_codes(name: str) -> None:
    scales = float8_scales()
    pool = float8_pool(scales)
    assert pool.k.dtype == pool.v.dtype == torch.float8_e4m3fn
    half = KVStorage(dtype=torch.float16).block_bytes(SPEC, BLOCK_SIZE)
    assert pool.storage.block_bytes(SPEC, BLOCK_SIZE) == half / 2
    batch = make_batch(STEPS["decodes"], BlockManager(NUM_BLOCKS, BLOCK_SIZE))
    attend(make_attention(name, SPEC, pool, select("torch", CPU)), batch, 2, torch.float32)
    _, k, v = random_qkv(len(batch.token_ids))
    for tensor, new, scale in ((pool.k, k, scales.k[2]), (pool.v, v, scales.v[2])):
        for row, slot in enumerate(batch.slots.tolist()):
            stored = tensor[2, slot // BLOCK_SIZE, :, slot % BLOCK_SIZE]
            clipped = (new[row] / scale).clamp(-448, 448)
            assert torch.equal(stored.float(), clipped.to(torch.float8_e4m3fn).float())


def test_choose_storage_follows_the_checkpoint_or_the_user() -> None:
    stored, half, fp8 = float8_scales(), torch.float16, torch.float8_e4m3fn
    assert choose_storage("auto", half, None) == KVStorage(dtype=half)
    assert choose_storage("auto", half, stored) == KVStorage(dtype=fp8, scales=stored)
    assert choose_storage("model", half, stored) == KVStorage(dtype=half)
    assert choose_storage("fp8", half, stored) == KVStorage(dtype=fp8, scales=stored)
    assert choose_storage("fp8", half, None) == KVStorage(dtype=fp8, per_token=True)
    for scales in (None, stored):
        assert choose_storage("int8", half, scales) == KVStorage(dtype=torch.int8, per_token=True)
    with pytest.raises(ValueError, match="unknown kv_dtype 'int4'"):
        choose_storage("int4", half, stored)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=["int8", "float8"])
def test_scales_of_tokens_give_attention_over_what_was_stored(
    name: str, step: str, stored: torch.dtype
) -> None:
    storage = KVStorage(dtype=stored, per_token=True)
    pool = allocate_pool(
        SPEC, NUM_BLOCKS, BLOCK_SIZE, dtype=torch.float32, device=CPU, storage=storage
    )
    assert pool.k_scale is not None and pool.v_scale is not None
    generator = torch.Generator().manual_seed(7)
    for codes, scale in ((pool.k, pool.k_scale), (pool.v, pool.v_scale)):
        codes.copy_(100 * torch.randn(codes.shape, generator=generator))
        scale.copy_(0.001 + 0.02 * torch.rand(scale.shape, generator=generator))
    plain = allocate_pool(SPEC, NUM_BLOCKS, BLOCK_SIZE, dtype=torch.float32, device=CPU)
    batch = make_batch(STEPS[step], BlockManager(NUM_BLOCKS, BLOCK_SIZE))
    ops = select("torch", CPU)
    got = attend(make_attention(name, SPEC, pool, ops), batch, 1, torch.float32)
    for whole, codes, scale in ((plain.k, pool.k, pool.k_scale), (plain.v, pool.v, pool.v_scale)):
        whole.copy_(codes.float() * scale.unsqueeze(-1))
    _, k, v = random_qkv(len(batch.token_ids))
    blocks, offsets = batch.slots // BLOCK_SIZE, batch.slots % BLOCK_SIZE
    for x, whole in ((k, plain.k), (v, plain.v)):
        assert (whole[1][blocks, :, offsets] - x).abs().max() < 0.07 * x.abs().max()
    q, _, _ = random_qkv(len(batch.token_ids))
    want = paged_attention_ref(
        q.double(),
        plain.k[1],
        plain.v[1],
        batch.block_tables,
        batch.context_lens,
        batch.query_starts,
        scale=SPEC.scale,
        window=SPEC.windows[1],
        max_query_len=max(batch.host_query_lens),
    )
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def scattered_blocks() -> BlockManager:
    """Every fourth block of the pool is free: too thin to read in place."""
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    for i in range(NUM_BLOCKS):
        blocks.reserve(f"hole{i}", 0, 1)
    for i in range(0, NUM_BLOCKS, 4):
        blocks.free(f"hole{i}")
    return blocks


def interleaved_blocks() -> BlockManager:
    """Two sequences that have grown in turns, the second first."""
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    for end in range(BLOCK_SIZE, 4 * BLOCK_SIZE, BLOCK_SIZE):
        blocks.reserve("r1", 0, end)
        blocks.reserve("r0", 0, end)
    return blocks


def shared_blocks() -> BlockManager:
    """Two sequences with the same first three blocks."""
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    blocks.reserve("r0", 0, 3 * BLOCK_SIZE)
    blocks.fork("r0", "r1")
    return blocks


def dead_block_between() -> BlockManager:
    """Tables of three and four blocks in a range of eight: as many as two padded tables have."""
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    for name, start in (("r0", 0), ("dead", 0), ("r1", 0)):
        blocks.reserve(name, start, (1 if name == "dead" else 3) * BLOCK_SIZE)
    blocks.reserve("r1", 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 6)
    blocks.free("dead")
    return blocks


@pytest.mark.parametrize(
    "layout", [scattered_blocks, interleaved_blocks, shared_blocks, dead_block_between]
)
@pytest.mark.parametrize("new", [(1, 1), (4, 2)], ids=["decode", "verification"])
def test_blockwise_does_not_depend_on_where_blocks_lie(
    layout: Callable[[], BlockManager], new: tuple[int, int]
) -> None:
    blocks, pool = layout(), random_pool()
    for name, start, end in (("r0", 33, 33 + new[0]), ("r1", 50, 50 + new[1])):
        copies = blocks.reserve(name, start, end) or []
        pool.copy_blocks(copies, select("torch", CPU).copy_blocks)
    batch = make_batch(Step((33, 50), new), blocks)
    expected = oracle(batch, pool, 0, torch.float32)
    backend = make_attention("blockwise", SPEC, pool, select("torch", CPU))
    got = attend(backend, batch, 0, torch.float32)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", ["decodes", "mixed"])
def test_blockwise_bfloat16_is_as_exact_as_plain_torch(step: str) -> None:
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    batch, pool = make_batch(STEPS[step], blocks), random_pool(torch.bfloat16)
    expected = oracle(batch, pool, 0, torch.bfloat16)
    ops = select("torch", CPU)
    errors = [
        float(
            (
                attend(make_attention(name, SPEC, pool, ops), batch, 0, torch.bfloat16) - expected
            ).norm()
            / expected.norm()
        )
        for name in BACKENDS
    ]
    assert errors[0] < 2 * max(errors[1], 2.0**-8)


def test_blockwise_float16_survives_products_beyond_its_range() -> None:
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=64, windows=(0,))
    pool = allocate_pool(spec, 2, BLOCK_SIZE, dtype=torch.float16, device=CPU)
    backend = make_attention("blockwise", spec, pool, select("torch", CPU))
    backend.plan(make_batch(Step((0,), (3,)), BlockManager(2, BLOCK_SIZE)))
    q, k, v = torch.full((3, 2, 64), 80.0), torch.full((3, 1, 64), 80.0), torch.ones(3, 1, 64)
    out = backend.forward(q.half(), k.half(), v.half(), 0)  # q k^T is 409600 before scaling
    torch.testing.assert_close(out, torch.ones(3, 2, 64).half())


def test_blockwise_ignores_garbage_in_dead_and_future_slots() -> None:
    blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
    blocks.reserve("dead", 0, 40)
    batch = make_batch(STEPS["decodes"], blocks)
    blocks.free("dead")
    pool = random_pool()
    backend = make_attention("blockwise", SPEC, pool, select("torch", CPU))
    clean = attend(backend, batch, 0, torch.float32)
    owned = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    for table, context in zip(batch.host_block_tables, batch.host_context_lens, strict=True):
        for position in range(context):
            owned[table[position // BLOCK_SIZE], position % BLOCK_SIZE] = True
    dead = ~owned[None, :, None, :, None]
    for tensor in (pool.k, pool.v):
        tensor.copy_(torch.where(dead, torch.tensor(1e4), tensor))
    assert torch.equal(attend(backend, batch, 0, torch.float32), clean)


@pytest.mark.parametrize("in_float8", [False, True], ids=["float", "float8"])
def test_copy_blocks_copies_every_layer(in_float8: bool) -> None:
    pool = float8_pool(float8_scales()) if in_float8 else random_pool()
    pool.copy_blocks([(3, 5), (4, 9)], select("torch", CPU).copy_blocks)
    for tensor in (pool.k, pool.v):
        assert torch.equal(tensor[:, 3].float(), tensor[:, 5].float())
        assert torch.equal(tensor[:, 4].float(), tensor[:, 9].float())


def test_copy_blocks_copies_the_scales_of_tokens() -> None:
    storage = KVStorage(dtype=torch.int8, per_token=True)
    pool = allocate_pool(SPEC, 8, BLOCK_SIZE, dtype=torch.half, device=CPU, storage=storage)
    assert pool.k_scale is not None and pool.v_scale is not None
    pool.k_scale[:, 3], pool.v_scale[:, 3] = 2.0, 3.0
    pool.copy_blocks([(3, 5)], select("torch", CPU).copy_blocks)
    assert (pool.k_scale[:, 5] == 2).all() and (pool.v_scale[:, 5] == 3).all()


def test_make_attention_refuses_an_unknown_name() -> None:
    with pytest.raises(ValueError, match="unknown attention backend 'pagd'; did you mean 'paged'"):
        make_attention("pagd", SPEC, random_pool(), select("torch", CPU))
