"""The nouns of generation: what is asked, what is in flight, what came out.

A request is one growing list of known tokens (the prompt, then the output) that the engine chases:
`num_computed_tokens` of them have keys and values in the cache. Prefill, chunked prefill, decoding,
recomputing after preemption and verifying drafted tokens are all the same act, computing the next
tokens that are known or guessed but not yet in the cache.
"""

import time
from dataclasses import dataclass, field

import torch

GREEDY = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    temperature 0 (or top_k 1) is greedy, ties to the lowest token id. `top_k` 0 and `top_p` 1 keep
    every token. The noise of a sampled token is a function of (seed, position, token id) alone.
    Generation ends at `max_tokens`, at any of `stop_token_ids`, or at the end-of-sequence tokens of
    the model unless `ignore_eos`; the stopping token is part of the output.
    """

    max_tokens: int = 128
    temperature: float = GREEDY
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and not negative: {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without noise."""
        return self.temperature == GREEDY or self.top_k == 1


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """One sequence on its way through the engine; the scheduler and the engine update it.

    `params` None asks for a score: log-probabilities of the prompt's own tokens and no output. A
    score whose `hidden` is a list collects the final hidden states (n, H) there instead.
    A lower `priority` is served first under the policy "priority"; `order` is that of arrival.
    `is_drafted` False keeps a draft from guessing: it has not seen the whole sequence.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams | None
    priority: int = 0
    arrival_time: float = field(default_factory=time.perf_counter)
    token_ids: list[int] = field(init=False)
    order: int = field(init=False, default=0)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    is_drafted: bool = True
    draft_ids: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    log_probs: list[torch.Tensor] = field(default_factory=list)
    hidden: list[torch.Tensor] | None = None

    def __post_init__(self) -> None:
        # Nothing follows the last token of a scored sequence: it is predicted, never computed.
        self.token_ids = list(self.prompt_ids if self.params else self.prompt_ids[:-1])

    @property
    def max_tokens(self) -> int:
        """Most tokens to generate; 0 for a score."""
        return self.params.max_tokens if self.params else 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens that may still be generated."""
        return self.max_tokens - max(self.num_output_tokens, 0)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known and drafted tokens whose keys and values are not in the cache yet."""
        return len(self.token_ids) + len(self.draft_ids) - self.num_computed_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token (and drafts after it) is left to compute."""
        return self.num_output_tokens > 0 and self.num_computed_tokens == len(self.token_ids) - 1

    @property
    def max_cached_tokens(self) -> int:
        """Most tokens that can ever be in the cache: the last of all is never fed back."""
        return len(self.prompt_ids) + self.max_tokens - 1

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Known tokens, then drafted ones, at positions [start, end)."""
        num_known = len(self.token_ids)
        drafts = self.draft_ids[max(start - num_known, 0) : max(end - num_known, 0)]
        return self.token_ids[start:end] + drafts


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The end of a request.

    `finish_reason` is "length", "stop", "abort" or "error"; `error` says what went wrong.
    Times are `time.perf_counter()` seconds; `token_times[i]` is when output token i became known
    (tokens accepted together share a time). `cached_tokens` of the prompt came from the prefix
    cache. `log_probs` (prompt_tokens - 1,) fp32 is the result of a score, None for a generation.
    """

    request_id: str
    prompt_tokens: int
    token_ids: list[int]
    finish_reason: str
    arrival_time: float
    token_times: list[float]
    cached_tokens: int = 0
    log_probs: torch.Tensor | None = None
    error: str | None = None


def check_request(request: Request, vocab_size: int, max_model_len: int) -> None:
    """Raise ValueError if `request` is malformed or too long for the model, naming the request."""
    name, prompt = request.request_id, request.prompt_ids
    shortest = 1 if request.params else 2
    if len(prompt) < shortest:
        raise ValueError(f"request {name!r}: {len(prompt)} tokens, need at least {shortest}")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise ValueError(f"request {name!r}: token {wrong} is not in [0, {vocab_size})")
    longest = len(prompt) + request.max_tokens
    if longest > max_model_len:
        raise ValueError(
            f"request {name!r}: {len(prompt)} prompt tokens + {request.max_tokens} to generate"
            f" exceed max_model_len {max_model_len}; the engine may be given a larger one, up to"
            " what the model was made for"
        )
