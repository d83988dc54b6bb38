"""The routes: completions, chat, models, metrics and health."""

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from compress.runtime.generation_config import describe_params
from compress.runtime.llm import LLM
from compress.runtime.request import Completion, SamplingParams
from compress.runtime.server.calls import Calls
from compress.runtime.server.guard import Guard, ServerLimits, error_response, read_json_body
from compress.runtime.server.metrics import CONTENT_TYPE, Metrics
from compress.runtime.server.protocol import (
    ApiError,
    ChatBody,
    CompletionBody,
    response_head,
    streamed_choice,
    usage_of,
    whole_choice,
)
from compress.runtime.text_stream import TextOptions
from compress.runtime.worker import Worker

_LOG = logging.getLogger(__name__)
_SAME_NAME = (  # in a body and in SamplingParams
    *("temperature", "top_p", "top_k", "min_p", "ignore_eos", "min_tokens"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_COMPLETION_TOKENS = 16  # the API's own default for completions; chat has none
_PATHS = ("/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions")

B = TypeVar("B", CompletionBody, ChatBody)


def make_app(
    llm: LLM,
    *,
    name: str | None = None,
    limits: ServerLimits | None = None,
    max_queue: int = 256,
    stall_seconds: float = 300.0,
) -> FastAPI:
    """An app that serves `llm` under `name`; its worker runs while the app does.

    As many requests as the engine runs at once are taken, and `max_queue` that wait.
    """
    limits, metrics = limits or ServerLimits(), Metrics()
    worker = Worker(
        llm,
        max_jobs=llm.engine.config.max_num_seqs + max_queue,
        stall_seconds=stall_seconds,
        on_finish=metrics.record_end,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        try:
            yield
        finally:
            await asyncio.to_thread(worker.stop)

    app = FastAPI(lifespan=lifespan, openapi_url=None)  # its pages would load scripts from afar
    service = Service(worker, name or llm.name, limits)
    app.add_api_route("/v1/completions", service.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"])
    app.add_api_route("/v1/models", service.models)
    app.add_api_route("/v1/models/{model:path}", service.model)
    app.add_api_route("/health", service.health)

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.render(llm.engine, worker.num_jobs), media_type=CONTENT_TYPE)

    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)
    app.add_middleware(Guard, limits=limits, metrics=metrics, paths=_PATHS)
    app.state.worker = worker
    return app


class Service:
    """What the routes do, with one worker."""

    def __init__(self, worker: Worker, name: str, limits: ServerLimits) -> None:
        self._worker = worker
        self._llm = worker.llm
        self._name = name
        self._limits = limits
        self._card = {
            "id": name,
            "object": "model",
            "created": response_head("text", name, stream=False)["created"],
            "owned_by": "compress",
            "max_model_len": self._llm.engine.max_model_len,
        }

    async def health(self) -> Response:
        """200, or 503 and why, if requests cannot be served."""
        problem = self._worker.problem
        body = {"status": "ok"} if problem is None else {"status": "failed", "reason": problem}
        return JSONResponse(body, 200 if problem is None else 503)

    async def models(self) -> Response:
        """The one model that there is."""
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, model: str) -> Response:
        """The card of the model, if that is its name."""
        self._check_model(model)
        return JSONResponse(self._card)

    async def completions(self, request: Request) -> Response:
        """Continue texts."""
        body = await self._read(request, CompletionBody)
        self._check_choices(len(body.prompts), body.n or 1)
        prompts = [await asyncio.to_thread(self._encode, prompt) for prompt in body.prompts]
        return await self._answer(request, body, "text", prompts)

    async def chat(self, request: Request) -> Response:
        """Answer in a conversation."""
        body = await self._read(request, ChatBody)
        self._check_choices(1, body.n or 1)
        messages = [message.for_template() for message in body.messages]
        try:
            prompt = await asyncio.to_thread(self._llm.encode_chat, messages)
        except ValueError as error:
            raise ApiError(400, str(error), param="messages") from error
        return await self._answer(request, body, "chat", [prompt])

    async def _read(self, request: Request, kind: type[B]) -> B:
        values = await read_json_body(request, self._limits)
        try:
            body = kind.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ApiError(400, f"{place}: {first['msg']}", param=place) from None
        body.check_fields()
        self._check_model(body.model)
        return body

    def _check_model(self, model: str) -> None:
        if model != self._name:
            raise ApiError(
                404,
                f"The model {model!r} does not exist; this server has {self._name!r}",
                param="model",
                code="model_not_found",
            )

    def _check_choices(self, num_prompts: int, copies: int) -> None:
        most = min(self._limits.max_choices, self._worker.max_jobs)
        if num_prompts * copies > most:
            raise ApiError(
                400,
                f"{num_prompts} prompts x n={copies} are more than {most} choices, the limit of"
                " this server",
                param="n",
            )

    def _encode(self, prompt: str | list[int]) -> list[int]:
        ids = self._llm.encode(prompt)
        if not ids:
            raise ApiError(400, "the prompt is empty, and the model has no token to start from")
        return ids

    async def _answer(
        self, request: Request, body: CompletionBody | ChatBody, kind: str, prompts: list[list[int]]
    ) -> Response:
        copies = body.n or 1
        requests = [
            (prompt, params)
            for prompt in prompts
            for params in _copies(self._params(body, kind, prompt), copies)
        ]
        options = TextOptions(
            stop=body.stops,
            skip_special_tokens=body.skip_special_tokens is not False,
            continues=kind == "text",
        )
        calls = Calls(self._worker, requests, options)
        try:
            await calls.accepted()
            head = response_head(kind, self._name, stream=bool(body.stream))
            head["sampling_params"] = asdict(requests[0][1]) | {"stop": list(body.stops)}
            _LOG.info(
                "%s: %d prompts, %s",
                head["id"],
                len(prompts),
                describe_params(requests[0][1], {"stop": body.stops, "n": copies - 1 and copies}),
            )
            if body.stream:
                events = _events(calls, head, kind, len(prompts), usage=body.includes_usage)
                return _EventStream(calls, events)
            texts, completions = await _unless_gone(request, calls)
        except BaseException:
            calls.abort()
            raise
        choices = [
            whole_choice(kind, i, text, completion.finish_reason)
            for i, (text, completion) in enumerate(zip(texts, completions, strict=True))
        ]
        usage = usage_of(completions, len(prompts))
        return JSONResponse({**head, "choices": choices, "usage": usage})

    def _params(
        self, body: CompletionBody | ChatBody, kind: str, prompt: list[int]
    ) -> SamplingParams:
        """The parameters of one prompt: the checkpoint's own, changed by what the body says."""
        defaults = self._llm.default_params
        changes = {n: value for n in _SAME_NAME if (value := getattr(body, n)) is not None}
        if body.logit_bias is not None:
            changes["logit_bias"] = {int(key): value for key, value in body.logit_bias.items()}
        if body.stop_token_ids is not None:
            changes["stop_token_ids"] = tuple(body.stop_token_ids)
        changes["seed"] = secrets.randbits(63) if body.seed is None else body.seed
        limit = self._limits.max_tokens
        if body.token_limit is None:
            fallback = _COMPLETION_TOKENS if kind == "text" else self._room(prompt)
            wanted = min(fallback, self._room(prompt), limit or fallback)
        elif limit is not None and body.token_limit > limit:
            raise ApiError(
                400,
                f"max_tokens {body.token_limit} is more than {limit}, the limit of this server",
                param="max_tokens",
            )
        else:
            wanted = body.token_limit
        try:
            return replace(defaults, max_tokens=wanted, **changes)
        except ValueError as error:
            raise ApiError(400, str(error)) from error

    def _room(self, prompt: list[int]) -> int:
        """Most tokens that can follow `prompt`; at least 1, which the engine may then refuse."""
        engine = self._llm.engine
        slots = engine.blocks.num_blocks * engine.blocks.block_size
        return max(min(engine.max_model_len - len(prompt), slots - len(prompt) + 1), 1)


class _EventStream(StreamingResponse):
    """Server-sent events; however it ends, its generations end with it."""

    def __init__(self, calls: Calls, events: AsyncIterator[str]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"cache-control": "no-cache"}
        )
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._calls.abort()


async def _events(
    calls: Calls, head: dict[str, Any], kind: str, num_prompts: int, *, usage: bool
) -> AsyncIterator[str]:
    """The events of a stream. An error ends it, as an event, since the status is sent already."""
    seen: set[int] = set()
    ends: dict[int, Completion] = {}
    empty = {"usage": None} if usage else {}
    try:
        async for index, chunk in calls.pieces():
            reason = chunk.finish_reason
            if chunk.completion is not None:
                ends[index] = chunk.completion
            if chunk.text or index not in seen:
                choice = streamed_choice(kind, index, chunk.text, None, is_first=index not in seen)
                seen.add(index)
                yield _event({**head, "choices": [choice], **empty})
            if reason is not None:
                choice = streamed_choice(kind, index, "", reason, is_first=False)
                yield _event({**head, "choices": [choice], **empty})
    except ApiError as error:
        yield _event(error.body)
        return
    if usage:
        completions = [ends[index] for index in sorted(ends)]
        yield _event({**head, "choices": [], "usage": usage_of(completions, num_prompts)})
    yield "data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


async def _unless_gone(request: Request, calls: Calls) -> tuple[list[str], list[Completion]]:
    """All texts; if the client goes away first, ApiError and the generations end."""
    work = asyncio.ensure_future(calls.collect())
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ApiError(499, "the client went away")
    finally:
        work.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _copies(params: SamplingParams, copies: int) -> list[SamplingParams]:
    """The parameters of `copies` choices of one prompt: seeds one after another."""
    first = params.seed
    return [replace(params, seed=None if first is None else first + i) for i in range(copies)]


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), f"no handler for {type(error).__name__}"
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), f"no handler for {type(error).__name__}"
    return error_response(ApiError(error.status_code, str(error.detail)))


async def _on_bug(request: Request, error: Exception) -> Response:
    message = "internal error; the log of the server has more"
    return error_response(ApiError(500, message, kind="server_error"))
