"""An evaluation target of known answers: a bigram model, and a server on a clock of its own.

Each step of the server takes `step_seconds` and either prefills the oldest waiting request, which
yields its first token, or gives every running request its next `tokens_per_step` tokens.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from compress.runtime.model import Decoder
from compress.runtime.request import Completion, Request
from compress.runtime.speculative.base import DraftContext


class FakeClock:
    """Seconds that pass only when somebody waits."""

    def __init__(self, start: float = 0.0) -> None:
        self.now = start

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeTarget:
    """Satisfies EvaluationTarget. `log_probs` (vocab, vocab): log p(next | previous)."""

    def __init__(
        self,
        *,
        log_probs: torch.Tensor | None = None,
        clock: FakeClock | None = None,
        step_seconds: float = 1.0,
        tokens_per_step: int = 1,
    ) -> None:
        self.table = log_probs
        self.clock = clock or FakeClock()
        self.step_seconds = step_seconds
        self.tokens_per_step = tokens_per_step
        self.seen: list[list[int]] = []
        self.scored: list[list[int]] = []
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    def log_probs(self, sequence: list[int], num_rows: int) -> Iterator[torch.Tensor]:
        assert self.table is not None
        self.scored.append(sequence)
        yield from self.table[sequence[:-1]].split(num_rows)

    def add_request(self, request: Request) -> None:
        self.seen.append(list(request.prompt_ids))
        self._waiting.append(request)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[Completion]:
        self.clock.sleep(self.step_seconds)
        if self._waiting:
            self._running.append(self._waiting.popleft())
            self._emit(self._running[-1], 1)
        else:
            for request in self._running:
                self._emit(request, self.tokens_per_step)
        done = [request for request in self._running if not request.num_remaining_tokens]
        self._running = [request for request in self._running if request.num_remaining_tokens]
        return [_completion(request) for request in done]

    def _emit(self, request: Request, most: int) -> None:
        num_tokens = min(most, request.num_remaining_tokens)
        request.token_ids += [sum(request.prompt_ids) % 97] * num_tokens
        request.token_times += [self.clock()] * num_tokens


def _completion(request: Request) -> Completion:
    return Completion(
        request_id=request.request_id,
        prompt_tokens=len(request.prompt_ids),
        token_ids=request.token_ids[len(request.prompt_ids) :],
        finish_reason="length",
        arrival_time=request.arrival_time,
        token_times=request.token_times,
    )


class ConstantDraft:
    """Satisfies the engine's DraftProposer: token 0, three times, always."""

    needs_all_positions = False

    def observe(self, request_id: str, start: int, hidden: torch.Tensor) -> None:
        pass

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        return [[0] * min(3, context.max_draft_tokens) for context in contexts]

    def reset(self, request_id: str) -> None:
        pass


def load_constant_draft(path: Path, target: Decoder) -> ConstantDraft:
    """For a folder whose config names the architecture ConstantDraft."""
    return ConstantDraft()
