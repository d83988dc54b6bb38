"""Paged attention over pools of codes, with soft caps, over trees, and at any shape."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import compress.kernels.paged_attention as paged_attention
from compress.kernels.kv_codes import quantize_heads
from compress.kernels.paged_attention import (
    paged_attention_ref,
    paged_attention_torch,
    paged_attention_triton,
)
from tests.kernels.tolerance import DTYPES, assert_as_exact_as, dtype_id

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CODES = [torch.int8, torch.float8_e4m3fn]


@dataclass(frozen=True, kw_only=True)
class Call:
    """The tensors of one call, by the name of the argument, and its options."""

    tensors: dict
    options: dict

    def run(self, function, **changes):
        names = ("q", "k_pool", "v_pool", "block_tables", "context_lens", "query_starts")
        tensors = self.tensors | changes
        args = [tensors.pop(name) for name in names]
        return function(*args, **tensors, **self.options)

    def exact(self):
        doubles = {name: self.tensors[name].double() for name in ("q", "k_pool", "v_pool")}
        return self.run(paged_attention_ref, **doubles)

    def check(self):
        got = self.run(paged_attention_triton)
        assert_as_exact_as(got, self.run(paged_attention_torch), self.exact())


def trees(lens, generator):
    """Masks of random trees whose tokens come after their parents."""
    masks = []
    for length in lens:
        own = []
        for i in range(length):
            parent = int(torch.randint(-1, i, (), generator=generator)) if i else -1
            own.append((own[parent] if parent >= 0 else 0) | 1 << i)
        masks += own
    return torch.tensor([m - 2**64 if m >= 2**63 else m for m in masks], dtype=torch.int64)


def make(
    query_lens,
    context_lens,
    *,
    heads=(9, 3),
    head_dim=64,
    block_size=64,
    dtype=torch.float16,
    codes=None,
    scaled=True,
    tree=False,
    window=0,
    soft_cap=0.0,
    shared=0,
):
    """Shuffled blocks; NaN in every slot and scale that nothing was written to, and -1 in every
    table entry that must not be read. The first `shared` blocks of all sequences are the same."""
    generator = torch.Generator().manual_seed(0)
    num_q_heads, num_kv_heads = heads
    num_blocks = [-(-context // block_size) for context in context_lens]
    order = torch.randperm(sum(num_blocks) + 2)  # of no importance: from another generator
    shape = (len(order), num_kv_heads, block_size)
    values = torch.full((2, *shape, head_dim), float("nan"))
    tables = torch.full((len(context_lens), max(num_blocks) + 2), -1, dtype=torch.int32)
    queries, taken = [], 0
    for s, (length, context) in enumerate(zip(query_lens, context_lens, strict=True)):
        blocks = order[taken : taken + num_blocks[s]]
        if s:
            blocks[:shared] = order[:shared]
        taken += num_blocks[s]
        tables[s, : len(blocks)] = blocks
        positions = torch.arange(context)
        rows = torch.randn(context, 2, num_kv_heads, head_dim, generator=generator)
        slots = (slice(None), blocks[positions // block_size], slice(None), positions % block_size)
        values[slots] = rows.transpose(0, 1).permute(1, 0, 2, 3)
        # each position has its own query, whatever query_lens
        q = torch.randn(context, num_q_heads, head_dim, generator=generator)
        queries.append(q[context - length :])
        if window:
            tables[s, : max(0, context - length - window + 1) // block_size] = -1
    tensors = {"q": 2 * torch.cat(queries).to(dtype), "block_tables": tables}
    for name, pool in zip("kv", values, strict=True):
        if codes is None:
            tensors[f"{name}_pool"] = pool.to(dtype)
            continue
        if scaled:
            pool, scale = quantize_heads(pool.flatten(1, 2), codes)
            tensors[f"{name}_scale"] = scale.view(shape)
        tensors[f"{name}_pool"] = pool.to(codes).view(*shape, head_dim)
    if tree:
        tensors["tree_mask"] = trees(query_lens, generator)
    tensors["context_lens"] = torch.tensor(context_lens, dtype=torch.int32)
    tensors["query_starts"] = torch.tensor([0, *query_lens]).cumsum(0).int()
    return Call(
        tensors={name: tensor.to(DEVICE) for name, tensor in tensors.items()},
        options={
            "scale": head_dim**-0.5,
            "window": window,
            "soft_cap": soft_cap,
            "max_query_len": max(query_lens),
        },
    )


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("window", [0, 40], ids="window{}".format)
def test_blocks_of_any_size_hold_the_same(block_size, window, poisoned_empty):
    lens = [1, 33, 66], [97, 50, 130]
    call = make(*lens, heads=(2, 1), block_size=block_size, window=window)
    call.check()
    # the key tiles do not depend on the blocks
    same = make(*lens, heads=(2, 1), block_size=64, window=window)
    assert torch.equal(call.run(paged_attention_triton), same.run(paged_attention_triton))


@pytest.mark.parametrize("context", [1, 15, 16, 17, 4097])
def test_decoding_at_awkward_contexts(context, poisoned_empty):
    make([1], [context], heads=(7, 1), block_size=16).check()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("soft_cap", [0.5, 500.0], ids="cap{}".format)
@pytest.mark.parametrize("query_lens", [[1, 17], [66, 1]], ids=["short", "long"])
def test_soft_cap_matches_reference(query_lens, soft_cap, dtype, poisoned_empty):
    call = make(query_lens, [140, 33], heads=(3, 1), soft_cap=soft_cap, dtype=dtype)
    call.check()
    plain = replace(call, options=call.options | {"soft_cap": 0.0})
    assert not torch.equal(call.run(paged_attention_triton), plain.run(paged_attention_triton))


@pytest.mark.parametrize("codes", CODES, ids=dtype_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("query_lens", [[1, 17], [66, 1]], ids=["short", "long"])
def test_scaled_codes_match_reference(query_lens, dtype, codes, poisoned_empty):
    make(query_lens, [530, 33], heads=(7, 1), codes=codes, dtype=dtype).check()


@pytest.mark.parametrize("codes", CODES, ids=dtype_id)
def test_small_values_survive_the_rounding_of_scaled_weights(codes):
    call = make([1], [70], codes=codes)
    call.tensors["v_scale"] *= 1e-3
    want = call.exact()
    torch.testing.assert_close(
        call.run(paged_attention_triton).double(),
        want,
        rtol=0.02,
        atol=2e-3 * want.abs().max().item(),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_every_int8_code_is_exact(dtype):
    codes = torch.arange(-128, 128).to(torch.int8).view(4, 1, 1, 64).to(DEVICE)
    pool = torch.zeros(4, 1, 64, 64, dtype=torch.int8, device=DEVICE)
    v_pool = pool.clone()
    v_pool[:, :, :1] = codes
    ones = torch.ones(4, 1, 64, device=DEVICE)
    integers = [torch.arange(4)[:, None], torch.ones(4), torch.arange(5)]
    got = paged_attention_triton(
        ones.to(dtype),
        pool,
        v_pool,
        *(x.to(DEVICE, torch.int32) for x in integers),
        scale=1.0,
        max_query_len=1,
        k_scale=ones,
        v_scale=ones,
    )
    assert torch.equal(got.flatten().float(), codes.flatten().float())


@pytest.mark.parametrize("window", [0, 3, 70], ids="window{}".format)
@pytest.mark.parametrize("codes", [None, torch.int8], ids=["float", "int8"])
def test_trees_match_reference(codes, window, poisoned_empty):
    lens = [1, 17, 64, 5], [7, 80, 130, 5]
    make(*lens, heads=(2, 1), tree=True, codes=codes, window=window).check()


@pytest.mark.parametrize("window", [0, 20], ids="window{}".format)
def test_a_chain_as_a_tree_is_bitwise_causal(window):
    lens = [1, 17, 64]
    causal = make(lens, [513, 80, 130], heads=(4, 1), window=window, soft_cap=5.0)
    # bit 63 of the longest is the sign
    chain = torch.cat([(2 << torch.arange(n)) - 1 for n in lens]).to(DEVICE)
    got = causal.run(paged_attention_triton, tree_mask=chain)
    assert torch.equal(got, causal.run(paged_attention_triton))


@pytest.mark.parametrize("codes", [None, torch.int8], ids=["float", "int8"])
def test_a_branch_of_a_tree_is_bitwise_what_decoding_gives(codes):
    # tokens 0, 1, 2 are a chain from position 510; 3 and 4 branch off after token 0
    branches = torch.tensor([0b1, 0b11, 0b111, 0b1001, 0b11001], device=DEVICE)
    tree = make([5, 1], [515, 20], codes=codes, block_size=16)
    masks = torch.cat((branches, branches[:1]))
    got = tree.run(paged_attention_triton, tree_mask=masks)
    for depth in range(3):
        alone = make([1, 1], [515, 20], codes=codes, block_size=16)
        contexts = torch.tensor([511 + depth, 20], dtype=torch.int32, device=DEVICE)
        q = torch.stack((tree.tensors["q"][depth], tree.tensors["q"][5]))
        want = alone.run(paged_attention_triton, q=q, context_lens=contexts)
        assert torch.equal(got[depth], want[0])
    assert torch.equal(got[5], want[1])


@pytest.mark.parametrize("codes", [None, torch.int8], ids=["float", "int8"])
@pytest.mark.parametrize("batch", [2, 5, 16, 64])
def test_a_decoded_row_does_not_depend_on_its_batch(batch, codes):
    contexts = [70, 17, *(1 + 7 * i % 40 for i in range(62))]
    options = {"heads": (3, 1), "head_dim": 16, "block_size": 16, "codes": codes}
    many = make([1] * batch, contexts[:batch], **options).run(paged_attention_triton)
    few = make([1], contexts[:1], **options)
    verified = make([17], contexts[:1], **options)
    assert torch.equal(few.run(paged_attention_triton)[0], many[0])
    assert torch.equal(verified.run(paged_attention_triton)[16], many[0])


def test_segments_and_one_program_give_the_same_bits(monkeypatch):
    call = make([1, 17, 3], [1100, 80, 513], heads=(3, 1), tree=True, window=700)
    split = call.run(paged_attention_triton)
    monkeypatch.setattr(paged_attention, "_MAX_SUMS_BYTES", 0)
    assert torch.equal(call.run(paged_attention_triton), split)


def test_sequences_may_share_blocks(poisoned_empty):
    make([1, 17, 1], [90, 100, 70], shared=1, codes=torch.int8).check()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_batch_matches_reference(data):
    draw = data.draw
    tree = draw(st.booleans())
    longest = draw(st.sampled_from([1, 20, 64] if tree else [1, 20, 90]))
    pairs = st.tuples(st.integers(1, longest), st.integers(0, 150))
    lens = draw(st.lists(pairs, min_size=1, max_size=2))
    group, kv_heads = draw(st.sampled_from([1, 3, 7, 8])), draw(st.integers(1, 2))
    call = make(
        [new for new, _ in lens],
        [new + old for new, old in lens],
        heads=(group * kv_heads, kv_heads),
        head_dim=draw(st.sampled_from([16, 40, 64])),
        block_size=draw(st.sampled_from([16, 32, 64, 128])),
        dtype=draw(st.sampled_from(DTYPES)),
        codes=draw(st.sampled_from([None, *CODES])),
        tree=tree,
        window=draw(st.sampled_from([0, 1, 9, 70])),
        soft_cap=draw(st.sampled_from([0.0, 2.0])),
    )
    call.check()


@pytest.mark.parametrize(
    "changes, message",
    [
        pytest.param({"v_scale": None}, "k_scale and v_scale must be given together", id="one"),
        pytest.param({"k_scale": None, "v_scale": None}, "are needed for int8 pools", id="none"),
        pytest.param(
            {"k_scale": torch.zeros(1, 3, 64)}, "k_scale must be float32 of shape", id="shape"
        ),
        pytest.param(
            {"tree_mask": torch.ones(3).int()}, "tree_mask must be int64", id="tree-dtype"
        ),
        pytest.param({"tree_mask": torch.ones(2).long()}, r"int64 of shape \(3\)", id="tree-shape"),
        pytest.param(
            {"context_lens": torch.ones(2, device="meta").int()},
            "context_lens must be on",
            id="device",
        ),
    ],
)
def test_bad_tensors_are_named(changes, message):
    call = make([1, 2], [3, 4], codes=torch.int8)
    changes = {
        name: x.to(DEVICE) if x is not None and x.device.type != "meta" else x
        for name, x in changes.items()
    }
    with pytest.raises(ValueError, match=message):
        call.run(paged_attention_triton, **changes)


def test_bad_options_are_named():
    call = make([65], [65], tree=False)
    with pytest.raises(
        ValueError, match="tree_mask serves up to 64 new tokens, got max_query_len=65"
    ):
        call.run(paged_attention_triton, tree_mask=torch.ones(65, device=DEVICE).long())
    ones = torch.ones(call.tensors["k_pool"].shape[:3], device=DEVICE)
    with pytest.raises(ValueError, match="k_scale belongs to int8 and float8 pools"):
        call.run(paged_attention_triton, k_scale=ones, v_scale=ones)
    with pytest.raises(ValueError, match="soft_cap must be 0"):
        replace(call, options=call.options | {"soft_cap": -1.0}).run(paged_attention_triton)
    wide = make([1], [1], head_dim=512)
    with pytest.raises(ValueError, match="head_dim 512; up to 256 is supported"):
        wide.run(paged_attention_triton)
