"""Measure a checkpoint on the engine that serves it: how large, how good, how fast.

The order of the work:

    1. resolve the models and check every option against them, before anything slow
    2. perplexity of model and baseline on the same windows, and how far one is from the other, by
       deterministic engines: a score does not depend on what was scored beside it
    3. each workload, by the fastest engines, the model with its draft among them: warm up, then
       repeats that alternate between the engines
    4. one report (see report.py), with the card that says how it was measured (see card.py)

Perplexity and speed are measured in the dtype the engine runs in, which the card states for each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from compress.calib.data import evaluation_text
from compress.devices import DTYPES, fast_dtype, pick_device
from compress.evalsuite.assemble import BASELINE, DRAFT, MODEL, Subject, assemble
from compress.evalsuite.card import environment, folder_sha256
from compress.evalsuite.fidelity import Fidelity, compare
from compress.evalsuite.perplexity import (
    PROTOCOLS,
    EvaluationData,
    Perplexity,
    perplexity,
    select_windows,
    tokenize,
)
from compress.evalsuite.throughput import (
    MIN_OUTPUT_TOKENS,
    WARMUP_OUTPUT_TOKENS,
    PromptMaker,
    Run,
    measure,
)
from compress.evalsuite.workload import Workload, parse_workloads, random_prompts, text_prompts
from compress.export.inspect import inspect_checkpoint
from compress.lookup import lookup
from compress.models.checkpoint import open_checkpoint
from compress.models.load import load_tokenizer, resolve_model
from compress.progress import progress
from compress.runtime.attention.pool import KV_DTYPES
from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.speculative.base import proposer_entry

_DTYPES = {"auto": None, **DTYPES}
_DEVICES = dict.fromkeys(("auto", "cpu", "cuda"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeEvalOptions:
    """What to measure. Raises ValueError for values that no model could make right.

    `model`, `baseline`: what `resolve_model` takes; `draft`: a folder. `ppl_data` is a text file,
    `pydoc`, or `none` to leave perplexity out and prompt with random tokens. `workload` as in
    workload.py. `dtype` "auto" is the fastest of the device, whatever the checkpoint stores, for
    model and baseline alike; `kv_dtype` is that of their caches. `deterministic` None scores with
    deterministic engines and times the fastest, True or False has one kind for both. `command` is
    the line that the card shows to repeat the run.
    """

    model: str
    baseline: str | None = None
    draft: Path | None = None
    ppl_data: str = "pydoc"
    ppl_protocol: str = "gptq"
    ppl_window: int = 2048
    ppl_limit: int | None = None
    workload: str = "batch:1,batch:16"
    prompt_tokens: int = 128
    output_tokens: int = 128
    repeats: int = 3
    dtype: str = "auto"
    kv_dtype: str = "auto"
    deterministic: bool | None = None
    device: str = "auto"
    seed: int = 0
    command: str = ""
    offline: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        lookup(PROTOCOLS, self.ppl_protocol, "perplexity protocol")
        lookup(_DTYPES, self.dtype, "dtype")
        lookup(KV_DTYPES, self.kv_dtype, "kv_dtype")
        lookup(_DEVICES, self.device, "device")
        workloads = parse_workloads(self.workload)
        for name, least in (
            ("prompt_tokens", 1),
            ("output_tokens", MIN_OUTPUT_TOKENS),
            ("repeats", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not workloads and self.draft is not None:
            raise ValueError("a draft is measured while generating, but workload is 'none'")
        if not workloads and self.ppl_data == "none":
            raise ValueError("nothing to measure: ppl_data and workload are both 'none'")


def serve_eval(options: ServeEvalOptions) -> dict[str, Any]:
    """Measure as `options` say and return the report: plain JSON values, see report.py.

    Raises ValueError and OSError for bad input, CheckFailed when a model's output is not finite.
    """
    surroundings = environment(options.command)  # before any work: the load is the others'
    subjects, data = check_options(options)
    workloads = parse_workloads(options.workload)
    make_prompts = _prompt_maker(options, subjects, data)
    for workload in workloads:
        make_prompts(workload.num_requests, "check")  # raises now if the text is too short
    engines: dict[str, Engine] = {}
    scores: dict[str, Perplexity | None] = dict.fromkeys(subjects)
    fidelity = None
    if data is not None:
        config = _engine_config(
            options, workloads, deterministic=options.deterministic is not False
        )
        engines = _load_engines(options, subjects, config)
        scores, fidelity = _score(options, subjects, engines, data)
    if workloads:
        engines.clear()  # before the others are loaded: there is memory for one set
        config = _engine_config(options, workloads, deterministic=bool(options.deterministic))
        engines = _load_engines(options, subjects, config, draft=options.draft)
    runs = {workload: _measure(options, engines, workload, make_prompts) for workload in workloads}
    report = assemble(subjects, scores, fidelity, runs)
    report["protocol"] = surroundings | _protocol(options, subjects, engines, data)
    return report


def check_options(
    options: ServeEvalOptions,
) -> tuple[dict[str, Subject], EvaluationData | None]:
    """The models by role and the tokenized text; ValueError and OSError as `serve_eval`."""
    subjects = _resolve(options)
    data = _evaluation_data(options, subjects)
    _check_lengths(options, subjects, parse_workloads(options.workload))
    return subjects, data


def _resolve(options: ServeEvalOptions) -> dict[str, Subject]:
    """Open the checkpoints by role; also check the folders that are needed only later."""
    if options.draft is not None and not options.draft.is_dir():
        raise FileNotFoundError(f"{options.draft}: no such draft folder")
    if options.draft is not None:
        proposer_entry(options.draft)
    names = {MODEL: options.model}
    if options.baseline is not None:
        names[BASELINE] = options.baseline
    return {role: _open(name, options) for role, name in names.items()}


def _open(name: str, options: ServeEvalOptions) -> Subject:
    path = resolve_model(name, offline=options.offline, quiet=options.quiet)
    return Subject(name=name, checkpoint=open_checkpoint(path), facts=inspect_checkpoint(path))


def _evaluation_data(
    options: ServeEvalOptions, subjects: Mapping[str, Subject]
) -> EvaluationData | None:
    """The tokenized text, None for `none`; perplexities per token need one and the same tokens."""
    if options.ppl_data == "none":
        return None
    text = evaluation_text(options.ppl_data)
    tokenized = {
        role: tokenize(text, load_tokenizer(subject.checkpoint.path), source=options.ppl_data)
        for role, subject in subjects.items()
    }
    if len({data.tokens_sha256 for data in tokenized.values()}) > 1:
        raise ValueError(
            f"{options.model} and {options.baseline} tokenize {options.ppl_data!r} differently: "
            "their perplexities per token cannot be compared"
        )
    data = tokenized[MODEL]
    select_windows(  # raises now what would be raised after loading
        data, protocol=options.ppl_protocol, window=options.ppl_window, limit=options.ppl_limit
    )
    return data


def _sequence_lengths(options: ServeEvalOptions, workloads: Sequence[Workload]) -> dict[str, int]:
    """The longest sequence of each kind of measurement, by the options that set it."""
    lengths = {}
    if options.ppl_data != "none":
        lengths["ppl_window"] = options.ppl_window
    if workloads:
        lengths["prompt_tokens + output_tokens"] = options.prompt_tokens + options.output_tokens
    return lengths


def _check_lengths(
    options: ServeEvalOptions, subjects: Mapping[str, Subject], workloads: Sequence[Workload]
) -> None:
    """No sequence of the evaluation may be longer than a model's context."""
    for subject in subjects.values():
        context = subject.checkpoint.config.get("max_position_embeddings")
        for name, length in _sequence_lengths(options, workloads).items():
            if context is not None and length > context:
                raise ValueError(
                    f"{name} = {length} does not fit the context of {subject.name} "
                    f"(max_position_embeddings = {context})"
                )


def _dtype(options: ServeEvalOptions) -> str:
    """Name of the dtype that the engines compute in."""
    if options.dtype != "auto":
        return options.dtype
    return str(fast_dtype(pick_device(options.device))).removeprefix("torch.")


def _load_engines(
    options: ServeEvalOptions,
    subjects: Mapping[str, Subject],
    config: EngineConfig,
    draft: Path | None = None,
) -> dict[str, Engine]:
    load = partial(
        Engine.load,
        dtype=_dtype(options),
        device=options.device,
        config=config,
        kv_dtype=options.kv_dtype,
    )
    engines = {role: load(subject.checkpoint.path) for role, subject in subjects.items()}
    if draft is not None:
        engines[DRAFT] = load(subjects[MODEL].checkpoint.path, draft=draft)
    return engines


def _engine_config(
    options: ServeEvalOptions, workloads: Sequence[Workload], *, deterministic: bool
) -> EngineConfig:
    """Room for the largest workload at once and the longest sequence, else the defaults.

    Were a batch larger than the engine takes, part of it would wait for the rest to finish, and
    that would be measured. Repeats have the same prompts, so a prefix cache would serve all but the
    first of them without their prefill.
    """
    default = EngineConfig()
    most = max([default.max_num_seqs, *(workload.num_requests for workload in workloads)])
    return EngineConfig(
        max_num_seqs=most,
        token_budget=max(default.token_budget, most),
        max_model_len=max(_sequence_lengths(options, workloads).values()),
        prefix_cache=False,
        deterministic=deterministic,
    )


def _score(
    options: ServeEvalOptions,
    subjects: Mapping[str, Subject],
    engines: Mapping[str, Engine],
    data: EvaluationData,
) -> tuple[dict[str, Perplexity | None], Fidelity | None]:
    """Perplexities by role and, where model and baseline can be compared, fidelity."""
    settings: dict[str, Any] = {
        "protocol": options.ppl_protocol,
        "window": options.ppl_window,
        "limit": options.ppl_limit,
    }
    total = len(select_windows(data, **settings)) * len(subjects)
    with progress("perplexity", total, quiet=options.quiet) as tick:
        settings["tick"] = tick
        if _comparable(subjects):
            names = (subjects[MODEL].name, subjects[BASELINE].name)
            both = compare(engines[MODEL], engines[BASELINE], data, names=names, **settings)
            return {MODEL: both.model, BASELINE: both.baseline}, both.fidelity
        return {
            role: perplexity(engines[role], data, name=subject.name, **settings)
            for role, subject in subjects.items()
        }, None


def _comparable(subjects: Mapping[str, Subject]) -> bool:
    """Whether there are two models, and they predict over the same vocabulary."""
    sizes = [subject.checkpoint.config["vocab_size"] for subject in subjects.values()]
    return len(sizes) == 2 and sizes[0] == sizes[1]


def _measure(
    options: ServeEvalOptions,
    engines: Mapping[str, Engine],
    workload: Workload,
    make_prompts: PromptMaker,
) -> dict[str, list[Run]]:
    """Runs of `workload` by role; each engine goes by its role and what the user called it."""
    names = {MODEL: options.model, BASELINE: options.baseline, DRAFT: options.draft}
    labels = {role: f"{role} {names[role]}" for role in engines}
    runs = measure(
        {labels[role]: engine for role, engine in engines.items()},
        workload,
        make_prompts=make_prompts,
        output_tokens=options.output_tokens,
        repeats=options.repeats,
        seed=options.seed,
        quiet=options.quiet,
    )
    return {role: runs[label] for role, label in labels.items()}


def _prompt_maker(
    options: ServeEvalOptions, subjects: Mapping[str, Subject], data: EvaluationData | None
) -> PromptMaker:
    vocab_size = min(int(s.checkpoint.config["vocab_size"]) for s in subjects.values())

    def make_prompts(num: int, seed: str) -> list[list[int]]:
        if data is None:
            return random_prompts(vocab_size, num, options.prompt_tokens, seed)
        return text_prompts(data.tokens, num, options.prompt_tokens, seed)

    return make_prompts


def _protocol(
    options: ServeEvalOptions,
    subjects: Mapping[str, Subject],
    engines: Mapping[str, Engine],
    data: EvaluationData | None,
) -> dict[str, Any]:
    """The part of the card that the options and the models decide."""
    card: dict[str, Any] = {
        role: {
            "name": subject.name,
            "path": str(subject.checkpoint.path),
            "fingerprint": subject.checkpoint.fingerprint,
            "scheme": subject.scheme,
            "dtype": str(engines[role].decoder.dtype).removeprefix("torch."),
            "kv_dtype": str(engines[role].kv_dtype).removeprefix("torch."),
            "device": str(engines[role].decoder.device),
        }
        for role, subject in subjects.items()
    }
    if options.draft is not None:
        fingerprint = folder_sha256(options.draft)
        card["draft"] = {"path": str(options.draft), "fingerprint": fingerprint}
    card["engine"] = asdict(engines[MODEL].config)
    card["seed"] = options.seed
    if data is not None:
        chosen = PROTOCOLS[options.ppl_protocol]
        card["perplexity"] = {
            "protocol": f"{options.ppl_protocol} v{chosen.version}",
            "data": data.source,
            "window": options.ppl_window,
            "stride": chosen.stride(options.ppl_window),
            "bos": chosen.bos,
            "limit": options.ppl_limit,
            "deterministic": options.deterministic is not False,
        }
        if _comparable(subjects):
            card["perplexity"]["fidelity"] = "KL(baseline || model), nats per predicted token"
    if parse_workloads(options.workload):
        card["throughput"] = {
            "workload": options.workload,
            "prompt_tokens": options.prompt_tokens,
            "output_tokens": options.output_tokens,
            "prompts": "random tokens" if data is None else f"random stretches of {data.source}",
            "sampling": "greedy, end of sequence ignored",
            "warm_up": f"one run per engine and workload, {WARMUP_OUTPUT_TOKENS} output tokens",
            "repeats": options.repeats,
            "order": "repeats alternate between the engines, other prompts in every repeat",
        }
    return card
