"""What stands before the routes: who may ask, how much, and for how long."""

import asyncio
import hmac
import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from compress.runtime.server.metrics import Metrics
from compress.runtime.server.protocol import ApiError

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_OPEN = ("/health", "/metrics")
_OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """What one request may ask for, and who may ask.

    `max_tokens` None leaves the length of an answer to the model and its cache. A request makes at
    most `max_choices` generations (prompts times `n`). `allowed_hosts` are names that the Host
    header may have, None for any: a server for this machine alone refuses others, so that a web
    page cannot reach it under a name of its own that resolves to this machine. An `api_key` is
    wanted for everything but /health and /metrics.
    """

    max_body_bytes: int = 8 * 2**20
    body_seconds: float = 30.0
    max_tokens: int | None = None
    max_choices: int = 128
    api_key: str | None = None
    allowed_hosts: Collection[str] | None = None

    def __post_init__(self) -> None:
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("the API key is empty; leave it out to serve without one")
        for name in ("max_body_bytes", "body_seconds", "max_tokens", "max_choices"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")


class Guard:
    """Refuses what may not pass, and counts every response under one of the known `paths`."""

    def __init__(
        self, app: ASGIApp, *, limits: ServerLimits, metrics: Metrics, paths: Collection[str]
    ) -> None:
        self._app = app
        self._limits = limits
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else _OTHER

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.record_response(path, message["status"])
            await send(message)

        refusal = self._refusal(Request(scope))
        if refusal is None:
            await self._app(scope, receive, counted)
        else:
            await error_response(refusal)(scope, receive, counted)

    def _refusal(self, request: Request) -> ApiError | None:
        limits = self._limits
        host = request.headers.get("host", "").lower()
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if limits.allowed_hosts is not None and name not in limits.allowed_hosts:
            return ApiError(421, f"this server does not answer for host {name!r}")
        if limits.api_key is None or request.url.path in _OPEN:
            return None
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        is_right = hmac.compare_digest(key.strip().encode(), limits.api_key.encode())
        if scheme.lower() == "bearer" and is_right:
            return None
        return ApiError(401, "Incorrect API key provided, or none.", code="invalid_api_key")


def error_response(error: ApiError) -> JSONResponse:
    """The response that says `error`."""
    headers = {"retry-after": "1"} if error.status in (429, 503) else {}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["connection"] = "close"  # what is left of the body is not read
    return JSONResponse(error.body, error.status, headers)


async def read_json_body(request: Request, limits: ServerLimits) -> dict[str, Any]:
    """The JSON object that `request` carries.

    Only under the content type of JSON: a web page may send others anywhere without asking.
    ApiError for another type (415), for too many bytes (413), if they come too slowly (408), and
    for anything but a JSON object (400).
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, f"expected content-type application/json, got {content_type!r}")
    too_large = ApiError(413, f"the body is larger than {limits.max_body_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > limits.max_body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                body += part
                if len(body) > limits.max_body_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body took more than {limits.body_seconds} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the client went away") from None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    return value
