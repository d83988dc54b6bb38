"""A request has the same bits alone and in any schedule, with every control in use.

A schedule is a random engine (block size, budget, pool, policy, batching, draft) and a random order
of arrivals, aborts and steps. Every output and every log-probability is compared with those of the
request alone in an engine that computes whole prompts.
"""

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.logprobs import LogProbs
from compress.runtime.model import Decoder
from compress.runtime.request import Completion, Request, SamplingParams
from compress.runtime.speculative.base import DraftContext
from tests.export.samples import W8A8, packed_model
from tests.runtime.test_loader import W4

VOCAB = 331
NUM_REQUESTS = 11


@pytest.fixture(scope="module", params=["fp32", "bf16", "w4", "w8a8"])
def decoder(request: pytest.FixtureRequest, llama: Path, tmp_path_factory: Any) -> Decoder:
    """A tiny Llama as it is kept in memory."""
    path = llama
    if request.param in ("w4", "w8a8"):
        path = tmp_path_factory.mktemp(request.param) / "model"
        packed_model(llama, path, W4 if request.param == "w4" else W8A8)
    dtype = "float32" if request.param == "fp32" else "bfloat16"
    config = EngineConfig(num_blocks=1, deterministic=True)
    return Engine.load(path, dtype=dtype, config=config).decoder


def prompts() -> list[list[int]]:
    """Awkward lengths; the last ones begin as the one of 130 tokens does."""
    generator = torch.Generator().manual_seed(2)
    made = [
        torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (1, 17, 33, 130, 5, 64)
    ]
    return [*made, made[3][:33], made[3][:64], [*made[3][:70], 5, 6], made[3], made[2]]


CONTROLS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3, "logprobs": 2},
    {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "seed": 4, "repetition_penalty": 1.3},
    {"temperature": 1.0, "min_p": 0.02, "seed": 5, "presence_penalty": 0.5, "prompt_logprobs": 2},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 0},
    {"temperature": 0.8, "seed": 6, "bad_words": ((3,), (7, 9)), "logit_bias": {17: 2.0, 60: 1.0}},
    {"temperature": 2.0, "seed": 7, "stop_token_ids": tuple(range(2, 40)), "min_tokens": 3},
    {"temperature": 1.0, "seed": 8, "n": 3, "logprobs": 1, "prompt_logprobs": 0},
    {"temperature": 1.0, "seed": 9, "n": 1, "best_of": 3},
    {"logprobs": 3, "prompt_logprobs": 3},
    {"beam_width": 3, "n": 2, "logprobs": 1},
]


def params_of(i: int) -> SamplingParams:
    return SamplingParams(max_tokens=9, ignore_eos=True, **CONTROLS[i])


def bits(completion: Completion) -> list[Any]:
    """All that must not depend on anything, in a form that compares exactly."""
    found: list[Any] = []
    for c in (completion, *completion.siblings):
        found.append((c.index, c.token_ids, c.finish_reason, c.beam_score))
        for part in (c.logprobs, c.prompt_logprobs):
            if isinstance(part, LogProbs):
                found += [part.chosen.tolist(), part.top_ids.tolist(), part.top.tolist()]
            else:
                found.append(None)
    return found


class StubProposer:
    """Proposes from known outputs with wrong tokens in between, at random."""

    def __init__(self, rng: random.Random, sequences: list[list[int]], needs_all: bool) -> None:
        self.needs_all_positions = needs_all
        self.rng = rng
        self.sequences = sequences

    def observe(self, request_id: str, start: int, hidden: torch.Tensor) -> None:
        pass

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        return [self.continue_(list(context.token_ids)) for context in contexts]

    def continue_(self, known: list[int]) -> list[int]:
        match = next((s for s in self.sequences if s[: len(known)] == known), [])
        guess = match[len(known) : len(known) + self.rng.randint(0, 5)] or [self.rng.randrange(40)]
        return [t if self.rng.random() < 0.8 else self.rng.randrange(VOCAB) for t in guess]

    def reset(self, request_id: str) -> None:
        pass


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> Callable[[], list[Completion]]:
    """Each request alone, in a new engine without a prefix cache."""

    @lru_cache
    def make() -> list[Completion]:
        config = EngineConfig(
            num_blocks=64, block_size=16, token_budget=512, prefix_cache=False, deterministic=True
        )
        return [
            Engine(decoder, config).generate([prompt], params_of(i))[0]
            for i, prompt in enumerate(prompts())
        ]

    return make


def random_engine(rng: random.Random, decoder: Decoder, known: list[Completion]) -> Engine:
    block_size = rng.choice([1, 4, 16, 64])
    max_num_seqs = rng.choice([3, 4, 8])
    # At least what the longest needs, and three beams at their full length.
    least = max(-(-138 // block_size), 3 * -(-64 // block_size))
    config = EngineConfig(
        block_size=block_size,
        num_blocks=least + rng.choice([0, 3, 200]) * (1 + 16 // block_size),
        max_num_seqs=max_num_seqs,
        token_budget=rng.choice([max_num_seqs, 11, 40, 512]),
        policy=rng.choice(["fifo", "priority"]),
        batching=rng.choice(["iteration", "iteration", "request"]),
        prefix_cache=rng.random() < 0.7,
        chunked_prefill=rng.random() < 0.8,
        max_preemptions=rng.choice([0, 1, 4]),
        deterministic=True,
    )
    sequences = [
        [*prompt, *c.token_ids]
        for prompt, completion in zip(prompts(), known, strict=True)
        for c in (completion, *completion.siblings)
    ]
    proposer = StubProposer(rng, sequences, rng.random() < 0.5) if rng.random() < 0.6 else None
    engine = Engine(decoder, config, proposer=proposer)
    if rng.random() < 0.5:  # hopeful admission, so that requests are preempted
        plan = engine.scheduler
        plan._can_admit = lambda: (  # type: ignore[method-assign]
            bool(plan.waiting)
            and len(plan.running) < max_num_seqs
            and plan._holds_pinned([*plan.running, plan.waiting[0]])
        )
    return engine


def run_schedule(seed: int, decoder: Decoder, known: list[Completion]) -> Engine:
    rng = random.Random(seed)
    engine = random_engine(rng, decoder, known)
    order = [(i, copy) for i in range(NUM_REQUESTS) for copy in range(2)]
    rng.shuffle(order)
    order = order[: rng.randint(5, 22)]
    done: dict[str, Completion] = {}
    aborted: list[str] = []
    for _ in range(20_000):
        while order and rng.random() < 0.4:
            i, copy = order.pop()
            engine.add_request(
                Request(
                    request_id=f"{i}.{copy}",
                    prompt_ids=prompts()[i],
                    params=params_of(i),
                    priority=rng.randrange(3),
                )
            )
        if rng.random() < 0.05 and engine._in_flight.names:
            aborted.append(rng.choice(engine._in_flight.names))
            engine.abort(aborted[-1])
        done.update((c.request_id, c) for c in engine.step())
        if not (order or engine.has_unfinished):
            break
    assert not (order or engine.has_unfinished), "the schedule did not come to an end"
    assert len(done) + len(aborted) > 0
    for name, completion in done.items():
        expected = known[int(name.split(".")[0])]
        assert bits(completion) == bits(expected), f"request {name} of schedule {seed}"
    engine.blocks.check()
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks
    return engine


@pytest.mark.parametrize("seed", range(6))
def test_request_has_the_bits_it_has_alone(
    seed: int, decoder: Decoder, alone: Callable[[], list[Completion]]
) -> None:
    run_schedule(seed, decoder, alone())


@pytest.mark.slow
def test_request_has_the_bits_it_has_alone_in_many_schedules(
    decoder: Decoder, alone: Callable[[], list[Completion]]
) -> None:
    """Enough schedules that every mechanism is known to have been at work."""
    engines = [run_schedule(seed, decoder, alone()) for seed in range(100, 150)]
    stats = [engine.stats for engine in engines]
    assert sum(s.preemptions for s in stats) > 50
    assert sum(s.prefix_hit_tokens for s in stats) > 500
    assert sum(s.accepted_tokens for s in stats) > 200
    assert sum(s.drafted_tokens - s.accepted_tokens for s in stats) > 200
