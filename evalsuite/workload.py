"""What a throughput run sends to the engine: which requests, when.

`batch:N`    N requests at time zero.
`rate:R`     Poisson arrivals at R requests per second, 32 requests; `rate:RxN` sends N.
`none`       no throughput run.

Several are joined by commas. Arrival times are cumulative exponential gaps, stretched so that the
last of N requests arrives at exactly N/R seconds (as vLLM's serving benchmark does): every seed
then offers the same load. All is drawn from `random.Random` seeded with a string, which gives the
same numbers on every platform.
"""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from compress.lookup import lookup

DEFAULT_RATE_REQUESTS = 32
_HELP = "expected 'batch:16', 'rate:4', 'rate:4x64' (4 requests per second, 64 in all) or 'none'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """`num_requests` requests: all at once (`rate` None) or at `rate` requests per second."""

    label: str
    num_requests: int
    rate: float | None = None


def parse_workloads(text: str) -> tuple[Workload, ...]:
    """Read a comma-separated list of workloads; ValueError quotes the part that is wrong."""
    parts = [part.strip() for part in text.split(",")]
    if parts == ["none"]:
        return ()
    workloads = tuple(_parse_workload(part) for part in parts)
    labels = [workload.label for workload in workloads]
    for label in labels:
        if labels.count(label) > 1:
            raise ValueError(f"workload {label!r} is given twice in {text!r}")
    return workloads


def _parse_workload(text: str) -> Workload:
    kind, colon, argument = text.partition(":")
    if not colon:
        raise ValueError(f"workload {text!r} is not understood: {_HELP}")
    try:
        return lookup(_PARSERS, kind, "workload kind")(text, argument)
    except ValueError as error:
        raise ValueError(f"workload {text!r} is not understood ({error}): {_HELP}") from None


def _parse_batch(text: str, argument: str) -> Workload:
    return Workload(label=text, num_requests=_positive_int(argument))


def _parse_rate(text: str, argument: str) -> Workload:
    rate_text, cross, count = argument.partition("x")
    rate = float(rate_text)
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(f"the rate must be a positive number, got {rate_text}")
    num_requests = _positive_int(count) if cross else DEFAULT_RATE_REQUESTS
    return Workload(label=text, num_requests=num_requests, rate=rate)


_PARSERS: dict[str, Callable[[str, str], Workload]] = {"batch": _parse_batch, "rate": _parse_rate}


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"the number of requests must be at least 1, got {value}")
    return value


def arrival_times(workload: Workload, seed: str) -> list[float]:
    """Seconds after the start at which each request arrives, ascending, (num_requests,)."""
    if workload.rate is None:
        return [0.0] * workload.num_requests
    generator = random.Random(seed)
    gaps = [generator.expovariate(1.0) for _ in range(workload.num_requests)]
    times = list(itertools.accumulate(gaps))
    stretch = workload.num_requests / workload.rate / times[-1]
    return [time * stretch for time in times]


def text_prompts(tokens: torch.Tensor, num: int, length: int, seed: str) -> list[list[int]]:
    """`num` stretches of `length` tokens from `tokens` (num_tokens,), at distinct random places.

    Distinct, so that a prefix cache finds nothing to share. ValueError if the text is too short.
    """
    places = tokens.numel() - length + 1
    if places < num:
        raise ValueError(
            f"a text of {tokens.numel()} tokens does not hold {num} different prompts "
            f"of {length} tokens: use a longer text, shorter prompts or a smaller workload"
        )
    starts = random.Random(seed).sample(range(places), num)
    return [tokens[start : start + length].tolist() for start in starts]


def random_prompts(vocab_size: int, num: int, length: int, seed: str) -> list[list[int]]:
    """`num` prompts of `length` ids drawn uniformly from [0, vocab_size)."""
    generator = random.Random(seed)
    return [[generator.randrange(vocab_size) for _ in range(length)] for _ in range(num)]
