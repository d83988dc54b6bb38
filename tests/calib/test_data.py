"""Calibration data: the tokens of every source, their choice by seed, and errors with places."""

import hashlib
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from compress.calib import data
from compress.calib.data import CalibrationSpec, evaluation_text, load_calibration
from tests.factory import tiny_tokenizer

_PROSE = "Names refer to objects. Each use of a name binds it anew, number {}.\n"


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    letters = random.Random(0).choices("abcdefgh \n\u00e9\u4e16", k=20_000)
    file.write_text("".join(letters), encoding="utf-8")
    return file


def _ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def _write_jsonl(file: Path, *records: object) -> Path:
    file.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("num_samples", "length"),
    [(1, 1), (1, 130), (17, 33), (33, 17)],
    ids=["1x1", "1x130", "17x33", "33x17"],
)
def test_load_calibration_takes_evenly_spaced_chunks_of_a_text(
    num_samples, length, text_file, tokenizer
) -> None:
    spec = CalibrationSpec(source=str(text_file), num_samples=num_samples, length=length)
    ids = _ids(tokenizer, text_file.read_text())
    num_chunks = len(ids) // length
    starts = [int(i * num_chunks / num_samples) * length for i in range(num_samples)]
    expected = torch.tensor([ids[start : start + length] for start in starts])
    tokens = load_calibration(spec, tokenizer).tokens
    assert tokens.dtype == torch.int64 and torch.equal(tokens, expected)


def test_load_calibration_draws_other_chunks_for_another_seed(text_file, tokenizer) -> None:
    def sample(seed: int) -> torch.Tensor:
        spec = CalibrationSpec(source=str(text_file), num_samples=17, length=33, seed=seed)
        return load_calibration(spec, tokenizer).tokens

    chunks = torch.tensor(_ids(tokenizer, text_file.read_text()))
    chunks = chunks[: len(chunks) // 33 * 33].view(-1, 33)
    positions = [(chunks == row).all(1).nonzero()[0].item() for row in sample(3)]
    assert positions == sorted(set(positions))
    assert torch.equal(sample(3), sample(3))
    assert not torch.equal(sample(3), sample(4)) and not torch.equal(sample(3), sample(0))


def test_load_calibration_uses_every_chunk_once_when_there_are_just_enough(
    text_file, tokenizer
) -> None:
    ids = _ids(tokenizer, text_file.read_text())
    num_chunks = len(ids) // 33
    for seed in (0, 1):
        spec = CalibrationSpec(source=str(text_file), num_samples=num_chunks, length=33, seed=seed)
        tokens = load_calibration(spec, tokenizer).tokens
        assert tokens.flatten().tolist() == ids[: num_chunks * 33]


def test_load_calibration_hashes_the_tokens_it_gives(text_file, tokenizer) -> None:
    spec = CalibrationSpec(source=str(text_file), num_samples=3, length=17)
    result = load_calibration(spec, tokenizer)
    expected = hashlib.sha256()
    for token in result.tokens.flatten().tolist():
        expected.update(token.to_bytes(8, "little"))
    assert result.sha256 == expected.hexdigest()
    assert "3 x 17" in result.description and str(text_file) in result.description


@pytest.mark.parametrize(
    ("num_samples", "length", "message"),
    [
        (10_000, 33, r"fewer than the 10000 samples"),
        (1, 100_000, r"tokens hold 0 chunks of 100000"),
    ],
    ids=["samples", "length"],
)
def test_load_calibration_refuses_too_little_text(
    num_samples, length, message, text_file, tokenizer
) -> None:
    spec = CalibrationSpec(source=str(text_file), num_samples=num_samples, length=length)
    with pytest.raises(ValueError, match=rf"text\.txt: .*{message}"):
        load_calibration(spec, tokenizer)


@pytest.mark.parametrize("content", [b"", b" \n\t\n"], ids=["nothing", "blank"])
@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl"])
def test_load_calibration_refuses_empty_text(name, content, tmp_path, tokenizer) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: the text is empty"):
        load_calibration(CalibrationSpec(source=str(tmp_path / name)), tokenizer)


def test_load_calibration_names_a_missing_file(tmp_path, tokenizer) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.txt: no such text file"):
        load_calibration(CalibrationSpec(source=str(tmp_path / "absent.txt")), tokenizer)


def test_load_calibration_refuses_a_folder(tmp_path, tokenizer) -> None:
    with pytest.raises(OSError, match=r"directory"):
        load_calibration(CalibrationSpec(source=str(tmp_path)), tokenizer)


def test_load_calibration_names_a_file_that_is_not_utf8(tmp_path, tokenizer) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 ")
    with pytest.raises(ValueError, match=r"latin\.txt: not UTF-8 .* at byte 3"):
        load_calibration(CalibrationSpec(source=str(tmp_path / "latin.txt")), tokenizer)


def test_load_calibration_ends_each_jsonl_document_with_eos(tmp_path, tokenizer) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"text": "first"}\n\n{"text": "  "}\n{"text": "second\u2028line"}\n', "utf-8")
    expected = [*_ids(tokenizer, "first"), 1, *_ids(tokenizer, "second\u2028line"), 1]
    spec = CalibrationSpec(source=str(file), num_samples=1, length=len(expected))
    assert load_calibration(spec, tokenizer).tokens[0].tolist() == expected


def test_load_calibration_renders_chats_with_the_template(tmp_path, tokenizer) -> None:
    messages = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    file = _write_jsonl(tmp_path / "chat.jsonl", {"messages": messages}, {"text": "and text"})
    chat = _ids(tokenizer, "<s>[user] 2+2?</s>[assistant] 4</s>")
    assert chat[0] == 0 and chat.count(1) == 2
    expected = [*chat, *_ids(tokenizer, "and text"), 1]
    spec = CalibrationSpec(source=str(file), num_samples=1, length=len(expected))
    assert load_calibration(spec, tokenizer).tokens[0].tolist() == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'text': 1}", "not valid JSON"),
        ("[1]", "expected an object"),
        ('{"prompt": "x"}', "found prompt"),
        ("{}", "found nothing"),
        ('{"text": 5}', "expected a string `text`"),
        ('{"messages": "hi"}', "a list `messages`"),
        ('{"messages": []}', "at least one"),
        ('{"messages": [1]}', "objects with `role` and `content`"),
        ('{"messages": [{"role": "user"}]}', "objects with `role` and `content`"),
    ],
    ids=[
        "json",
        "list",
        "keys",
        "empty",
        "number",
        "string",
        "no-messages",
        "items",
        "no-content",
    ],
)
def test_load_calibration_names_the_line_of_a_bad_record(
    line, message, tmp_path, tokenizer
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(ValueError, match=rf"bad\.jsonl:3: .*{message}"):
        load_calibration(CalibrationSpec(source=str(file)), tokenizer)


def test_load_calibration_needs_a_chat_template_for_messages(tmp_path) -> None:
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    file = _write_jsonl(tmp_path / "c.jsonl", {"messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(ValueError, match=r"c\.jsonl:1: the tokenizer has no chat template"):
        load_calibration(CalibrationSpec(source=str(file)), plain)


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[0]['content'] + 1 }}"],
    ids=["raise", "type"],
)
def test_load_calibration_says_that_a_template_refuses_the_messages(template, tmp_path) -> None:
    from transformers import PreTrainedTokenizerFast

    strict = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer().backend_tokenizer, chat_template=template
    )
    file = _write_jsonl(tmp_path / "c.jsonl", {"messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(ValueError, match=r"c\.jsonl:1: the chat template refuses"):
        load_calibration(CalibrationSpec(source=str(file)), strict)


def test_load_calibration_without_eos_joins_documents_directly(tmp_path) -> None:
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    file = _write_jsonl(tmp_path / "d.jsonl", {"text": "first"}, {"text": "second"})
    expected = _ids(plain, "first") + _ids(plain, "second")
    spec = CalibrationSpec(source=str(file), num_samples=1, length=len(expected))
    assert load_calibration(spec, plain).tokens[0].tolist() == expected


@pytest.fixture
def hub_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set in a local folder: the data set library reads it like one of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "dataset"
    folder.mkdir()
    _write_jsonl(folder / "train.jsonl", *({"text": _PROSE.format(n)} for n in range(60)))
    return folder


def test_load_calibration_reads_a_data_set_as_far_as_needed(hub_folder, tokenizer) -> None:
    spec = CalibrationSpec(source=f"hub:{hub_folder}", num_samples=3, length=33)
    expected = [id_ for n in range(60) for id_ in [*_ids(tokenizer, _PROSE.format(n)), 1]]
    assert load_calibration(spec, tokenizer).tokens.flatten().tolist() == expected[:99]


def test_load_calibration_shuffles_a_data_set_by_seed(hub_folder, tokenizer) -> None:
    def sample(seed: int) -> str:
        spec = CalibrationSpec(source=f"hub:{hub_folder}", num_samples=3, length=33, seed=seed)
        return load_calibration(spec, tokenizer).sha256

    assert sample(1) == sample(1) and len({sample(0), sample(1), sample(2)}) == 3


def test_load_calibration_passes_the_configuration_of_a_data_set(monkeypatch, tokenizer) -> None:
    asked = []

    def load_dataset(name, config, **options):
        asked.append((name, config, options["split"]))
        return [{"text": "x" * 99}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    for source in ("hub:owner/name", "hub:owner/name:raw"):
        load_calibration(CalibrationSpec(source=source, num_samples=1, length=1), tokenizer)
    assert asked == [("owner/name", None, "train"), ("owner/name", "raw", "train")]


def test_load_calibration_refuses_a_data_set_offline(monkeypatch, tokenizer) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="hub:owner/name: --offline"):
        load_calibration(CalibrationSpec(source="hub:owner/name"), tokenizer, offline=True)


@pytest.mark.parametrize(
    "fields", [{"num_samples": 0}, {"length": 0}, {"length": -3}, {"seed": -1}], ids=str
)
def test_calibration_spec_refuses_impossible_numbers(fields) -> None:
    (name, value), *_ = fields.items()
    with pytest.raises(ValueError, match=f"{name} must .*got {value}"):
        CalibrationSpec(**fields)


def test_pydoc_is_enough_for_the_defaults(tokenizer) -> None:
    result = load_calibration(CalibrationSpec(), tokenizer)
    assert result.tokens.shape == (128, 512)
    assert len(_ids(tokenizer, evaluation_text("pydoc"))) >= 8 * 2048


def test_pydoc_shares_no_paragraph_between_calibration_and_evaluation() -> None:
    calibration, evaluation = data._pydoc_texts()
    assert data._prose(calibration) and data._prose(evaluation)
    assert not data._prose(calibration) & data._prose(evaluation)


def test_pydoc_holds_each_long_paragraph_once_in_a_part() -> None:
    """Excerpts of longer topics are left out, the topics themselves are not."""
    from pydoc_data.topics import topics

    everything = frozenset().union(*map(data._prose, topics.values()))
    parts = [data._prose(text) for text in data._pydoc_texts()]
    assert parts[0] | parts[1] == everything
    compound = topics["compound"]
    assert compound in data._pydoc_texts()[0]
    paragraph = max(data._prose(topics["for"]), key=len)
    assert " ".join(data._pydoc_texts()[0].split()).count(paragraph) == 1


def test_evaluation_topics_all_exist() -> None:
    from pydoc_data.topics import topics

    assert set(topics) >= data.EVALUATION_TOPICS


def test_evaluation_text_gives_a_file_whole(text_file) -> None:
    assert evaluation_text(str(text_file)) == text_file.read_text()


@pytest.mark.parametrize("source", ["hub:owner/name", "records.jsonl"])
def test_evaluation_text_refuses_what_is_not_plain_text(source) -> None:
    with pytest.raises(ValueError, match=f"{source}: evaluation needs"):
        evaluation_text(source)


def test_evaluation_text_refuses_an_empty_file(tmp_path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.txt: the text is empty"):
        evaluation_text(str(tmp_path / "empty.txt"))
