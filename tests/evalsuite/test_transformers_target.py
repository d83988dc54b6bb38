from pathlib import Path

import pytest
import torch

from compress.evalsuite.throughput import serve
from compress.evalsuite.transformers_target import TransformersTarget
from compress.runtime.engine import Engine
from compress.runtime.request import Request, SamplingParams
from tests.factory import tiny_model

PROMPTS = [[5 + row, 7, 11 + row, 300] for row in range(3)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("hf") / "model")


def test_both_targets_serve_the_same_tokens_with_one_time_each(llama: Path) -> None:
    targets = (
        TransformersTarget(llama, torch.float32),
        Engine.load(llama, dtype="float32", device="cpu"),
    )
    runs = [serve(target, PROMPTS, [0.0] * 3, 9) for target in targets]
    for ours, theirs in zip(runs[0].records, runs[1].records, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert len(ours.token_times) == 9
        assert list(ours.token_times) == sorted(set(ours.token_times))
        assert ours.ttft > 0


@pytest.mark.parametrize("sequence", [list(range(2, 130)), [3, 9]], ids=len)
def test_both_targets_give_the_same_log_probabilities(llama: Path, sequence: list[int]) -> None:
    theirs = TransformersTarget(llama, torch.float32).log_probs(sequence, 33)
    ours = Engine.load(llama, dtype="float32", device="cpu").log_probs(sequence, 33)
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_requests_it_cannot_serve_are_refused(llama: Path) -> None:
    target = TransformersTarget(llama, torch.float32)
    greedy = SamplingParams(max_tokens=2, ignore_eos=True)
    target.add_request(Request(request_id="a", prompt_ids=[1, 2], params=greedy))
    with pytest.raises(ValueError, match="b: prompts of a batch must have one length"):
        target.add_request(Request(request_id="b", prompt_ids=[1], params=greedy))
    sampled = SamplingParams(max_tokens=2, ignore_eos=True, temperature=1.0)
    with pytest.raises(ValueError, match="c: only greedy requests"):
        target.add_request(Request(request_id="c", prompt_ids=[1, 2], params=sampled))
