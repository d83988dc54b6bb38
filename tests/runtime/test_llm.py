"""Text in, text out, on a tiny random model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress.runtime.engine_config import EngineConfig
from compress.runtime.llm import LLM
from compress.runtime.request import SamplingParams
from compress.runtime.text_stream import TextOptions
from tests.factory import tiny_tokenizer

CONFIG = EngineConfig(block_size=16, num_blocks=33, max_num_seqs=5, token_budget=64)
PARAMS = SamplingParams(max_tokens=33, ignore_eos=True)
CHAT = [{"role": "user", "content": "What is an expression?"}]


@pytest.fixture(scope="module")
def llm(llama: Path) -> LLM:
    return LLM(llama, config=CONFIG)


def check_idle(llm: LLM) -> None:
    blocks = llm.engine.blocks
    blocks.check()
    assert not llm.engine.has_unfinished
    assert blocks.num_free_blocks == blocks.num_blocks


def test_generate_decodes_what_the_engine_makes(llm: LLM) -> None:
    prompts = ["The assignment", "An import of", "x"]
    generations = llm.generate(prompts, PARAMS)
    ids = [tiny_tokenizer()(prompt)["input_ids"] for prompt in prompts]
    completions = llm.engine.generate(ids, PARAMS)
    for generation, prompt_ids, completion in zip(generations, ids, completions, strict=True):
        assert generation.prompt_ids == prompt_ids
        assert generation.token_ids == completion.token_ids
        text = tiny_tokenizer().decode(completion.token_ids, skip_special_tokens=True)
        assert generation.text == text
        assert generation.finish_reason == "length"
        assert (
            replace(generation.params, seed=None) == PARAMS and generation.params.seed is not None
        )
    check_idle(llm)


def test_stream_joins_to_what_generate_gives(llm: LLM) -> None:
    (whole,) = llm.generate("for x in", PARAMS)
    chunks = list(llm.stream("for x in", PARAMS))
    assert len(chunks) > 5
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_stop_string_ends_the_request_at_once(llm: LLM) -> None:
    (free,) = llm.generate("for x in", PARAMS)
    start = len(free.text) // 2
    stop = free.text[start : start + 4]
    steps = llm.engine.stats.num_steps
    (stopped,) = llm.generate("for x in", PARAMS, stop=["never seen", stop])
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert len(stopped.token_ids) < len(free.token_ids)
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert llm.engine.stats.num_steps - steps == len(stopped.token_ids)
    check_idle(llm)


def test_streams_and_generations_may_be_interleaved(llm: LLM) -> None:
    expected = [g.text for g in llm.generate(["one", "two", "three"], PARAMS)]
    first, second = llm.stream("one", PARAMS), llm.stream("two", PARAMS)
    texts = [next(first).text, next(second).text]
    (third,) = llm.generate("three", PARAMS)  # advances, and may end, the other two
    texts[1] += "".join(chunk.text for chunk in second)
    texts[0] += "".join(chunk.text for chunk in first)
    assert [*texts, third.text] == expected
    check_idle(llm)


def test_closing_a_stream_frees_its_blocks(llm: LLM) -> None:
    stream = llm.stream("one", PARAMS)
    next(stream)
    assert llm.engine.blocks.num_free_blocks < llm.engine.blocks.num_blocks
    stream.close()  # type: ignore[attr-defined]
    check_idle(llm)


def test_prompts_of_every_form(llm: LLM) -> None:
    bos = tiny_tokenizer().bos_token_id
    assert llm.encode("a b")[0] == bos
    assert llm.encode([5, 6, 7]) == [5, 6, 7]
    chat = llm.encode(CHAT)
    text = tiny_tokenizer().decode(chat)
    assert text == "<s>[user] What is an expression?</s>[assistant] "
    assert chat.count(bos) == 1
    assert [g.prompt_ids for g in llm.generate([[5, 6], "a b", CHAT], PARAMS)] == [
        [5, 6],
        llm.encode("a b"),
        chat,
    ]
    assert llm.generate([5, 6], PARAMS)[0].prompt_ids == [5, 6]
    assert llm.chat(CHAT, PARAMS).prompt_ids == chat
    assert llm.generate([], PARAMS) == []
    with pytest.raises(ValueError, match="a prompt is a string"):
        llm.generate([[5.0]], PARAMS)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="2 prompts but 1 sampling"):
        llm.generate(["a", "b"], [PARAMS])


def test_what_can_never_fit_is_refused_with_numbers_and_leaves_nothing(llm: LLM) -> None:
    long = [5] * 600
    with pytest.raises(ValueError, match="632 tokens need 40 cache blocks, the pool has 33"):
        llm.generate(["short", long], PARAMS)
    check_idle(llm)
    with pytest.raises(ValueError, match="exceed max_model_len 4096"):
        llm.stream([5] * 4090, PARAMS)
    check_idle(llm)


def test_score_is_that_of_the_engine(llm: LLM) -> None:
    (score,) = llm.score("The import statement")
    ids = tiny_tokenizer()("The import statement")["input_ids"]
    assert score.token_ids == ids
    torch.testing.assert_close(score.log_probs, llm.engine.score([ids])[0])
    assert score.perplexity == pytest.approx(float(score.log_probs.mean().neg().exp()), rel=1e-5)
    assert [len(s.log_probs) for s in llm.score([[5, 6, 7], "a b"])] == [
        2,
        len(llm.encode("a b")) - 1,
    ]


def test_parameters_are_those_of_the_checkpoint_unless_given(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(llama, folder)
    file = folder / "generation_config.json"
    values = json.loads(file.read_text()) | {"do_sample": True, "top_p": 0.7, "max_new_tokens": 3}
    file.write_text(json.dumps(values | {"guidance_scale": 1.5}))
    llm = LLM(folder, config=CONFIG)
    assert llm.ignored_defaults == ("guidance_scale=1.5",)
    (generation,) = llm.generate("a")
    expected = SamplingParams(temperature=1.0, top_p=0.7, max_tokens=3)
    assert replace(generation.params, seed=None) == expected
    assert llm.params(seed=5, max_tokens=2) == SamplingParams(
        temperature=1.0, top_p=0.7, max_tokens=2, seed=5
    )


def test_top_k_1_and_temperature_0_are_the_same(llm: LLM) -> None:
    drawn = SamplingParams(max_tokens=17, temperature=0.9, top_k=1, seed=3, ignore_eos=True)
    greedy = SamplingParams(max_tokens=17, ignore_eos=True)
    assert llm.generate("a", drawn)[0].token_ids == llm.generate("a", greedy)[0].token_ids


def test_chat_without_a_template_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="has no chat template"):
        llm.chat(CHAT)
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ raise_exception('no such role') }}")
    with pytest.raises(ValueError, match="template refuses these messages: no such role"):
        llm.chat(CHAT)


def test_an_error_in_delivery_leaves_the_engine_as_it_was(llm: LLM) -> None:
    chunks: list[object] = []
    request = llm.request([5, 6], PARAMS)
    stream = llm.submit(request, TextOptions(), chunks.append)
    llm.step()
    llm.abort(stream)
    llm.abort(stream)  # nothing happens twice
    assert len([c for c in chunks if getattr(c, "completion", None)]) == 1
    check_idle(llm)
