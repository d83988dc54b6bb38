import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.noise import DRAFT_SALT
from compress.kernels.rejection import (
    accept_chain_ref,
    accept_chain_torch,
    accept_chain_triton,
    accept_tree_ref,
    accept_tree_torch,
    accept_tree_triton,
)
from compress.kernels.sampling import sample_torch
from tests.kernels.conftest import HAS_GPU

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
CHAIN = pytest.mark.parametrize(
    "accept_chain", [accept_chain_torch, accept_chain_triton], ids=["torch", "triton"]
)
TREE = pytest.mark.parametrize(
    "accept_tree", [accept_tree_torch, accept_tree_triton], ids=["torch", "triton"]
)
PROBS = pytest.mark.parametrize("has_probs", [True, False], ids=["probs", "points"])


def random_keys(num_rows, generator):
    return {
        "seed": torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator).to(DEVICE),
        "position": torch.randint(0, 9000, (num_rows,), generator=generator).to(DEVICE),
    }


def make_chain(num_rows, n, vocab, has_probs, seed=0):
    """Laws with zeros, as truncation leaves them; every third row greedy; drafts that are near."""
    generator = torch.Generator().manual_seed(num_rows + n + vocab + seed)
    logits = torch.randn(num_rows, n + 1, vocab, generator=generator) * 2
    near = logits[:, :n] + torch.randn(num_rows, n, vocab, generator=generator)
    target = torch.softmax(logits.masked_fill(logits < 0, -9999.0), dim=-1)
    target[::3] = torch.nn.functional.one_hot(logits[::3].argmax(-1), vocab).float()
    law = torch.softmax(near, dim=-1)
    if has_probs:
        ids = torch.multinomial(law.reshape(-1, vocab), 1, generator=generator).view(num_rows, n)
    else:
        ids = near.argmax(-1)
    num_drafts = torch.randint(0, n + 1, (num_rows,), generator=generator)
    num_drafts[:1] = n
    args = target.to(DEVICE), ids.to(DEVICE), law.to(DEVICE) if has_probs else None
    keys = random_keys(num_rows, generator)
    return args, keys | {"num_drafts": num_drafts.to(DEVICE, torch.int32)}


def make_trees(sizes, vocab, seed=0):
    """Random trees of these sizes, with twins now and then, and laws with zeros."""
    generator = torch.Generator().manual_seed(sum(sizes) + vocab + seed)
    num_nodes = sum(sizes)
    logits = torch.randn(num_nodes, vocab, generator=generator) * 2
    target = torch.softmax(logits.masked_fill(logits < 0, -9999.0), dim=-1)
    target[::4] = torch.nn.functional.one_hot(logits[::4].argmax(-1), vocab).float()
    parents, tokens, start = [], [], 0
    for size in sizes:
        for node in range(size):
            above = int(torch.randint(0, max(node, 1), (1,), generator=generator)) if node else -1
            likely = target[start + max(above, 0)]
            parents.append(above)
            tokens.append(int(torch.multinomial(likely, 1, generator=generator)))
        start += size
    starts = torch.tensor([0, *sizes]).cumsum(0)
    args = (torch.tensor(parents), torch.tensor(tokens), starts.int())
    return (target.to(DEVICE), *(x.to(DEVICE) for x in args)), random_keys(len(sizes), generator)


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other), (one, other)


@CHAIN
@PROBS
@pytest.mark.parametrize("num_rows, n, vocab", [(1, 1, 2), (17, 4, 33), (5, 2, 1031), (3, 0, 130)])
def test_chain_equals_reference(accept_chain, has_probs, num_rows, n, vocab):
    args, keys = make_chain(num_rows, n, vocab, has_probs)
    want = accept_chain_ref(*args, **keys)
    assert_same(accept_chain(*args, **keys), want)
    assert (want[0] <= keys["num_drafts"]).all()
    del keys["num_drafts"]
    assert_same(accept_chain(*args, **keys), accept_chain_ref(*args, **keys))


def test_chain_cases_cover_every_number_of_accepted_drafts():
    args, keys = make_chain(17, 4, 33, False)
    del keys["num_drafts"]
    assert set(accept_chain_ref(*args, **keys)[0].tolist()) >= {0, 1, 2}


@TREE
@pytest.mark.parametrize("sizes", [[1], [17, 1, 33], [2, 5, 70], [3] * 16], ids=str)
def test_tree_equals_reference(accept_tree, sizes):
    args, keys = make_trees(sizes, 33)
    assert_same(accept_tree(*args, **keys), accept_tree_ref(*args, **keys))


@CHAIN
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    num_rows=st.integers(1, 4),
    n=st.integers(0, 5),
    vocab=st.integers(1, 200),
    has_probs=st.booleans(),
    seed=st.integers(0, 99),
)
def test_chain_equals_reference_anywhere(accept_chain, num_rows, n, vocab, has_probs, seed):
    args, keys = make_chain(num_rows, n, vocab, has_probs, seed)
    assert_same(accept_chain(*args, **keys), accept_chain_ref(*args, **keys))


@TREE
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    vocab=st.integers(2, 40),
    seed=st.integers(0, 99),
)
def test_tree_equals_reference_anywhere(accept_tree, sizes, vocab, seed):
    args, keys = make_trees(sizes, vocab, seed)
    assert_same(accept_tree(*args, **keys), accept_tree_ref(*args, **keys))


@CHAIN
def test_chain_of_greedy_rows_accepts_the_longest_right_prefix(accept_chain):
    wanted = torch.tensor([[5, 3, 8, 1]]).expand(4, 4)
    target = torch.nn.functional.one_hot(wanted, 9).float().to(DEVICE)
    drafts = torch.tensor([[5, 3, 8], [5, 3, 7], [5, 0, 8], [0, 3, 8]], device=DEVICE)
    keys = random_keys(4, torch.Generator().manual_seed(0))
    for law in (None, torch.full((4, 3, 9), 1 / 9, device=DEVICE)):
        num_accepted, token = accept_chain(target, drafts, law, **keys)
        assert num_accepted.tolist() == [3, 2, 1, 0] and token.tolist() == [1, 8, 3, 5]


@CHAIN
def test_chain_accepts_everything_from_its_own_law(accept_chain):
    (target, ids, _), keys = make_chain(16, 4, 33, True)
    ids = torch.multinomial(target[:, :4].reshape(-1, 33), 1).view(16, 4)
    num_accepted, _ = accept_chain(target, ids, target[:, :4].clone(), **keys)
    assert torch.equal(num_accepted, keys["num_drafts"].long())


@CHAIN
def test_chain_without_drafts_is_plain_sampling(accept_chain):
    (target, ids, _), keys = make_chain(16, 4, 130, False)
    keys["num_drafts"].zero_()
    _, token = accept_chain(target, ids, None, **keys)
    del keys["num_drafts"]
    ones = torch.ones(16, device=DEVICE)
    assert torch.equal(token, sample_torch(target[:, 0].log(), temperature=ones, **keys))


@CHAIN
@PROBS
def test_chain_row_does_not_depend_on_the_others(accept_chain, has_probs):
    (target, ids, law), keys = make_chain(17, 3, 130, has_probs)
    whole = accept_chain(target, ids, law, **keys)
    for rows in ([4], [16, 0], [3, 1, 4, 15, 9]):
        own = {name: tensor[rows] for name, tensor in keys.items()}
        got = accept_chain(target[rows], ids[rows], None if law is None else law[rows], **own)
        assert_same(got, [x[rows] for x in whole])


@TREE
def test_tree_does_not_depend_on_the_others(accept_tree):
    sizes = [5, 17, 1, 12]
    (target, parents, tokens, starts), keys = make_trees(sizes, 33)
    path, num_accepted, token = accept_tree(target, parents, tokens, starts, **keys)
    for r, size in enumerate(sizes):
        nodes = slice(int(starts[r]), int(starts[r + 1]))
        own = {name: tensor[r : r + 1].clone() for name, tensor in keys.items()}
        alone = torch.tensor([0, size], dtype=torch.int32, device=DEVICE)
        parts = (x[nodes].clone() for x in (target, parents, tokens))
        got = accept_tree(*parts, alone, **own)
        assert_same(got, (path[nodes], num_accepted[r : r + 1], token[r : r + 1]))


@TREE
def test_tree_of_one_path_is_a_chain(accept_tree):
    (target, ids, _), keys = make_chain(16, 4, 33, False)
    del keys["num_drafts"]
    parents = torch.arange(-1, 4).repeat(16)
    tokens = torch.cat((torch.full((16, 1), -1, device=DEVICE), ids), dim=1).flatten()
    starts = torch.arange(0, 81, 5, dtype=torch.int32)
    args = target.flatten(0, 1), parents.to(DEVICE), tokens, starts.to(DEVICE)
    path, num_accepted, token = accept_tree(*args, **keys)
    assert_same((num_accepted, token), accept_chain_ref(target, ids, None, **keys))
    for row, count in zip(path.view(16, 5).tolist(), num_accepted.tolist(), strict=True):
        assert row == [*range(1, count + 1), *[-1] * (5 - count)]


@CHAIN
@PROBS
def test_chain_fails_only_the_row_whose_law_is_broken(accept_chain, has_probs, poisoned_empty):
    (target, ids, law), keys = make_chain(17, 3, 33, has_probs)
    want = accept_chain(target, ids, law, **keys)
    target[3], target[5] = float("nan"), 0.0
    target[7, :, 2] = float("inf")
    ids[7] = (ids[7] == 2) * 1 + 3 * (ids[7] != 2)  # not the token of infinite weight
    got = accept_chain(target, ids, law, **keys)
    good = [r for r in range(17) if r not in (3, 5, 7)]
    assert got[1][[3, 5, 7]].tolist() == [-1, -1, -1]
    assert_same([x[good] for x in got], [x[good] for x in want])


@TREE
def test_tree_fails_only_the_tree_whose_law_is_broken(accept_tree):
    args, keys = make_trees([5, 6, 7], 33)
    want = accept_tree(*args, **keys)
    args[0][5:11] = float("nan")
    path, num_accepted, token = accept_tree(*args, **keys)
    assert num_accepted[1] == 0 and token[1] == -1
    assert torch.equal(token[[0, 2]], want[2][[0, 2]])
    assert torch.equal(path[:5], want[0][:5]) and torch.equal(path[11:], want[0][11:])


@CHAIN
@PROBS
def test_chain_rejects_a_draft_outside_the_vocabulary(accept_chain, has_probs):
    (target, ids, law), keys = make_chain(16, 3, 33, has_probs)
    keys["num_drafts"].fill_(3)
    ids[:, 0] = torch.tensor([-1, 33] * 8)
    num_accepted, token = accept_chain(target, ids, law, **keys)
    assert (num_accepted == 0).all() and ((token >= 0) & (token < 33)).all()


@TREE
def test_tree_rejects_a_token_outside_the_vocabulary(accept_tree):
    target = torch.full((3, 33), 1 / 33, device=DEVICE)
    tree = torch.tensor([-1, 0, 0]), torch.tensor([-1, 33, -1]), torch.tensor([0, 3]).int()
    keys = random_keys(1, torch.Generator().manual_seed(0))
    _, num_accepted, token = accept_tree(target, *(x.to(DEVICE) for x in tree), **keys)
    assert num_accepted.tolist() == [0] and 0 <= int(token) < 33


@CHAIN
def test_chain_draws_from_the_target_if_rounding_leaves_no_residual(accept_chain):
    target = torch.tensor([[[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]], device=DEVICE)
    law = torch.tensor([[[0.5, 0.25, 1e30]]], device=DEVICE)  # rejects, and nothing is above it
    keys = random_keys(1, torch.Generator().manual_seed(0))
    num_accepted, token = accept_chain(target, torch.tensor([[2]], device=DEVICE), law, **keys)
    ones = torch.ones(1, device=DEVICE)
    assert num_accepted.tolist() == [0]
    assert torch.equal(token, sample_torch(target[:, 0].log(), temperature=ones, **keys))


COUNT = 20_000


def chi_square(found, law):
    """Pearson's statistic over the cells that can occur; what cannot must not."""
    possible = law > 0
    assert not found[~possible].any()
    expected = COUNT * law[possible]
    return float(((found[possible] - expected) ** 2 / expected).sum())


@PROBS
def test_chain_torch_emits_the_target(has_probs):
    """20000 draws of a draft, its verification and the next token: at most 9 pairs and 8 degrees
    of freedom, beyond 43 once in a million."""
    p1 = torch.tensor([0.2, 0.5, 0.3, 0.0])
    p2 = torch.tensor([[0.1, 0.6, 0.3, 0.0], [0.3, 0.3, 0.4, 0.0], [0.5, 0.0, 0.5, 0.0]])
    q = torch.tensor([0.6, 0.2, 0.2, 0.0])
    position = 2 * torch.arange(COUNT)
    keys = {"seed": torch.full((COUNT,), 11), "position": position}
    ones, top_k = torch.ones(COUNT), torch.full((COUNT,), 3, dtype=torch.int32)
    drafted = q.log().expand(COUNT, 4).contiguous()
    ids = sample_torch(drafted, temperature=ones, top_k=top_k, **keys, salt=DRAFT_SALT)
    if not has_probs:
        ids = torch.arange(COUNT) % 3  # any choice will do
    target = torch.stack((p1.expand(COUNT, 4), p2[ids]), dim=1)
    law = q.expand(COUNT, 1, 4).contiguous() if has_probs else None
    num_accepted, token = accept_chain_torch(target, ids[:, None], law, **keys)
    first = torch.where(num_accepted == 1, ids, token)
    # where the draft was rejected the target goes on by plain sampling
    after = sample_torch(
        p2[first].log(), temperature=ones, top_k=top_k, seed=keys["seed"], position=position + 1
    )
    second = torch.where(num_accepted == 1, token, after)
    pairs = torch.bincount(first * 3 + second, minlength=9)
    assert chi_square(pairs, (p1[:3, None] * p2[:, :3]).flatten()) < 43
    rate = float(torch.minimum(p1, q).sum()) if has_probs else 1 / 3
    assert abs(float(num_accepted.double().mean()) - rate) < 0.02


def test_tree_torch_emits_the_target():
    """5000 trees of two children and one below each; 4 cells exceed 30.7 once in a million."""
    count = 5000
    law = torch.tensor([0.2, 0.4, 0.1, 0.3])
    parents = torch.tensor([-1, 0, 0, 1, 2]).repeat(count)
    tokens = torch.tensor([-1, 1, 0, 3, 3]).repeat(count)
    starts = 5 * torch.arange(count + 1, dtype=torch.int32)
    keys = {"seed": torch.full((count,), 5), "position": 3 * torch.arange(count)}
    target = law.repeat(5 * count, 1)
    path, num_accepted, token = accept_tree_torch(target, parents, tokens, starts, **keys)
    first = torch.where(num_accepted > 0, tokens[path.view(count, 5)[:, 0].clamp(min=0)], token)
    found = torch.bincount(first, minlength=4)
    assert float(((found - count * law) ** 2 / (count * law)).sum()) < 30.7
    second = torch.where(num_accepted == 1, token, 3)[num_accepted > 0]
    found, count = torch.bincount(second, minlength=4), len(second)
    assert float(((found - count * law) ** 2 / (count * law)).sum()) < 30.7


@CHAIN
def test_chain_of_no_rows_is_empty(accept_chain):
    (target, ids, law), keys = make_chain(2, 3, 33, True)
    none = {name: tensor[:0] for name, tensor in keys.items()}
    num_accepted, token = accept_chain(target[:0], ids[:0], law[:0], **none)
    assert num_accepted.shape == token.shape == (0,)


@TREE
def test_tree_of_no_rows_is_empty(accept_tree):
    (target, parents, tokens, starts), keys = make_trees([3], 33)
    none = {name: tensor[:0] for name, tensor in keys.items()}
    got = accept_tree(target[:0], parents[:0], tokens[:0], starts[:1], **none)
    assert [x.shape for x in got] == [(0,)] * 3


@CHAIN
def test_chain_names_the_bad_argument(accept_chain):
    (target, ids, law), keys = make_chain(4, 3, 33, True)
    with pytest.raises(ValueError, match=r"target_probs must be float32 of shape \(4, 4, any\)"):
        accept_chain(target[:, :3], ids, law, **keys)
    with pytest.raises(ValueError, match=r"draft_probs must be float32 of shape \(4, 3, 33\)"):
        accept_chain(target, ids, law[:, :2], **keys)
    with pytest.raises(ValueError, match="draft_ids must be int64"):
        accept_chain(target, ids.int(), law, **keys)
    with pytest.raises(ValueError, match="num_drafts must be int32"):
        accept_chain(target, ids, law, **keys | {"num_drafts": keys["seed"]})
    with pytest.raises(ValueError, match="seed must be on"):
        accept_chain(target, ids, law, **keys | {"seed": keys["seed"].to("meta")})
    with pytest.raises(ValueError, match="target_probs must have contiguous rows"):
        accept_chain(target.transpose(1, 2).contiguous().transpose(1, 2), ids, law, **keys)


@TREE
def test_tree_names_the_bad_argument(accept_tree):
    (target, parents, tokens, starts), keys = make_trees([3, 4], 33)
    with pytest.raises(ValueError, match="target_probs must be float32"):
        accept_tree(target.half(), parents, tokens, starts, **keys)
    with pytest.raises(ValueError, match=r"parents must be int64 of shape \(7\)"):
        accept_tree(target, parents[:6], tokens, starts, **keys)
    with pytest.raises(ValueError, match=r"node_starts must be int32 of shape \(3\)"):
        accept_tree(target, parents, tokens, starts[:2], **keys)
    with pytest.raises(ValueError, match="tokens must be on"):
        accept_tree(target, parents, tokens.to("meta"), starts, **keys)
