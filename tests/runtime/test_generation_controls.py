"""The controls through the whole engine: transformers' outputs, log-probabilities, failures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.sampling_params import effective

VOCAB = 331
LENGTHS = (1, 17, 33, 130)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (length,), generator=generator).tolist()


def load(path: Path, **config: Any) -> Engine:
    fields: dict[str, Any] = {"num_blocks": 64, "block_size": 16, "max_num_seqs": 8}
    return Engine.load(path, dtype="float32", config=EngineConfig(**(fields | config)))


@pytest.fixture(scope="module")
def theirs(llama: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()


def generate(theirs: Any, ids: list[int], **arguments: Any) -> list[int]:
    with torch.no_grad():
        out = theirs.generate(torch.tensor([ids]), do_sample=False, pad_token_id=1, **arguments)
    found: list[int] = out[0, len(ids) :].tolist()
    return found


@pytest.mark.parametrize("budget", [16, 512], ids=["chunked", "whole"])
def test_greedy_output_with_penalty_and_bad_words_is_that_of_transformers(
    budget: int, llama: Path, theirs: Any
) -> None:
    engine = load(llama, token_budget=budget)
    for length in LENGTHS:
        ids = prompt(length)
        free = generate(theirs, ids, max_new_tokens=16, eos_token_id=None)
        bad = ((free[0],), (free[2], free[3]))
        params = SamplingParams(
            max_tokens=16, repetition_penalty=1.25, bad_words=bad, ignore_eos=True
        )
        wanted = generate(
            theirs, ids, max_new_tokens=16, eos_token_id=None, repetition_penalty=1.25,
            bad_words_ids=[list(word) for word in bad],
        )  # fmt: skip
        assert wanted != free
        assert engine.generate([ids], params)[0].token_ids == wanted


def test_min_tokens_keeps_the_end_away_as_in_transformers(llama: Path, theirs: Any) -> None:
    ids = prompt(17)
    free = generate(theirs, ids, max_new_tokens=16, eos_token_id=None)
    end = free[1]
    params = SamplingParams(max_tokens=16, min_tokens=7, stop_token_ids=(end,), ignore_eos=True)
    (found,) = load(llama).generate([ids], params)
    wanted = generate(theirs, ids, max_new_tokens=16, eos_token_id=end, min_new_tokens=7)
    assert found.token_ids == wanted
    assert end not in found.token_ids[:7]


@pytest.mark.parametrize("budget", [16, 512], ids=["chunked", "whole"])
@pytest.mark.parametrize("hit", [False, True], ids=["cold", "cached"])
def test_log_probabilities_are_those_of_transformers(
    hit: bool, budget: int, llama: Path, theirs: Any
) -> None:
    engine, ids = load(llama, token_budget=budget), prompt(130)
    if hit:
        engine.generate([ids], SamplingParams(max_tokens=1))
    params = SamplingParams(
        max_tokens=6, temperature=0.9, seed=4, repetition_penalty=1.5, ignore_eos=True,
        logprobs=5, prompt_logprobs=3,
    )  # fmt: skip
    (found,) = engine.generate([ids], params)
    whole = torch.tensor([*ids, *found.token_ids])
    with torch.no_grad():
        expected = theirs(whole[None]).logits[0, :-1].double().log_softmax(-1)
    assert found.prompt_logprobs is not None and found.logprobs is not None
    assert found.cached_tokens == 0
    for part, rows, num_top in (
        (found.prompt_logprobs, slice(0, 129), 3),
        (found.logprobs, slice(129, 135), 5),
    ):
        chosen = expected[rows].gather(1, whole[1:][rows, None])[:, 0]
        torch.testing.assert_close(part.chosen.double(), chosen, rtol=0, atol=1e-4)
        best = expected[rows].topk(num_top)
        assert torch.equal(part.top_ids, best.indices)
        torch.testing.assert_close(part.top.double(), best.values, rtol=0, atol=1e-4)


def test_log_probabilities_are_made_in_chunks_of_rows(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ids = load(llama), prompt(130)
    params = SamplingParams(max_tokens=4, prompt_logprobs=2, logprobs=2, ignore_eos=True)
    expected = engine.generate([ids] * 7, params)
    monkeypatch.setattr("compress.runtime.logprobs._LOGITS_BYTES", 4 * VOCAB * 3)
    sizes: list[int] = []
    logits = type(engine.decoder).logits
    monkeypatch.setattr(
        type(engine.decoder),
        "logits",
        lambda self, hidden: sizes.append(len(hidden)) or logits(self, hidden),
    )
    found = engine.generate([ids] * 7, params)
    assert max(sizes) == 3
    assert sum(sizes) == 7 * (129 + 4)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
        torch.testing.assert_close(
            one.prompt_logprobs.top, other.prompt_logprobs.top, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("attention", ["auto", "paged"])
@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1.0}, {"beam_width": 3}], ids=str)
def test_a_request_that_is_not_finite_fails_alone_and_leaves_no_trace(
    fields: dict[str, Any], attention: str, llama: Path
) -> None:
    engine = load(llama, attention=attention, token_budget=24, num_blocks=40)
    params = SamplingParams(max_tokens=8, ignore_eos=True, bad_words=((77,),))
    prompts = [prompt(n, 1) for n in (17, 33, 20)]
    prompts = [[token if token != 77 else 78 for token in ids] for ids in prompts]
    wanted = [engine.generate([ids], params)[0].token_ids for ids in prompts]
    engine.decoder.embedding.table[77] = float("nan")  # type: ignore[attr-defined]
    bad = [*prompts[0][:16], 77, *prompt(30)]
    for _ in range(3):
        mixed = [params, SamplingParams(max_tokens=8, **fields), params, params]
        found = engine.generate([prompts[0], bad, *prompts[1:]], mixed)
        failed = found.pop(1)
        assert failed.finish_reason == "error"
        assert failed.error is not None and "NaN" in failed.error
        assert failed.token_ids == []
        assert [c.token_ids for c in found] == wanted
        assert bool(engine._pool.k.isfinite().all()) and bool(engine._pool.v.isfinite().all())
    engine.blocks.check()


def test_request_for_which_every_token_is_banned_ends_with_an_error(llama: Path) -> None:
    params = SamplingParams(max_tokens=4, bad_words=tuple((i,) for i in range(VOCAB)))
    (found,) = load(llama).generate([prompt(5)], params)
    assert (found.finish_reason, found.token_ids) == ("error", [])
    assert found.error is not None and "position 5" in found.error


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, f"logit_bias: token {VOCAB} is not in"),
        ({"bad_words": ((4, -1),)}, "bad_words: token -1 is not in"),
        ({"stop_token_ids": (400,)}, "stop_token_ids: token 400 is not in"),
    ],
    ids=["bias", "bad-words", "stop"],
)
def test_tokens_that_the_model_does_not_have_are_refused(
    fields: dict[str, Any], named: str, llama: Path
) -> None:
    engine = load(llama)
    params = SamplingParams(**fields)
    with pytest.raises(ValueError, match=named):
        engine.add_request(Request(request_id="a", prompt_ids=[5], params=params))
    assert not engine.has_unfinished


def test_parameters_in_force_are_those_of_generation_config_and_are_reported(
    llama: Path, tmp_path: Path
) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).symlink_to(file)
    stored = {"do_sample": True, "temperature": 0.5, "top_k": 7, "eos_token_id": [1, 5]}
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    engine = load(tmp_path)
    params = effective(engine.generation_config, {"max_tokens": 3, "top_k": 9}).params
    (found,) = engine.generate([prompt(5)], params)
    assert found.params is not None and found.params.seed is not None
    assert (found.params.temperature, found.params.top_k) == (0.5, 9)
