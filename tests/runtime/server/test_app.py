"""The routes of the server, without a network."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from compress.runtime.llm import LLM
from compress.runtime.request import SamplingParams
from compress.runtime.server.app import make_app
from compress.runtime.server.guard import LOOPBACK, ServerLimits
from tests.factory import tiny_tokenizer
from tests.runtime.server.conftest import check_idle

LIMITS = ServerLimits(max_body_bytes=20_000, max_choices=8)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASE = {"model": "tiny", "prompt": "The import", "max_tokens": 9, "ignore_eos": True}
TALK = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_completion_tokens": 9,
    "ignore_eos": True,
}


def client_of(llm: LLM, limits: ServerLimits = LIMITS, **options: Any) -> TestClient:
    return TestClient(
        make_app(llm, name="tiny", limits=limits, **options), raise_server_exceptions=False
    )


@pytest.fixture
def client(llm: LLM) -> Iterator[TestClient]:
    with client_of(llm) as client:
        yield client
        check_idle(llm)


def events(client: TestClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, without the mark at its end, which must be there."""
    response = client.post(path, json=body)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.removesuffix("\n\n").split("\n\n")
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def refusal(response: Any) -> dict[str, Any]:
    """The error object, in the one form that all errors have."""
    (error,) = response.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    return dict(error, status=response.status_code)


def test_completion_is_what_generate_gives(client: TestClient, oracle: LLM) -> None:
    response = client.post(COMPLETIONS, json=BASE).json()
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    assert response["object"] == "text_completion"
    (choice,) = response["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    ids = tiny_tokenizer()("The import")["input_ids"]
    assert response["usage"]["prompt_tokens"] == len(ids)
    assert response["usage"]["completion_tokens"] == 9
    assert response["usage"]["total_tokens"] == len(ids) + 9
    assert response["sampling_params"]["max_tokens"] == 9
    assert choice["text"] == oracle.generate("The import", params)[0].text


def test_chat_answer_is_that_of_the_template(client: TestClient, oracle: LLM) -> None:
    response = client.post(CHAT, json=TALK).json()
    assert response["object"] == "chat.completion"
    message = response["choices"][0]["message"]
    assert message["role"] == "assistant"
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    assert message["content"] == oracle.chat(TALK["messages"], params).text  # type: ignore[arg-type]
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    in_parts = TALK | {"messages": [{"role": "user", "content": parts}]}
    assert client.post(CHAT, json=in_parts).json()["choices"][0]["message"] == message


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, BASE), (CHAT, TALK)], ids=["text", "chat"]
)
def test_stream_joins_to_the_whole(client: TestClient, path: str, body: dict[str, Any]) -> None:
    whole = client.post(path, json=body).json()
    chunks = events(client, path, body | {"stream": True})
    choices = [chunk["choices"][0] for chunk in chunks]
    if path == CHAT:
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert choices[0]["delta"]["role"] == "assistant"
        assert all("role" not in choice["delta"] for choice in choices[1:])
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["choices"][0]["message"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_stream_ends_with_usage_if_asked_for(client: TestClient) -> None:
    usage = client.post(COMPLETIONS, json=BASE).json()["usage"]
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(client, COMPLETIONS, BASE | asked)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == usage


def test_several_prompts_and_copies_are_choices_in_order(client: TestClient) -> None:
    sampled = BASE | {"temperature": 1.5, "seed": 7, "n": 2, "prompt": ["one", "three"]}
    response = client.post(COMPLETIONS, json=sampled).json()
    texts = [choice["text"] for choice in response["choices"]]
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3]
    single = [
        client.post(COMPLETIONS, json=sampled | {"prompt": prompt, "n": 1, "seed": seed}).json()
        for prompt in ("one", "three")
        for seed in (7, 8)
    ]
    assert texts == [answer["choices"][0]["text"] for answer in single]
    assert len(set(texts)) == 4
    assert response["usage"]["completion_tokens"] == 36
    assert response["usage"]["prompt_tokens"] == sum(
        answer["usage"]["prompt_tokens"] for answer in single[::2]
    )
    chunks = events(client, COMPLETIONS, sampled | {"stream": True})
    streamed = [""] * 4
    for chunk in chunks:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts


def test_without_a_seed_answers_differ_and_say_theirs(client: TestClient) -> None:
    sampled = BASE | {"temperature": 1.5}
    first, second = (client.post(COMPLETIONS, json=sampled).json() for _ in range(2))
    assert first["choices"] != second["choices"]
    seed = first["sampling_params"]["seed"]
    again = client.post(COMPLETIONS, json=sampled | {"seed": seed}).json()
    assert again["choices"] == first["choices"]


def test_stop_string_is_not_in_the_text(client: TestClient) -> None:
    text = client.post(COMPLETIONS, json=BASE).json()["choices"][0]["text"]
    stop = text[3:5]
    for value in (stop, ["never", stop]):
        (choice,) = client.post(COMPLETIONS, json=BASE | {"stop": value}).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_default_lengths(client: TestClient, llm: LLM) -> None:
    bare = {"model": "tiny", "prompt": "a", "ignore_eos": True}
    assert client.post(COMPLETIONS, json=bare).json()["usage"]["completion_tokens"] == 16
    talk = {k: v for k, v in TALK.items() if k != "max_completion_tokens"}
    response = client.post(CHAT, json=talk).json()
    slots = llm.engine.blocks.num_blocks * llm.engine.blocks.block_size
    usage = response["usage"]
    assert usage["total_tokens"] == slots + 1  # the last token is never fed back
    assert usage["completion_tokens"] == response["sampling_params"]["max_tokens"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens: "),
    ({"max_tokens": "9"}, "max_tokens: "),
    ({"temperature": -1}, "temperature: "),
    ({"top_p": 0}, "top_p: "),
    ({"prompt": []}, "prompt."),
    ({"prompt": {"a": 1}}, "prompt."),
    ({"prompt": [[-1]]}, "prompt."),
    ({"prompt": [331]}, "token 331 is not in"),
    ({"stop": [""]}, "stop."),
    ({"stop": ["a"] * 17}, "stop."),
    ({"seed": 2**63}, "seed: "),
    ({"n": 9}, "more than 8 choices"),
    ({"logprobs": 0}, "logprobs=0 is not supported"),
    ({"echo": True}, "echo=True is not supported"),
    ({"best_of": 2}, "best_of=2 is not supported"),
    ({"presence_penalty": 2.5}, "presence_penalty: "),
    ({"logit_bias": {"a": 1}}, "logit_bias."),
    ({"logit_bias": {"331": 1}}, "331"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens must be in [0, max_tokens 3]"),
    ({"max_token": 9}, "Unrecognized request argument supplied: max_token"),
    ({"stream_options": {"include_usage": True}}, "only allowed when stream is true"),
    ({"max_tokens": 5000}, "exceed max_model_len 4096"),
    ({"max_tokens": 2000}, "cache blocks, the pool has 65"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=str)
def test_wrong_field_is_refused_by_name(
    client: TestClient, change: dict[str, Any], message: str
) -> None:
    error = refusal(client.post(COMPLETIONS, json=BASE | change))
    assert message in error["message"]
    assert (error["status"], error["type"]) == (400, "invalid_request_error")
    if "stream_options" not in change:
        streamed = refusal(client.post(COMPLETIONS, json=BASE | change | {"stream": True}))
        assert (streamed["status"], streamed["param"]) == (400, error["param"])


def test_neutral_and_provider_fields_change_nothing(client: TestClient) -> None:
    neutral = {"logit_bias": {}, "logprobs": None, "frequency_penalty": 0.0, "best_of": 1}
    ours = {"user": "me", "metadata": {"a": "b"}, "store": False}
    answers = [
        client.post(COMPLETIONS, json=BASE | more).json()["choices"] for more in ({}, neutral, ours)
    ]
    assert answers[0] == answers[1] == answers[2]
    tools = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    assert client.post(CHAT, json=TALK | tools).status_code == 200
    tool = refusal(client.post(CHAT, json=TALK | {"tools": [{"type": "function"}]}))
    assert tool["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([], "messages"),
        ([{"role": "nobody", "content": "a"}], "messages.0.role"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content"),
    ],
    ids=["none", "role", "image"],
)
def test_wrong_messages_are_refused_by_place(
    client: TestClient, messages: list[Any], place: str
) -> None:
    error = refusal(client.post(CHAT, json=TALK | {"messages": messages}))
    assert error["status"] == 400
    assert error["param"].startswith(place)


def test_model_must_be_the_one_that_is_served(client: TestClient) -> None:
    assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json()["max_model_len"] == 4096
    for response in (
        client.get("/v1/models/other"),
        client.post(COMPLETIONS, json=BASE | {"model": "other"}),
    ):
        error = refusal(response)
        assert (error["status"], error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"[1]", "application/json", 400),
        (b"[" * 10_000, "application/json", 400),
        (b"{}", "text/plain", 415),
        (b"{}", "", 415),
        (b" " * 20_001, "application/json", 413),
    ],
    ids=["syntax", "list", "depth", "text", "untyped", "size"],
)
def test_bodies_that_are_not_read(
    client: TestClient, content: bytes, kind: str, status: int
) -> None:
    response = client.post(COMPLETIONS, content=content, headers={"content-type": kind})
    assert refusal(response)["status"] == status

    def in_parts() -> Iterator[bytes]:  # without a content-length
        for start in range(0, len(content), 999):
            yield content[start : start + 999]

    response = client.post(COMPLETIONS, content=in_parts(), headers={"content-type": kind})
    assert refusal(response)["status"] == status


def test_unknown_paths_and_methods_have_the_same_form(client: TestClient) -> None:
    assert refusal(client.get("/v1/nothing"))["status"] == 404
    assert refusal(client.get(COMPLETIONS))["status"] == 405
    assert client.get("/docs").status_code == client.get("/openapi.json").status_code == 404


def test_key_is_wanted_for_all_but_health_and_metrics(llm: LLM) -> None:
    with client_of(llm, ServerLimits(api_key="s3cret")) as client:
        for key in (None, "Bearer wrong", "Bearer s3cretx", "Basic s3cret", "Bearer \u00e9"):
            headers = {} if key is None else {"authorization": key.encode()}
            error = refusal(client.post(COMPLETIONS, json=BASE, headers=headers))
            assert (error["status"], error["code"]) == (401, "invalid_api_key")
        assert client.get("/v1/models").status_code == 401
        assert client.get("/health").status_code == client.get("/metrics").status_code == 200
        right = {"authorization": "Bearer s3cret"}
        assert client.post(COMPLETIONS, json=BASE, headers=right).status_code == 200
    with pytest.raises(ValueError, match="API key is empty"):
        ServerLimits(api_key=" ")


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8000", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example:8000", 421)],
)
def test_local_server_answers_for_this_machine_alone(llm: LLM, host: str, status: int) -> None:
    with client_of(llm, ServerLimits(allowed_hosts=LOOPBACK)) as client:
        assert client.get("/health", headers={"host": host}).status_code == status


def test_limit_of_tokens_is_a_refusal_or_a_default(llm: LLM) -> None:
    with client_of(llm, ServerLimits(max_tokens=12)) as client:
        error = refusal(client.post(COMPLETIONS, json=BASE | {"max_tokens": 13}))
        assert (error["status"], error["param"]) == (400, "max_tokens")
        bare = {"model": "tiny", "prompt": "a", "ignore_eos": True}
        assert client.post(COMPLETIONS, json=bare).json()["usage"]["completion_tokens"] == 12


def test_more_requests_than_fit_are_told_to_come_back(llm: LLM) -> None:
    with client_of(llm, ServerLimits(), max_queue=0) as client:  # 5 at once
        error = refusal(client.post(COMPLETIONS, json=BASE | {"n": 6}))
        assert error["status"] == 400  # can never be
        worker = client.app.state.worker  # type: ignore[attr-defined]
        worker.max_jobs = 1
        worker._jobs["somebody else"] = None
        response = client.post(COMPLETIONS, json=BASE)
        assert refusal(response)["status"] == 429
        assert response.headers["retry-after"] == "1"
        del worker._jobs["somebody else"]
        assert client.post(COMPLETIONS, json=BASE).status_code == 200


def test_broken_engine_is_said_by_health_and_by_every_route(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client_of(llm) as client:
        assert client.get("/health").json() == {"status": "ok"}
        step, calls = llm.step, iter("12")

        def fail() -> None:
            if next(calls, None) is None:
                raise RuntimeError("device lost")
            step()

        monkeypatch.setattr(llm, "step", fail)
        response = client.post(COMPLETIONS, json=BASE | {"stream": True})
        *_, last = response.text.removesuffix("\n\n").split("\n\n")
        assert "device lost" in json.loads(last.removeprefix("data: "))["error"]["message"]
        health = client.get("/health")
        assert health.status_code == 503
        assert "device lost" in health.json()["reason"]
        assert refusal(client.post(COMPLETIONS, json=BASE))["status"] == 503
        worker = client.app.state.worker  # type: ignore[attr-defined]
        for stream in list(worker.llm._streams.values()):
            worker.llm.abort(stream)  # the thread is gone: nobody else does


def test_failed_step_is_a_server_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(llm) as client:
        with monkeypatch.context() as patch:

            def fail() -> None:
                raise MemoryError("out of memory")

            patch.setattr(llm, "step", fail)
            error = refusal(client.post(COMPLETIONS, json=BASE))
        assert (error["status"], error["type"]) == (500, "server_error")
        assert "out of memory" in error["message"]
        assert client.get("/health").status_code == 200
        assert client.post(COMPLETIONS, json=BASE).status_code == 200


def test_metrics_count_what_was_done(client: TestClient, llm: LLM) -> None:
    client.post(COMPLETIONS, json=BASE)
    client.post(COMPLETIONS, json=BASE | {"n": 0})
    client.get("/nothing/that/exists")
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    for line in (
        'compress_http_responses_total{path="/v1/completions",status="200"} 1',
        'compress_http_responses_total{path="/v1/completions",status="400"} 1',
        'compress_http_responses_total{path="other",status="404"} 1',
        'compress_requests_total{finish_reason="length"} 1',
        "compress_inter_token_latency_seconds_count 8",
        "compress_kv_blocks_owned 0",
        "compress_requests_in_flight 0",
    ):
        assert line in lines


def test_penalties_and_biases_are_followed(client: TestClient) -> None:
    def answer(**more: Any) -> dict[str, Any]:
        response: dict[str, Any] = client.post(COMPLETIONS, json=BASE | more).json()
        return response

    plain, biased = answer(max_tokens=12), answer(max_tokens=12, logit_bias={"7": 100})
    assert biased["choices"][0]["text"] != plain["choices"][0]["text"]
    penalized = answer(max_tokens=12, repetition_penalty=1.8, presence_penalty=1)
    assert penalized["choices"][0]["text"] != plain["choices"][0]["text"]
    assert penalized["sampling_params"]["presence_penalty"] == 1
    assert biased["sampling_params"]["logit_bias"] == {"7": 100.0}
