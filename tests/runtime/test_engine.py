"""The engine against itself under every way of cutting up the work; families: test_families.py."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compress.runtime.attention.pool import affordable_blocks
from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.request import Completion, Request, SamplingParams
from compress.runtime.scheduler import Schedule

VOCAB = 331
PROMPT_LENGTHS = (1, 17, 33, 130)
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True)


def prompts(seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def load(path: Path, **config: Any) -> Engine:
    fields: dict[str, Any] = {"num_blocks": 64, "block_size": 16, "max_num_seqs": 8}
    return Engine.load(path, config=EngineConfig(**(fields | config)))


def outputs(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="session")
def expected(llama: Path) -> dict[SamplingParams, list[list[int]]]:
    """What the engine generates for each prompt alone, in one piece."""
    engine = load(llama, token_budget=512)
    return {
        params: [outputs(engine.generate([prompt], params))[0] for prompt in prompts()]
        for params in (PARAMS, SAMPLED)
    }


@pytest.mark.parametrize("params", [PARAMS, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"token_budget": 16},
        {"token_budget": 8, "block_size": 4, "num_blocks": 200},
        {"block_size": 64},
        {"max_num_seqs": 2},
        {"num_blocks": 12, "token_budget": 40},
        {"attention": "paged", "token_budget": 16},
    ],
    ids=["batched", "chunked", "small-blocks", "block64", "2-seqs", "tight-pool", "paged"],
)
def test_generate_does_not_depend_on_batching_chunks_or_blocks(
    config: dict[str, Any],
    params: SamplingParams,
    llama: Path,
    expected: dict[SamplingParams, list[list[int]]],
) -> None:
    engine = load(llama, **config)
    assert outputs(engine.generate(prompts(), params)) == expected[params]
    engine.blocks.check()
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks


@pytest.mark.parametrize("budget", [512, 16], ids=["whole", "chunked"])
def test_score_does_not_depend_on_chunks(budget: int, llama: Path) -> None:
    alone = [load(llama, token_budget=512).score([p])[0] for p in prompts()[1:]]
    together = load(llama, token_budget=budget).score(prompts()[1:])
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_score_in_row_chunks_equals_score_at_once(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(llama)
    whole = engine.score(prompts()[3:])[0]
    monkeypatch.setattr("compress.runtime.logprobs._LOGITS_BYTES", 4 * VOCAB * 7)
    seen: list[int] = []
    logits = type(engine.decoder).logits
    monkeypatch.setattr(
        type(engine.decoder),
        "logits",
        lambda self, hidden: seen.append(len(hidden)) or logits(self, hidden),
    )
    torch.testing.assert_close(engine.score(prompts()[3:])[0], whole, rtol=0, atol=1e-5)
    assert max(seen) == 7
    assert sum(seen) == PROMPT_LENGTHS[3] - 1


def test_requests_may_arrive_between_steps(
    llama: Path, expected: dict[SamplingParams, list[list[int]]]
) -> None:
    engine = load(llama, token_budget=32)
    waiting = [
        Request(request_id=f"r{i}", prompt_ids=prompt, params=PARAMS)
        for i, prompt in enumerate(prompts())
    ]
    done: dict[str, list[int]] = {}
    for _ in range(100):
        if waiting:
            engine.add_request(waiting.pop())
        done.update((c.request_id, c.token_ids) for c in engine.step())
        engine.blocks.check()
        if not (waiting or engine.has_unfinished):
            break
    assert [done[f"r{i}"] for i in range(4)] == expected[PARAMS]


def test_preempted_requests_give_the_same_output(
    llama: Path, expected: dict[SamplingParams, list[list[int]]]
) -> None:
    engine = load(llama, num_blocks=13, block_size=16)
    requests = [
        Request(request_id=f"r{i}", prompt_ids=prompt, params=PARAMS)
        for i, prompt in enumerate(prompts())
    ]
    for request in requests:
        engine.add_request(request)
    engine.scheduler._can_admit = lambda: bool(engine.scheduler.waiting)  # type: ignore[method-assign]
    done = {}
    while engine.has_unfinished:
        done.update((c.request_id, c.token_ids) for c in engine.step())
        engine.blocks.check()
    assert engine.stats.preemptions > 0
    assert [done[f"r{i}"] for i in range(4)] == expected[PARAMS]


def test_score_of_a_preempted_request_is_that_of_the_request_alone(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(llama, num_blocks=12, block_size=16, token_budget=40)
    generating = SamplingParams(max_tokens=30, ignore_eos=True)
    for i in range(3):
        request = Request(request_id=f"r{i}", prompt_ids=prompts()[2][:30], params=generating)
        engine.add_request(request)
    for _ in range(3):
        engine.step()
    monkeypatch.setattr(engine.scheduler, "_can_admit", lambda: bool(engine.scheduler.waiting))
    work, lost = engine.scheduler._preempt, []

    def preempt(step: Any, request: Request) -> None:
        lost.append(len(request.prompt_logprobs))
        work(step, request)

    monkeypatch.setattr(engine.scheduler, "_preempt", preempt)
    engine.add_request(Request(request_id="scored", prompt_ids=prompts()[3], params=None))
    done = {}
    while engine.has_unfinished:
        done.update((c.request_id, c) for c in engine.step())
    assert max(lost) > 0, "nothing had been scored when the request was preempted"
    scores = done["scored"].prompt_logprobs
    assert scores is not None
    expected = load(llama, token_budget=512).score([prompts()[3]])[0]
    torch.testing.assert_close(scores.chosen, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("budget", [8, 512], ids=["chunked", "whole"])
@pytest.mark.parametrize("num_rows", [17, 1000])
def test_log_probs_are_those_of_transformers_in_slices(
    llama: Path, budget: int, num_rows: int
) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    sequence = prompts()[3]
    slices = list(load(llama, token_budget=budget).log_probs(sequence, num_rows))
    assert [len(rows) for rows in slices[:-1]] == [num_rows] * (len(slices) - 1)
    with torch.no_grad():
        expected = theirs(torch.tensor([sequence])).logits[0, :-1].double().log_softmax(-1)
    torch.testing.assert_close(torch.cat(slices).double(), expected, rtol=0, atol=1e-4)


def test_log_probs_leave_the_engine_as_it_was(llama: Path) -> None:
    engine = load(llama)
    expected = engine.score([prompts()[1]])[0]
    rows = torch.cat(list(engine.log_probs(prompts()[1], 5)))
    assert not engine.has_unfinished
    picked = rows.gather(1, torch.tensor(prompts()[1][1:])[:, None])[:, 0]
    torch.testing.assert_close(picked, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(engine.score([prompts()[1]])[0], expected, rtol=0, atol=0)


def test_log_probs_of_a_preempted_request_are_made_once(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(llama, token_budget=40)
    work, steps = engine.scheduler.schedule, iter(range(100))

    def schedule() -> Schedule:
        step = work()
        if next(steps) == 1:  # after the first chunk
            engine.scheduler._preempt(step, step.scheduled.pop().request)
            return work()
        return step

    monkeypatch.setattr(engine.scheduler, "schedule", schedule)
    got = torch.cat(list(engine.log_probs(prompts()[3], 64)))
    expected = torch.cat(list(load(llama, token_budget=512).log_probs(prompts()[3], 64)))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_cache_takes_no_more_than_a_share_of_the_free_memory(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4  # K and V, layers, heads, block, head_dim, fp32
    wanted = 8 * 128 // 16
    for free_blocks, expected in ((10_000, wanted), (wanted * 4, wanted), (100, 25), (4, 1)):
        memory = SimpleNamespace(available=free_blocks * block_bytes)
        monkeypatch.setattr("psutil.virtual_memory", lambda memory=memory: memory)
        engine = load(llama, num_blocks=None, max_model_len=128)
        assert engine.blocks.num_blocks == expected
    memory = SimpleNamespace(available=3 * block_bytes)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    with pytest.raises(ValueError, match=f"a block takes {block_bytes} bytes"):
        load(llama, num_blocks=None, max_model_len=128)


def test_cache_on_a_gpu_is_sized_by_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1000, 10**9))
    device = torch.device("cuda")
    assert affordable_blocks(10, device, wanted=1000) == 80
    assert affordable_blocks(10, device, wanted=7) == 7


def test_fork_shares_blocks_and_leaves_the_parent_alone(
    llama: Path, expected: dict[SamplingParams, list[list[int]]]
) -> None:
    engine = load(llama)
    engine.add_request(Request(request_id="parent", prompt_ids=prompts()[2], params=PARAMS))
    for _ in range(4):
        engine.step()
    used = engine.blocks.num_blocks - engine.blocks.num_free_blocks
    engine.fork("parent", "same", SamplingParams(max_tokens=8, ignore_eos=True))
    engine.fork("parent", "other", SamplingParams(max_tokens=8, temperature=5.0, ignore_eos=True))
    assert engine.blocks.num_blocks - engine.blocks.num_free_blocks == used
    done: dict[str, list[int]] = {}
    while engine.has_unfinished:
        done.update((c.request_id, c.token_ids) for c in engine.step())
        engine.blocks.check()
    assert done["parent"] == expected[PARAMS][2]
    assert done["same"] == expected[PARAMS][2][4:]
    assert done["other"] != done["same"]


def test_generate_stops_at_a_stop_token_and_keeps_it(
    llama: Path, expected: dict[SamplingParams, list[list[int]]]
) -> None:
    output = expected[PARAMS][1]
    params = SamplingParams(max_tokens=12, stop_token_ids=(output[3],), ignore_eos=True)
    (completion,) = load(llama).generate([prompts()[1]], params)
    first = output.index(output[3])
    assert completion.token_ids == output[: first + 1]
    assert completion.finish_reason == "stop"


def test_generate_stops_at_the_eos_of_generation_config(
    llama: Path, expected: dict[SamplingParams, list[list[int]]], tmp_path: Path
) -> None:
    output = expected[PARAMS][1]
    for file in llama.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{output[3]}]}}')
    (stopped,) = load(tmp_path).generate([prompts()[1]], SamplingParams(max_tokens=12))
    (ignoring,) = load(tmp_path).generate([prompts()[1]], PARAMS)
    assert stopped.token_ids == output[: output.index(output[3]) + 1]
    assert (ignoring.token_ids, ignoring.finish_reason) == (output, "length")


def test_completion_times_are_ordered(llama: Path) -> None:
    (completion,) = load(llama).generate([prompts()[1]], PARAMS)
    times = [completion.arrival_time, *completion.token_times]
    assert len(completion.token_times) == len(completion.token_ids)
    assert times == sorted(times)


def test_abort_frees_the_blocks_and_returns_what_there_is(llama: Path) -> None:
    engine = load(llama)
    engine.add_request(Request(request_id="a", prompt_ids=prompts()[1], params=PARAMS))
    for _ in range(3):
        engine.step()
    completion = engine.abort("a")
    assert (completion.finish_reason, len(completion.token_ids)) == ("abort", 3)
    assert not engine.has_unfinished
    assert engine.blocks.num_free_blocks == engine.blocks.num_blocks
    with pytest.raises(ValueError, match="'a' is not in flight"):
        engine.abort("a")


def test_stats_count_what_was_computed(llama: Path) -> None:
    engine = load(llama)
    engine.generate(prompts(), PARAMS)
    assert engine.stats.generated_tokens == 4 * 12
    assert engine.stats.computed_tokens == sum(PROMPT_LENGTHS) + 4 * 11
    assert engine.stats.num_steps == 12


@pytest.mark.parametrize(
    ("prompt", "params", "named"),
    [
        ([], PARAMS, "0 tokens, need at least 1"),
        ([5], None, "1 tokens, need at least 2"),
        ([5, VOCAB], PARAMS, f"token {VOCAB} is not in"),
        ([5, -1], PARAMS, "token -1 is not in"),
        ([5] * 200, SamplingParams(max_tokens=57), "200 prompt tokens . 57 .* 256"),
        ([5] * 200, SamplingParams(max_tokens=50), "need 16 cache blocks, the pool has 8"),
    ],
    ids=["empty", "nothing-to-score", "token-high", "token-low", "too-long", "never-fits"],
)
def test_add_request_refuses_what_it_could_never_finish(
    prompt: list[int], params: SamplingParams | None, named: str, llama: Path
) -> None:
    engine = load(llama, max_model_len=256, num_blocks=8)
    with pytest.raises(ValueError, match=named):
        engine.add_request(Request(request_id="a", prompt_ids=prompt, params=params))
    assert not engine.has_unfinished


def test_generate_leaves_nothing_behind_when_a_prompt_is_refused(llama: Path) -> None:
    engine = load(llama)
    with pytest.raises(ValueError, match="token 999"):
        engine.generate([[5, 6], [5, 999]], PARAMS)
    assert not engine.has_unfinished
    assert engine.generate([[5, 6]], PARAMS)[0].finish_reason == "length"


def test_generate_refuses_to_run_over_other_requests(llama: Path) -> None:
    engine = load(llama)
    engine.add_request(Request(request_id="a", prompt_ids=[5], params=PARAMS))
    with pytest.raises(ValueError, match="in flight"):
        engine.generate([[5, 6]], PARAMS)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_load_computes_in_the_asked_dtype(dtype: str, llama: Path) -> None:
    config = EngineConfig(num_blocks=64)
    engine = Engine.load(llama, dtype=dtype, config=config)
    exact, rounded = load(llama).score(prompts()[3:])[0], engine.score(prompts()[3:])[0]
    assert engine.decoder.dtype == getattr(torch, dtype)
    assert 1e-5 < float((exact - rounded).abs().mean()) < 0.05


def test_load_refuses_unknown_dtype_and_missing_folder(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown dtype 'bf16'"):
        Engine.load(llama, dtype="bf16")
    with pytest.raises(FileNotFoundError, match="no such checkpoint folder"):
        Engine.load(tmp_path / "missing")
