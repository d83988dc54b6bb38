"""The engine: requests in, completions out, one step at a time.

A step is: propose drafts, schedule, build the batch, run the decoder over it, and for every request
that has caught up with its known tokens choose the next ones (`advance.py`). Scoring is the same
path without the choice: the log-probability of each following token of the prompt is read off in
chunks of rows. A request for several outputs (`parallel.py`) or a beam search (`beam.py`) runs as
several requests that share cache blocks, and ends as one completion.

How OpenMP's threads wait matters much on CPUs: `compress/__init__.py` sets it, if it is imported
before torch. Threads that spin for one that lost its core can make a step a hundred times slower;
threads that sleep at once make small operations wait for their waking.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from compress.devices import DTYPES, pick_device
from compress.errors import CheckFailed
from compress.kernels.gated_mul import gated_mul_by_rows
from compress.kernels.ops import select
from compress.lookup import lookup
from compress.models.checkpoint import open_checkpoint, read_json
from compress.runtime.advance import Advance, accept, read_states
from compress.runtime.attention.choice import make_attention
from compress.runtime.attention.pool import affordable_blocks, allocate_pool, choose_storage
from compress.runtime.batch import build_batch
from compress.runtime.config import decoder_config, token_ids_of
from compress.runtime.engine_config import EngineConfig, make_blocks, make_scheduler
from compress.runtime.in_flight import InFlight
from compress.runtime.loader import load_decoder
from compress.runtime.model import Decoder, attention_spec
from compress.runtime.request import Completion, Request, SamplingParams, check_request
from compress.runtime.scheduler import ScheduledRequest
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
        generation_config: Mapping[str, Any] | None = None,
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
        self.generation_config = dict(generation_config or {})  # of the checkpoint
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
        self._in_flight = InFlight(
            self.scheduler,
            self._pool,
            self._eos_token_ids,
            needs_all_positions=proposer is not None and proposer.needs_all_positions,
            forget=self._reset_proposer,
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
        ops = select(config.kernels, place)
        if config.deterministic and ops.backend == "torch":
            ops = ops._replace(gated_mul=gated_mul_by_rows)
        stored = decoder_config(checkpoint.config).dtype
        decoder = load_decoder(
            checkpoint,
            dtype=stored if dtype == "auto" else lookup(DTYPES, dtype, "dtype"),
            device=place,
            ops=ops,
            deterministic=config.deterministic,
            max_len=config.max_model_len,
        )
        file = path / "generation_config.json"
        generation_config = read_json(file) if file.is_file() else {}
        eos = {*decoder.config.eos_token_ids, *token_ids_of(generation_config.get("eos_token_id"))}
        return cls(
            decoder,
            config,
            proposer=load_proposer(draft, decoder) if draft else None,
            eos_token_ids=sorted(eos),
            generation_config=generation_config,
            kv_dtype=kv_dtype,
        )

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype that keys and values are stored in."""
        return self._pool.k.dtype

    @property
    def has_unfinished(self) -> bool:
        """Whether a step would have something to do."""
        return bool(self._in_flight.requests or self._in_flight.done)

    def add_request(self, request: Request) -> None:
        """Queue a request; ValueError if it is malformed or could never be finished.

        One for several outputs gets `children`, whose tokens can be watched, and which can be
        aborted one by one; there will be one completion, by its own name.
        """
        self._check(request)
        self._in_flight.add(request)

    def fork(self, request_id: str, child_id: str, params: SamplingParams) -> None:
        """Continue a running request a second time, as `child_id`, from its tokens so far.

        The child shares the parent's cache blocks (copied when one of them writes); its prompt is
        everything the parent knows now. A draft that needs all hidden states leaves the child to
        the model alone.
        """
        parent = self._in_flight.requests.get(request_id)
        if parent is None or parent not in self.scheduler.running or parent.params is None:
            raise ValueError(f"request {request_id!r} is not generating")
        child = Request(request_id=child_id, prompt_ids=list(parent.token_ids), params=params)
        self._check(child)
        self._in_flight.fork(parent, child)

    def abort(self, request_id: str) -> Completion:
        """Stop a request now; what it has generated is in the completion.

        With a request for several outputs all of them stop. One of its `children` can be stopped
        alone: its completion is returned here and is part of that of the whole, which comes from
        the next step if this was the last output.
        """
        return self._in_flight.abort(request_id)

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Complete every prompt (token ids); completions are in the order of the prompts.

        There is one for each prompt. Where `n` outputs were asked for, it is the first of them and
        the others are its `siblings`. A prompt for which no token was possible has a completion
        with finish_reason "error"; CheckFailed if the engine came to a standstill.
        """
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
        return [c.prompt_logprobs.chosen for c in completions if c.prompt_logprobs is not None]

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
        done, self._in_flight.done = self._in_flight.done, []
        if self._proposer is not None:
            draft(self._proposer, self.scheduler.running)
        schedule = self.scheduler.schedule()
        for request in schedule.preempted:
            self._reset_proposer(request)
        self.stats.preemptions += len(schedule.preempted)
        if not self._watchdog.has_progressed(self.scheduler, schedule):
            report = self._watchdog.report
            names = self._in_flight.names if report else []
            return done + [self._in_flight.end(name, "error", report) for name in names]
        self._pool.copy_blocks(schedule.copies, self.decoder.ops.copy_blocks)
        batch = build_batch(schedule.scheduled, self.blocks, self.decoder.device)
        self._attention.plan(batch)
        hidden = self.decoder.forward(batch, self._attention)
        self.stats.record_step(self.scheduler, schedule)
        rows = hidden.split_with_sizes(batch.host_query_lens)
        return done + self._advance(schedule.scheduled, rows)

    def _advance(
        self, scheduled: Sequence[ScheduledRequest], hidden: Sequence[torch.Tensor]
    ) -> list[Completion]:
        """Take the hidden states (n, H) of each scheduled request to its next state."""
        items, states = list(scheduled), list(hidden)
        for item, rows in zip(scheduled, hidden, strict=True):
            forked = self._in_flight.fork_outputs(item)
            items += forked
            states += [rows] * len(forked)
        results = read_states(self.decoder, items, states, self._eos_token_ids)
        now = time.perf_counter()
        finished: list[Completion] = []
        for result in results:
            request, candidates = result.item.request, result.candidates
            reason = accept(result, self._eos_token_ids, now, self.stats)
            self._observe(result)
            if candidates is not None:
                self._in_flight.offer(request, candidates)
            elif result.choices and request.parent_id is not None:
                self._in_flight.keep_prompt(request)
            if reason != "error" and (candidates is None or candidates.token_ids):
                self.scheduler.record_computed(request)
            if reason is not None:
                finished += self._in_flight.settle(request, reason)
        return finished + self._in_flight.advance_searches(now)

    def _observe(self, result: Advance) -> None:
        """Show the draft the states of what is certain."""
        request, start = result.item.request, result.item.start
        if self._proposer is not None and request.params is not None and request.is_drafted:
            certain = result.states[: request.num_computed_tokens - start]
            self._proposer.observe(request.request_id, start, certain)

    def _check(self, request: Request) -> None:
        if request.request_id in {*self._in_flight.names, *self._in_flight.requests}:
            raise ValueError(f"request {request.request_id!r} is already in flight")
        check_request(request, self.decoder.config.vocab_size, self.max_model_len)

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
            if self._watchdog.report is not None:
                raise CheckFailed(f"no request could make progress: {self._watchdog.report}")
        except BaseException:
            for name in self._in_flight.names:
                self.abort(name)
            raise
        return [done[request.request_id] for request in requests]

    def _name(self) -> str:
        self._num_named += 1
        return f"#{self._num_named}"
