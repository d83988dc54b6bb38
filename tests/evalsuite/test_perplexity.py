"""Perplexity on a bigram model whose log-probabilities are written down."""

import hashlib
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.errors import CheckFailed
from compress.evalsuite.perplexity import (
    EvaluationData,
    disjoint_windows,
    perplexity,
    select_windows,
    tokenize,
)
from tests.evalsuite.fake import FakeTarget
from tests.factory import tiny_tokenizer


def _data(ids: list[int]) -> EvaluationData:
    return EvaluationData(
        source="test", tokens=torch.tensor(ids), text_sha256="text", tokens_sha256="tokens"
    )


def _uniform(vocab: int) -> torch.Tensor:
    return torch.full((vocab, vocab), -math.log(vocab))


def test_perplexity_of_a_uniform_model_is_its_vocabulary() -> None:
    result = perplexity(FakeTarget(log_probs=_uniform(37)), _data([5, 1, 36] * 11), window=4)
    assert result.value == pytest.approx(37, rel=1e-6)
    assert result.stderr == pytest.approx(0, abs=1e-5)
    assert (result.windows, result.window, result.stride, result.tokens) == (8, 4, 4, 24)
    assert (result.data_tokens, result.data_sha256, result.tokens_sha256) == (33, "text", "tokens")
    assert result.protocol == "gptq"


def test_perplexity_predicts_all_but_the_first_token_of_each_window() -> None:
    # p = 1/2 for 0 -> 1, 1/8 for 1 -> 0, 1/4 for 0 -> 0; the boundary pair (1, 0) is not scored
    log_probs = torch.tensor([[-math.log(4), -math.log(2)], [-math.log(8), -math.inf]])
    target = FakeTarget(log_probs=log_probs)
    result = perplexity(target, _data([0, 0, 1, 0, 0, 0, 1, 1]), window=3)
    assert target.scored == [[0, 0, 1], [0, 0, 0]]
    assert result.value == pytest.approx(math.exp((3 * math.log(4) + math.log(2)) / 4))
    # window means log 4 - log(2)/2 and log 4: standard deviation log(2) / (2 sqrt 2), over sqrt 2
    assert result.stderr == pytest.approx(result.value * math.log(2) / 4)
    assert result.window_nll == pytest.approx((1.5 * math.log(2), 2 * math.log(2)))
    assert "clusters" in result.stderr_method


def test_perplexity_of_one_window_takes_its_tokens_as_independent() -> None:
    log_probs = torch.tensor([[-math.log(4), -math.log(2)], [-math.log(8), 0.0]])
    result = perplexity(FakeTarget(log_probs=log_probs), _data([0, 1, 0, 9]), window=3)
    # losses log 2 and log 8: mean log 4, standard deviation log(4) / sqrt 2, over sqrt 2
    assert result.value == pytest.approx(4)
    assert result.stderr == pytest.approx(4 * math.log(4) / 2)
    assert "independent" in result.stderr_method


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_perplexity_scores_at_most_limit_windows(limit: int) -> None:
    ticks: list[int] = []

    def tick(steps: int = 1, note: str = "") -> None:
        ticks.append(steps)

    target = FakeTarget(log_probs=_uniform(3))
    result = perplexity(target, _data([0, 1, 2] * 7), window=4, limit=limit, tick=tick)
    assert result.windows == len(target.scored) == sum(ticks) == min(limit, 5)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_perplexity_fails_on_a_log_probability_that_is_not_finite(bad: float) -> None:
    log_probs = _uniform(3)
    log_probs[2, 0] = bad
    with pytest.raises(CheckFailed, match=r"^there/model: window 1, token 2: "):
        perplexity(
            FakeTarget(log_probs=log_probs),
            _data([0, 1, 1, 1, 2, 0]),
            window=3,
            name="there/model",
        )


def test_perplexity_fails_when_it_overflows() -> None:
    target = FakeTarget(log_probs=torch.full((2, 2), -1000.0))
    with pytest.raises(CheckFailed, match=r"1000\.0 nats"):
        perplexity(target, _data([0, 1, 0, 1]), window=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 10}, "'test' has 9 tokens, which does not fill one window of 10"),
        ({"window": 2}, "at least 3 tokens, got 2"),
        ({"window": 3, "limit": 0}, "at least 1, got 0"),
        ({"window": 3, "protocol": "gpt"}, "did you mean 'gptq'"),
    ],
)
def test_select_windows_refuses(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_windows(_data(list(range(9))), **{"protocol": "gptq", **settings})


@pytest.mark.parametrize(("num_tokens", "window", "num_windows"), [(33, 17, 1), (130, 13, 10)])
def test_disjoint_windows_drop_the_tail(num_tokens: int, window: int, num_windows: int) -> None:
    windows = disjoint_windows(torch.arange(num_tokens), window)
    assert windows.shape == (num_windows, window)
    assert windows.flatten().tolist() == list(range(num_windows * window))


def test_tokenize_adds_no_special_tokens_and_hashes_text_and_ids() -> None:
    tokenizer = tiny_tokenizer()
    text = "the import statement\n" * 3
    assert tokenizer(text)["input_ids"][0] == tokenizer.bos_token_id  # it would, if it were asked
    data = tokenize(text, tokenizer, source="somewhere")
    assert tokenizer.bos_token_id not in data.tokens.tolist()
    assert tokenizer.decode(data.tokens) == text
    assert data.text_sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert data.tokens_sha256 != tokenize(text, tiny_tokenizer(300), source="").tokens_sha256
    assert data.tokens_sha256 == tokenize(text, tokenizer, source="").tokens_sha256


def test_llama_cpp_scores_the_second_half_after_the_bos_of_the_tokenizer() -> None:
    # p(next = i) = 1 / 2^(i + 1) whatever came before, for the tokens 0 to 3
    log_probs = (-math.log(2) * torch.arange(1.0, 5.0)).expand(4, 4)
    data = replace(_data([1, 1, 0, 3, 2, 0, 0, 0, 0, 1, 9]), bos_id=3)
    target = FakeTarget(log_probs=log_probs)
    result = perplexity(target, data, protocol="llama.cpp", window=5)
    assert target.scored == [[3, 1, 0, 3, 2], [3, 0, 0, 0, 1]]
    # scored are the last two of each window: losses (4, 3) and (1, 2) times log 2
    assert (result.tokens, result.windows, result.window) == (4, 2, 5)
    assert result.value == pytest.approx(2**2.5)
    assert result.window_nll == pytest.approx((3.5 * math.log(2), 1.5 * math.log(2)))
    assert (result.protocol, result.stride) == ("llama.cpp", 5)
    without = perplexity(target, replace(data, bos_id=None), protocol="llama.cpp", window=5)
    assert target.scored[2][0] == 1 and without.value == result.value
    with pytest.raises(ValueError, match="must be at least 5 tokens, got 4"):
        perplexity(target, data, protocol="llama.cpp", window=4)
    assert perplexity(target, data, window=4).protocol == "gptq"
