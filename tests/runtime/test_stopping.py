"""Stop strings, against a search that looks at one character at a time."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compress.runtime.stopping import StopStrings

LETTERS = st.text(alphabet="ab\u00e9", max_size=33)
STOPS = st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=5), max_size=4)


def cut_ref(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The text before the first stop string that is complete, and that string."""
    for end in range(len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@given(LETTERS, STOPS, st.lists(st.integers(0, 99), max_size=33))
def test_any_cut_of_the_text_gives_the_same(text: str, stop: list[str], cuts: list[int]) -> None:
    stopper = StopStrings(stop)
    passed = "".join([*map(stopper.feed, pieces(text, cuts)), stopper.flush()])
    assert (passed, stopper.matched) == cut_ref(text, stop)


@given(LETTERS, STOPS)
def test_holds_back_only_what_may_become_a_stop_string(text: str, stop: list[str]) -> None:
    stopper, passed = StopStrings(stop), ""
    longest = max(map(len, stop), default=1)
    for i, character in enumerate(text):
        passed += stopper.feed(character)
        if stopper.matched is None:
            held = text[len(passed) : i + 1]
            assert len(held) < longest
            assert not held or any(s.startswith(held) for s in stop)


def test_nothing_passes_after_a_match() -> None:
    stopper = StopStrings(["END"])
    assert [stopper.feed(t) for t in ("a E", "N", "Db", "c")] == ["a ", "", "", ""]
    assert stopper.flush() == ""


@pytest.mark.parametrize("stop", ["END", ["a", ""]], ids=["one string", "an empty string"])
def test_refuses_what_is_no_list_of_strings(stop: list[str]) -> None:
    with pytest.raises(ValueError, match="list of strings"):
        StopStrings(stop)
