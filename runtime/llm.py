"""A model that reads and writes text: the engine, its tokenizer, and what the checkpoint prefers.

    from compress import LLM

    llm = LLM("demo")
    print(llm.generate("The capital of France is")[0].text)
    for chunk in llm.stream("Once upon a time", llm.params(max_tokens=64, temperature=0.8)):
        print(chunk.text, end="", flush=True)
    print(llm.chat([{"role": "user", "content": "Who are you?"}]).text)
    print(llm.score("To be or not to be")[0].perplexity)

A prompt is a string (the tokenizer adds what it adds by itself, such as a beginning-of-sequence
token), a list of token ids (taken as they are), or a list of chat messages (put through the chat
template of the checkpoint, with the opening of the answer).
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from compress.errors import CheckFailed
from compress.models.load import load_tokenizer, resolve_model
from compress.runtime.engine import Engine
from compress.runtime.engine_config import EngineConfig
from compress.runtime.generation_config import sampling_defaults
from compress.runtime.request import Completion, Request, SamplingParams
from compress.runtime.text_stream import TextChunk, TextOptions, TextStream

Deliver = Callable[[TextChunk], None]
Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What came of one prompt.

    `text` lacks the stop string or the token that ended it, and special tokens; `token_ids` are all
    output tokens. `finish_reason` is "stop" or "length". `params` are those in effect. `completion`
    has the times and what the prefix cache gave.
    """

    prompt_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    params: SamplingParams
    completion: Completion


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How likely a text is: entry i of `log_probs` (len - 1,) fp32 is that of token i + 1."""

    token_ids: list[int]
    log_probs: torch.Tensor

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability of all tokens but the first."""
        return float(self.log_probs.double().mean().neg().exp())


class LLM:
    """One loaded model. `default_params` are those of the checkpoint's generation_config.json.

    Generations and streams may be interleaved, in one thread: every step of one advances all.
    `encode`, `encode_chat` and `params` may be called from any thread.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        draft: str | Path | None = None,
        kv_dtype: str = "auto",
        config: EngineConfig | None = None,
        offline: bool = False,
        quiet: bool = False,
    ) -> None:
        """Load `model`: a checkpoint folder, float or packed, a .gguf file, a hub id, or `demo`.

        `draft` is a folder of `compress train-draft`. For the rest see `Engine.load`; ValueError
        and OSError for what cannot be loaded, a folder without a tokenizer included.
        """
        path = resolve_model(str(model), offline=offline, quiet=quiet)
        self.name = str(model)
        self.tokenizer = load_tokenizer(path)
        defaults = sampling_defaults(path)
        self.default_params = defaults.params
        self.ignored_defaults = defaults.ignored
        self.engine = Engine.load(
            path,
            dtype=dtype,
            device=device,
            config=config,
            draft=Path(draft) if draft else None,
            kv_dtype=kv_dtype,
        )
        self._streams: dict[str, TextStream] = {}
        self._tokenizing = threading.Lock()  # the tokenizer changes its own state while it works
        self._names = (f"llm-{number}" for number in itertools.count())

    def params(self, **changes: Any) -> SamplingParams:
        """The default parameters of the checkpoint with `changes`; ValueError for a wrong value."""
        return replace(self.default_params, **changes)

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how a conversation becomes a prompt."""
        return bool(self.tokenizer.chat_template)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt of any form."""
        if isinstance(prompt, str):
            with self._tokenizing:
                return list(self.tokenizer(prompt, verbose=False)["input_ids"])
        if _is_chat(prompt):
            return self.encode_chat(prompt)
        if not all(isinstance(token, int) for token in prompt):
            raise ValueError("a prompt is a string, a list of token ids, or a list of messages")
        return list(prompt)  # type: ignore[arg-type]  # just checked

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        """Token ids of a conversation, up to where the model's answer begins.

        ValueError if there is no chat template, or if it refuses the messages.
        """
        if not self.has_chat_template:
            raise ValueError(f"{self.name} has no chat template; give the prompt as one string")
        try:
            with self._tokenizing:
                text = self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    add_generation_prompt=True,
                    tokenize=False,
                )
                return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        except Exception as error:  # templates raise what they like, jinja's errors among it
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> list[Generation]:
        """Complete one prompt or several, together; the results are in the order of the prompts.

        Parameters that are not given are `default_params`. Text ends before any of the strings
        `stop`. ValueError for a prompt that is malformed or can never fit, CheckFailed if nothing
        progresses; other prompts of the call are then stopped too.
        """
        every = _as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_params] * len(every)
        if len(params) != len(every):
            raise ValueError(f"{len(every)} prompts but {len(params)} sampling params")
        results: list[list[TextChunk]] = [[] for _ in every]
        streams: list[TextStream] = []
        try:
            for prompt, own, chunks in zip(every, params, results, strict=True):
                options = self._options(prompt, stop, skip_special_tokens)
                request = self.request(self.encode(prompt), own)
                streams.append(self.submit(request, options, chunks.append))
            while not all(chunks and chunks[-1].completion for chunks in results):
                self.step()
        finally:
            for stream in streams:
                self.abort(stream)
        return [_generation(s, c) for s, c in zip(streams, results, strict=True)]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
    ) -> Generation:
        """The model's answer to a conversation, `[{"role": "user", "content": ...}, ...]`."""
        return self.generate([messages], params, stop=stop)[0]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> Iterator[TextChunk]:
        """The completion of one prompt, piece by piece; closing the iterator stops it.

        The joined texts are the `text` that `generate` gives.
        """
        chunks: deque[TextChunk] = deque()
        options = self._options(prompt, stop, skip_special_tokens)
        request = self.request(self.encode(prompt), params or self.default_params)
        stream = self.submit(request, options, chunks.append)
        return self._pieces(stream, chunks)

    def score(self, texts: Prompt | Sequence[Prompt]) -> list[Score]:
        """Log-probabilities of the tokens of one text or several, given those before them."""
        sequences = [self.encode(text) for text in _as_prompts(texts)]
        log_probs = self.engine.score(sequences)
        return [
            Score(token_ids=ids, log_probs=own)
            for ids, own in zip(sequences, log_probs, strict=True)
        ]

    def request(self, prompt_ids: list[int], params: SamplingParams) -> Request:
        """A request with a name of its own."""
        return Request(request_id=next(self._names), prompt_ids=prompt_ids, params=params)

    def submit(self, request: Request, options: TextOptions, deliver: Deliver) -> TextStream:
        """Queue a request; `step` hands its text to `deliver`. ValueError if it can never fit."""
        stream = TextStream(request, self.tokenizer, options, deliver)
        self.engine.add_request(request)
        self._streams[request.request_id] = stream
        return stream

    def step(self) -> None:
        """One step of the engine, and the text that came of it, delivered."""
        done = {completion.request_id: completion for completion in self.engine.step()}
        for name, stream in list(self._streams.items()):
            if name in done:
                del self._streams[name]
                stream.deliver(stream.finish(done[name]))
                continue
            chunk = stream.advance()
            if stream.is_stopped:
                del self._streams[name]
                last = stream.finish(self.engine.abort(name))
                text = (chunk.text if chunk else "") + last.text
                ids = (chunk.token_ids if chunk else []) + last.token_ids
                stream.deliver(replace(last, text=text, token_ids=ids))
            elif chunk is not None:
                stream.deliver(chunk)

    def abort(self, stream: TextStream) -> None:
        """Stop a request, if it is still in flight; its last piece is delivered."""
        name = stream.request.request_id
        if self._streams.pop(name, None) is not None:
            stream.deliver(stream.finish(self.engine.abort(name)))

    def _options(self, prompt: Prompt, stop: Sequence[str], skip_special: bool) -> TextOptions:
        if isinstance(stop, str):
            stop = (stop,)
        return TextOptions(
            stop=tuple(stop), skip_special_tokens=skip_special, continues=not _is_chat(prompt)
        )

    def _pieces(self, stream: TextStream, chunks: deque[TextChunk]) -> Iterator[TextChunk]:
        try:
            while True:
                while not chunks:
                    self.step()
                chunk = chunks.popleft()
                _check_end(chunk)
                yield chunk
                if chunk.completion is not None:
                    return
        finally:
            self.abort(stream)


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int | Mapping)):
        return [prompts]  # type: ignore[list-item]  # one prompt, by its first item
    return list(prompts)  # type: ignore[arg-type]


def _check_end(chunk: TextChunk) -> None:
    """CheckFailed if the request was given up."""
    if chunk.finish_reason == "error" and chunk.completion is not None:
        raise CheckFailed(f"no request could make progress: {chunk.completion.error}")


def _generation(stream: TextStream, chunks: Sequence[TextChunk]) -> Generation:
    completion = chunks[-1].completion
    params = stream.request.params
    assert completion is not None and params is not None, "a generation has an end"
    _check_end(chunks[-1])
    return Generation(
        prompt_ids=stream.request.prompt_ids,
        text="".join(chunk.text for chunk in chunks),
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        params=params,
        completion=completion,
    )
