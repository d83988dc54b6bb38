"""Token ids to text, a few at a time.

`IncrementalDecoder` gives out text as soon as later tokens cannot change it. What it gives out,
joined, is what the tokenizer's own `decode` makes of all the ids at once, character for character,
for any stream of ids: broken UTF-8, special tokens and ids without a token included.

Two kinds of tokenizer are known, by the decoder that they carry:

- byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): a token is bytes, in an alphabet of printable
  characters. The bytes of all tokens are decoded together, broken ones to U+FFFD, so the decoder
  holds back an unfinished character (at most three bytes) and nothing else.
- sentencepiece with byte fallback (Llama 2, Mistral, Phi-3, Gemma): a token is text, or one byte
  `<0xE2>`. A run of byte tokens is decoded as a whole; if any byte of it is broken, the tokenizer
  makes U+FFFD of every one. So the decoder holds back a run until a token ends it.
"""

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_BROKEN = "\ufffd"
_BYTE_LEVEL, _BYTE_FALLBACK = "byte-level", "byte-fallback"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scheme:
    """How a tokenizer decodes. `replacements` are (old, new) pairs within the text of a token;
    `stripped` is a character that up to `num_stripped` times disappears at the very start.
    """

    kind: str
    special_tokens: frozenset[str]
    replacements: tuple[tuple[str, str], ...] = ()
    stripped: str = " "
    num_stripped: int = 0


class IncrementalDecoder:
    """The text of one stream of token ids.

    `tokenizer` is a fast tokenizer of transformers; ValueError if it decodes in a way not known
    here. `skip_special_tokens` leaves special tokens out. `continues` says that the text follows
    another, such as a prompt: a sentencepiece tokenizer drops a space at the start of a text, which
    must stay where the text is put behind that of the prompt.
    """

    def __init__(
        self, tokenizer: Any, *, skip_special_tokens: bool = True, continues: bool = False
    ) -> None:
        self._scheme = _scheme(tokenizer)
        self._token = tokenizer.backend_tokenizer.id_to_token
        self._skipped = self._scheme.special_tokens if skip_special_tokens else frozenset()
        self._num_to_strip = 0 if continues else self._scheme.num_stripped
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._run = bytearray()

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not before."""
        tokens = [self._token(token_id) for token_id in token_ids]
        known = [token for token in tokens if token is not None and token not in self._skipped]
        if self._scheme.kind == _BYTE_LEVEL:
            return self._utf8.decode(b"".join(map(_bytes_of, known)))
        return self._strip("".join(map(self._feed_fallback, known)))

    def flush(self) -> str:
        """What was held back, at the end of the stream: unfinished characters become U+FFFD."""
        if self._scheme.kind == _BYTE_LEVEL:
            return self._utf8.decode(b"", final=True)
        return self._strip(self._end_run())

    def _feed_fallback(self, token: str) -> str:
        if match := _BYTE_TOKEN.fullmatch(token):
            self._run.append(int(match[1], 16))
            return ""
        for old, new in self._scheme.replacements:
            token = token.replace(old, new)
        return self._end_run() + token

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return _BROKEN * len(run)

    def _strip(self, text: str) -> str:
        """`text` without what disappears at the start of the stream; it may come in pieces."""
        start = 0
        while self._num_to_strip and start < len(text):
            if text[start] == self._scheme.stripped:
                start += 1
                self._num_to_strip -= 1
            else:
                self._num_to_strip = 0
        return text[start:]


@lru_cache(maxsize=8)
def _scheme(tokenizer: Any) -> _Scheme:
    """How `tokenizer` decodes, from the description that its decoder gives of itself."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        raise ValueError(f"{type(tokenizer).__name__} has no decoder; a fast tokenizer is needed")
    special = frozenset(
        token.content for token in backend.get_added_tokens_decoder().values() if token.special
    )
    described = json.loads(backend.decoder.__getstate__())
    steps = described["decoders"] if described["type"] == "Sequence" else [described]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _Scheme(kind=_BYTE_LEVEL, special_tokens=special)
    unknown = set(kinds) - {"Replace", "ByteFallback", "Fuse", "Strip"}
    if unknown or "Fuse" not in kinds or "ByteFallback" not in kinds:
        raise ValueError(
            f"the tokenizer decodes with {', '.join(kinds)}; known are ByteLevel alone, and"
            " ByteFallback and Fuse with Replace and Strip"
        )
    strip = _strip_step(steps)
    return _Scheme(
        kind=_BYTE_FALLBACK,
        special_tokens=special,
        replacements=tuple(_replacement(step) for step in steps if step["type"] == "Replace"),
        stripped=strip.get("content", " "),
        num_stripped=strip.get("start", 0),
    )


def _replacement(step: dict[str, Any]) -> tuple[str, str]:
    """(old, new). One character is replaced alike before and after tokens are joined."""
    old = step["pattern"].get("String")
    if old is None or len(old) != 1:
        raise ValueError(f"the tokenizer replaces {step['pattern']}; only one character is known")
    return old, step["content"]


def _strip_step(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The step that strips the joined text, {} if there is none."""
    places = [i for i, step in enumerate(steps) if step["type"] == "Strip"]
    if not places:
        return {}
    kinds = [step["type"] for step in steps]
    step = steps[places[0]]
    if len(places) > 1 or places[0] < kinds.index("Fuse") or step["stop"]:
        raise ValueError(f"the tokenizer strips {step}; known is one Strip, of the start, at last")
    return step


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 is itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@lru_cache(maxsize=1 << 16)
def _bytes_of(token: str) -> bytes:
    """The bytes of a byte-level token; one with other characters (an added token) is itself."""
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode("utf-8")
