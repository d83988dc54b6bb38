import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels import kept_sets
from compress.kernels.sampling import (
    sample_ref,
    sample_torch,
    sample_triton,
    sampling_probs_ref,
    sampling_probs_torch,
    sampling_probs_triton,
)
from tests.kernels.conftest import HAS_GPU

SAMPLE = pytest.mark.parametrize("sample", [sample_torch, sample_triton], ids=["torch", "triton"])
PROBS = pytest.mark.parametrize(
    "sampling_probs", [sampling_probs_torch, sampling_probs_triton], ids=["torch", "triton"]
)
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
INF, NAN = float("inf"), float("nan")


def make(num_rows, vocab, device=DEVICE, seed=0):
    """Random logits, and parameters of which each is off in some rows; a greedy row among them."""
    generator = torch.Generator().manual_seed(num_rows + vocab + seed)

    def draw(low, high):
        return torch.rand(num_rows, generator=generator) * (high - low) + low

    logits = torch.randn(num_rows, vocab, generator=generator) * 3
    off = torch.randint(0, 3, (4, num_rows), generator=generator) == 0
    laws = {
        "temperature": draw(0.3, 2.0).masked_fill(off[0], 0.0 if num_rows > 2 else 1.0),
        "top_k": draw(0, 60).int().masked_fill(off[1], 0),
        "top_p": draw(0.1, 1.0).masked_fill(off[2], 1.0),
        "min_p": draw(0.0, 0.2).masked_fill(off[3], 0.0),
    }
    keys = {
        "seed": torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator),
        "position": torch.randint(0, 10000, (num_rows,), generator=generator),
    }
    return logits.to(device), *({k: v.to(device) for k, v in d.items()} for d in (laws, keys))


def rows_of(tensors, rows):
    return {name: tensor[rows].clone() for name, tensor in tensors.items()}


def one(device=DEVICE, **values):
    """Parameters of a single row."""
    kinds = {"top_k": torch.int32, "seed": torch.int64, "position": torch.int64}
    return {
        k: torch.tensor([v], dtype=kinds.get(k, torch.float32)).to(device)
        for k, v in values.items()
    }


@SAMPLE
@pytest.mark.parametrize("num_rows, vocab", [(1, 1), (1, 1031), (17, 33), (5, 130)])
def test_sample_equals_reference(sample, num_rows, vocab, device):
    logits, laws, keys = make(num_rows, vocab)
    assert torch.equal(sample(logits, **laws, **keys), sample_ref(logits, **laws, **keys))


@PROBS
@pytest.mark.parametrize("num_rows, vocab", [(1, 1), (17, 33), (5, 1030)])
def test_sampling_probs_matches_reference(sampling_probs, num_rows, vocab, poisoned_empty):
    logits, laws, _ = make(num_rows, vocab)
    got, want = sampling_probs(logits, **laws), sampling_probs_ref(logits, **laws)
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=0)


@SAMPLE
def test_sample_needs_no_truncation(sample):
    logits, laws, keys = make(5, 1031)
    keys["temperature"] = laws["temperature"] + 0.5
    want = sample_ref(logits, **keys)
    assert torch.equal(sample(logits, **keys), want)
    assert not torch.equal(sample(logits, **keys, salt=1), want)
    assert torch.equal(sample(logits, **keys, salt=1), sample_ref(logits, **keys, salt=1))


@PROBS
@pytest.mark.parametrize("top_k", [2, 3, 4, 7])
def test_sampling_probs_keeps_ties_at_the_kth(sampling_probs, top_k):
    logits = torch.tensor([[0.0, 5.0, 3.0, 3.0, -0.0, 3.0, -1.0, 2.0]], device=DEVICE)
    kept = sampling_probs(logits, **one(temperature=1.0, top_k=top_k)).flatten().nonzero().flatten()
    want = {2: [1, 2, 3, 5], 3: [1, 2, 3, 5], 4: [1, 2, 3, 5], 7: [0, 1, 2, 3, 4, 5, 7]}
    assert kept.tolist() == want[top_k]


@PROBS
@pytest.mark.parametrize(
    "top_p, kept",
    [(0.39, [1]), (0.41, [1, 0]), (0.69, [1, 0]), (0.71, [1, 0, 2, 4]), (0.89, [1, 0, 2, 4])],
)
def test_sampling_probs_keeps_the_fewest_that_reach_top_p(sampling_probs, top_p, kept):
    law = torch.tensor([[0.3, 0.4, 0.1, 0.08, 0.1, 0.02]], device=DEVICE)
    got = sampling_probs(law.log(), **one(temperature=1.0, top_p=top_p))
    want = torch.zeros_like(law)
    want[0, kept] = law[0, kept] / law[0, kept].sum()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


@PROBS
def test_sampling_probs_applies_top_p_to_what_top_k_left(sampling_probs):
    law = torch.tensor([[0.4, 0.3, 0.2, 0.1]], device=DEVICE)
    # of the two kept, 0.4 is 4/7 of the mass: enough for 0.55, not for 0.6
    for top_p, kept in ((0.55, 1), (0.6, 2)):
        got = sampling_probs(law.log(), **one(temperature=1.0, top_k=2, top_p=top_p))
        assert int((got > 0).sum()) == kept


@PROBS
def test_sampling_probs_applies_min_p_relative_to_the_largest(sampling_probs):
    law = torch.tensor([[0.5, 0.26, 0.24]], device=DEVICE)
    got = sampling_probs(law.log(), **one(temperature=1.0, min_p=0.5))
    torch.testing.assert_close(got, torch.tensor([[50 / 76, 26 / 76, 0]], device=DEVICE))
    got = sampling_probs(law.log(), **one(temperature=0.5, min_p=0.5))  # 0.27 of the largest
    assert got.tolist() == [[1.0, 0.0, 0.0]]


@SAMPLE
@pytest.mark.parametrize(
    "greedy", [{"temperature": 0.0}, {"temperature": 3.0, "top_k": 1}], ids=str
)
def test_sample_greedy_takes_the_lowest_id_among_ties(sample, greedy):
    logits = torch.zeros(1, 1031, device=DEVICE)
    assert sample(logits, **one(**greedy, seed=3, position=0)).tolist() == [0]
    logits[0, [1030, 17, 700]] = 1.0
    assert sample(logits, **one(**greedy, seed=3, position=0)).tolist() == [17]


@pytest.mark.parametrize(
    "sample, sampling_probs",
    [(sample_torch, sampling_probs_torch), (sample_triton, sampling_probs_triton)],
    ids=["torch", "triton"],
)
def test_a_row_that_is_not_finite_fails_alone(sample, sampling_probs, poisoned_empty):
    logits, laws, keys = make(17, 33)
    want = sample(logits, **laws, **keys)
    good = torch.ones(17, dtype=torch.bool, device=DEVICE)
    for rows, bad in (((0, 1, 2), NAN), ((5, 6, 7), INF), ((9, 10, 11), -NAN)):
        for row in rows:
            logits[row, row] = bad
            good[row] = False
    logits[13:15] = -INF
    good[13:15] = False
    got, probs = sample(logits, **laws, **keys), sampling_probs(logits, **laws)
    assert torch.equal(got, torch.where(good, want, -1))
    assert torch.equal(probs.isnan().all(1), ~good) and torch.equal(probs.isnan().any(1), ~good)


@SAMPLE
def test_sample_takes_minus_infinity_as_impossible(sample):
    logits, laws, keys = make(5, 130)
    logits[:, :100] = -INF
    assert (sample(logits, **laws, **keys) >= 100).all()
    logits[:, 101:] = -INF
    assert (sample(logits, **laws, **keys) == 100).all()


@SAMPLE
def test_sample_with_a_tiny_temperature_is_greedy(sample):
    logits, _, keys = make(4, 130)
    tiny = torch.full((4,), 1e-42, device=DEVICE)
    assert torch.equal(sample(logits, temperature=tiny, **keys), logits.argmax(1))


@pytest.mark.parametrize(
    "sample, num_rows",
    [pytest.param(sample_torch, 64, id="torch"), pytest.param(sample_triton, 5, id="triton")],
)
def test_row_does_not_depend_on_its_batch(sample, num_rows, device):
    probs = sampling_probs_torch if sample is sample_torch else sampling_probs_triton
    logits, laws, keys = make(num_rows, 1031)
    whole, whole_probs = sample(logits, **laws, **keys), probs(logits, **laws)
    for size in (1, 2, 16):
        rows = torch.randperm(num_rows, generator=torch.Generator().manual_seed(size))[:size]
        rows = rows.to(device)
        own = rows_of(laws, rows)
        assert torch.equal(sample(logits[rows], **own, **rows_of(keys, rows)), whole[rows])
        assert torch.equal(probs(logits[rows], **own), whole_probs[rows])


@SAMPLE
@settings(max_examples=6, deadline=None, derandomize=True)
@given(num_rows=st.integers(1, 3), vocab=st.integers(1, 300), seed=st.integers(0, 99))
def test_sample_draws_what_is_kept(sample, num_rows, vocab, seed):
    logits, laws, keys = make(num_rows, vocab, DEVICE, seed)
    logits = (logits * 2).round() / 2  # many ties
    tokens = sample(logits, **laws, **keys)
    assert torch.equal(tokens, sample_ref(logits, **laws, **keys))
    assert (sampling_probs_torch(logits, **laws).gather(1, tokens[:, None]) > 0).all()


@pytest.mark.parametrize("change", ["_NARROW", "_SMALL"])
def test_sampling_probs_torch_is_the_same_by_every_way_to_a_threshold(change, monkeypatch):
    logits, laws, _ = make(64, 1031)
    want = sampling_probs_torch(logits, **laws)
    monkeypatch.setattr(kept_sets, change, 8)  # most rows alone; bisection down to few candidates
    got = sampling_probs_torch(logits, **laws)
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


def test_sample_torch_has_the_law_of_sampling_probs():
    """Chi-square with 6 cells: 5 degrees of freedom exceed 35.9 once in a million."""
    law = torch.tensor([0.35, 0.05, 0.2, 0.1, 0.25, 0.05, 0.0])
    count = 20_000
    tokens = sample_torch(
        law.log().expand(count, 7).contiguous(),
        temperature=torch.ones(count),
        top_k=torch.full((count,), 6, dtype=torch.int32),
        seed=torch.full((count,), 7),
        position=torch.arange(count),
    )
    found = torch.bincount(tokens, minlength=7)
    assert found[6] == 0
    expected, shifted = count * law[:6], count * law[:6].roll(1)
    assert float(((found[:6] - expected) ** 2 / expected).sum()) < 35.9
    assert float(((found[:6] - shifted) ** 2 / shifted).sum()) > 1000  # the test can tell


@SAMPLE
def test_sample_of_no_rows_is_empty(sample):
    logits, laws, keys = make(4, 33)
    laws, keys = rows_of(laws, slice(0, 0)), rows_of(keys, slice(0, 0))
    got = sample(logits[:0], **laws, **keys)
    assert got.shape == (0,) and got.dtype == torch.int64
    assert sampling_probs_triton(logits[:0], **laws).shape == (0, 33)
    assert sampling_probs_torch(logits[:0], **laws).shape == (0, 33)


@SAMPLE
def test_sample_names_the_bad_argument(sample):
    logits, laws, keys = make(4, 33)
    given_all = laws | keys
    with pytest.raises(ValueError, match="logits must be float32"):
        sample(logits.half(), **given_all)
    with pytest.raises(ValueError, match="logits must have contiguous rows"):
        sample(logits.t().contiguous().t(), **given_all)
    with pytest.raises(ValueError, match="logits must have 1 to 262144 columns, got 0"):
        sample(logits[:, :0], **given_all)
    with pytest.raises(ValueError, match=r"top_p must be float32 of shape \(4\)"):
        sample(logits, **given_all | {"top_p": laws["top_p"][:3]})
    with pytest.raises(ValueError, match="top_k must be int32"):
        sample(logits, **given_all | {"top_k": laws["top_k"].long()})
    with pytest.raises(ValueError, match="seed must be int64"):
        sample(logits, **given_all | {"seed": keys["seed"].int()})
    with pytest.raises(ValueError, match="position must be on"):
        sample(logits, **given_all | {"position": keys["position"].to("meta")})
    with pytest.raises(ValueError, match="temperature must be contiguous"):
        sample(logits, **given_all | {"temperature": laws["temperature"].repeat(2)[::2]})
