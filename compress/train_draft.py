"""Train a draft for a target, float or packed: the only place that knows the whole order.

    prompts cut from the text -> the target reads and continues them, greedily, on the engine that
    will serve it -> its hidden states, and its choice after each -> some sequences held out ->
    train -> write, rename to the final name

The draft learns what it will be judged by: verification accepts a guess when it is the target's own
choice, so choices are the labels, not the text's tokens. Prompts count as well: they are cheap, and
more varied than what a small target writes. Acceptance is tested on what it writes.

The wall-clock budget covers everything. Half of it may go into the continuations: what there is
by then is used. The hidden states stay in memory, 2 bytes x hidden size x tokens in bfloat16.
"""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compress import __version__
from compress.calib.data import CalibrationSpec, read_token_ids
from compress.calib.drafts.medusa import (
    MedusaHeads,
    Stretch,
    draft_vocabulary,
    make_examples,
)
from compress.calib.drafts.trainer import Acceptance, Training, TrainingConfig, train_heads
from compress.devices import DTYPES, fast_dtype, peak_rss_bytes, pick_device
from compress.export.draft import MedusaDraft, write_medusa
from compress.export.writer import check_free, check_keeps, publish, staging_dir
from compress.kernels.ops import select
from compress.lookup import lookup
from compress.models.checkpoint import open_checkpoint
from compress.models.load import load_tokenizer, resolve_model
from compress.progress import Ticker, progress
from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.loader import head_rows, load_decoder
from compress.runtime.model import Decoder
from compress.runtime.request import Completion, Request, SamplingParams
from compress.runtime.speculative.base import DraftContext

PROMPT_TOKENS = 256
OUTPUT_TOKENS = 160
MAX_SEQUENCES = 1024
MIN_SEQUENCES = 4
HELD_OUT_FRACTION = 0.1
_NUM_LAYERS = 2
MIN_HELD_OUT_POSITIONS = 100
_BATCH_SEQUENCES = 32  # more is faster, but a short budget ends with more that are unfinished
_COLLECT_SHARE = 0.5  # of the budget
_RESERVE_SHARE, _RESERVE_SECONDS = 0.02, 2.0  # kept back for the last evaluation and for saving
_AUTO_DTYPE = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainDraftJob:
    """One run of `compress train-draft`. Raises ValueError for values that no target could use.

    `target` is what `resolve_model` takes, `data` a source of calibration text (calib/data.py).
    `dtype` "auto" is the fastest of `device`, whatever the checkpoint stores.
    """

    target: str
    output: Path
    kind: str = "medusa"
    data: str = "pydoc"
    max_minutes: float = 10.0
    seed: int = 0
    num_heads: int = 3
    dtype: str = _AUTO_DTYPE
    device: str = "auto"
    offline: bool = False
    force: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        lookup(_KINDS, self.kind, "draft kind")
        if self.dtype != _AUTO_DTYPE:
            lookup(DTYPES, self.dtype, "dtype")
        if not 0 < self.max_minutes < math.inf:
            raise ValueError(f"max_minutes must be positive and finite, got {self.max_minutes}")
        if self.num_heads < 1:
            raise ValueError(f"num_heads must be at least 1, got {self.num_heads}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")


def train_draft(job: TrainDraftJob) -> dict[str, Any]:
    """Run `job` and return its report, which is saved as `draft.json` too.

    Raises ValueError and OSError for bad input; nothing is left under the name of the output then.
    """
    return _KINDS[job.kind](job)


def _train_medusa(job: TrainDraftJob) -> dict[str, Any]:
    started = time.monotonic()
    budget = 60 * job.max_minutes
    check_free(job.output, force=job.force)
    path = resolve_model(job.target, offline=job.offline, quiet=job.quiet)
    check_keeps(path, job.output)
    prompts, data = _prompts(job, path)
    decoder = _load_target(job, path)
    fingerprint = decoder.source.fingerprint
    continuations = collect(
        decoder,
        prompts.tolist(),
        OUTPUT_TOKENS,
        deadline=started + _COLLECT_SHARE * budget,
        quiet=job.quiet,
    )
    reserve = max(_RESERVE_SHARE * budget, min(_RESERVE_SECONDS, 0.1 * budget))
    heads, token_map, training, counts = _fit(
        job, decoder, continuations, deadline=started + budget - reserve
    )
    best = training.history[training.best].held_out
    report = {
        "version": __version__,
        "kind": job.kind,
        "output": str(job.output),
        "target": {"name": job.target, "fingerprint": fingerprint},
        "data": data,
        "seed": job.seed,
        **counts,
        "history": [_plain(asdict(entry)) for entry in training.history],
        "best_round": training.best,
        "stopped": training.stopped,
        "held_out_acceptance": list(best.per_head),
        "predicted_acceptance_length": best.length,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "device": str(decoder.device),
        "max_minutes": job.max_minutes,
    }
    config = decoder.config
    draft = MedusaDraft(
        num_heads=job.num_heads,
        num_layers=_NUM_LAYERS,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        target_fingerprint=fingerprint,
        tensors=heads.state_dict(),
        token_map=None if len(token_map) == config.vocab_size else token_map,
    )
    with _new_folder(job.output) as folder:
        report["seconds"] = round(time.monotonic() - started, 2)
        report["peak_rss_bytes"] = peak_rss_bytes()
        write_medusa(folder, draft, report)
        publish(folder, job.output, force=job.force)
    return report


# Kind of draft -> the function that trains it.
_KINDS: dict[str, Callable[[TrainDraftJob], dict[str, Any]]] = {"medusa": _train_medusa}


def _prompts(job: TrainDraftJob, path: Path) -> tuple[torch.Tensor, dict[str, Any]]:
    """Prompts (N, PROMPT_TOKENS) in random order, and what the report says of them."""
    spec = CalibrationSpec(source=job.data, num_samples=MAX_SEQUENCES, length=PROMPT_TOKENS)
    ids = read_token_ids(spec, load_tokenizer(path), offline=job.offline)
    num_chunks = len(ids) // PROMPT_TOKENS
    if num_chunks < MIN_SEQUENCES:
        raise ValueError(
            f"{job.data}: {len(ids)} tokens are too few to train on; at least"
            f" {MIN_SEQUENCES * PROMPT_TOKENS} are needed"
        )
    chunks = torch.tensor(ids[: num_chunks * PROMPT_TOKENS]).view(num_chunks, PROMPT_TOKENS)
    order = torch.randperm(num_chunks, generator=torch.Generator().manual_seed(job.seed))
    prompts = chunks[order[:MAX_SEQUENCES]]
    return prompts, {
        "source": job.data,
        "prompts": len(prompts),
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "sha256": hashlib.sha256(prompts.numpy().astype("<i8").tobytes()).hexdigest(),
    }


def _load_target(job: TrainDraftJob, path: Path) -> Decoder:
    device = pick_device(job.device)
    return load_decoder(
        open_checkpoint(path),
        dtype=fast_dtype(device) if job.dtype == _AUTO_DTYPE else DTYPES[job.dtype],
        device=device,
        ops=select("auto", device),
    )


class _Recorder:
    """A draft proposer that proposes nothing and keeps every state it hears of.

    One buffer of `max_tokens` states per request: thousands of single rows, kept between the large
    temporaries of each step, would leave the heap full of holes.
    """

    needs_all_positions = True

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._buffers: dict[str, torch.Tensor] = {}
        self._num_states: dict[str, int] = {}

    def observe(self, request_id: str, start: int, hidden: torch.Tensor) -> None:
        if request_id not in self._buffers:
            shape = (self._max_tokens, hidden.shape[1])
            self._buffers[request_id] = torch.empty(shape, dtype=hidden.dtype)
        end = start + len(hidden)
        self._buffers[request_id][start:end] = hidden
        self._num_states[request_id] = end

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        return [[] for _ in contexts]

    def reset(self, request_id: str) -> None:
        """Nothing: the states of a finished request are about to be taken."""

    def take(self, request_id: str) -> torch.Tensor:
        """The states (n, H) of a request, which are forgotten."""
        return self._buffers.pop(request_id)[: self._num_states.pop(request_id)]


class Continuation(NamedTuple):
    """What the target made of a prompt: over the text of the prompt, and where it wrote itself.

    At the last position of the prompt it starts to write.
    """

    prompt: Stretch
    output: Stretch


def collect(
    decoder: Decoder,
    prompts: Sequence[list[int]],
    output_tokens: int,
    *,
    deadline: float,
    quiet: bool = True,
) -> list[Continuation]:
    """What `decoder` chooses over each of `prompts`, all of one length, and greedily after it.

    In the order of the prompts. At the deadline, a value of `time.monotonic()`, they are taken as
    far as they have come; a prompt that has no output then is left out.
    """
    prompt_tokens = len(prompts[0])
    recorder = _Recorder(prompt_tokens + output_tokens)
    engine = Engine(
        decoder,
        EngineConfig(
            max_num_seqs=_BATCH_SEQUENCES,
            max_model_len=prompt_tokens + output_tokens,
            prefix_cache=False,
        ),
        proposer=recorder,
        eos_token_ids=decoder.config.eos_token_ids,
    )
    params = SamplingParams(max_tokens=output_tokens)
    for number, prompt in enumerate(prompts):
        engine.add_request(Request(request_id=str(number), prompt_ids=prompt, params=params))
    done: dict[int, Continuation] = {}
    total = len(prompts) * output_tokens
    with progress("tokens from the target", total, quiet=quiet) as tick:
        for completion in _serve_until(deadline, engine, len(prompts), output_tokens, tick):
            if completion.token_ids:
                states = recorder.take(completion.request_id)
                done[int(completion.request_id)] = _continuation(
                    decoder, states, prompt_tokens, completion.token_ids
                )
    return [done[number] for number in sorted(done)]


def _serve_until(
    deadline: float, engine: Engine, num_requests: int, output_tokens: int, tick: Ticker
) -> Iterator[Completion]:
    """Step until all requests of `engine` are done, or abort the rest at the deadline."""
    left = {str(number) for number in range(num_requests)}
    generated = 0
    while engine.has_unfinished and time.monotonic() < deadline:
        steps = 0
        for completion in engine.step():
            left.remove(completion.request_id)
            steps += output_tokens - len(completion.token_ids)  # ended early
            yield completion
        steps += engine.stats.generated_tokens - generated
        generated = engine.stats.generated_tokens
        tick(steps, f"{len(left)} of {num_requests} sequences left")
    for request_id in sorted(left):
        yield engine.abort(request_id)


@torch.inference_mode()
def _continuation(
    decoder: Decoder, states: torch.Tensor, prompt_tokens: int, output: list[int]
) -> Continuation:
    """`states` (n, H) of the prompt and, but for the last token, of the output."""
    before = states[: prompt_tokens - 1]
    choices = decoder.logits(before.to(decoder.device)).argmax(dim=-1).cpu()
    after = states[prompt_tokens - 1 :]
    return Continuation(
        prompt=Stretch(before, choices),
        output=Stretch(after, torch.tensor(output[: len(after)])),
    )


def _fit(
    job: TrainDraftJob, decoder: Decoder, continuations: Sequence[Continuation], *, deadline: float
) -> tuple[MedusaHeads, torch.Tensor, Training, dict[str, int]]:
    """Trained heads, their vocabulary (Vd,), how it went, and the numbers for the report.

    Held out are whole sequences, and of these what the target wrote: on such text the acceptance
    measured here is that of an engine.
    """
    num_held_out = max(1, round(HELD_OUT_FRACTION * len(continuations)))
    training_part = [stretch for pair in continuations[num_held_out:] for stretch in pair]
    held_out_part = [pair.output for pair in continuations[:num_held_out]]
    if not training_part:
        raise ValueError(
            f"max_minutes = {job.max_minutes:g}: time for {len(continuations)} sequences only"
        )
    vocabulary = draft_vocabulary(training_part)
    training_examples = make_examples(training_part, vocabulary, job.num_heads)
    held_out_examples = [make_examples([s], vocabulary, job.num_heads) for s in held_out_part]
    num_complete = sum(int(examples.is_complete.sum()) for examples in held_out_examples)
    if num_complete < MIN_HELD_OUT_POSITIONS:
        raise ValueError(
            f"the target wrote too little to test the heads on: {num_complete} positions, need"
            f" {MIN_HELD_OUT_POSITIONS}; give it more than --max-minutes"
            f" {job.max_minutes:g}, or more text"
        )
    heads = MedusaHeads(decoder.config.hidden_size, job.num_heads, _NUM_LAYERS).to(decoder.device)
    with progress("training heads, %", 100, quiet=job.quiet) as tick:
        training = train_heads(
            heads,
            training_examples,
            held_out_examples,
            head_rows(decoder, vocabulary),
            TrainingConfig(seed=job.seed),
            deadline=deadline,
            on_step=_percent_ticker(tick),
        )
    if len(training.history) == 1:
        raise ValueError(f"max_minutes = {job.max_minutes:g} left no time to train")
    counts = {
        "sequences": len(continuations),
        "tokens": len(training_examples),
        "held_out_tokens": sum(len(examples) for examples in held_out_examples),
        "draft_vocab_size": len(vocabulary),
        "parameters": sum(parameter.numel() for parameter in heads.parameters()),
    }
    return heads, vocabulary, training, counts


def _percent_ticker(tick: Ticker) -> Callable[[float, Acceptance, torch.Tensor], None]:
    """Shows the share of the plan that is done, the loss and the latest held-out acceptance."""
    shown = 0

    def on_step(share: float, held_out: Acceptance, losses: torch.Tensor) -> None:
        nonlocal shown
        percent = min(int(100 * share), 100)
        per_head = " ".join(f"{value:.2f}" for value in held_out.per_head)
        tick(percent - shown, f"loss {float(losses.sum()):.2f}, held-out acceptance {per_head}")
        shown = percent

    return on_step


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """`values` as JSON gives them back: tuples become lists."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """An empty folder beside `output`, deleted unless it has been renamed."""
    folder = staging_dir(output)
    shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
