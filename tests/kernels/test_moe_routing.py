import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.moe_routing import (
    BLOCKS_M,
    route,
    topk_softmax_ref,
    topk_softmax_torch,
    topk_softmax_triton,
)
from tests.kernels.tolerance import DTYPES, dtype_id

BOTH = pytest.mark.parametrize(
    "topk_softmax", [topk_softmax_torch, topk_softmax_triton], ids=["torch", "triton"]
)


def make(num_tokens, num_experts, dtype, device):
    generator = torch.Generator().manual_seed(num_tokens * num_experts)
    return torch.randn(num_tokens, num_experts, generator=generator).to(device, dtype)


def check_routing(routing, topk_ids, num_experts):
    """Every slot once, in the tiles of its expert, in ascending order."""
    ids, starts = topk_ids.flatten().tolist(), routing.expert_starts.tolist()
    rows = routing.sorted_rows.tolist()
    assert rows == sorted(range(len(ids)), key=lambda slot: (ids[slot], slot))
    assert starts == [sum(i < expert for i in ids) for expert in range(num_experts + 1)]
    covered = []
    tiles = zip(routing.tile_expert.tolist(), routing.tile_first.tolist(), strict=True)
    for expert, first in tiles:
        end = min(first + routing.block_m, starts[expert + 1])
        covered += range(first, end)
        assert all(ids[rows[i]] == expert for i in range(first, end))
    assert covered == list(range(len(ids)))  # in order, none twice: empty tiles add nothing


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), num_experts=st.sampled_from([1, 4, 8, 60]), top_k=st.integers(1, 3))
def test_route_covers_every_slot_once(data, num_experts, top_k):
    block_m = data.draw(st.sampled_from([None, *BLOCKS_M]))
    num_tokens = data.draw(st.integers(0, 70))
    highest = data.draw(st.integers(0, num_experts - 1))  # the experts above it get no tokens
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    ids = torch.randint(0, highest + 1, (num_tokens, top_k), generator=generator)
    check_routing(route(ids, num_experts, block_m), ids, num_experts)


def test_route_has_as_many_tiles_for_every_choice_of_experts(device):
    """The number of tiles is a shape: it must not depend on values that are on the GPU."""
    spread = torch.arange(66, device=device).view(33, 2) % 8
    tiles = {len(route(ids, 8, 16).tile_first) for ids in (spread, torch.zeros_like(spread))}
    assert tiles == {(66 + 8 * 15) // 16}
    assert len(route(spread[:1], 8, 16).tile_first) == 2


@pytest.mark.parametrize(
    "num_tokens, block_m", [(1, 16), (64, 16), (65, 32), (256, 64), (4096, 128)]
)
def test_route_takes_the_tile_of_the_mean_load(num_tokens, block_m):
    assert route(torch.zeros(num_tokens, 2, dtype=torch.int64), 8).block_m == block_m


def test_route_names_the_bad_argument():
    ids = torch.tensor([[0, 3]])
    with pytest.raises(ValueError, match=r"topk_ids must be in 0 .. 2, got 0 .. 3"):
        route(ids, 3)
    with pytest.raises(ValueError, match=r"topk_ids must be in 0 .. 3, got -1 .. 2"):
        route(ids - 1, 4)
    with pytest.raises(ValueError, match="topk_ids must be int64"):
        route(ids.int(), 4)
    with pytest.raises(ValueError, match=r"block_m must be one of \(16, 32, 64, 128\), got 48"):
        route(ids, 4, 48)
    with pytest.raises(ValueError, match="topk_ids must choose of at least one expert"):
        route(ids[:, :0], 4)


@pytest.mark.parametrize(
    "num_tokens, num_experts, top_k", [(1, 1, 1), (17, 8, 2), (33, 60, 4), (130, 8, 2), (5, 200, 8)]
)
@pytest.mark.parametrize("renormalize", [True, False], ids=["sum1", "softmax"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@BOTH
def test_topk_softmax_matches_reference(
    topk_softmax, num_tokens, num_experts, top_k, renormalize, dtype, device, poisoned_empty
):
    logits = make(num_tokens, num_experts, dtype, device)
    weights, ids = topk_softmax(logits, top_k, renormalize)
    exact, exact_ids = topk_softmax_ref(logits, top_k, renormalize)
    assert torch.equal(ids, exact_ids)
    torch.testing.assert_close(weights, exact, rtol=2e-6, atol=1e-8)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data(), num_experts=st.integers(1, 20))
def test_topk_softmax_takes_the_lowest_of_equal_experts(data, num_experts):
    """Few distinct values, so nearly every row has ties; also -inf, for experts shut off."""
    top_k = data.draw(st.integers(1, num_experts))
    value = st.sampled_from([-1.0, 0.0, 0.5, float("-inf")])
    row = data.draw(st.lists(value, min_size=num_experts, max_size=num_experts))
    row[data.draw(st.integers(0, num_experts - 1))] = 1.0  # not all -inf
    logits = torch.tensor([row])
    expected = sorted(range(num_experts), key=lambda e: (-row[e], e))[:top_k]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for topk_softmax in (topk_softmax_torch, topk_softmax_triton):
        weights, ids = topk_softmax(logits.to(device), top_k, True)
        assert ids.tolist() == [expected]
        assert weights.sum().item() == pytest.approx(1)


@BOTH
def test_topk_softmax_of_nan_keeps_ids_in_range_and_tells(topk_softmax, device):
    logits = make(3, 5, torch.float32, device)
    logits[0] = float("nan")
    logits[1, 2] = float("nan")
    weights, ids = topk_softmax(logits, 4, True)
    assert ids[0].tolist() == [0, 1, 2, 3] and 2 not in ids[1].tolist()
    assert weights[:2].isnan().all() and not weights[2].isnan().any()


@BOTH
def test_topk_softmax_row_has_the_same_bits_in_every_batch(topk_softmax, device):
    logits = make(64, 60, torch.float16, device)
    weights, ids = topk_softmax(logits, 6, True)
    for rows in (1, 2, 5, 16):
        alone = topk_softmax(logits[:rows], 6, True)
        assert torch.equal(alone[0], weights[:rows]) and torch.equal(alone[1], ids[:rows])


def test_topk_softmax_of_no_tokens_and_of_rows_that_lie_apart(device):
    wide = make(9, 16, torch.float32, device)
    weights, ids = topk_softmax_triton(wide[:0], 2, True)
    assert weights.shape == (0, 2) and ids.shape == (0, 2)
    apart, close = wide[:, :8], wide[:, :8].contiguous()
    assert torch.equal(
        topk_softmax_triton(apart, 2, True)[0], topk_softmax_triton(close, 2, True)[0]
    )


def test_topk_softmax_names_the_bad_argument(device):
    logits = make(3, 8, torch.float32, device)
    with pytest.raises(ValueError, match=r"top_k must be in 1 .. 8, the experts, got 9"):
        topk_softmax_triton(logits, 9, True)
    with pytest.raises(ValueError, match="logits must be float16 or"):
        topk_softmax_triton(logits.double(), 2, True)
    with pytest.raises(ValueError, match="logits must have contiguous rows"):
        topk_softmax_triton(logits.T.contiguous().T, 2, True)
    with pytest.raises(
        ValueError, match="up to 1024 experts and top_k be up to 32, got 2000 and 2"
    ):
        topk_softmax_triton(make(1, 2000, torch.float32, device), 2, True)
