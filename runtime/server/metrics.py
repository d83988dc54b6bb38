"""Counters and histograms in the text format of Prometheus (version 0.0.4).

Histograms follow the names of the trade: time to first token from arrival, inter-token latency
between consecutive tokens of a request, end-to-end latency from arrival to the last token; seconds.
Gauges and the counters of the engine are read when they are asked for.
"""

import bisect
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from compress.runtime.engine import Engine
from compress.runtime.request import Completion

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """How many values are at most each of `bounds`, their number and their sum."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect.bisect_left(self.bounds, value)] += 1
        self._sum += value

    def samples(self, name: str) -> list[str]:
        """The lines of the histogram called `name`; buckets are cumulative."""
        lines, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum!r}", f"{name}_count {total}"]


class Metrics:
    """What a server has done so far; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._responses: Counter[tuple[str, int]] = Counter()
        self._finished: Counter[str] = Counter()
        self._first, self._between = Histogram(_FIRST), Histogram(_BETWEEN)
        self._whole = Histogram(_WHOLE)

    def record_response(self, path: str, status: int) -> None:
        """Count an HTTP response; `path` is one of the server's own, so there are few."""
        with self._lock:
            self._responses[path, status] += 1

    def record_end(self, completion: Completion) -> None:
        """Count the end of a generation, with its latencies."""
        times = completion.token_times
        with self._lock:
            self._finished[completion.finish_reason] += 1
            if times:
                self._first.observe(times[0] - completion.arrival_time)
                self._whole.observe(times[-1] - completion.arrival_time)
            for before, after in pairwise(times):
                self._between.observe(after - before)

    def render(self, engine: Engine, num_jobs: int) -> str:
        """Everything, for a scrape; `num_jobs` are the requests that have not ended."""
        blocks, stats, scheduler = engine.blocks, engine.stats, engine.scheduler
        owned = blocks.num_blocks - blocks.num_free_blocks
        with self._lock:
            responses = [
                (f'path="{path}",status="{status}"', count)
                for (path, status), count in sorted(self._responses.items())
            ]
            finished = [
                (f'finish_reason="{reason}"', count)
                for reason, count in sorted(self._finished.items())
            ]
            lines = [
                *_counter("http_responses", "HTTP responses", responses),
                *_counter("requests", "Generations that ended", finished),
                *_histogram("time_to_first_token_seconds", self._first),
                *_histogram("inter_token_latency_seconds", self._between),
                *_histogram("e2e_request_latency_seconds", self._whole),
            ]
        gauges = {
            "requests_in_flight": ("Generations that have not ended", num_jobs),
            "requests_running": ("Generations with cache blocks", len(scheduler.running)),
            "requests_waiting": ("Generations that wait for admission", len(scheduler.waiting)),
            "kv_blocks": ("Blocks of the key-value cache", blocks.num_blocks),
            "kv_blocks_owned": ("Blocks that requests own", owned),
            "kv_blocks_cached": (
                "Blocks that only the prefix cache keeps",
                blocks.num_cached_blocks,
            ),
        }
        for name, (text, value) in gauges.items():
            lines += _family(name, text, "gauge", [f"compress_{name} {value}"])
        counters = {
            "steps": ("Steps of the engine", stats.num_steps),
            "computed_tokens": ("Tokens that went through the model", stats.computed_tokens),
            "generated_tokens": ("Output tokens", stats.generated_tokens),
            "prefix_hit_tokens": ("Prompt tokens from the prefix cache", stats.prefix_hit_tokens),
            "preemptions": ("Requests that lost their blocks and waited", stats.preemptions),
            "drafted_tokens": ("Tokens that a draft guessed", stats.drafted_tokens),
            "accepted_tokens": ("Drafted tokens that were right", stats.accepted_tokens),
        }
        for name, (text, value) in counters.items():
            lines += _counter(name, text, [("", value)])
        return "\n".join(lines) + "\n"


def _counter(name: str, text: str, values: Sequence[tuple[str, int]]) -> list[str]:
    """A family of counters; each of `values` is (labels, count)."""
    samples = [
        f"compress_{name}_total{{{labels}}} {count}" if labels else f"compress_{name}_total {count}"
        for labels, count in values
    ]
    return _family(f"{name}_total", text, "counter", samples)


def _histogram(name: str, histogram: Histogram) -> list[str]:
    return _family(name, "Seconds", "histogram", histogram.samples(f"compress_{name}"))


def _family(name: str, text: str, kind: str, samples: Sequence[str]) -> list[str]:
    return [f"# HELP compress_{name} {text}.", f"# TYPE compress_{name} {kind}", *samples]
