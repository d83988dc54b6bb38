"""The two faces of an evaluation: a JSON object for machines, one table for people.

The object holds, beside what else it says,

    model, quantized                                     what was measured, and whether it is packed
    protocol    {...}                                    the card
    size        {bytes, bits_per_weight, ...}
    perplexity  {value, stderr, tokens, windows, window, data_sha256, ...}, or null if not measured
    throughput  [{workload, prefill_tokens_per_s, decode_tokens_per_s, latency_ms, ...}]
    baseline    the same but the card, only if a baseline was measured
    fidelity    {kl_mean, kl_stderr, kl_median, kl_p99, kl_max, top1_agreement, top1_stderr, ...}:
                how far the model is from the baseline, in nats per prediction and as a share; only
                with a baseline, null if perplexity was not measured or the vocabularies differ
    ratio       model / baseline: {bytes, bits_per_weight, perplexity {value, stderr}, throughput[]}
    speculation {acceptance_length, identical_outputs, throughput, speedup, ...}, only with a draft

where a rate is {median, std, runs[]} over the repeats. A ratio of rates is taken within each pair
of interleaved runs and then summarized, so it need not be the ratio of the medians.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from compress.evalsuite.throughput import summarize

_PIPE_WIDTH = 120  # rich takes 80 when it cannot know, which folds rows
_QUIET_CPUS = 0.2  # more than this of other processes is a busy machine
_SMALL_KL = 0.01  # nats; computing the float demo model in bfloat16 alone makes 0.0011

RATES = ("prefill_tokens_per_s", "decode_tokens_per_s")


def rate_ratios(
    numerator: Sequence[Mapping[str, Any]], denominator: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Per workload the ratio of two `throughput` lists, run by run, as {median, std, runs}."""
    return [
        {
            "workload": top["workload"],
            **{
                rate: summarize(
                    [a / b for a, b in zip(top[rate]["runs"], bottom[rate]["runs"], strict=True)]
                )
                for rate in RATES
            },
        }
        for top, bottom in zip(numerator, denominator, strict=True)
    ]


def ratio(model: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Model divided by baseline for every figure that both have."""
    scores = model["perplexity"], baseline["perplexity"]
    return {
        **{key: model["size"][key] / baseline["size"][key] for key in ("bytes", "bits_per_weight")},
        "perplexity": None if None in scores else perplexity_ratio(*scores),
        "throughput": rate_ratios(model["throughput"], baseline["throughput"]),
    }


def perplexity_ratio(model: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """Ratio of two perplexities on the same windows, `stderr` by the windows' differences.

    Windows that are hard for one model are hard for the other: paired, the error of the ratio is
    far smaller than those of the two values suggest. Null for a single window.
    """
    pairs = zip(model["window_nll"], baseline["window_nll"], strict=True)
    differences = [ours - theirs for ours, theirs in pairs]
    value = math.exp(statistics.fmean(differences))
    if len(differences) == 1:
        return {"value": value, "stderr": None}
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return {"value": value, "stderr": value * error}


def print_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the table, what to beware of, and the card; to a file or a pipe 120 columns wide."""
    if console is None:
        console = Console()
        if not console.is_terminal:
            console.width = _PIPE_WIDTH
    console.print(results_table(report))
    for caution in cautions(report):
        console.print(f"beware: {caution}\n", markup=False, highlight=False)
    console.print(card_table(report["protocol"]))


def cautions(report: Mapping[str, Any]) -> list[str]:
    """What stands in the figures and should make a reader careful, one sentence each."""
    found = []
    parts = [report, report.get("baseline", {}), report.get("speculation", {})]
    entries = [entry for part in parts for entry in part.get("throughput", [])]
    foreign = [load for entry in entries for load in entry["foreign_cpus"] if load is not None]
    if foreign and statistics.median(foreign) > _QUIET_CPUS:
        found.append(
            f"other processes kept {statistics.median(foreign):.1f} CPUs busy during the runs: "
            "speeds are too low, and ratios noisy"
        )
    if any(len(entry[RATES[0]]["runs"]) == 1 for entry in entries):
        found.append("a single repeat: the speeds have no error bar")
    same = report.get("speculation", {}).get("identical_outputs", 1.0)
    if same < 1:
        found.append(
            f"with the draft {same:.0%} of the outputs are the same tokens as without: in low "
            "precision a near tie falls by the rows that happen to be computed together"
        )
    dtypes = {report["protocol"][role]["dtype"] for role in ("model", *_baseline(report))}
    if len(dtypes) > 1:
        found.append(f"model and baseline ran in different dtypes ({', '.join(sorted(dtypes))})")
    found.extend(_fidelity_cautions(report, dtypes))
    return found


def _fidelity_cautions(report: Mapping[str, Any], dtypes: set[str]) -> list[str]:
    if "baseline" not in report or report["perplexity"] is None:
        return []
    if report["fidelity"] is None:
        return ["no KL to the baseline: its vocabulary has another size"]
    if report["fidelity"]["kl_mean"] < _SMALL_KL and dtypes != {"float32"}:
        return [
            f"a KL as small as this holds the rounding of {', '.join(sorted(dtypes))} logits: "
            "measure it with --dtype float32"
        ]
    return []


def _baseline(report: Mapping[str, Any]) -> tuple[str, ...]:
    return ("baseline",) if "baseline" in report else ()


def results_table(report: Mapping[str, Any]) -> Table:
    """Rows are figures, columns are original (the baseline), packed, with the draft, and ratio."""
    columns = _columns(report)
    table = Table(title="results", title_justify="left", box=box.SIMPLE, pad_edge=False)
    table.add_column("")
    for title in columns:
        table.add_column(title, justify="right")
    for row in (
        *_size_rows(columns),
        *_quality_rows(columns),
        *_rate_rows(columns),
        *_latency_rows(columns),
    ):
        table.add_row(*row)
    return table


def _columns(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Column title -> what is known about it, left to right."""
    columns: dict[str, Mapping[str, Any]] = {}
    title = "packed" if report["quantized"] else "model"
    if "baseline" in report:
        columns["baseline" if report["baseline"]["quantized"] else "original"] = report["baseline"]
    columns[title] = report
    if "speculation" in report:
        columns[f"{title} + draft"] = report["speculation"]
    if "ratio" in report:
        columns["ratio"] = report["ratio"]
    return columns


def _size_rows(columns: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    sizes = [column.get("size") for column in columns.values()]
    ratios = columns.get("ratio")
    rows = [
        ["bytes on disk", *(_bytes(size["bytes"]) if size else "" for size in sizes)],
        ["bits per weight", *(f"{size['bits_per_weight']:.2f}" if size else "" for size in sizes)],
        [
            "  quantized layers alone",
            *(_optional(size and size["quantized_bits_per_weight"], ".2f") for size in sizes),
        ],
    ]
    if ratios:
        rows[0][-1] = f"{ratios['bytes']:.3f}"
        rows[1][-1] = f"{ratios['bits_per_weight']:.3f}"
    return rows


def _quality_rows(columns: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    rows = []
    values = [column.get("perplexity") for column in columns.values()]
    if any(value is not None for value in values):
        rows.append(["perplexity", *(_perplexity(value) for value in values)])
    distances = [column.get("fidelity") for column in columns.values()]
    if any(distance is not None for distance in distances):
        rows += [
            [title, *("" if distance is None else show(distance) for distance in distances)]
            for title, show in _FIDELITY_ROWS.items()
        ]
    lengths = [column.get("acceptance_length") for column in columns.values()]
    if any(length is not None for length in lengths):
        rows.append(["acceptance length", *(_optional(length, ".2f") for length in lengths)])
    return rows


def _rate_rows(columns: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    lists = [column["throughput"] for column in columns.values()]
    return [
        [
            f"{rate.partition('_')[0]} tokens/s, {entries[0]['workload']}",
            *(_rate(entry[rate], name) for name, entry in zip(columns, entries, strict=True)),
        ]
        for entries in zip(*lists, strict=True)
        for rate in RATES
    ]


def _latency_rows(columns: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Latencies of request-rate workloads; in a batch they only repeat what the rates say."""
    lists = [column["throughput"] for column in columns.values()]
    return [
        [
            f"{name} p50 / p99 ms, {entries[0]['workload']}",
            *(_percentiles(entry.get("latency_ms"), name) for entry in entries),
        ]
        for entries in zip(*lists, strict=True)
        if entries[0].get("request_rate") is not None
        for name in ("ttft", "tpot", "e2el")
    ]


def card_table(card: Mapping[str, Any]) -> Table:
    """The card as two columns, nested keys joined by dots; what is unknown is left out."""
    table = Table(title="protocol", title_justify="left", show_header=False, box=None)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in _flatten(card):
        table.add_row(key, value)
    return table


def _flatten(card: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows = []
    for key, value in card.items():
        if isinstance(value, Mapping):
            rows.extend(_flatten(value, f"{prefix}{key}."))
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for index, item in enumerate(value):
                rows.extend(_flatten(item, f"{prefix}{key}.{index}."))
        elif value is not None and value != []:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            rows.append((f"{prefix}{key}", shown))
    return rows


def _bytes(num: int) -> str:
    return f"{num / 1e9:.2f} GB" if num >= 1e9 else f"{num / 1e6:.1f} MB"


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _perplexity(score: Mapping[str, Any] | None) -> str:
    return "" if score is None else _with_error(score["value"], score["stderr"], 3)


_FIDELITY_ROWS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "KL to baseline, nats": lambda fidelity: _with_error(
        fidelity["kl_mean"], fidelity["kl_stderr"], 5
    ),
    "  median / p99": lambda fidelity: f"{fidelity['kl_median']:.5f} / {fidelity['kl_p99']:.4f}",
    "top-1 agreement, %": lambda fidelity: _with_error(
        100 * fidelity["top1_agreement"], 100 * fidelity["top1_stderr"], 2
    ),
}


def _rate(summary: Mapping[str, Any], column: str) -> str:
    return _with_error(summary["median"], summary["std"], 2 if column == "ratio" else 1)


def _percentiles(latency: Mapping[str, Any] | None, name: str) -> str:
    if latency is None:  # the ratio column
        return ""
    return " / ".join(f"{latency[name][p]['median']:.1f}" for p in ("p50", "p99"))


def _with_error(value: float, error: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if error is None else f" +- {error:.{digits}f}")
