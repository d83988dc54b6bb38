"""Beam search finds what transformers finds, on cache blocks that its beams share."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.request import Completion, Request, SamplingParams

VOCAB = 331
EOS = 1


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (length,), generator=generator).tolist()


def load(path: Path, **config: Any) -> Engine:
    fields: dict[str, Any] = {"num_blocks": 128, "block_size": 16, "max_num_seqs": 8}
    return Engine.load(path, dtype="float32", config=EngineConfig(**(fields | config)))


@pytest.fixture(scope="module")
def theirs(llama: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()


def expected(theirs: Any, ids: list[int], width: int, **arguments: Any) -> list[list[int]]:
    """The sequences of `generate`, without the padding after an end-of-sequence token."""
    fields: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": EOS, "pad_token_id": EOS}
    fields |= {"num_return_sequences": width} | arguments
    with torch.no_grad():
        out = theirs.generate(torch.tensor([ids]), num_beams=width, do_sample=False, **fields)
    ends = fields["eos_token_id"]
    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
    rows = []
    for row in out[:, len(ids) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        rows.append(row[:end])
    return rows


def all_of(completion: Completion) -> list[Completion]:
    return [completion, *completion.siblings]


def likely_ends(theirs: Any, ids: list[int]) -> list[int]:
    """Tokens of the greedy continuation, so that beams do end when they are the ends."""
    return expected(theirs, ids, 2, eos_token_id=None)[0][2:9:3]


@pytest.mark.parametrize("early", [False, True, "never"], ids=["bound", "first", "never"])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5, -1.0], ids=lambda p: f"lp{p}")
@pytest.mark.parametrize("width", [2, 3, 5])
def test_beam_search_gives_the_sequences_of_transformers(
    width: int, penalty: float, early: Any, llama: Path, theirs: Any
) -> None:
    engine = load(llama)
    for length in (1, 17, 33) if width == 3 else (17,):
        ids = prompt(length)
        ends = likely_ends(theirs, ids)
        engine._eos_token_ids = engine._in_flight._eos_token_ids = frozenset(ends)
        params = SamplingParams(
            max_tokens=12, beam_width=width, n=width, length_penalty=penalty, early_stopping=early
        )
        (found,) = engine.generate([ids], params)
        wanted = expected(
            theirs, ids, width, eos_token_id=ends, length_penalty=penalty, early_stopping=early
        )
        assert [c.token_ids for c in all_of(found)] == wanted
        reasons = ["stop" if row[-1] in ends else "length" for row in wanted]
        assert [c.finish_reason for c in all_of(found)] == reasons


def test_beam_search_applies_processors_as_transformers_does(llama: Path, theirs: Any) -> None:
    ids = prompt(17, 3)
    words = expected(theirs, ids, 3, eos_token_id=None)[0]
    bad = ((words[1],), (words[2], words[3]))  # transformers lets an end be no bad word
    assert words[6] not in words[:4]
    params = SamplingParams(
        max_tokens=10, beam_width=3, n=3, repetition_penalty=1.3, bad_words=bad, min_tokens=6,
        stop_token_ids=(words[6],), ignore_eos=True,
    )  # fmt: skip
    (found,) = load(llama).generate([ids], params)
    wanted = expected(
        theirs, ids, 3, max_new_tokens=10, repetition_penalty=1.3, min_new_tokens=6,
        eos_token_id=words[6], bad_words_ids=[list(word) for word in bad],
    )  # fmt: skip
    assert [c.token_ids for c in all_of(found)] == wanted


def test_beam_scores_and_logprobs_are_those_of_the_sequences(llama: Path) -> None:
    engine = load(llama)
    ids = prompt(33)
    params = SamplingParams(
        max_tokens=9, beam_width=4, n=3, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    (found,) = engine.generate([ids], params)
    scores = [c.beam_score for c in all_of(found)]
    assert scores == sorted(scores, reverse=True) and len(scores) == 3
    for c in all_of(found):
        score = engine.score([[*ids, *c.token_ids]])[0]
        assert c.logprobs is not None and c.prompt_logprobs is not None
        torch.testing.assert_close(c.logprobs.chosen, score[-9:], rtol=0, atol=1e-4)
        torch.testing.assert_close(c.prompt_logprobs.chosen, score[:-9], rtol=0, atol=1e-4)
        assert c.beam_score == pytest.approx(c.mean_logprob, abs=1e-5)
        assert c.logprobs.top.shape == (9, 2) and c.prompt_logprobs.top.shape == (32, 1)
        assert bool((c.logprobs.top[:, 0] >= c.logprobs.chosen).all())
        assert len(c.token_times) == 9


@pytest.mark.parametrize(
    "config",
    [
        {"token_budget": 8},
        {"block_size": 4, "num_blocks": 64},
        {"num_blocks": 20, "block_size": 4},
        {"max_num_seqs": 3, "token_budget": 3},
        {"batching": "request"},
        {"policy": "priority", "prefix_cache": False, "num_blocks": 20, "block_size": 4},
        {"allocation": "contiguous", "prefix_cache": False, "max_model_len": 32},
    ],
    ids=["chunked", "small-blocks", "tight", "few-seqs", "request", "no-cache", "contiguous"],
)
def test_beam_search_does_not_depend_on_schedule_or_neighbours(
    config: dict[str, Any], llama: Path
) -> None:
    params = SamplingParams(max_tokens=8, beam_width=3, n=3, ignore_eos=True)
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [prompt(17, i) for i in range(4)]
    wanted = [
        [c.token_ids for c in all_of(load(llama).generate([ids], params)[0])] for ids in prompts
    ]
    engine = load(llama, **config)
    mixed = [params, greedy, params, params]
    for _ in range(2):
        found = engine.generate(prompts, mixed)
        for i in (0, 2, 3):
            assert [c.token_ids for c in all_of(found[i])] == wanted[i]
        engine.blocks.check()
        assert engine.blocks.num_free_blocks == engine.blocks.num_blocks


def test_beams_share_the_blocks_of_the_prompt(llama: Path) -> None:
    engine = load(llama, prefix_cache=False)
    params = SamplingParams(max_tokens=12, beam_width=5, ignore_eos=True)
    engine.add_request(Request(request_id="a", prompt_ids=prompt(130), params=params))
    peak = 0
    while engine.has_unfinished:
        engine.step()
        peak = max(peak, engine.blocks.num_blocks - engine.blocks.num_free_blocks)
    assert 9 < peak <= 8 + 2 * 5  # 8 full blocks of the prompt, and what each beam writes


def test_idle_beams_give_way_where_the_pool_is_too_small_for_two_searches(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With admission that looks at nothing, beams are preempted while their siblings wait."""
    params = SamplingParams(max_tokens=8, beam_width=3, n=3, ignore_eos=True)
    prompts = [prompt(17, i) for i in range(3)]
    wanted = [[c.token_ids for c in all_of(c)] for c in load(llama).generate(prompts, params)]
    engine = load(llama, num_blocks=18, block_size=4, prefix_cache=False, max_num_seqs=7)
    plan = engine.scheduler
    monkeypatch.setattr(
        plan,
        "_can_admit",
        lambda: (
            bool(plan.waiting)
            and len(plan.running) < 7
            and plan.blocks.num_free_blocks >= 2
            and plan._holds_pinned([*plan.running, plan.waiting[0]])
        ),
    )
    found = engine.generate(prompts, params)
    assert [[c.token_ids for c in all_of(c)] for c in found] == wanted
    assert engine.stats.preemptions > 0


def test_an_aborted_search_returns_its_best_beam_and_frees_all(llama: Path) -> None:
    engine = load(llama)
    params = SamplingParams(max_tokens=30, beam_width=4, ignore_eos=True)
    engine.add_request(Request(request_id="a", prompt_ids=prompt(33), params=params))
    for _ in range(5):
        engine.step()
    with pytest.raises(ValueError, match="'a' is already in flight"):
        engine.add_request(Request(request_id="a", prompt_ids=prompt(3), params=params))
    completion = engine.abort("a")
    assert (completion.finish_reason, len(completion.token_ids)) == ("abort", 5)
    assert not engine.has_unfinished
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks


def test_a_search_that_can_not_fit_is_refused(llama: Path) -> None:
    engine = load(llama, num_blocks=8, block_size=4, max_num_seqs=4)
    wide = SamplingParams(max_tokens=4, beam_width=5)
    with pytest.raises(ValueError, match="beam_width 5 is more than max_num_seqs 4"):
        engine.add_request(Request(request_id="a", prompt_ids=[5], params=wide))
    long = SamplingParams(max_tokens=4, beam_width=3)
    with pytest.raises(ValueError, match="3 beams of 12 tokens may need 9 cache blocks"):
        engine.add_request(Request(request_id="a", prompt_ids=[5] * 9, params=long))
    assert not engine.has_unfinished
