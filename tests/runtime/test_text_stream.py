"""From tokens to text with an end, without an engine: tokens are appended by hand."""

from typing import Any

import pytest

from compress.runtime.request import Completion, Request, SamplingParams
from compress.runtime.text_stream import TextChunk, TextOptions, TextStream
from tests.factory import tiny_tokenizer

PROMPT = [5, 6, 7]
EOS = 1


def ids_of(text: str) -> list[int]:
    ids: list[int] = tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return ids


def run(tokens: list[int], sizes: list[int], reason: str, **options: Any) -> list[TextChunk]:
    """The pieces that come out when `tokens` arrive in groups of `sizes`, the rest with the end."""
    request = Request(request_id="r", prompt_ids=PROMPT, params=SamplingParams())
    stream = TextStream(request, tiny_tokenizer(), TextOptions(**options), lambda chunk: None)
    chunks, start = [], 0
    for size in sizes:
        request.token_ids += tokens[start : start + size]
        start += size
        if chunk := stream.advance():
            chunks.append(chunk)
        if stream.is_stopped:
            tokens, reason = tokens[:start], "abort"
            break
    completion = Completion(
        request_id="r",
        prompt_tokens=len(PROMPT),
        token_ids=tokens,
        finish_reason=reason,
        arrival_time=0.0,
        token_times=[float(i) for i in range(len(tokens))],
    )
    return [*chunks, stream.finish(completion)]


@pytest.mark.parametrize("sizes", [[], [1] * 40, [3, 0, 5], [40]], ids=str)
def test_pieces_join_to_the_text_and_the_tokens(sizes: list[int]) -> None:
    tokens = ids_of("na\u00efve \U0001f600 caf\u00e9 assignment")
    chunks = run(tokens, sizes, "length")
    assert "".join(chunk.text for chunk in chunks) == "na\u00efve \U0001f600 caf\u00e9 assignment"
    assert [token for chunk in chunks for token in chunk.token_ids] == tokens
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize("sizes", [[], [1] * 60, [7, 7, 7, 7, 7], [60]], ids=str)
def test_tokens_after_a_stop_string_are_dropped(sizes: list[int]) -> None:
    tokens = ids_of("an assignment statement evaluates the expression")
    chunks = run(tokens, sizes, "length", stop=("evaluates", "ment st"))
    assert "".join(chunk.text for chunk in chunks) == "an assign"
    completion = chunks[-1].completion
    assert completion is not None
    assert completion.finish_reason == "stop"
    kept = completion.token_ids
    decode = tiny_tokenizer().decode
    assert kept == tokens[: len(kept)] == [token for chunk in chunks for token in chunk.token_ids]
    assert "ment st" in decode(kept)
    assert "ment st" not in decode(kept[:-1])
    assert len(completion.token_times) == len(kept)


def test_text_that_never_became_a_stop_string_comes_at_the_end() -> None:
    chunks = run(ids_of("wait, END"), [1] * 20, "length", stop=("ENDING",))
    assert "".join(chunk.text for chunk in chunks[:-1]) == "wait, "
    assert chunks[-1].text == "END"


@pytest.mark.parametrize("sizes", [[], [2], [1, 1]], ids=str)
def test_the_token_that_ends_has_no_text(sizes: list[int]) -> None:
    (mark,) = ids_of("a")
    tokens = [*ids_of("b!"), mark]
    chunks = run(tokens, sizes, "stop")
    assert "".join(chunk.text for chunk in chunks) == "b!"
    assert [token for chunk in chunks for token in chunk.token_ids] == tokens
    assert "".join(c.text for c in run(tokens, sizes, "length")) == "b!a"


def test_special_tokens_within_are_shown_if_asked_for() -> None:
    tokens = [*ids_of("b"), EOS, *ids_of("c")]
    assert "".join(c.text for c in run(tokens, [], "length")) == "bc"
    shown = run(tokens, [], "length", skip_special_tokens=False)
    assert "".join(c.text for c in shown) == "b</s>c"
