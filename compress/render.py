"""Tables for the terminal. Everything here only reads plain values and prints them to stdout."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

if TYPE_CHECKING:
    from compress.export.verify import VerifyReport
    from compress.plan import Plan

_WORST_LAYERS = 5
_SPEED_NOTE = (
    "transformers unpacks such a checkpoint when it runs: smaller there, not faster;"
    " serving engines and `compress serve-eval` compute with the packed weights"
)


def megabytes(num_bytes: float) -> str:
    """Bytes as decimal megabytes, as disks and checkpoints are labelled."""
    return f"{num_bytes / 1e6:,.1f} MB"


def print_plan(plan: "Plan") -> None:
    """Every Linear with its scheme or the reason why it stays in float, and the totals."""
    table = Table(Column("linear", overflow="fold"), "shape", "scheme", title="plan")
    for linear in plan.linears:
        table.add_row(linear.name, f"{linear.shape[0]} x {linear.shape[1]}", linear.scheme.label)
    for row in plan.left_in_float:
        table.add_row(escape(row.name), "", escape(f"float: {row.reason}"), style="dim")
    console = Console()
    console.print(table)
    console.print(
        f"{len(plan.linears)} Linears at {plan.bits_per_weight:.2f} bits per weight,"
        f" {len(plan.left_in_float)} left in float;"
        f" weights {megabytes(plan.bytes_before)} -> {megabytes(plan.bytes_after)};"
        f" peak memory about {megabytes(plan.peak_memory_bytes)}"
    )
    _print_warnings(console, plan.warnings)


def plan_to_dict(plan: "Plan") -> dict[str, Any]:
    """The plan with the keys that the report of a run has too."""
    return {
        "bytes": {"before": plan.bytes_before, "after": plan.bytes_after},
        "bits_per_weight": plan.bits_per_weight,
        "planned_peak_rss_bytes": plan.peak_memory_bytes,
        "layers": [
            {"name": row.name, "shape": list(row.shape), "scheme": row.scheme.label}
            for row in plan.linears
        ],
        "warnings": list(plan.warnings),
        "left_in_float": [{"name": row.name, "reason": row.reason} for row in plan.left_in_float],
    }


def print_quantize_report(report: dict[str, Any], output: str) -> None:
    """What a run did: totals, the layers with the largest error, and every fallback."""
    table = Table(
        *("linear", "scheme", "relative error", "note"),
        title="largest output errors",
        caption="relative error: |X (W - W_packed)^T| / |X W^T| on calibration inputs X",
    )
    layers = sorted(report["layers"], key=lambda row: -row["relative_error"])
    for row in layers[:_WORST_LAYERS]:
        error = f"{row['relative_error']:.4f}"
        table.add_row(row["name"], row["scheme"], error, row["fallback"] or "")
    console = Console()
    console.print(table)
    for row in layers:
        if row["fallback"]:
            note = f"fallback in {row['name']}: {row['fallback']}"
            console.print(note, style="yellow", markup=False)
    for site in report["sites"]:
        if site["left_alone"]:
            note = f"left alone: {site['producer']}: {site['left_alone']}"
            console.print(note, style="dim", markup=False)
    for reason, names in _by_reason(report["left_in_float"]).items():
        console.print(f"in float: {', '.join(names)}: {reason}", style="dim", markup=False)
    _print_warnings(console, report["warnings"])
    console.print(f"calibrated on {report['calibration']['description']}", markup=False)
    console.print(_SPEED_NOTE, style="dim", highlight=False)
    before, after = report["bytes"]["before"], report["bytes"]["after"]
    left = report["left_in_float"]
    console.print(
        f"{escape(output)}: {len(layers)} Linears at {report['bits_per_weight']:.2f} bits per"
        f" weight,"
        f" {len(left)} left in float; weights {megabytes(before)} -> {megabytes(after)}"
        f" ({before / after:.2f}x smaller); {report['seconds']:.0f} s,"
        f" peak memory {megabytes(report['peak_rss_bytes'])}"
    )


def print_draft_report(report: dict[str, Any], output: str) -> None:
    """What was trained on what, and how often each head is right on text held out."""
    per_head = ", ".join(f"{share:.1%}" for share in report["held_out_acceptance"])
    Console().print(
        f"{escape(output)}: {report['kind']} draft for {escape(report['target']['name'])};"
        f" held-out acceptance by head {per_head};"
        f" predicted acceptance length {report['predicted_acceptance_length']:.2f};"
        f" {report['seconds']:.0f} s, peak memory {megabytes(report['peak_rss_bytes'])}",
        highlight=False,
    )


def _by_reason(left_in_float: Iterable[dict[str, str]]) -> dict[str, list[str]]:
    """Reason -> names of the Linears, block numbers replaced by `*`."""
    names: dict[str, list[str]] = {}
    for row in left_in_float:
        known = names.setdefault(row["reason"], [])
        if (name := re.sub(r"\.\d+\.", ".*.", row["name"])) not in known:
            known.append(name)
    return names


def _print_warnings(console: Console, warnings: Iterable[str]) -> None:
    for warning in warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, highlight=False)


def print_convert_report(report: dict[str, Any]) -> None:
    """What was converted, and the bytes before and after."""
    before, after = report["bytes"]["before"], report["bytes"]["after"]
    Console().print(
        f"{escape(report['output'])}: {report['num_linears']} modules from {report['from']} to"
        f" {report['to']}, each read back and equal; weights {megabytes(before)} ->"
        f" {megabytes(after)}",
        highlight=False,
    )


def print_verify_report(report: "VerifyReport") -> None:
    """One line per check, failed ones first."""
    console = Console()
    for check in sorted(report.checks, key=lambda check: check.ok):
        mark = "[green]ok[/green]    " if check.ok else "[red]FAILED[/red]"
        console.print(f"{mark} {check.name}: {escape(check.detail)}", highlight=False)


def print_inspection(facts: dict[str, Any]) -> None:
    """The facts of `inspect_checkpoint` as indented `key: value` lines."""
    _print_mapping(Console(), facts, indent=0)


def _print_mapping(console: Console, values: dict[str, Any], indent: int) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            console.print(" " * indent + f"{key}:", highlight=False, markup=False)
            _print_mapping(console, value, indent + 2)
        elif _is_rows(value):
            console.print(" " * indent + f"{key}:", highlight=False, markup=False)
            for row in value:
                console.print(" " * indent + f"  - {_plain(row)}", highlight=False, markup=False)
        else:
            line = " " * indent + f"{key}: {_plain(value)}"
            console.print(line, highlight=False, markup=False)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(row, dict) for row in value)


def _plain(value: Any) -> str:
    """A value of JSON as people write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_plain, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(part)}" for key, part in value.items())
    return str(value)
