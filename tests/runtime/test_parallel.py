"""Several outputs of one prompt: what each would be alone, on cache blocks that they share."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.request import Completion, Request, SamplingParams
from compress.runtime.sampling_params import child_seed

VOCAB = 331
SAMPLED: dict[str, Any] = {
    "max_tokens": 9, "temperature": 1.0, "top_p": 0.95, "seed": 11, "ignore_eos": True,
}  # fmt: skip


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(2, VOCAB, (length,), generator=generator).tolist()


def load(path: Path, **config: Any) -> Engine:
    fields: dict[str, Any] = {"num_blocks": 128, "block_size": 16, "max_num_seqs": 8}
    return Engine.load(
        path, dtype="float32", config=EngineConfig(**(fields | config), deterministic=True)
    )


def all_of(completion: Completion) -> list[Completion]:
    return [completion, *completion.siblings]


def alone(path: Path, ids: list[int], index: int, **fields: Any) -> Completion:
    params = SamplingParams(**(SAMPLED | {"seed": child_seed(11, index)} | fields))
    return load(path).generate([ids], params)[0]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"token_budget": 8},
        {"max_num_seqs": 2},
        {"block_size": 4, "num_blocks": 24},
        {"batching": "request"},
        {"chunked_prefill": False},
        {"allocation": "contiguous", "prefix_cache": False, "max_model_len": 64},
    ],
    ids=["batched", "chunked", "2-seqs", "tight", "request", "whole", "contiguous"],
)
def test_each_of_n_outputs_is_that_of_a_request_with_its_own_seed(
    config: dict[str, Any], llama: Path
) -> None:
    engine = load(llama, **config)
    prompts = [prompt(n) for n in (1, 17, 33)]
    params = SamplingParams(n=4, **SAMPLED)
    for _ in range(2):
        found = engine.generate(prompts, params)
        for ids, completion in zip(prompts, found, strict=True):
            outputs = all_of(completion)
            assert [c.index for c in outputs] == [0, 1, 2, 3]
            expected = [alone(llama, ids, i).token_ids for i in range(4)]
            assert [c.token_ids for c in outputs] == expected
            seeds = [c.params.seed for c in outputs if c.params]
            assert seeds == [child_seed(11, i) for i in range(4)]
        assert engine.blocks.num_free_blocks == engine.blocks.num_blocks
        engine.blocks.check()


def test_prompt_is_computed_once_and_its_blocks_are_shared(llama: Path) -> None:
    engine = load(llama, prefix_cache=False)
    params = SamplingParams(**(SAMPLED | {"max_tokens": 5}), n=6)
    engine.add_request(Request(request_id="a", prompt_ids=prompt(130), params=params))
    peak = 0
    while engine.has_unfinished:
        engine.step()
        peak = max(peak, engine.blocks.num_blocks - engine.blocks.num_free_blocks)
    assert engine.stats.computed_tokens == 130 + 6 * 4
    assert peak == 8 + 6  # eight full blocks, and the ninth for each


def test_best_of_returns_the_most_likely_by_mean_log_probability(llama: Path) -> None:
    engine, ids = load(llama), prompt(17)
    orders = set()
    for seed in (1, 2, 3):
        fields = SAMPLED | {"seed": seed}
        (found,) = engine.generate([ids], SamplingParams(**fields, n=2, best_of=5))
        means = []
        for i in range(5):
            (one,) = engine.generate(
                [ids], SamplingParams(**(fields | {"seed": child_seed(seed, i)}))
            )
            means.append(float(engine.score([[*ids, *one.token_ids]])[0][-9:].mean()))
        order = sorted(range(5), key=lambda i: -means[i])
        assert [c.index for c in all_of(found)] == order[:2]
        assert found.mean_logprob == pytest.approx(means[order[0]], abs=1e-5)
        orders.add(tuple(order[:2]))
    assert len(orders) > 1, "seeds with which the order matters"


@pytest.mark.parametrize("budget", [10, 512], ids=["chunked", "whole"])
def test_every_output_has_the_log_probabilities_of_the_prompt(budget: int, llama: Path) -> None:
    engine, ids = load(llama, token_budget=budget), prompt(33)
    params = SamplingParams(**SAMPLED, n=3, logprobs=2, prompt_logprobs=4)
    for _ in range(2):
        (found,) = engine.generate([ids], params)
        (score,) = engine.score([ids])
        for i, c in enumerate(all_of(found)):
            assert c.prompt_logprobs is not None and c.logprobs is not None
            assert torch.equal(c.prompt_logprobs.chosen, score)
            assert c.prompt_logprobs.top.shape == (32, 4)
            expected = alone(llama, ids, i, logprobs=2).logprobs
            assert expected is not None
            assert torch.equal(c.logprobs.chosen, expected.chosen)
            assert torch.equal(c.logprobs.top_ids, expected.top_ids)


def start(engine: Engine, steps: int, **fields: Any) -> Request:
    params = SamplingParams(**(SAMPLED | {"n": 4} | fields))
    request = Request(request_id="a", prompt_ids=prompt(33), params=params)
    engine.add_request(request)
    for _ in range(steps):
        assert not engine.step()
    return request


@pytest.mark.parametrize("steps", [0, 2, 7])
def test_abort_of_the_parent_aborts_every_output(steps: int, llama: Path) -> None:
    engine = load(llama, token_budget=16)
    start(engine, steps)
    completion = engine.abort("a")
    generated = max(steps - 2, 0)
    assert [c.finish_reason for c in all_of(completion)] == ["abort"] * 4
    assert [len(c.token_ids) for c in all_of(completion)] == [generated] * 4
    assert not engine.has_unfinished
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks


@pytest.mark.parametrize("steps", [0, 1, 6])
@pytest.mark.parametrize("which", [0, 2])
def test_abort_of_one_output_leaves_the_others_as_they_were(
    which: int, steps: int, llama: Path
) -> None:
    engine = load(llama, token_budget=16)
    request = start(engine, steps, prompt_logprobs=0)
    aborted = engine.abort(request.children[which].request_id)
    assert (aborted.finish_reason, aborted.index) == ("abort", which)
    with pytest.raises(ValueError, match="not in flight"):
        engine.abort(aborted.request_id)
    (found,) = [c for _ in range(40) for c in engine.step()]
    outputs = {c.index: c for c in all_of(found)}
    for i in {0, 1, 2, 3} - {which}:
        assert outputs[i].token_ids == alone(llama, prompt(33), i).token_ids
        assert outputs[i].finish_reason == "length"
        prompt_logprobs = outputs[i].prompt_logprobs
        assert prompt_logprobs is not None and len(prompt_logprobs.chosen) == 32
    assert outputs[which].token_ids == aborted.token_ids
    assert not engine.has_unfinished


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("backwards", [False, True])
def test_when_each_output_was_aborted_the_next_step_reports_the_whole(
    backwards: bool, steps: int, llama: Path
) -> None:
    engine = load(llama)
    request = start(engine, steps)
    for child in request.children[:: -1 if backwards else 1]:
        assert engine.has_unfinished
        engine.abort(child.request_id)
    assert engine.has_unfinished
    (found,) = engine.step()
    assert found.request_id == "a"
    assert [c.finish_reason for c in all_of(found)] == ["abort"] * 4
    assert not engine.has_unfinished


def test_outputs_stop_each_at_its_own_token(llama: Path) -> None:
    ids = prompt(17)
    stop = alone(llama, ids, 1).token_ids[4]
    params = SamplingParams(**SAMPLED, n=3, stop_token_ids=(stop,))
    (found,) = load(llama).generate([ids], params)
    for i, c in enumerate(all_of(found)):
        whole = alone(llama, ids, i).token_ids
        length = whole.index(stop) + 1 if stop in whole else 9
        assert c.token_ids == whole[:length]
        assert c.finish_reason == ("stop" if stop in whole else "length")


def test_seed_that_is_not_given_is_drawn_and_reported(llama: Path) -> None:
    engine, ids = load(llama), prompt(17)
    params = SamplingParams(**(SAMPLED | {"seed": None, "n": 2, "temperature": 3.0}))
    first, second = (engine.generate([ids], params)[0] for _ in range(2))
    assert first.params and second.params and first.params.seed is not None
    assert first.params.seed != second.params.seed
    assert first.token_ids != second.token_ids
    again = SamplingParams(**(SAMPLED | {"seed": first.params.seed, "n": 2, "temperature": 3.0}))
    (third,) = engine.generate([ids], again)
    assert [c.token_ids for c in all_of(third)] == [c.token_ids for c in all_of(first)]


def test_a_group_is_admitted_when_all_its_outputs_fit(llama: Path) -> None:
    """Without counting forks, admission would let both in and preempt."""
    engine = load(llama, block_size=4, num_blocks=26, prefix_cache=False)
    params = SamplingParams(**(SAMPLED | {"max_tokens": 12, "n": 4}))
    found = engine.generate([prompt(17), prompt(18)], params)
    assert engine.stats.preemptions == 0
    assert all(len(c.token_ids) == 12 for f in found for c in all_of(f))


def test_a_group_that_is_larger_than_the_pool_still_comes_to_its_end(llama: Path) -> None:
    """One output fits, all four do not: they are preempted or wait."""
    engine = load(llama, block_size=4, num_blocks=8)
    params = SamplingParams(**(SAMPLED | {"max_tokens": 12, "n": 4}))
    (found,) = engine.generate([prompt(20)], params)
    expected = [alone(llama, prompt(20), i, max_tokens=12).token_ids for i in range(4)]
    assert [c.token_ids for c in all_of(found)] == expected
