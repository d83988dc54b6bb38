"""Differences between the rows of an ablation, and its table."""

import math
from typing import Any

import pytest
from rich.console import Console

from compress.evalsuite.ablation import results_table, with_changes


def _variant(name: str, nll: list[float], kl: list[float], **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "recipe": "rtn-w4a16",
        "overrides": [],
        "perplexity": {"value": math.exp(sum(nll) / len(nll)), "window_nll": nll},
        "fidelity": {
            "kl_mean": sum(kl) / len(kl),
            "window_kl": kl,
            "top1_agreement": 0.9,
        },
        "size": {"bits_per_weight": 4.25},
        "seconds": 61.4,
        "peak_rss_bytes": 1_234_000_000,
    } | more


BASELINE = {
    "perplexity": {"value": math.exp(3.0), "window_nll": [2.0, 4.0]},
    "size": {"bits_per_weight": 32.0},
}


def test_with_changes_compares_the_first_variant_with_the_float_model() -> None:
    (row,) = with_changes(BASELINE, [_variant("a", [2.1, 4.3], [0.1, 0.3])])
    # differences 0.1 and 0.3: mean 0.2, standard deviation 0.2 / sqrt 2, over sqrt 2
    assert row["change"]["perplexity"]["value"] == pytest.approx(math.exp(0.2))
    assert row["change"]["perplexity"]["stderr"] == pytest.approx(0.1 * math.exp(0.2))
    assert row["change"]["kl"] == pytest.approx({"value": 0.2, "stderr": 0.1})


def test_with_changes_pairs_each_variant_with_the_one_before() -> None:
    first = _variant("a", [2.2, 4.3], [0.2, 0.6])
    second = _variant("b", [2.1, 4.2], [0.1, 0.4])
    third = _variant("c", [2.1, 4.2], [0.1, 0.4])
    rows = with_changes(BASELINE, [first, second, third])
    assert [row["name"] for row in rows] == ["a", "b", "c"]
    assert rows[1]["change"]["perplexity"]["value"] == pytest.approx(math.exp(-0.1))
    assert rows[1]["change"]["perplexity"]["stderr"] == pytest.approx(0, abs=1e-12)
    assert rows[1]["change"]["kl"] == pytest.approx({"value": -0.15, "stderr": 0.05})
    assert rows[2]["change"]["kl"] == {"value": 0.0, "stderr": 0.0}


def test_with_changes_of_a_single_window_has_no_error() -> None:
    baseline = BASELINE | {"perplexity": {"value": math.exp(2.0), "window_nll": [2.0]}}
    (row,) = with_changes(baseline, [_variant("a", [2.1], [0.1])])
    assert row["change"]["kl"] == {"value": pytest.approx(0.1), "stderr": None}
    assert row["change"]["perplexity"]["stderr"] is None


def test_results_table_has_one_row_per_variant_under_the_float_model() -> None:
    variants = [
        _variant("a", [2.2, 4.3], [0.2, 0.6]),
        _variant("b", [2.1, 4.2], [0.1, 0.4], overrides=["method.scale.weighted=false"]),
    ]
    report = {"model": "m", "baseline": BASELINE, "variants": with_changes(BASELINE, variants)}
    console = Console(width=160, record=True)
    console.print(results_table(report))
    rows = [" ".join(line.split()) for line in console.export_text().splitlines()]
    assert "float 20.086 32.00" in rows
    assert (
        "b rtn-w4a16, method.scale.weighted=false 23.336 -9.52 +- 0.00 0.25000"
        " -0.15000 +- 0.05000 90.00 4.25 61 1234"
    ) in rows
