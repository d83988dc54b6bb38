"""The requests and responses of the OpenAI API, as far as this server knows them.

A field is one of four kinds:

- followed: it does what the API says it does;
- without effect here: accepted and ignored (`user`, `store`, `metadata`, ...), as it says something
  to the provider and nothing to the model;
- known but not supported: accepted with its neutral value, refused with any other (`_NEUTRAL`);
- unknown: refused, as the API does, so that a misspelt field is no surprise.

`top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `ignore_eos`, `stop_token_ids` and
`skip_special_tokens` are additions of this server; the official client passes them in `extra_body`.
"""

import time
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from compress.runtime.request import Completion

_MAX_STOPS, _MAX_STOP_CHARACTERS = 16, 512
_INT64 = 2**63

StopString = Annotated[str, StringConstraints(min_length=1, max_length=_MAX_STOP_CHARACTERS)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]  # JSON has no other keys
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]

# Field -> values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None,),
}


class ApiError(Exception):
    """A refusal in the form of the API: an HTTP status, and an error object."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    """`include_usage` adds a last chunk with the usage and no choices."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # without effect here


class _Body(BaseModel):
    """What both kinds of request have in common."""

    model_config = ConfigDict(extra="allow", strict=True)  # see `unsupported`

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1)
    stop: StopString | Annotated[list[StopString], Field(max_length=_MAX_STOPS)] | None = None
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[TokenKey, Annotated[float, Field(ge=-100, le=100)]] | None = None
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, allow_inf_nan=False)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    skip_special_tokens: bool | None = None
    # Without effect here.
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate, if the request says."""
        return self.max_tokens

    def check_fields(self) -> None:
        """ApiError for a field that is unknown, or not supported with its value."""
        for name, value in (self.model_extra or {}).items():
            if name not in _NEUTRAL:
                raise ApiError(400, f"Unrecognized request argument supplied: {name}", param=name)
            # By type as well: logprobs=0 asks for something, logprobs=false does not.
            if not any(type(value) is type(other) and value == other for other in _NEUTRAL[name]):
                raise ApiError(
                    400,
                    f"{name}={value!r} is not supported by this server; leave it out",
                    param=name,
                    code="unsupported_parameter",
                )
        if self.stream_options is not None and not self.stream:
            raise ApiError(
                400, "stream_options is only allowed when stream is true", param="stream_options"
            )


class CompletionBody(_Body):
    """`POST /v1/completions`: one prompt or several, as text or token ids."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenIds], Field(min_length=1)]
    )

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as a list of them."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TextPart(BaseModel):
    """A part of the content of a message; text is the only kind that a language model reads."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message. Fields beyond these two are handed to the chat template as they are."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message with its content as one string."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content or ""}


class ChatBody(_Body):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def token_limit(self) -> int | None:
        """Most tokens to generate; the newer of two names for it counts."""
        return self.max_completion_tokens or self.max_tokens


def response_head(kind: str, model: str, *, stream: bool) -> dict[str, Any]:
    """The fields that a response, or all chunks of one, have alike; kind is "text" or "chat"."""
    is_chat = kind == "chat"
    name = "chat.completion" if is_chat else "text_completion"
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}",
        "object": f"{name}.chunk" if is_chat and stream else name,
        "created": int(time.time()),
        "model": model,
    }


def whole_choice(kind: str, index: int, text: str, finish_reason: str) -> dict[str, Any]:
    """One choice of a response that is not streamed."""
    content: dict[str, Any] = {"text": text}
    if kind == "chat":
        content = {"message": {"role": "assistant", "content": text, "refusal": None}}
    return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}


def streamed_choice(
    kind: str, index: int, text: str, finish_reason: str | None, *, is_first: bool
) -> dict[str, Any]:
    """One choice of a chunk; the first of a chat says whose turn it is."""
    content: dict[str, Any] = {"text": text}
    if kind == "chat":
        role = {"role": "assistant"} if is_first else {}
        content = {"delta": role | ({"content": text} if text or is_first else {})}
    return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}


def usage_of(completions: list[Completion], num_prompts: int) -> dict[str, Any]:
    """Token counts. `completions` are in groups of one prompt each, which counts once."""
    size = len(completions) // num_prompts
    prompt = sum(completion.prompt_tokens for completion in completions[::size])
    output = sum(len(completion.token_ids) for completion in completions)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {
            "cached_tokens": sum(completion.cached_tokens for completion in completions[::size])
        },
    }
