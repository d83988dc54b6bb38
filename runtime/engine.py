"""The engine: requests in, completions out, one step at a time.

A step is: propose drafts, schedule, build the batch, run the decoder over it, and for every request
that has caught up with its known tokens choose the next ones. Scoring is the same path without the
choice: the log-probability of each following token of the prompt is read off in chunks of rows.

How OpenMP's threads wait matters much on CPUs: `compress/__init__.py` sets it, if it is imported
before torch. Threads that spin for one that lost its core can make a step a hundred times slower;
threads that sleep at once make small operations wait for their waking.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from compress.devices import DTYPES, pick_device
from compress.errors import CheckFailed
from compress.kernels.ops import select
from compress.lookup import lookup
from compress.models.checkpoint import open_checkpoint, read_json
from compress.runtime.attention.choice import make_attention
from compress.runtime.attention.pool import affordable_blocks, allocate_pool, choose_storage
from compress.runtime.batch import build_batch
from compress.runtime.config import decoder_config, token_ids_of
from compress.runtime.engine_config import EngineConfig, make_blocks, make_scheduler
from compress.runtime.loader import load_decoder
from compress.runtime.model import Decoder, attention_spec
from compress.runtime.request import Completion, Request, SamplingParams, check_request
from compress.runtime.sampler import SampledRow, sample
from compress.runtime.scheduler import ScheduledRequest
from compress.runtime.scoring import append_scores
from compress.runtime.speculative.base import DraftProposer, load_proposer
from compress.runtime.speculative.drafting import allows_prefix_cache, draft
from compress.runtime.stats import EngineStats
from compress.runtime.watchdog import Watchdog

__all__ = ["Engine", "EngineConfig", "EngineStats"]


class Engine:
    """Generates with and scores by one loaded model. Not for concurrent use from threads."""

    def __init__(
        self,
        decoder: Decoder,
        config: EngineConfig,
        *,
        proposer: DraftProposer | None = None,
        eos_token_ids: Sequence[int] = (),
        kv_dtype: str = "auto",
    ) -> None:
        self.decoder = decoder
        self.config = config
        self.stats = EngineStats()
        self.max_model_len = min(
            config.max_model_len or decoder.config.max_positions, decoder.config.max_positions
        )
        self._proposer = proposer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._num_named = 0
        spec = attention_spec(decoder.config)
        storage = choose_storage(kv_dtype, decoder.dtype, decoder.kv_scales)
        num_blocks = config.num_blocks or affordable_blocks(
            storage.block_bytes(spec, config.block_size),
            decoder.device,
            wanted=config.max_num_seqs * -(-self.max_model_len // config.block_size),
        )
        self.blocks = make_blocks(config, num_blocks, self.max_model_len)
        self.scheduler = make_scheduler(
            config, self.blocks, prefix_cache=allows_prefix_cache(config, proposer)
        )
        self._watchdog = Watchdog(config.watchdog_steps)
        self._pool = allocate_pool(
            spec,
            num_blocks,
            config.block_size,
            dtype=decoder.dtype,
            device=decoder.device,
            storage=storage,
        )
        self._attention = make_attention(
            config.attention, spec, self._pool, decoder.ops, deterministic=config.deterministic
        )

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        config: EngineConfig | None = None,
        draft: Path | None = None,
        kv_dtype: str = "auto",
    ) -> "Engine":
        """Load a float or packed checkpoint folder, and a draft for it.

        dtype 'auto' is the dtype of the checkpoint; device 'auto' is a GPU if there is one. On a
        CPU the 4-bit product needs 'bfloat16': packed weights are dequantized for other dtypes.
        kv_dtype 'fp8' keeps keys and values in float8_e4m3fn, with the scales of the checkpoint or,
        if it has none, one per token and head; 'int8' has always those; 'model' keeps them in
        dtype; 'auto' is what the checkpoint says.
        """
        config = config or EngineConfig()
        checkpoint = open_checkpoint(path)
        place = pick_device(device)
        stored = decoder_config(checkpoint.config).dtype
        decoder = load_decoder(
            checkpoint,
            dtype=stored if dtype == "auto" else lookup(DTYPES, dtype, "dtype"),
            device=place,
            ops=select(config.kernels, place),
            deterministic=config.deterministic,
            max_len=config.max_model_len,
        )
        eos = set(decoder.config.eos_token_ids)
        generation_config = path / "generation_config.json"
        if generation_config.is_file():
            eos |= set(token_ids_of(read_json(generation_config).get("eos_token_id")))
        proposer = load_proposer(draft, decoder) if draft else None
        return cls(decoder, config, proposer=proposer, eos_token_ids=sorted(eos), kv_dtype=kv_dtype)

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype that keys and values are stored in."""
        return self._pool.k.dtype

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would have something to do."""
        return bool(self._requests)

    def add_request(self, request: Request) -> None:
        """Queue a request; ValueError if it is malformed or could never be finished."""
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} is already in flight")
        check_request(request, self.decoder.config.vocab_size, self.max_model_len)
        self.scheduler.add(request)
        self._requests[request.request_id] = request

    def fork(self, request_id: str, child_id: str, params: SamplingParams) -> None:
        """Continue a running request a second time, as `child_id`, from its tokens so far.

        The child shares the parent's cache blocks (copied when one of them writes); its prompt is
        everything the parent knows now. A draft that needs all hidden states leaves the child to
        the model alone.
        """
        parent = self._requests.get(request_id)
        if parent is None or parent not in self.scheduler.running or parent.params is None:
            raise ValueError(f"request {request_id!r} is not generating")
        child = Request(request_id=child_id, prompt_ids=list(parent.token_ids), params=params)
        if child_id in self._requests:
            raise ValueError(f"request {child_id!r} is already in flight")
        check_request(child, self.decoder.config.vocab_size, self.max_model_len)
        child.is_drafted = not (self._proposer and self._proposer.needs_all_positions)
        self.scheduler.fork(parent, child)
        self._requests[child_id] = child

    def abort(self, request_id: str) -> Completion:
        """Stop a request now; what it has generated is in the completion."""
        if request_id not in self._requests:
            raise ValueError(f"request {request_id!r} is not in flight")
        return self._finish(self._requests[request_id], "abort")

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Complete every prompt (token ids); completions are in the order of the prompts."""
        if isinstance(params, SamplingParams):
            params = [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} sampling params")
        return self._run(
            [
                Request(request_id=self._name(), prompt_ids=list(prompt), params=param)
                for prompt, param in zip(prompts, params, strict=True)
            ]
        )

    def score(self, sequences: Sequence[list[int]]) -> list[torch.Tensor]:
        """Log-probabilities of each sequence under the model, fp32 on the CPU.

        Entry i of a result (len - 1,) is log p(token[i + 1] | tokens[: i + 1]).
        """
        completions = self._run(
            [
                Request(request_id=self._name(), prompt_ids=list(sequence), params=None)
                for sequence in sequences
            ]
        )
        return [c.log_probs for c in completions if c.log_probs is not None]

    @torch.inference_mode()
    def log_probs(self, sequence: list[int], num_rows: int) -> Iterator[torch.Tensor]:
        """Log-probabilities of the whole vocabulary after each token but the last.

        Yields consecutive slices (at most num_rows, V) fp32 on the engine's device; a row is made
        when its slice is asked for, so that no more than one slice need be in memory.
        """
        hidden: list[torch.Tensor] = []
        name = self._name()
        self._run([Request(request_id=name, prompt_ids=sequence, params=None, hidden=hidden)])
        for rows in torch.split(torch.cat(hidden), num_rows):
            yield self.decoder.logits(rows).log_softmax(dim=-1)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Run one iteration over the scheduled requests; the requests that it finished.

        If nothing could be scheduled for `watchdog_steps` steps, all requests end with an error.
        """
        if self._proposer is not None:
            draft(self._proposer, self.scheduler.running)
        schedule = self.scheduler.schedule()
        for request in schedule.preempted:
            self._reset_proposer(request)
        self.stats.preemptions += len(schedule.preempted)
        if not self._watchdog.has_progressed(self.scheduler, schedule):
            unfinished = list(self._requests.values()) if self._watchdog.report else []
            return [self._finish(request, "error") for request in unfinished]
        self._pool.copy_blocks(schedule.copies, self.decoder.ops.copy_blocks)
        batch = build_batch(schedule.scheduled, self.blocks, self.decoder.device)
        self._attention.plan(batch)
        hidden = self.decoder.forward(batch, self._attention)
        self.stats.record_step(self.scheduler, schedule)
        rows = hidden.split_with_sizes(batch.host_query_lens)
        return self._advance(schedule.scheduled, rows)

    def _advance(
        self, scheduled: Sequence[ScheduledRequest], hidden: Sequence[torch.Tensor]
    ) -> list[Completion]:
        """Take the hidden states (n, H) of each scheduled request to its next state."""
        wanted: list[torch.Tensor] = []
        rows: list[SampledRow] = []
        for item, states in zip(scheduled, hidden, strict=True):
            request = item.request
            if request.params is None:
                append_scores(self.decoder, item, states)
                continue
            for position in _choice_positions(item):
                wanted.append(states[position - 1 - item.start])
                rows.append(SampledRow(request.params, position))
        choices: list[int] = []
        if wanted:
            choices = sample(self.decoder.logits(torch.stack(wanted)), rows)
        now = time.perf_counter()
        finished = []
        for item, states in zip(scheduled, hidden, strict=True):
            num_choices = len(_choice_positions(item))
            chosen, choices = choices[:num_choices], choices[num_choices:]
            reason = self._accept(item, states, chosen, now)
            self.scheduler.record_computed(item.request)
            if reason is not None:
                finished.append(self._finish(item.request, reason))
        return finished

    def _accept(
        self, item: ScheduledRequest, states: torch.Tensor, chosen: list[int], now: float
    ) -> str | None:
        """Append the chosen tokens as far as the drafts agree; why the request ends, if it does.

        The computed length is rolled back to the last position whose token is certain: the cache
        slots of refused drafts are overwritten by the next step.
        """
        request = item.request
        num_known = len(request.token_ids)
        drafts = request.draft_ids[: len(chosen) - 1] if chosen else []
        num_accepted = 0
        while num_accepted < len(drafts) and drafts[num_accepted] == chosen[num_accepted]:
            num_accepted += 1
        request.draft_ids.clear()
        request.num_computed_tokens = min(item.start + item.num_tokens, num_known + num_accepted)
        if self._proposer is not None and request.params is not None and request.is_drafted:
            certain = states[: request.num_computed_tokens - item.start]
            self._proposer.observe(request.request_id, item.start, certain)
        if request.params is None:
            return "length" if request.num_computed_tokens == num_known else None
        if drafts:
            self.stats.num_verifications += 1
            self.stats.drafted_tokens += len(drafts)
            self.stats.accepted_tokens += num_accepted
        for token in chosen[: num_accepted + 1]:
            request.token_ids.append(token)
            request.token_times.append(now)
            self.stats.generated_tokens += 1
            if reason := self._finish_reason(request, request.params, token):
                return reason
        return None

    def _finish_reason(self, request: Request, params: SamplingParams, token: int) -> str | None:
        is_eos = token in self._eos_token_ids and not params.ignore_eos
        if is_eos or token in params.stop_token_ids:
            return "stop"
        return "length" if request.num_remaining_tokens == 0 else None

    def _finish(self, request: Request, reason: str) -> Completion:
        self.scheduler.remove(request)
        self._reset_proposer(request)
        del self._requests[request.request_id]
        if not self._requests:
            self.blocks.check()
            assert self.blocks.num_free_blocks == self.blocks.num_blocks, (
                "an idle engine owns blocks"
            )
        is_scored = request.params is None and request.hidden is None and reason == "length"
        return Completion(
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_ids),
            token_ids=request.token_ids[len(request.prompt_ids) :],
            finish_reason=reason,
            arrival_time=request.arrival_time,
            token_times=request.token_times,
            cached_tokens=min(request.num_cached_tokens or 0, len(request.prompt_ids)),
            log_probs=torch.cat(request.log_probs) if is_scored else None,
            error=self._watchdog.report if reason == "error" else None,
        )

    def _reset_proposer(self, request: Request) -> None:
        if self._proposer is not None:
            self._proposer.reset(request.request_id)

    def _run(self, requests: Sequence[Request]) -> list[Completion]:
        """Add `requests` and step until all are done; completions in the same order.

        CheckFailed, with the state of the scheduler, if nothing progresses.
        """
        if self.has_unfinished:
            raise ValueError("other requests are in flight; use add_request() and step()")
        try:
            for request in requests:
                self.add_request(request)
            done: dict[str, Completion] = {}
            while self.has_unfinished:
                done.update((c.request_id, c) for c in self.step())
            if any(completion.finish_reason == "error" for completion in done.values()):
                raise CheckFailed(f"no request could make progress: {self._watchdog.report}")
        except BaseException:
            for request_id in list(self._requests):
                self.abort(request_id)
            raise
        return [done[request.request_id] for request in requests]

    def _name(self) -> str:
        self._num_named += 1
        return f"#{self._num_named}"


def _choice_positions(item: ScheduledRequest) -> range:
    """Positions whose tokens are chosen in this step: after the last known token and each draft."""
    request, end = item.request, item.start + item.num_tokens
    if request.params is None or end < len(request.token_ids):
        return range(0)
    return range(len(request.token_ids), end + 1)
