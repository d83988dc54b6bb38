"""The table of an ablation: variants of one model in a row, each beside the one before it.

A variant is a mapping with `name`, `recipe`, `overrides`, `seconds`, `peak_rss_bytes` and, as in a
report of `compress serve-eval` against the float model (see report.py), `perplexity`, `fidelity`
and `size`. `with_changes` adds

    change  {perplexity {value, stderr}: ratio to the one before, kl {value, stderr}: difference}

Both are paired by windows, which are hard or easy for all variants alike: their errors are far
smaller than those of the values suggest. The first variant stands beside the float model.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from compress.evalsuite.report import perplexity_ratio


def with_changes(
    baseline: Mapping[str, Any], variants: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """`variants` in their order, each with its `change`; `baseline` holds a `perplexity`."""
    befores = [{"perplexity": baseline["perplexity"], "fidelity": None}, *variants]
    return [
        {
            **variant,
            "change": {
                "perplexity": perplexity_ratio(variant["perplexity"], before["perplexity"]),
                "kl": _kl_change(variant["fidelity"], before["fidelity"]),
            },
        }
        for variant, before in zip(variants, befores, strict=False)
    ]


def _kl_change(
    fidelity: Mapping[str, Any], before: Mapping[str, Any] | None
) -> dict[str, float | None]:
    """Difference of mean KL to that of `before` (None: the float model), paired by windows."""
    windows = fidelity["window_kl"]
    others = before["window_kl"] if before else [0.0] * len(windows)
    differences = [ours - theirs for ours, theirs in zip(windows, others, strict=True)]
    error = None
    if len(differences) > 1:
        error = statistics.stdev(differences) / math.sqrt(len(differences))
    return {"value": statistics.fmean(differences), "stderr": error}


def results_table(report: Mapping[str, Any]) -> Table:
    """One row per variant, the float model first; "change" is against the row above."""
    table = Table(title=f"ablation of {report['model']}", title_justify="left", box=box.SIMPLE)
    for title in ("variant", "recipe"):
        table.add_column(title, overflow="fold")
    titles = ("perplexity", "change %", "KL, nats", "change", "top-1 %", "bits", "seconds", "MB")
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    baseline = report["baseline"]
    bits = f"{baseline['size']['bits_per_weight']:.2f}"
    table.add_row("float", "", f"{baseline['perplexity']['value']:.3f}", "", *[""] * 3, bits)
    for row in report["variants"]:
        fidelity, change = row["fidelity"], row["change"]
        ratio, kl = change["perplexity"], change["kl"]
        percent = (100 * (ratio["value"] - 1), ratio["stderr"] and 100 * ratio["stderr"])
        table.add_row(
            row["name"],
            ", ".join([row["recipe"], *row["overrides"]]),
            f"{row['perplexity']['value']:.3f}",
            _signed(*percent, digits=2),
            f"{fidelity['kl_mean']:.5f}",
            _signed(kl["value"], kl["stderr"], digits=5),
            f"{100 * fidelity['top1_agreement']:.2f}",
            f"{row['size']['bits_per_weight']:.2f}",
            f"{row['seconds']:.0f}",
            f"{row['peak_rss_bytes'] / 1e6:.0f}",
        )
    return table


def _signed(value: float, error: float | None, *, digits: int) -> str:
    return f"{value:+.{digits}f}" + ("" if error is None else f" +- {error:.{digits}f}")
