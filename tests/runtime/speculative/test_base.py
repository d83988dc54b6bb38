"""Speculation never changes the output, whatever is proposed."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.request import Request, SamplingParams
from compress.runtime.speculative.base import DraftContext, load_proposer

VOCAB = 331
MAX_TOKENS = 14
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=3, ignore_eos=True)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (3, 17, 40)]


class FakeProposer:
    """Knows the outputs in advance; `corrupt` turns the right continuation into a proposal.

    Keeps every hidden state it hears of, and checks that positions arrive without gaps.
    """

    needs_all_positions = True

    def __init__(
        self, outputs: Sequence[list[int]], corrupt: Callable[[list[int]], list[int]]
    ) -> None:
        self.sequences = [p + o for p, o in zip(prompts(), outputs, strict=True)]
        self.corrupt = corrupt
        self.hidden: dict[str, torch.Tensor] = {}
        self.finished: dict[str, torch.Tensor] = {}

    def observe(self, request_id: str, start: int, hidden: torch.Tensor) -> None:
        heard = self.hidden.get(request_id, hidden[:0])
        assert start == len(heard), f"positions {len(heard)} to {start} were never observed"
        self.hidden[request_id] = torch.cat([heard, hidden])

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        proposals = []
        for context in contexts:
            known = list(context.token_ids)
            assert len(self.hidden[context.request_id]) == len(known) - 1
            match = next(s for s in self.sequences if s[: len(known)] == known)
            proposals.append(self.corrupt(match[len(known) :]))
        return proposals

    def reset(self, request_id: str) -> None:
        self.finished[request_id] = self.hidden.pop(request_id, torch.empty(0))


def right(continuation: list[int]) -> list[int]:
    return continuation[:4]


def right_and_too_long(continuation: list[int]) -> list[int]:
    return [*continuation, 5, 5, 5]


def wrong(continuation: list[int]) -> list[int]:
    return [(token + 1) % VOCAB for token in continuation[:4]]


def right_then_wrong(continuation: list[int]) -> list[int]:
    return [*continuation[:2], *wrong(continuation[2:])]


def nothing(continuation: list[int]) -> list[int]:
    return []


def mixture(continuation: list[int]) -> list[int]:
    rng = random.Random(len(continuation))
    length = rng.randint(0, 6)
    return [t if rng.random() < 0.7 else rng.randrange(VOCAB) for t in continuation[:length]]


def make_engine(path: Path, proposer: FakeProposer | None = None, **config: Any) -> Engine:
    fields: dict[str, Any] = {"num_blocks": 64, "block_size": 16, "max_num_seqs": 8}
    loaded = Engine.load(path, config=EngineConfig(num_blocks=1))
    return Engine(loaded.decoder, EngineConfig(**(fields | config)), proposer=proposer)


@pytest.fixture(scope="module")
def expected(llama: Path) -> dict[SamplingParams, list[list[int]]]:
    engine = make_engine(llama)
    return {
        params: [completion.token_ids for completion in engine.generate(prompts(), params)]
        for params in (GREEDY, SAMPLED)
    }


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "corrupt", [right, right_and_too_long, wrong, right_then_wrong, nothing, mixture]
)
@pytest.mark.parametrize(
    "config",
    [{}, {"token_budget": 10}, {"block_size": 4, "num_blocks": 60}, {"attention": "paged"}],
    ids=["batched", "chunked", "small-blocks", "paged"],
)
def test_generate_is_unchanged_by_any_proposal(
    config: dict[str, Any],
    corrupt: Callable[[list[int]], list[int]],
    params: SamplingParams,
    llama: Path,
    expected: dict[SamplingParams, list[list[int]]],
) -> None:
    proposer = FakeProposer(expected[params], corrupt)
    engine = make_engine(llama, proposer, **config)
    completions = engine.generate(prompts(), params)
    assert [completion.token_ids for completion in completions] == expected[params]
    engine.blocks.check()
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks
    assert not proposer.hidden, "a finished request was not reset"


def test_right_proposals_are_accepted_and_save_steps(
    llama: Path, expected: dict[SamplingParams, list[list[int]]]
) -> None:
    engine = make_engine(llama, FakeProposer(expected[GREEDY], right))
    engine.generate(prompts(), GREEDY)
    assert engine.stats.num_steps == 4  # 1 + 5 + 5 + 3 tokens
    assert engine.stats.drafted_tokens == engine.stats.accepted_tokens == 3 * (4 + 4 + 2)
    assert engine.stats.acceptance_length == 1 + 10 / 3


def test_wrong_proposals_are_counted_and_gain_nothing(
    llama: Path, expected: dict[SamplingParams, list[list[int]]]
) -> None:
    engine = make_engine(llama, FakeProposer(expected[GREEDY], wrong))
    engine.generate(prompts(), GREEDY)
    assert engine.stats.num_steps == MAX_TOKENS
    assert engine.stats.accepted_tokens == 0
    assert engine.stats.acceptance_length == 1.0


def test_a_stop_token_among_accepted_drafts_ends_the_request(
    llama: Path, expected: dict[SamplingParams, list[list[int]]]
) -> None:
    output = expected[GREEDY][1]
    params = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=(output[3],), ignore_eos=True)
    engine = make_engine(llama, FakeProposer(expected[GREEDY], right))
    (completion,) = engine.generate([prompts()[1]], params)
    assert completion.token_ids == output[: output.index(output[3]) + 1]
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize("corrupt", [nothing, right_then_wrong, mixture])
def test_observed_states_are_those_of_a_single_pass(
    corrupt: Callable[[list[int]], list[int]],
    llama: Path,
    expected: dict[SamplingParams, list[list[int]]],
) -> None:
    proposer = FakeProposer(expected[GREEDY], corrupt)
    make_engine(llama, proposer, token_budget=12).generate(prompts(), GREEDY)
    by_prompt = [heard for _, heard in sorted(proposer.finished.items())]
    for heard, sequence in zip(by_prompt, proposer.sequences, strict=True):
        whole = FakeProposer(expected[GREEDY], nothing)
        make_engine(llama, whole).generate([sequence], SamplingParams(max_tokens=1))
        (at_once,) = whole.finished.values()
        torch.testing.assert_close(heard, at_once[: len(heard)], rtol=0, atol=1e-4)


def test_preemption_resets_the_proposer_and_keeps_the_output(
    llama: Path, expected: dict[SamplingParams, list[list[int]]]
) -> None:
    proposer = FakeProposer(expected[GREEDY], right_then_wrong)
    engine = make_engine(llama, proposer, num_blocks=5)
    for i, prompt in enumerate(prompts()):
        engine.add_request(Request(request_id=f"r{i}", prompt_ids=prompt, params=GREEDY))
    engine.scheduler._can_admit = lambda: bool(engine.scheduler.waiting)  # type: ignore[method-assign]
    done = {}
    while engine.has_unfinished:
        done.update((c.request_id, c.token_ids) for c in engine.step())
        engine.blocks.check()
    assert engine.stats.preemptions > 0
    assert [done[f"r{i}"] for i in range(3)] == expected[GREEDY]


def test_load_proposer_names_an_unknown_kind(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MedusaModl"]}')
    decoder = make_engine(llama).decoder
    with pytest.raises(ValueError, match="unknown draft architecture 'MedusaModl'; did you mean"):
        load_proposer(tmp_path, decoder)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_proposer(tmp_path / "missing", decoder)
