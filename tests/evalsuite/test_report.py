"""The JSON file and the table."""

import io
import math
from typing import Any

import pytest
from rich.console import Console

from compress.evalsuite.report import (
    cautions,
    perplexity_ratio,
    print_report,
    rate_ratios,
    ratio,
)
from compress.evalsuite.throughput import RequestRecord, Run, summarize, workload_report
from compress.evalsuite.workload import Workload


def _throughput(*decode: float, workload: str = "batch:1") -> list[dict[str, Any]]:
    prefill = [10 * value for value in decode]
    return [
        {
            "workload": workload,
            "prefill_tokens_per_s": summarize(prefill),
            "decode_tokens_per_s": summarize(decode),
            "foreign_cpus": [0.0] * len(decode),
        }
    ]


def _part(num_bytes: int, value: float, *decode: float, quantized: bool) -> dict[str, Any]:
    return {
        "model": "m",
        "quantized": quantized,
        "size": {
            "bytes": num_bytes,
            "bits_per_weight": num_bytes / 1e6,
            "quantized_bits_per_weight": 4.25 if quantized else None,
        },
        "perplexity": {
            "value": value,
            "stderr": 0.25,
            "window_nll": [math.log(value) - 0.5, math.log(value) + (0.52 if quantized else 0.5)],
        },
        "throughput": _throughput(*decode),
    }


@pytest.fixture
def report() -> dict[str, Any]:
    model = _part(8_000_000, 22.0, 40.0, 30.0, quantized=True)
    baseline = _part(32_000_000, 20.0, 10.0, 20.0, quantized=False)
    card = {
        "command": "compress serve-eval packed",
        "hardware": {"gpus": [{"name": "H200"}]},
        "model": {"dtype": "bfloat16"},
        "baseline": {"dtype": "bfloat16"},
    }
    both = {
        "baseline": baseline,
        "ratio": ratio(model, baseline),
        "fidelity": {
            "kl_mean": 0.05,
            "kl_stderr": 0.0004,
            "kl_median": 0.0123,
            "kl_p99": 0.54321,
            "top1_agreement": 0.9375,
            "top1_stderr": 0.005,
        },
        "protocol": card,
    }
    return model | both


def _printed(report: dict[str, Any]) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    print_report(report, console)
    return console.export_text()


def test_rate_ratios_pair_the_interleaved_runs() -> None:
    (entry,) = rate_ratios(_throughput(40.0, 30.0, 1.0), _throughput(10.0, 20.0, 2.0))
    assert entry["workload"] == "batch:1"
    assert entry["decode_tokens_per_s"]["runs"] == [4.0, 1.5, 0.5]
    assert entry["decode_tokens_per_s"]["median"] == 1.5  # the ratio of the medians is 3


def test_ratio_divides_model_by_baseline(report: dict[str, Any]) -> None:
    assert report["ratio"]["bytes"] == 0.25
    assert report["ratio"]["bits_per_weight"] == 0.25


def test_perplexity_ratio_pairs_the_windows() -> None:
    # differences 0.1 and 0.3: mean 0.2, standard deviation 0.2 / sqrt 2, over sqrt 2
    result = perplexity_ratio({"window_nll": [2.1, 5.3]}, {"window_nll": [2.0, 5.0]})
    assert result["value"] == pytest.approx(math.exp(0.2))
    assert result["stderr"] == pytest.approx(math.exp(0.2) * 0.1)
    alone = perplexity_ratio({"window_nll": [2.1]}, {"window_nll": [2.0]})
    assert alone == {"value": pytest.approx(math.exp(0.1)), "stderr": None}


def test_ratio_without_perplexity_is_null(report: dict[str, Any]) -> None:
    assert ratio(report | {"perplexity": None}, report["baseline"])["perplexity"] is None


def test_print_report_shows_original_packed_ratio_and_card(report: dict[str, Any]) -> None:
    rows = [" ".join(line.split()) for line in _printed(report).splitlines()]
    assert "original packed ratio" in rows
    assert "bytes on disk 32.0 MB 8.0 MB 0.250" in rows
    assert "bits per weight 32.00 8.00 0.250" in rows
    assert "quantized layers alone 4.25" in rows
    assert "perplexity 20.000 +- 0.250 22.000 +- 0.250 1.111 +- 0.011" in rows
    assert "KL to baseline, nats 0.05000 +- 0.00040" in rows
    assert "median / p99 0.01230 / 0.5432" in rows
    assert "top-1 agreement, % 93.75 +- 0.50" in rows
    assert "decode tokens/s, batch:1 15.0 +- 7.1 35.0 +- 7.1 2.75 +- 1.77" in rows
    assert "command compress serve-eval packed" in rows
    assert "hardware.gpus.0.name H200" in rows


def test_print_report_without_baseline_or_perplexity(report: dict[str, Any]) -> None:
    alone = {k: v for k, v in report.items() if k not in ("baseline", "ratio", "fidelity")}
    alone |= {"perplexity": None, "throughput": _throughput(40.0)}
    text = _printed(alone)
    assert "ratio" not in text
    assert "perplexity" not in text
    assert "KL" not in text
    assert "40.0" in text
    assert "+-" not in text  # one run has no deviation
    assert "beware: a single repeat" in text


def test_print_report_shows_latencies_of_a_request_rate(report: dict[str, Any]) -> None:
    records = tuple(
        RequestRecord(arrival=0.0, prompt_tokens=4, token_ids=(1, 2), token_times=(t, t + 0.25))
        for t in (1.0, 2.0, 3.0)
    )
    workload = Workload(label="rate:2x3", num_requests=3, rate=2.0)
    entries = [workload_report(workload, [Run(records=records)])]
    report["baseline"]["throughput"] = report["throughput"] = entries
    report["ratio"]["throughput"] = rate_ratios(entries, entries)
    rows = [" ".join(line.split()) for line in _printed(report).splitlines()]
    assert "ttft p50 / p99 ms, rate:2x3 2000.0 / 2980.0 2000.0 / 2980.0" in rows
    assert "tpot p50 / p99 ms, rate:2x3 250.0 / 250.0 250.0 / 250.0" in rows


def test_print_report_with_a_draft(report: dict[str, Any]) -> None:
    report["speculation"] = {"acceptance_length": 1.75, "throughput": _throughput(60.0, 80.0)}
    text = _printed(report)
    assert "packed + draft" in text
    assert "acceptance length" in text
    assert "1.75" in text
    assert "70.0 +- 14.1" in text


def test_cautions_of_a_sound_report_are_none(report: dict[str, Any]) -> None:
    assert cautions(report) == []


def test_cautions_name_a_busy_machine_and_different_dtypes(report: dict[str, Any]) -> None:
    report["throughput"][0]["foreign_cpus"] = [1.5, 1.75]
    report["baseline"]["throughput"][0]["foreign_cpus"] = [1.5, 0.0]
    report["protocol"]["baseline"]["dtype"] = "float32"
    busy, dtypes = cautions(report)
    assert "other processes kept 1.5 CPUs busy" in busy
    assert "different dtypes (bfloat16, float32)" in dtypes


def test_cautions_name_a_kl_as_small_as_rounding(report: dict[str, Any]) -> None:
    report["fidelity"]["kl_mean"] = 0.002
    (caution,) = cautions(report)
    assert "rounding of bfloat16 logits" in caution
    for part in ("model", "baseline"):
        report["protocol"][part]["dtype"] = "float32"
    assert cautions(report) == []


def test_cautions_name_vocabularies_that_differ(report: dict[str, Any]) -> None:
    report["fidelity"] = None
    (caution,) = cautions(report)
    assert "vocabulary has another size" in caution
    report["perplexity"] = None  # nothing to compare was asked for
    assert cautions(report) == []


def test_cautions_name_outputs_that_differ_with_a_draft(report: dict[str, Any]) -> None:
    report["speculation"] = {"throughput": [], "identical_outputs": 0.75}
    (caution,) = cautions(report)
    assert caution.startswith("with the draft 75% of the outputs are the same tokens")
