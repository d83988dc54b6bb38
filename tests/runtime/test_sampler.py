"""Rows of requests become arguments of the operations; transformers' processors are the oracle."""

import math
from typing import Any

import pytest
import torch

from compress.kernels.ops import select
from compress.runtime.logprobs import join
from compress.runtime.processors import SampledRow, process_rows
from compress.runtime.request import Request, SamplingParams
from compress.runtime.sampler import Choice, sample_rows

OPS = select("torch", "cpu")
VOCAB = 130
EOS = frozenset({1, 7})


def logits(rows: int = 1, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def request(output: list[int] | None = None, drafts: list[int] | None = None, **fields: Any) -> Any:
    prompt = [5, 9, 9, 40, 17]
    made = Request(request_id="a", prompt_ids=prompt, params=SamplingParams(**fields))
    made.token_ids += output or []
    made.draft_ids = drafts or []
    return made


def sampled(x: torch.Tensor, rows: list[SampledRow]) -> list[Choice]:
    return sample_rows(x.clone(), rows, OPS, EOS)


def tokens(x: torch.Tensor, rows: list[SampledRow]) -> list[int]:
    return [choice.token for choice in sampled(x, rows)]


def by_transformers(x: torch.Tensor, made: Request) -> torch.Tensor:
    """Row `x` (V,) after transformers' processors for the parameters that it has."""
    from transformers.generation import logits_process as hf

    params, ids = made.params, torch.tensor([made.token_ids])
    assert params is not None
    chain: list[Any] = []
    if params.repetition_penalty != 1:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.logit_bias:
        bias = [[[token], float(value)] for token, value in params.logit_bias.items()]
        chain.append(hf.SequenceBiasLogitsProcessor(bias))
    if params.bad_words:
        chain.append(hf.NoBadWordsLogitsProcessor([list(word) for word in params.bad_words]))
    if params.min_tokens:
        ends = sorted(params.ending_ids(EOS))
        least = params.min_tokens
        chain.append(hf.MinNewTokensLengthLogitsProcessor(len(made.prompt_ids), least, ends))
    scores = x[None].clone()
    for processor in chain:
        scores = processor(ids, scores)
    return scores[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"logit_bias": {3: 2.5, 129: -4.0, 9: 0.5}},
        {"bad_words": ((3,), (9, 40, 6), (17, 22), (22, 60, 8), (22, 60, 60, 4), (50, 60, 4))},
        {"min_tokens": 3},
        {"min_tokens": 2},
        {"min_tokens": 4, "stop_token_ids": (60,), "ignore_eos": True},
        {
            "repetition_penalty": 1.3,
            "logit_bias": {22: 3.0},
            "bad_words": ((60,),),
            "min_tokens": 9,
        },
    ],
    ids=["rep", "rep-below-1", "bias", "bad-words", "min-3", "min-2", "min-stop", "all"],
)
def test_processed_logits_are_those_of_transformers(fields: dict[str, Any]) -> None:
    for output in ([], [22], [22, 60], [22, 60, 60, 9]):
        made = request(output, **fields)
        x = logits(1, len(output))
        found = process_rows(x.clone(), [SampledRow(made)], OPS, EOS)
        torch.testing.assert_close(found[0], by_transformers(x[0], made), rtol=1e-6, atol=1e-6)


def test_presence_and_frequency_count_the_output_alone() -> None:
    made = request([22, 60, 60, 9], presence_penalty=0.5, frequency_penalty=0.25)
    x = logits()
    found = process_rows(x.clone(), [SampledRow(made)], OPS, EOS)
    expected = x.clone()
    for token, count in ((22, 1), (60, 2), (9, 1)):  # 9 is in the prompt as well
        expected[0, token] -= 0.5 + 0.25 * count
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_rows_after_drafts_see_them_as_output() -> None:
    """One row for each draft, as if it had been generated before; then without them again."""
    fields: dict[str, Any] = {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "bad_words": ((33, 60, 2),),
        "min_tokens": 3,
    }
    drafts = [33, 60, 60, 128]
    made = request([22], drafts, **fields)
    x = logits(5)
    for _ in range(2):
        rows = [SampledRow(made, i) for i in range(5)]
        found = process_rows(x.clone(), rows, OPS, EOS)
        for i in range(5):
            alone = request([22, *drafts[:i]], **fields)
            expected = process_rows(x[i : i + 1].clone(), [SampledRow(alone)], OPS, EOS)
            torch.testing.assert_close(found[i], expected[0], rtol=0, atol=0)
    made.token_ids += [33, 61]  # one draft was right
    made.draft_ids = []
    found = process_rows(x[:1].clone(), [SampledRow(made)], OPS, EOS)
    alone = request([22, 33, 61], **fields)
    expected = process_rows(x[:1].clone(), [SampledRow(alone)], OPS, EOS)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_counts_grow_past_their_first_size() -> None:
    made = request([], repetition_penalty=1.4, frequency_penalty=0.1)
    x = logits(1)
    for step in range(100):
        made.token_ids.append(step)
        process_rows(x.clone(), [SampledRow(made)], OPS, EOS)
    alone = request(list(range(100)), repetition_penalty=1.4, frequency_penalty=0.1)
    found = process_rows(x.clone(), [SampledRow(made)], OPS, EOS)
    torch.testing.assert_close(
        found, process_rows(x.clone(), [SampledRow(alone)], OPS, EOS), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    "fields",
    [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.8, "min_p": 0.02}],
    ids=["top-k", "top-p", "min-p", "all"],
)
def test_draws_stay_in_the_set_that_the_warpers_of_transformers_keep(
    fields: dict[str, Any],
) -> None:
    from transformers.generation import logits_process as hf

    x = logits(1, 3)
    scores = x / 1.5
    warpers = {
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "min_p": hf.MinPLogitsWarper,
    }
    for name, value in fields.items():
        scores = warpers[name](value)(None, scores)
    kept = set(scores[0].isfinite().nonzero().flatten().tolist())
    rows = [SampledRow(request(temperature=1.5, seed=i, **fields)) for i in range(3000)]
    drawn = tokens(x.repeat(3000, 1), rows)
    assert set(drawn) <= kept
    counts = torch.bincount(torch.tensor(drawn), minlength=VOCAB)
    expected = 3000 * scores[0].softmax(-1)
    often = expected > 5
    chi_square = ((counts[often] - expected[often]) ** 2 / expected[often]).sum()
    assert chi_square < 2 * int(often.sum()) + 20


def test_sample_rows_is_the_operation_with_the_parameters_of_each_row() -> None:
    x = logits(17, 1, 1030)
    rows = [
        SampledRow(request(temperature=0.7 + 0.1 * i, top_k=i, top_p=0.95, min_p=0.001, seed=i - 8))
        for i in range(17)
    ]

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(row.params, name) for row in rows], dtype=dtype)

    expected = OPS.sample(
        x,
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        seed=column("seed", torch.int64),
        position=torch.full((17,), 5),
    )
    assert tokens(x, rows) == expected.tolist()


def test_sample_rows_depends_on_seed_and_position() -> None:
    x = torch.zeros(20, 1000)
    by_seed = [SampledRow(request(temperature=1.0, seed=i)) for i in range(20)]
    by_place = [SampledRow(request([2] * i, temperature=1.0, seed=0)) for i in range(20)]
    by_draft = [SampledRow(request([], [2] * i, temperature=1.0, seed=0), i) for i in range(20)]
    assert len(set(tokens(x, by_seed))) > 15
    assert len(set(tokens(x, by_place))) > 15
    assert tokens(x, by_place) == tokens(x, by_draft)


EVERYTHING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "top_k": 12, "seed": 5, "logprobs": 3},
    {"temperature": 1.2, "top_p": 0.8, "seed": 6, "presence_penalty": 1.0},
    {"repetition_penalty": 1.5, "logprobs": 0},
    {"temperature": 0.9, "min_p": 0.1, "seed": 7, "frequency_penalty": 0.5, "logprobs": 7},
    {"logit_bias": {4: 6.0, 90: -2.0}, "temperature": 1.0, "seed": 1},
    {"bad_words": ((22, 3), (8,)), "min_tokens": 4, "logprobs": 200},
]


def test_a_choice_does_not_depend_on_the_other_rows() -> None:
    """Logits are rounded to few values, so that ties are everywhere."""
    x = (logits(8, 4) * 2).round() / 2
    rows = [SampledRow(request([22, 60], seed=i, **{k: v for k, v in f.items() if k != "seed"}))
            for i, f in enumerate(EVERYTHING)]  # fmt: skip
    together = sampled(x, rows)
    backwards = sampled(x.flip(0), rows[::-1])[::-1]
    for i, row in enumerate(rows):
        (alone,) = sampled(x[i : i + 1], [row])
        for other in (together[i], backwards[i]):
            assert other.token == alone.token
            assert (other.logprobs is None) == (alone.logprobs is None)
            if alone.logprobs is not None and other.logprobs is not None:
                for name in ("chosen", "top_ids", "top"):
                    assert torch.equal(
                        getattr(other.logprobs, name), getattr(alone.logprobs, name)
                    ), (i, name)


def test_logprobs_are_those_of_the_model_before_any_processing() -> None:
    x = logits(1, 5)
    made = request([22], temperature=2.0, seed=3, top_k=4, logit_bias={4: 30.0}, logprobs=6)
    (choice,) = sampled(x, [SampledRow(made)])
    assert choice.token == 4 and choice.logprobs is not None
    expected = x[0].double().log_softmax(-1)
    found = choice.logprobs
    torch.testing.assert_close(found.chosen[0].double(), expected[4], rtol=0, atol=1e-5)
    best = expected.topk(6)
    assert found.top_ids[0].tolist() == best.indices.tolist()
    torch.testing.assert_close(found.top[0].double(), best.values, rtol=0, atol=1e-5)


def test_top_logprobs_of_equal_tokens_come_in_the_order_of_their_ids() -> None:
    x = torch.zeros(1, VOCAB)
    x[0, [7, 100, 3, 128]] = 2.0
    x[0, 50] = 4.0
    for count in (2, 4, 7):
        (choice,) = sampled(x, [SampledRow(request(logprobs=count))])
        assert choice.logprobs is not None
        assert choice.logprobs.top_ids[0].tolist() == [50, 3, 7, 100, 128, 0, 1][:count]
    assert join([], 3).top.shape == (0, 3)


def test_greedy_takes_the_lowest_id_among_ties_and_top_k_one_is_greedy() -> None:
    x = torch.zeros(2, 33)
    x[0, [5, 17]] = 1.0
    rows = [SampledRow(request()), SampledRow(request(temperature=5.0, top_k=1, seed=3))]
    assert tokens(x, rows) == [5, 0]
    assert tokens(x.flip(0), rows) == [0, 5]


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "logprobs": 2}], ids=["greedy", "t1"])
def test_rows_that_are_not_finite_get_no_token(fields: dict[str, Any], bad: float) -> None:
    x = logits(3)
    x[1, 17] = bad
    rows = [SampledRow(request(seed=1, **fields)) for _ in range(3)]
    found = tokens(x, rows)
    assert found[1] == -1
    assert [found[0], found[2]] == tokens(x[[0, 2]], rows[:2])


def test_a_row_whose_tokens_are_all_banned_gets_none() -> None:
    made = request(bad_words=tuple((token,) for token in range(33)))
    assert tokens(torch.zeros(1, 33), [SampledRow(made)]) == [-1]
    made = request(bad_words=tuple((token,) for token in range(33) if token != 20))
    assert tokens(torch.zeros(1, 33), [SampledRow(made)]) == [20]
