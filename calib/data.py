"""Calibration and evaluation text, as token ids.

A source of calibration data is one of
    pydoc         the language reference that Python's standard library carries (the default)
    PATH          plain text; or, if it ends in .jsonl, one JSON object per line with `text`
                  (a document) or `messages` (a chat, rendered by the tokenizer's chat template)
    hub:NAME      a data set of the Hugging Face hub, split `train`, records as in .jsonl, read
                  only as far as the samples need; `hub:NAME:CONFIG` picks a configuration

Whatever the source, its token ids form one long sequence, which is cut into consecutive chunks of
`length` tokens; the rest is dropped. Of the num_chunks chunks, seed 0 takes num_samples evenly
spaced ones, number floor(i * num_chunks / num_samples) for sample i; any other seed draws a random
subset. Samples keep the order of the text. No chunk is used twice: too little data is an error.

Special tokens: no beginning-of-sequence token is added anywhere, so a chunk starts in the middle of
a text, as in the GPTQ protocol. The documents of a .jsonl file or a data set are each followed by
the end-of-sequence token, if the tokenizer has one; a chat has the tokens that its template writes.

The pydoc corpus is split by topic: EVALUATION_TOPICS are for evaluation only, and a paragraph that
also occurs in a calibration topic is taken out of the evaluation text.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from pydantic import ConfigDict

PYDOC = "pydoc"
HUB_PREFIX = "hub:"

# Listed by name, so that a topic stays on its side in every Python version.
EVALUATION_TOPICS = frozenset(
    [
        "assignment",
        "binary",
        "calls",
        "comparisons",
        "dict",
        "execmodel",
        "identifiers",
        "import",
        "objects",
        "operator-summary",
        "slicings",
        "subscriptions",
    ]
)
_PARAGRAPH_BREAK = re.compile(r"\n[ \t]*\n")
_MAX_SEED = 2**63 - 1
_MIN_PROSE_CHARS = 80  # shorter paragraphs (headings, one-line examples) recur by nature


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationSpec:
    """Which text to calibrate on: `num_samples` sequences of `length` tokens from `source`."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    source: str = PYDOC
    num_samples: int = 128
    length: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_samples", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"calibration {name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.seed <= _MAX_SEED:
            raise ValueError(f"calibration seed must be between 0 and 2^63 - 1, got {self.seed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationData:
    """Token ids ready for the model.

    tokens       (num_samples, length) int64
    sha256       hash of `tokens` as little-endian int64 in row-major order
    description  one line for reports: source, sizes, seed
    """

    tokens: torch.Tensor
    sha256: str
    description: str


def load_calibration(
    spec: CalibrationSpec, tokenizer: Any, *, offline: bool = False
) -> CalibrationData:
    """Read, tokenize and sample the source of `spec`; equal arguments give equal tokens.

    Raises FileNotFoundError for a missing file; ValueError for text that is empty, not UTF-8 or too
    short, for a bad record (naming file and line), a chat without a chat template, and a hub data
    set when `offline`.
    """
    ids = torch.tensor(read_token_ids(spec, tokenizer, offline=offline), dtype=torch.int64)
    num_chunks = len(ids) // spec.length
    if num_chunks < spec.num_samples:
        raise ValueError(
            f"{spec.source}: {len(ids)} tokens hold {num_chunks} chunks of {spec.length}, fewer "
            f"than the {spec.num_samples} samples asked for; ask for fewer or shorter samples"
        )
    chunks = ids[: num_chunks * spec.length].view(num_chunks, spec.length)
    tokens = chunks[_chosen_chunks(num_chunks, spec.num_samples, spec.seed)]
    return CalibrationData(
        tokens=tokens,
        sha256=hashlib.sha256(tokens.numpy().astype("<i8").tobytes()).hexdigest(),
        description=f"{spec.source}: {spec.num_samples} x {spec.length} tokens of {len(ids)}, "
        f"seed {spec.seed}",
    )


def evaluation_text(source: str) -> str:
    """The text to measure perplexity on: the evaluation part of `pydoc`, or a text file, whole.

    Raises FileNotFoundError for a missing file, ValueError for text that is empty or not UTF-8 and
    for a source that is not plain text.
    """
    if source == PYDOC:
        return _pydoc_texts()[1]
    if source.startswith(HUB_PREFIX) or Path(source).suffix == ".jsonl":
        raise ValueError(f"{source}: evaluation needs {PYDOC!r} or a plain text file")
    return _read_text(Path(source))


def read_token_ids(spec: CalibrationSpec, tokenizer: Any, *, offline: bool = False) -> list[int]:
    """All token ids of a file or of pydoc; of a hub data set, as many as the samples need.

    Raises what `load_calibration` raises, except for text that is too short.
    """
    if spec.source.startswith(HUB_PREFIX):
        if offline:
            raise ValueError(f"{spec.source}: --offline refuses to ask the hub for a data set")
        budget = spec.num_samples * spec.length
        return _record_ids(_hub_records(spec), tokenizer, budget)
    path = Path(spec.source)
    if spec.source != PYDOC and path.suffix == ".jsonl":
        return _record_ids(_jsonl_records(path), tokenizer)
    text = _pydoc_texts()[0] if spec.source == PYDOC else _read_text(path)
    return _encode(text, tokenizer)


def _encode(text: str, tokenizer: Any) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def _chosen_chunks(num_chunks: int, num_samples: int, seed: int) -> list[int]:
    if seed == 0:
        return [i * num_chunks // num_samples for i in range(num_samples)]
    generator = torch.Generator().manual_seed(seed)
    return sorted(torch.randperm(num_chunks, generator=generator)[:num_samples].tolist())


def _read_text(path: Path) -> str:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such text file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not text.strip():
        raise ValueError(f"{path}: the text is empty")
    return text


def _record_ids(
    records: Iterable[tuple[str, Any]], tokenizer: Any, budget: int | None = None
) -> list[int]:
    """Token ids of (place, record) pairs, one after the other, until there are `budget`."""
    ids: list[int] = []
    for place, record in records:
        try:
            ids += _one_record_ids(record, tokenizer)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        if budget is not None and len(ids) >= budget:
            break
    return ids


def _one_record_ids(record: Any, tokenizer: Any) -> list[int]:
    """Tokens of one `text` or `messages` record; ValueError says what is wrong with it."""
    if not isinstance(record, dict):
        raise ValueError(f"expected an object with text or messages, got {type(record).__name__}")
    if isinstance(record.get("messages"), list):
        return _encode(_render_chat(record["messages"], tokenizer), tokenizer)
    text = record.get("text")
    if not isinstance(text, str):
        found = ", ".join(map(str, record)) or "nothing"
        raise ValueError(f"expected a string `text` or a list `messages`, found {found}")
    if not text.strip():
        return []
    if not text.isprintable() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("the text holds half of a surrogate pair")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return _encode(text, tokenizer) + end


def _render_chat(messages: list[Any], tokenizer: Any) -> str:
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("the tokenizer has no chat template for `messages`; give `text` instead")
    if not messages or not all(map(_is_message, messages)):
        raise ValueError("`messages` needs objects with `role` and `content`, at least one")
    try:
        rendered: str = tokenizer.apply_chat_template(messages, tokenize=False)
    except (TemplateError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the chat template refuses these messages ({error})") from error
    return rendered


def _is_message(message: Any) -> bool:
    """Checked here, because templates render a missing field as nothing."""
    return isinstance(message, dict) and "role" in message and "content" in message


def _jsonl_records(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, record) for each line that is not blank; `place` is file:line, for error messages."""
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            yield place, json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: not valid JSON ({error.msg})") from None
        except RecursionError:
            raise ValueError(f"{place}: nested too deeply") from None


def _hub_records(spec: CalibrationSpec) -> Iterator[tuple[str, Any]]:
    """The records of a hub data set: in their own order for seed 0, shuffled for another seed.

    Streamed, because a few thousand records of a data set of any size are enough.
    """
    import datasets

    name, _, config = spec.source.removeprefix(HUB_PREFIX).partition(":")
    if not name:
        raise ValueError(f"{spec.source}: expected {HUB_PREFIX}NAME, the name of a data set")
    records = datasets.load_dataset(name, config or None, split="train", streaming=True)
    if spec.seed:
        records = records.shuffle(seed=spec.seed)
    for number, record in enumerate(records):
        yield f"{spec.source} record {number}", record


@lru_cache
def _pydoc_texts() -> tuple[str, str]:
    """The (calibration, evaluation) text of the pydoc corpus, without repetitions between topics.

    Some topics are excerpts of others (`for` of `compound`): one whose every paragraph stands in
    another topic is left out.
    """
    from pydoc_data.topics import topics

    prose = {name: _prose(text) for name, text in topics.items()}
    names = [name for name in sorted(topics) if not _is_excerpt(name, prose)]
    calibration = [name for name in names if name not in EVALUATION_TOPICS]
    seen = frozenset().union(*(prose[name] for name in calibration))
    evaluation = [
        paragraph
        for name in names
        if name in EVALUATION_TOPICS
        for paragraph in _PARAGRAPH_BREAK.split(topics[name])
        if not _prose(paragraph) & seen
    ]
    return "\n\n".join(topics[name] for name in calibration), "\n\n".join(evaluation)


def _prose(text: str) -> frozenset[str]:
    """The paragraphs of `text` that are long enough to tell texts apart, white space normalised."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in _PARAGRAPH_BREAK.split(text))
    return frozenset(p for p in paragraphs if len(p) >= _MIN_PROSE_CHARS)


def _is_excerpt(name: str, prose: dict[str, frozenset[str]]) -> bool:
    """Whether all paragraphs of a topic stand in one other topic; of equal ones the first stays."""
    own = prose[name]
    return any(
        own < other or (own == other and other_name < name)
        for other_name, other in prose.items()
        if own and other_name != name
    )
