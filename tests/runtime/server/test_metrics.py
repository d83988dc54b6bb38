"""The text that Prometheus scrapes."""

import re

import pytest

from compress.runtime.llm import LLM
from compress.runtime.request import Completion
from compress.runtime.server.metrics import Histogram, Metrics

SAMPLE = re.compile(r'compress_[a-z0-9_]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? -?[0-9.e+-]+')


def test_histogram_buckets_are_cumulative_and_closed_above() -> None:
    histogram = Histogram((0.5, 1.0))
    for value in (0.25, 0.5, 0.75, 4.0):
        histogram.observe(value)
    assert histogram.samples("h") == [
        'h_bucket{le="0.5"} 2',
        'h_bucket{le="1.0"} 3',
        'h_bucket{le="+Inf"} 4',
        "h_sum 5.5",
        "h_count 4",
    ]


def test_latencies_come_from_the_times_of_tokens(llm: LLM) -> None:
    metrics = Metrics()
    completion = Completion(
        request_id="r",
        prompt_tokens=3,
        token_ids=[1, 2, 3],
        finish_reason="length",
        arrival_time=10.0,
        token_times=[10.5, 10.5, 12.5],
    )
    metrics.record_end(completion)
    lines = metrics.render(llm.engine, 7).splitlines()
    for line in (
        'compress_requests_total{finish_reason="length"} 1',
        "compress_time_to_first_token_seconds_sum 0.5",
        "compress_inter_token_latency_seconds_count 2",
        "compress_inter_token_latency_seconds_sum 2.0",
        "compress_e2e_request_latency_seconds_sum 2.5",
        "compress_requests_in_flight 7",
        f"compress_kv_blocks {llm.engine.blocks.num_blocks}",
    ):
        assert line in lines


def test_text_is_well_formed(llm: LLM) -> None:
    metrics = Metrics()
    metrics.record_response("/health", 200)
    metrics.record_response("/health", 503)
    text = metrics.render(llm.engine, 0)
    assert text.endswith("\n")
    families: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in families
            families[name] = kind
        elif not line.startswith("# HELP "):
            assert SAMPLE.fullmatch(line), line
            family = re.split(r"[{ ]", line)[0]
            if family not in families:
                family = re.sub(r"_(bucket|sum|count)$", "", family)
                assert families[family] == "histogram"
            if families[family] == "counter":
                assert family.endswith("_total")


@pytest.mark.parametrize("status", [200, 503])
def test_responses_are_counted_by_path_and_status(llm: LLM, status: int) -> None:
    metrics = Metrics()
    metrics.record_response("/health", status)
    line = f'compress_http_responses_total{{path="/health",status="{status}"}} 1'
    assert line in metrics.render(llm.engine, 0).splitlines()
