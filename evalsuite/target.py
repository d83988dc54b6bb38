"""What an evaluation needs from an engine. `compress.runtime.engine.Engine` satisfies it as it is.

Another engine is evaluated by writing these four members for it; nothing else of an engine is
touched by the measurements.
"""

from collections.abc import Iterator
from typing import Protocol

import torch

from compress.runtime.request import Completion, Request


class EvaluationTarget(Protocol):
    """A loaded model that predicts the tokens of a text and serves requests.

    Serving is a loop in the caller's hands, so that requests can arrive while others run:

        target.add_request(request)
        while target.has_unfinished:
            for completion in target.step(): ...
    """

    def log_probs(self, sequence: list[int], num_rows: int) -> Iterator[torch.Tensor]:
        """Row i of all slices together is log p(every token | tokens[: i + 1]), (length - 1, V).

        Natural log, fp32, in consecutive slices of `num_rows` rows, the last one with the rest.
        """
        ...

    def add_request(self, request: Request) -> None:
        """Queue `request`; ValueError if it can never be served."""
        ...

    def step(self) -> list[Completion]:
        """Run one iteration and return the requests that finished in it.

        `Completion.token_times` are `time.perf_counter` seconds, one per generated token; tokens
        that came out of the same iteration have the same time.
        """
        ...

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        ...
