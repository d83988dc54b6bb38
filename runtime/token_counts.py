"""The distinct tokens of a request and how often each was generated, for penalties."""

from collections.abc import Sequence

import numpy as np


class TokenCounts:
    """Follows a growing sequence; what a step needs of it is three arrays, ready to be copied.

    Tokens keep their place once they were seen, also when the drafts that brought them are taken
    back: then with a count of 0, which no penalty minds.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        distinct = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self._num_prompt = self._num_followed = len(prompt_ids)
        self._size = len(distinct)
        self._places = {token: i for i, token in enumerate(distinct.tolist())}
        self._ids = np.zeros(2 * self._size + 16, dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.int32)
        self._ids[: self._size] = distinct
        self._num_in_prompt = self._size

    def follow(self, token_ids: Sequence[int]) -> None:
        """Count what `token_ids`, prompt and output, has more than the last time."""
        for token in token_ids[self._num_followed :]:
            self._add(token)
        self._num_followed = len(token_ids)

    def with_drafts(self, drafts: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Copies of (ids int64, output counts int32, in prompt bool), drafts taken as output."""
        for token in drafts:
            self._add(token)
        ids, counts = self._ids[: self._size].copy(), self._counts[: self._size].copy()
        for token in drafts:
            self._counts[self._places[token]] -= 1
        return ids, counts, np.arange(self._size) < self._num_in_prompt

    def _add(self, token: int) -> None:
        place = self._places.setdefault(token, self._size)
        if place == self._size:
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1
