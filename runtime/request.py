"""The nouns of generation: what is asked, what is in flight, what came out.

A request is one growing list of known tokens (the prompt, then the output) that the engine chases:
`num_computed_tokens` of them have keys and values in the cache. Prefill, chunked prefill, decoding,
recomputing after preemption and verifying drafted tokens are all the same act, computing the next
tokens that are known or guessed but not yet in the cache.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from compress.runtime.logprobs import LogProbs
from compress.runtime.sampling_params import GREEDY, SamplingParams
from compress.runtime.token_counts import TokenCounts

__all__ = ["GREEDY", "Completion", "Request", "SamplingParams", "check_request"]


@dataclass(kw_only=True, slots=True, eq=False)
class Request:
    """One sequence on its way through the engine; the scheduler and the engine update it.

    `params` None asks for a score: log-probabilities of the prompt's own tokens and no output. A
    score whose `hidden` is a list collects the final hidden states (n, H) there instead. A seed
    that is None is drawn here. A lower `priority` is served first under the policy "priority";
    `order` is that of arrival.
    `is_drafted` False keeps a draft from guessing: it has not seen the whole sequence.

    A request for several outputs, or for a beam search, is not computed itself. Requests with its
    name in `parent_id` are: its `children`, numbered by `index`, or beams that come and go. A beam
    (`is_beam`) that has computed all it knows waits for the others. `num_forks` more requests will
    fork from this one when its prompt is computed.
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
    prompt_logprobs: list[LogProbs] = field(default_factory=list)
    logprobs: list[LogProbs] = field(default_factory=list)
    hidden: list[torch.Tensor] | None = None
    parent_id: str | None = None
    index: int = 0
    children: list["Request"] = field(default_factory=list)
    num_forks: int = 0
    is_beam: bool = False
    error: str | None = None
    counts: TokenCounts | None = None

    def __post_init__(self) -> None:
        if self.params is not None and self.params.seed is None:
            self.params = replace(self.params, seed=secrets.randbits(63))
        # Nothing follows the last token of a scored sequence: it is predicted, never computed.
        self.token_ids = list(self.prompt_ids if self.params else self.prompt_ids[:-1])

    @property
    def max_tokens(self) -> int:
        """Most tokens to generate; 0 for a score."""
        return self.params.max_tokens if self.params else 0

    @property
    def num_top_of_prompt(self) -> int | None:
        """How many tokens are reported beside each one of the prompt; None: not even that one."""
        return self.params.prompt_logprobs if self.params else 0

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
    `params` are those that were in force, with the seed that was used. Times are
    `time.perf_counter()` seconds; `token_times[i]` is when output token i became known (tokens
    accepted together share a time). `cached_tokens` of the prompt came from the prefix cache.

    `logprobs` are of the output tokens, `prompt_logprobs` of all prompt tokens but the first; None
    where they were not asked for. The latter are the result of a score.

    A request for n outputs has one completion: the first output, and in `siblings` the others. They
    are in the order of `index`, which says which seed they had; with `best_of`, and in a beam
    search, the best comes first. `beam_score` is what a beam search compares by.
    """

    request_id: str
    prompt_tokens: int
    token_ids: list[int]
    finish_reason: str
    arrival_time: float
    token_times: list[float]
    cached_tokens: int = 0
    params: SamplingParams | None = None
    logprobs: LogProbs | None = None
    prompt_logprobs: LogProbs | None = None
    error: str | None = None
    index: int = 0
    siblings: tuple["Completion", ...] = ()
    beam_score: float | None = None

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the output tokens; -inf if there are none or they are unknown."""
        if self.logprobs is None or not len(self.logprobs.chosen):
            return float("-inf")
        return float(self.logprobs.chosen.double().mean())


def check_request(request: Request, vocab_size: int, max_model_len: int) -> None:
    """Raise ValueError if `request` is malformed or too long for the model, naming the request."""
    name, prompt = request.request_id, request.prompt_ids
    shortest = 1 if request.params else 2
    if len(prompt) < shortest:
        raise ValueError(f"request {name!r}: {len(prompt)} tokens, need at least {shortest}")
    _check_ids(name, "", prompt, vocab_size)
    if request.params is not None:
        _check_ids(name, "logit_bias: ", list(request.params.logit_bias), vocab_size)
        for word in request.params.bad_words:
            _check_ids(name, "bad_words: ", word, vocab_size)
        _check_ids(name, "stop_token_ids: ", request.params.stop_token_ids, vocab_size)
    longest = len(prompt) + request.max_tokens
    if longest > max_model_len:
        raise ValueError(
            f"request {name!r}: {len(prompt)} prompt tokens + {request.max_tokens} to generate"
            f" exceed max_model_len {max_model_len}; the engine may be given a larger one, up to"
            " what the model was made for"
        )


def _check_ids(name: str, what: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise ValueError(f"request {name!r}: {what}token {wrong} is not in [0, {vocab_size})")
