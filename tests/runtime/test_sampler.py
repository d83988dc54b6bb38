"""Choosing tokens: greedy ties, thresholds without sorting, noise that belongs to the request."""

import math

import pytest
import torch

from compress.errors import CheckFailed
from compress.runtime.request import SamplingParams
from compress.runtime.sampler import SampledRow, _nucleus, gumbel_noise, sample

GREEDY = SamplingParams()


def test_sample_greedy_takes_the_lowest_id_among_ties() -> None:
    logits = torch.zeros(2, 33)
    logits[0, [5, 17]] = 1.0
    assert sample(logits, [SampledRow(GREEDY, 0), SampledRow(GREEDY, 9)]) == [5, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0)], ids=["greedy", "t1"])
def test_sample_fails_on_logits_that_are_not_finite(params: SamplingParams, bad: float) -> None:
    logits = torch.zeros(2, 33)
    logits[1, 17] = bad
    with pytest.raises(CheckFailed, match="token at position 9 are not finite"):
        sample(logits, [SampledRow(params, 3), SampledRow(params, 9)])


def test_sample_takes_minus_infinity_as_impossible() -> None:
    logits = torch.full((1, 33), -math.inf)
    with pytest.raises(CheckFailed, match="position 4 are not finite"):
        sample(logits, [SampledRow(GREEDY, 4)])
    logits[0, 7] = -3.0
    assert sample(logits, [SampledRow(GREEDY, 4)]) == [7]


def test_sample_with_top_k_one_is_greedy() -> None:
    logits = torch.randn(1, 130, generator=torch.Generator().manual_seed(0))
    row = SampledRow(SamplingParams(temperature=5.0, top_k=1, seed=3), 4)
    assert sample(logits, [row]) == [int(logits.argmax())]


def test_sample_does_not_depend_on_neighbours_or_row() -> None:
    logits = torch.randn(17, 1030, generator=torch.Generator().manual_seed(1))
    rows = [
        SampledRow(SamplingParams(temperature=0.7 + 0.1 * i, top_k=i, top_p=0.95, seed=i), 3 * i)
        for i in range(17)
    ]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(17)]
    backwards = sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == backwards


@pytest.mark.parametrize("change", ["seed", "position"])
def test_sample_depends_on_seed_and_position(change: str) -> None:
    logits = torch.zeros(1, 1000)
    rows = [
        SampledRow(
            SamplingParams(temperature=1.0, seed=i if change == "seed" else 0),
            i if change == "position" else 0,
        )
        for i in range(20)
    ]
    assert len({sample(logits, [row])[0] for row in rows}) > 15


def test_sample_draws_from_the_softmax() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    params = SamplingParams(temperature=2.0, seed=11)
    logits = 2.0 * probs.log().repeat(4000, 1)
    drawn = sample(logits, [SampledRow(params, i) for i in range(4000)])
    counts = torch.bincount(torch.tensor(drawn), minlength=4)
    chi_square = ((counts - 4000 * probs) ** 2 / (4000 * probs)).sum()
    assert chi_square < 16.3  # 3 degrees of freedom, one in a thousand


def test_gumbel_noise_has_gumbel_moments_and_no_repeats() -> None:
    noise = gumbel_noise(5, 77, torch.arange(200_000))
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    assert len(noise.unique()) > 199_000


def test_gumbel_noise_of_neighbouring_positions_is_uncorrelated() -> None:
    tokens = torch.arange(50_000)
    pairs = torch.stack([gumbel_noise(0, 10, tokens), gumbel_noise(0, 11, tokens)])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.02


@pytest.mark.parametrize("top_k", [1, 2, 17, 130, 500], ids=lambda k: f"k{k}")
def test_sample_top_k_stays_inside_the_k_most_likely(top_k: int) -> None:
    logits = torch.randn(1, 130, generator=torch.Generator().manual_seed(2))
    allowed = set(logits[0].topk(min(top_k, 130)).indices.tolist())
    rows = [SampledRow(SamplingParams(temperature=9.0, top_k=top_k), i) for i in range(300)]
    drawn = {sample(logits, [row])[0] for row in rows}
    assert drawn <= allowed
    assert len(drawn) > min(top_k, 130) * 0.8


def test_sample_top_p_counts_the_mass_that_top_k_left() -> None:
    """Of the two most likely the first has 4/7 >= 0.5; among all four it has only 0.4."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    rows = [SampledRow(SamplingParams(temperature=1, top_k=2, top_p=0.5), i) for i in range(200)]
    assert {sample(logits, [row])[0] for row in rows} == {0}
    rows = [SampledRow(SamplingParams(temperature=1, top_p=0.5), i) for i in range(200)]
    assert {sample(logits, [row])[0] for row in rows} == {0, 1}


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999], ids=lambda p: f"p{p}")
def test_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float) -> None:
    probs = torch.randn(330, generator=torch.Generator().manual_seed(3)).mul(2).softmax(-1)
    ranked = probs.sort(descending=True)
    num_kept = int((ranked.values.double().cumsum(-1) < top_p).sum()) + 1
    assert _nucleus(probs, top_p).nonzero().flatten().tolist() == sorted(
        ranked.indices[:num_kept].tolist()
    )


def test_nucleus_keeps_all_ties_at_its_threshold() -> None:
    probs = torch.tensor([0.4, 0.2, 0.2, 0.2])
    assert _nucleus(probs, 0.5).tolist() == [True, True, True, True]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
    ids=[
        "max_tokens-0",
        "temperature-negative",
        "temperature-nan",
        "top_k-1",
        "top_p-0",
        "top_p-1.5",
    ],
)
def test_sampling_params_refuse_what_has_no_meaning(wrong: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SamplingParams(**wrong)  # type: ignore[arg-type]
