"""Serving speed: load an engine with requests, watch when each token comes, reduce to figures.

Time zero is just before the first request is submitted. With a_i the arrival of request i (its time
by the workload's schedule, even if the engine was busy in a step then), t_i1 <= t_i2 <= ... the
times of its tokens, all in seconds:

    TTFT_i = t_i1 - a_i                              time to first token
    E2EL_i = t_i,last - a_i                          end-to-end latency
    TPOT_i = (E2EL_i - TTFT_i) / (num_tokens_i - 1)  time per output token, if num_tokens_i > 1
    ITL    = gaps between consecutive chunks, pooled over requests; the tokens of one iteration
             (a verified draft) are one chunk

These are the definitions of `vllm bench serve`; percentiles are numpy's (linear interpolation).
What prefill and decode rates mean depends on the load:

    batch   prefill: all prompt tokens / (time until every request has its first token)
            decode:  tokens that come after that moment / time after it
    rate    prompt tokens and output tokens / duration of the run: what was served, at most the load
            offered, which is not what the engine could do

All targets see the same prompts, and their runs alternate (A B A B ...), so that a machine that
slows down slows both: a ratio is taken within each pair of runs. Every run has prompts of its own,
so a prefix cache cannot help it. Each target is warmed up on each workload, not measured: same
number and length of prompts, a few tokens of output.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from compress.errors import CheckFailed
from compress.evalsuite.contention import cpu_snapshot, foreign_cpus
from compress.evalsuite.target import EvaluationTarget
from compress.evalsuite.workload import Workload, arrival_times
from compress.progress import progress
from compress.runtime.request import Request, SamplingParams

WARMUP_OUTPUT_TOKENS = 8
PERCENTILES = (50, 90, 99)
MIN_OUTPUT_TOKENS = 2  # one token is all prefill: there would be no decode rate

PromptMaker = Callable[[int, str], list[list[int]]]  # (number of prompts, seed) -> prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestRecord:
    """One served request; times in seconds after the start of the run."""

    arrival: float
    prompt_tokens: int
    token_ids: tuple[int, ...]
    token_times: tuple[float, ...]

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.token_times[0] - self.arrival

    @property
    def latency(self) -> float:
        """End-to-end latency, seconds."""
        return self.token_times[-1] - self.arrival

    @property
    def chunk_times(self) -> tuple[float, ...]:
        """Distinct token times: tokens of one iteration arrive as one chunk."""
        return tuple(sorted(set(self.token_times)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """All requests of one run, in the order of submission.

    `foreign_cpus`: CPUs that other processes kept busy meanwhile, None if nobody looked.
    """

    records: tuple[RequestRecord, ...]
    foreign_cpus: float | None = None

    @property
    def duration(self) -> float:
        """Seconds from the start to the last token of the last request."""
        return max(record.token_times[-1] for record in self.records)


def serve(
    target: EvaluationTarget,
    prompts: Sequence[list[int]],
    arrivals: Sequence[float],
    output_tokens: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Run:
    """Submit `prompts[i]` at `arrivals[i]` seconds (ascending) and generate greedily to the end.

    Every request yields exactly `output_tokens` tokens: end-of-sequence is ignored. `clock` must be
    the clock of the target's token times.
    """
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    coming = deque(range(len(prompts)))
    records: dict[str, RequestRecord] = {}
    start = clock()
    while coming or target.has_unfinished:
        while coming and clock() - start >= arrivals[coming[0]]:
            index = coming.popleft()
            target.add_request(
                Request(
                    request_id=str(index),
                    prompt_ids=prompts[index],
                    params=params,
                    arrival_time=start + arrivals[index],
                )
            )
        if not target.has_unfinished:
            sleep(max(0.0, arrivals[coming[0]] - (clock() - start)))
            continue
        for done in target.step():
            if done.finish_reason == "error":
                raise CheckFailed(done.error)
            records[done.request_id] = RequestRecord(
                arrival=done.arrival_time - start,
                prompt_tokens=done.prompt_tokens,
                token_ids=tuple(done.token_ids),
                token_times=tuple(moment - start for moment in done.token_times),
            )
    return Run(records=tuple(records[str(index)] for index in range(len(prompts))))


def batch_rates(run: Run) -> dict[str, float]:
    """Prefill and decode tokens per second of requests that all arrived at time zero."""
    prefilled = max(record.token_times[0] for record in run.records)
    decoded = sum(moment > prefilled for record in run.records for moment in record.token_times)
    return {
        "prefill_tokens_per_s": sum(record.prompt_tokens for record in run.records) / prefilled,
        "decode_tokens_per_s": decoded / (run.duration - prefilled),
    }


def load_rates(run: Run) -> dict[str, float]:
    """Prompt and output tokens served per second of the run, for requests that arrived over it."""
    return {
        "prefill_tokens_per_s": sum(record.prompt_tokens for record in run.records) / run.duration,
        "decode_tokens_per_s": sum(len(r.token_ids) for r in run.records) / run.duration,
    }


def latencies(run: Run) -> dict[str, list[float]]:
    """TTFT, TPOT and E2EL per request and ITL pooled, in seconds."""
    records = run.records
    return {
        "ttft": [record.ttft for record in records],
        "tpot": [
            (record.latency - record.ttft) / (len(record.token_ids) - 1)
            for record in records
            if len(record.token_ids) > 1
        ],
        "itl": [
            after - before for record in records for before, after in pairwise(record.chunk_times)
        ],
        "e2el": [record.latency for record in records],
    }


def acceptance_length(runs: Sequence[Run]) -> float:
    """Tokens per decoding iteration of a request, the target's own token included.

    Pooled over requests; the first token of a request, which comes from its prefill, is left out.
    Without a draft this is 1.
    """
    records = [record for run in runs for record in run.records]
    tokens = sum(len(record.token_times) - 1 for record in records)
    return tokens / sum(len(record.chunk_times) - 1 for record in records)


def identical_outputs(runs: Sequence[Run], others: Sequence[Run]) -> float:
    """Share of requests for which two targets generated the same tokens, in [0, 1]."""
    same = [
        record.token_ids == other.token_ids
        for run, counterpart in zip(runs, others, strict=True)
        for record, other in zip(run.records, counterpart.records, strict=True)
    ]
    return sum(same) / len(same)


def measure(
    targets: Mapping[str, EvaluationTarget],
    workload: Workload,
    *,
    make_prompts: PromptMaker,
    output_tokens: int,
    repeats: int,
    seed: int,
    quiet: bool = False,
) -> dict[str, list[Run]]:
    """Warm every target up, then run `workload` `repeats` times on each, alternating.

    Returns the runs per target; runs at the same place saw the same prompts and arrivals. Raises
    CheckFailed, with the name of the target, when what it computes is not finite.
    """
    if output_tokens < MIN_OUTPUT_TOKENS:
        raise ValueError(f"output tokens must be at least {MIN_OUTPUT_TOKENS}, got {output_tokens}")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    runs: dict[str, list[Run]] = {name: [] for name in targets}
    total = (repeats + 1) * len(targets)
    with progress(f"throughput {workload.label}", total, quiet=quiet) as tick:
        warmup = make_prompts(workload.num_requests, f"{seed} {workload.label} warm-up")
        for name, target in targets.items():
            at_once = [0.0] * len(warmup)
            with _named(name):
                serve(target, warmup, at_once, min(output_tokens, WARMUP_OUTPUT_TOKENS))
            tick(note=f"{name} warmed up")
        for repeat in range(repeats):
            run_seed = f"{seed} {workload.label} {repeat}"
            prompts = make_prompts(workload.num_requests, run_seed)
            arrivals = arrival_times(workload, run_seed)
            for name, target in targets.items():
                before = cpu_snapshot()
                with _named(name):
                    run = serve(target, prompts, arrivals, output_tokens)
                foreign = foreign_cpus(before, cpu_snapshot())
                runs[name].append(replace(run, foreign_cpus=foreign))
                tick(note=name)
    return runs


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Put the target's name in front of what a failed check says."""
    try:
        yield
    except CheckFailed as error:
        raise CheckFailed(f"{name}: {error}") from None


def summarize(values: Sequence[float]) -> dict[str, Any]:
    """Median, sample standard deviation (null for a single run) and the values themselves."""
    return {
        "median": statistics.median(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "runs": list(values),
    }


def workload_report(workload: Workload, runs: Sequence[Run]) -> dict[str, Any]:
    """The JSON entry of one workload: rates and latencies, each as `summarize` over the runs."""
    rates = [batch_rates(run) if workload.rate is None else load_rates(run) for run in runs]
    return {
        "workload": workload.label,
        "requests": workload.num_requests,
        "request_rate": workload.rate,
        **{name: summarize([rate[name] for rate in rates]) for name in rates[0]},
        **_run_totals(runs),
        "latency_ms": _latency_report(runs),
        "foreign_cpus": [run.foreign_cpus for run in runs],
    }


def _run_totals(runs: Sequence[Run]) -> dict[str, Any]:
    requests = [len(run.records) / run.duration for run in runs]
    output = [sum(len(r.token_ids) for r in run.records) / run.duration for run in runs]
    return {
        "requests_per_s": summarize(requests),
        "output_tokens_per_s": summarize(output),
        "duration_s": summarize([run.duration for run in runs]),
    }


def _latency_report(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """{ttft, tpot, itl, e2el} -> {mean, std, p50, ...} -> summary over the runs, milliseconds."""
    per_run = [latencies(run) for run in runs]
    return {
        name: {
            statistic: summarize([1000 * float(reduce(run[name])) for run in per_run])
            for statistic, reduce in _STATISTICS.items()
        }
        for name in per_run[0]
    }


_STATISTICS: dict[str, Callable[[list[float]], Any]] = {
    "mean": np.mean,
    "std": np.std,
    **{f"p{percent}": partial(np.percentile, q=percent) for percent in PERCENTILES},
}
