"""One request as text: from the tokens that the engine adds to it to the text that a reader sees.

Tokens become text as far as it is certain (`detokenize.py`), text passes as far as it cannot belong
to a stop string (`stopping.py`). The token that completes a stop string is the last one: tokens
after it, of the same step, are dropped. The token that ends a generation (end of sequence,
`stop_token_ids`) counts as output but its text does not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from compress.runtime.detokenize import IncrementalDecoder
from compress.runtime.request import Completion, Request
from compress.runtime.stopping import StopStrings


@dataclass(frozen=True, kw_only=True, slots=True)
class TextOptions:
    """How tokens become text, and the strings that end it.

    `continues` is for text that is put behind that of its prompt, see `IncrementalDecoder`.
    """

    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    continues: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class TextChunk:
    """A piece of a generation: its text and the tokens since the last piece.

    Text may lag behind tokens. The last piece alone has `completion`, whose `finish_reason` is
    "stop", "length", "abort" or "error", and which holds all output tokens.
    """

    text: str
    token_ids: list[int]
    completion: Completion | None = None

    @property
    def finish_reason(self) -> str | None:
        """Why the generation ended; None before its end."""
        return self.completion.finish_reason if self.completion else None


class TextStream:
    """The text of one request in flight. `deliver` gets every piece, in the thread that steps."""

    def __init__(
        self,
        request: Request,
        tokenizer: Any,
        options: TextOptions,
        deliver: Callable[[TextChunk], None],
    ) -> None:
        self.request = request
        self.deliver = deliver
        self._stop = StopStrings(options.stop)
        self._decoder = IncrementalDecoder(
            tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            continues=options.continues,
        )
        self._num_read = len(request.prompt_ids)
        self._token_ids: list[int] = []  # since the last piece

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the text: the engine should not go on."""
        return self._stop.matched is not None

    def advance(self) -> TextChunk | None:
        """The text of the request's new tokens, if there is any."""
        text = self._read(self.request.token_ids[self._num_read :])
        return self._chunk(text) if text else None

    def finish(self, completion: Completion) -> TextChunk:
        """The last piece: of what `completion` has that was not read, and what was held back."""
        read = self._num_read - len(self.request.prompt_ids)
        unread = completion.token_ids[read:]
        ends_with_mark = completion.finish_reason == "stop" and bool(unread)
        text = self._read(unread[:-1] if ends_with_mark else unread)
        if ends_with_mark and not self.is_stopped:
            self._count(unread[-1])
        if not self.is_stopped:
            text += self._stop.feed(self._decoder.flush())
        text += self._stop.flush()
        return self._chunk(text, self._trimmed(completion))

    def _read(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token in token_ids:
            if self.is_stopped:
                break
            text += self._stop.feed(self._decoder.feed([token]))
            self._count(token)
        return text

    def _count(self, token: int) -> None:
        self._num_read += 1
        self._token_ids.append(token)

    def _chunk(self, text: str, completion: Completion | None = None) -> TextChunk:
        token_ids, self._token_ids = self._token_ids, []
        return TextChunk(text=text, token_ids=token_ids, completion=completion)

    def _trimmed(self, completion: Completion) -> Completion:
        """`completion` up to the token that completed a stop string, if one did."""
        if not self.is_stopped:
            return completion
        num_tokens = self._num_read - len(self.request.prompt_ids)
        return replace(
            completion,
            finish_reason="stop",
            token_ids=completion.token_ids[:num_tokens],
            token_times=completion.token_times[:num_tokens],
            error=None,
        )
