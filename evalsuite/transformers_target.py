"""transformers as an evaluation target, and its figures beside ours from one command.

    python -m compress.evalsuite.transformers_target MODEL [--also PACKED] [--workload batch:1]

The same checkpoint, prompts, dtype and threads; `transformers.generate` and our engine take turns
in one run (see throughput.py). With `--ppl-data` it also compares perplexities.
"""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from compress.calib.data import evaluation_text
from compress.devices import DTYPES
from compress.evalsuite.perplexity import perplexity, tokenize
from compress.evalsuite.target import EvaluationTarget
from compress.evalsuite.throughput import measure, workload_report
from compress.evalsuite.workload import parse_workloads, text_prompts
from compress.lookup import lookup
from compress.models.load import load_tokenizer, resolve_model
from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.request import Completion, Request


class TransformersTarget:
    """Serves all waiting requests as one `generate` call: prompts of one length, greedy."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self._waiting: list[Request] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether a request is waiting."""
        return bool(self._waiting)

    def add_request(self, request: Request) -> None:
        """Queue a greedy request that ignores the end of sequence."""
        params = request.params
        if params is None or not params.is_greedy or not params.ignore_eos:
            raise ValueError(f"{request.request_id}: only greedy requests that ignore EOS")
        if self._waiting and len(request.prompt_ids) != len(self._waiting[0].prompt_ids):
            raise ValueError(f"{request.request_id}: prompts of a batch must have one length")
        self._waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Serve everything that waits, to its end."""
        requests, self._waiting = self._waiting, []
        prompts = torch.tensor([request.prompt_ids for request in requests])
        count = max(request.max_tokens for request in requests)
        times: list[float] = []

        def note_time(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

        output = self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[note_time],
        )
        new = output[:, prompts.shape[1] :].tolist()
        return [
            Completion(
                request_id=request.request_id,
                prompt_tokens=len(request.prompt_ids),
                token_ids=tokens[: request.max_tokens],
                finish_reason="length",
                arrival_time=request.arrival_time,
                token_times=times[: request.max_tokens],
            )
            for request, tokens in zip(requests, new, strict=True)
        ]

    @torch.inference_mode()
    def log_probs(self, sequence: list[int], num_rows: int) -> Iterator[torch.Tensor]:
        """As in `EvaluationTarget`; the logits of the whole sequence are in memory at once."""
        logits = self._model(torch.tensor([sequence]), use_cache=False).logits[0, :-1]
        for rows in logits.split(num_rows):
            yield rows.float().log_softmax(dim=-1)


def main(
    model: Annotated[str, typer.Argument(help="Model for both engines.")],
    also: Annotated[str | None, typer.Option(help="Packed model for our engine only.")] = None,
    workload: Annotated[str, typer.Option(help="batch:N, comma-separated.")] = "batch:1,batch:16",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="Tokens generated per prompt.")] = 128,
    repeats: Annotated[int, typer.Option(help="Runs of each.")] = 3,
    dtype: Annotated[str, typer.Option(help="Of both engines.")] = "bfloat16",
    ppl_data: Annotated[str, typer.Option(help="Text for perplexity, or none.")] = "none",
    ppl_limit: Annotated[int, typer.Option(help="Windows of 2048 tokens.")] = 2,
) -> None:
    """Print tokens per second, and perplexity if asked for, of transformers and of our engine."""
    path = resolve_model(model)
    config = EngineConfig(prefix_cache=False)  # repeats have the same prompts
    targets: dict[str, EvaluationTarget] = {
        f"transformers {model}": TransformersTarget(path, lookup(DTYPES, dtype, "dtype")),
        f"compress {model}": Engine.load(path, dtype=dtype, device="cpu", config=config),
    }
    if also is not None:
        targets[f"compress {also}"] = Engine.load(
            resolve_model(also), dtype=dtype, device="cpu", config=config
        )
    source = "pydoc" if ppl_data == "none" else ppl_data
    data = tokenize(evaluation_text(source), load_tokenizer(path), source=source)
    if ppl_data != "none":
        for name, target in targets.items():
            value = perplexity(target, data, limit=ppl_limit, name=name).value
            print(f"{name}: perplexity {value:.5f} over {ppl_limit} windows of {source}, {dtype}")
    for load in parse_workloads(workload):
        runs = measure(
            targets,
            load,
            make_prompts=lambda num, seed: text_prompts(data.tokens, num, prompt_tokens, seed),
            output_tokens=output_tokens,
            repeats=repeats,
            seed=0,
        )
        reports = {name: workload_report(load, served) for name, served in runs.items()}
        first = next(iter(reports.values()))
        for name, report in reports.items():
            print(f"{load.label} {name}: {_line(report, first)}")


def _line(report: dict[str, Any], reference: dict[str, Any]) -> str:
    """Rates with their deviation, and their ratio to those of `reference`."""
    parts = []
    for key in ("prefill_tokens_per_s", "decode_tokens_per_s"):
        value, base = report[key], reference[key]
        spread = value["std"] if value["std"] is not None else math.nan
        ratio = value["median"] / base["median"]
        parts.append(f"{key} {value['median']:.1f} +- {spread:.1f} ({ratio:.2f}x)")
    busy = max(value for value in report["foreign_cpus"] if value is not None)
    return f"{', '.join(parts)}; other processes used up to {busy:.1f} CPUs"


if __name__ == "__main__":
    typer.run(main)
