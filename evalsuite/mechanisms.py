"""What each mechanism of the engine brings on one load: the same requests with it switched off.

    python -m compress.evalsuite.mechanisms demo

The load mixes short and long outputs, as in Orca (Yu et al. 2022): requests arrive together, with
`lengths` tokens to generate in turn. Every engine has the same weights and the same pool of cache
blocks; runs alternate between the engines, after one round that is not counted.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated

import typer

from compress.devices import DTYPES, fast_dtype, pick_device
from compress.evalsuite.workload import random_prompts
from compress.kernels.ops import select
from compress.lookup import lookup
from compress.models.checkpoint import open_checkpoint
from compress.models.load import resolve_model
from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.loader import load_decoder
from compress.runtime.model import Decoder
from compress.runtime.request import SamplingParams

# Name -> the fields of EngineConfig that switch the mechanism off.
SWITCHES: dict[str, dict[str, object]] = {
    "as it is": {},
    "request-level batching": {"batching": "request"},
    "contiguous allocation": {"allocation": "contiguous", "prefix_cache": False},
    "no prefix cache": {"prefix_cache": False},
    "no chunked prefill": {"chunked_prefill": False},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MechanismRun:
    """One run of the load. `seconds` is wall time; the rest are counts over the whole run."""

    seconds: float
    output_tokens: int
    num_steps: int
    peak_running: int
    preemptions: int
    prefix_hit_tokens: int
    kv_waste: float


def run_load(
    decoder: Decoder, config: EngineConfig, prompts: Sequence[list[int]], lengths: Sequence[int]
) -> MechanismRun:
    """Generate `lengths[i]` tokens, greedily, for each prompt i on a new engine."""
    engine = Engine(decoder, config)
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    start = time.perf_counter()
    engine.generate(prompts, params)
    stats = engine.stats
    return MechanismRun(
        seconds=time.perf_counter() - start,
        output_tokens=stats.generated_tokens,
        num_steps=stats.num_steps,
        peak_running=stats.peak_running,
        preemptions=stats.preemptions,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        kv_waste=stats.kv_waste,
    )


def main(
    model: Annotated[str, typer.Argument(help="Model to serve.")],
    lengths: Annotated[str, typer.Option(help="Output tokens, in turn.")] = "8,50,200",
    requests: Annotated[int, typer.Option(help="Requests in the load.")] = 48,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 32,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests at once.")] = 16,
    num_blocks: Annotated[int, typer.Option(help="Cache blocks of 64 tokens.")] = 512,
    max_model_len: Annotated[int, typer.Option(help="Longest sequence.")] = 2048,
    only: Annotated[str, typer.Option(help="Mechanisms to switch off, comma-separated.")] = "",
    repeats: Annotated[int, typer.Option(help="Runs of each.")] = 3,
    dtype: Annotated[str, typer.Option(help="auto or a dtype.")] = "auto",
) -> None:
    """Print steps, throughput and use of the cache with each mechanism on, and off."""
    device = pick_device("auto")
    wanted = fast_dtype(device) if dtype == "auto" else lookup(DTYPES, dtype, "dtype")
    checkpoint = open_checkpoint(resolve_model(model))
    decoder = load_decoder(checkpoint, dtype=wanted, device=device, ops=select("auto", device))
    base = EngineConfig(
        max_num_seqs=max_num_seqs, num_blocks=num_blocks, max_model_len=max_model_len
    )
    names = ["as it is", *(only.split(",") if only else list(SWITCHES)[1:])]
    configs = {name: replace(base, **lookup(SWITCHES, name, "mechanism")) for name in names}  # type: ignore[arg-type]
    cycle = [int(length) for length in lengths.split(",")]
    outputs = [cycle[i % len(cycle)] for i in range(requests)]
    prompts = random_prompts(decoder.config.vocab_size, requests, prompt_tokens, "0")
    runs: dict[str, list[MechanismRun]] = {name: [] for name in names}
    for repeat in range(repeats + 1):
        for name, config in configs.items():
            run = run_load(decoder, config, prompts, outputs)
            if repeat:
                runs[name].append(run)
    for name, measured in runs.items():
        print(_line(name, measured))


def _line(name: str, runs: Sequence[MechanismRun]) -> str:
    rates = sorted(run.output_tokens / run.seconds for run in runs)
    last = runs[-1]
    return (
        f"{name:>22}: {median(rates):7.1f} tok/s ({rates[0]:.1f} to {rates[-1]:.1f}),"
        f" {last.num_steps} steps, {last.peak_running} requests at once,"
        f" {last.preemptions} preemptions, {last.prefix_hit_tokens} tokens from the cache,"
        f" {last.kv_waste:.0%} of owned slots empty"
    )


if __name__ == "__main__":
    typer.run(main)
