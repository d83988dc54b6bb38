"""Stop strings: where a growing text ends, found on the text itself and not on tokens.

A stop string may lie across tokens, begin inside one and end inside another. So text that could be
the beginning of a stop string is held back, at most the longest string less one character, until
what follows decides. The text ends before the stop string whose last character comes first; among
those that end together, before the longest. So the outcome is the same however the text is cut.
"""

from collections.abc import Sequence


class StopStrings:
    """Passes the text of one stream on, up to the first of the strings `stop`.

    `matched` is the string that ended the text, None until then.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"stop must be a list of strings that are not empty, got {stop!r}")
        self._stop = tuple(stop)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain now to come before any stop string; after a match, none."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = [(start + len(s), start, s) for s in self._stop if (start := text.find(s)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        cut = len(text) - self._num_undecided(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was held back, at the end of the stream."""
        text, self._held = self._held, ""
        return text

    def _num_undecided(self, text: str) -> int:
        """Characters at the end of `text` that may be the beginning of a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            end = text[-length:]
            if any(s.startswith(end) for s in self._stop):
                return length
        return 0
