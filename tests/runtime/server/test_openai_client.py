"""The server as the official client meets it, over loopback."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from compress.runtime.llm import LLM
from compress.runtime.request import SamplingParams
from compress.runtime.server.app import make_app
from compress.runtime.server.guard import LOOPBACK, ServerLimits
from tests.runtime.server.conftest import SECONDS, check_idle, eventually, served

KEY = "s3cret"
LIMITS = ServerLimits(api_key=KEY, max_body_bytes=100_000, allowed_hosts=LOOPBACK)
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
GREEDY = SamplingParams(max_tokens=17, ignore_eos=True)
ENDLESS: dict[str, Any] = {
    "model": "tiny",
    "prompt": "x",
    "max_tokens": 1000,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def url(llm: LLM) -> Iterator[str]:
    with served(make_app(llm, name="tiny", limits=LIMITS)) as url:
        yield url


@pytest.fixture
def client(url: str, llm: LLM) -> Iterator[OpenAI]:
    with client_of(url) as client:
        yield client
    check_idle(llm)


def client_of(url: str, key: str = KEY, **options: Any) -> OpenAI:
    options = {"timeout": SECONDS, "max_retries": 0} | options
    return OpenAI(base_url=f"{url}/v1", api_key=key, **options)


def complete(client: OpenAI, **changes: Any) -> Any:
    fields = ENDLESS | {"max_tokens": 17} | changes
    return client.completions.create(**fields)


def chat(client: OpenAI, **changes: Any) -> Any:
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 17}
    return client.chat.completions.create(
        **(fields | {"extra_body": {"ignore_eos": True}} | changes)
    )


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "compress"


def test_completion(client: OpenAI, llm: LLM, oracle: LLM) -> None:
    answer = complete(client)
    check_idle(llm)
    (expected,) = oracle.generate("x", GREEDY)
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 17
    streamed = list(complete(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.text for chunk in streamed for choice in chunk.choices)
    assert text == expected.text
    assert streamed[-1].usage == answer.usage


def test_chat(client: OpenAI, llm: LLM, oracle: LLM) -> None:
    answer = chat(client)
    check_idle(llm)
    expected = oracle.chat(MESSAGES, GREEDY)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    deltas = [chunk.choices[0].delta for chunk in chat(client, stream=True)]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == expected.text


def test_stop_strings_and_seeds(client: OpenAI) -> None:
    text = complete(client).choices[0].text
    stopped = complete(client, stop=[text[5:8]]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (text[: text.index(text[5:8])], "stop")
    drawn = [complete(client, temperature=1.2, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_closing_a_stream_frees_its_blocks(client: OpenAI, llm: LLM) -> None:
    generated = llm.engine.stats.generated_tokens
    with client.completions.create(**ENDLESS, stream=True) as stream:
        for _ in range(3):
            next(stream)
        assert llm.engine.has_unfinished
    check_idle(llm)
    assert llm.engine.stats.generated_tokens - generated < 900


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_client_that_gives_up_frees_its_blocks(url: str, llm: LLM, stream: bool) -> None:
    generated = llm.engine.stats.generated_tokens
    body = json.dumps(
        {k: v for k, v in ENDLESS.items() if k != "extra_body"}
        | {"ignore_eos": True, "stream": stream}
    )
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        head += f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        eventually(lambda: llm.engine.stats.generated_tokens > generated + 3)
    check_idle(llm)
    assert llm.engine.stats.generated_tokens - generated < 900


def test_wrong_key(url: str) -> None:
    with client_of(url, key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1050}, r"1051 tokens need 66 cache blocks, the pool has 65"),
        ({"logprobs": 3}, "logprobs=3 is not supported"),
        ({"extra_body": {"max_token": 3}}, "Unrecognized request argument"),
        ({"prompt": [400]}, "token 400 is not in"),
    ],
    ids=["negative", "never fits", "unsupported", "unknown", "token"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_wrong_request(client: OpenAI, changes: dict[str, Any], message: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        complete(client, **changes, stream=stream)
    assert caught.value.type == "invalid_request_error"


def test_wrong_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist") as caught:
        complete(client, model="gpt")
    assert caught.value.code == "model_not_found"


def test_too_large_body(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        complete(client, prompt="x" * 100_001)
    assert caught.value.status_code == 413


def test_request_that_waits_is_served_after_the_others(client: OpenAI, llm: LLM) -> None:
    answers = complete(client, n=17, temperature=1.0, seed=3)  # 5 run at once
    assert len({choice.text for choice in answers.choices}) == 17
    assert answers.usage.completion_tokens == 17 * 17
