"""What the command line hands to the functions that do the work, which are replaced here."""

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from compress.calib.data import CalibrationSpec
from compress.cli import run
from compress.evalsuite.serve_eval import ServeEvalOptions
from compress.options import parse_bytes
from compress.recipe import load_recipe
from compress.run import QuantizeJob
from compress.train_draft import TrainDraftJob
from tests.compress.test_cli import fails

WORK = {
    "quantize": "compress.quantize.quantize",
    "serve-eval": "compress.evalsuite.serve_eval.serve_eval",
    "train-draft": "compress.train_draft.train_draft",
}
QUANTIZE_FLAGS = """-o OUT --recipe rtn-w4a16 --set scheme.weights.bits=8 --set dtype=float16
    --calib-data TEXT --calib-samples 7 --calib-length 33 --seed 5 --device cpu --resume --force
    --offline --quiet --activation-budget 1.5GB"""
SERVE_EVAL_FLAGS = """--baseline BASE --draft DRAFT --ppl-data TEXT --ppl-protocol gptq
    --ppl-window 33 --ppl-limit 3 --workload rate:2.5 --prompt-tokens 17 --output-tokens 9
    --repeats 2 --dtype float16 --device cpu --seed 5 --offline --quiet"""
TRAIN_DRAFT_FLAGS = """-o OUT --kind medusa --data TEXT --max-minutes 1.5 --seed 5 --device cpu
    --force --offline --quiet"""


def asked_for(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """The job that a command line hands to the function that does the work."""
    jobs: list[Any] = []

    def work(job: Any) -> dict[str, Any]:
        jobs.append(job)
        return {"jobs": len(jobs)}

    monkeypatch.setattr(WORK[arguments[0]], work)
    monkeypatch.setattr(sys, "argv", ["compress", *arguments])
    assert run([*arguments]) == 0
    (job,) = jobs
    return job


def test_every_flag_of_quantize_reaches_its_field(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = tmp_path / "r.json"
    arguments = ["quantize", "MODEL", *QUANTIZE_FLAGS.split(), "--json", str(report)]
    assert asked_for(monkeypatch, *arguments) == QuantizeJob(
        model="MODEL",
        output=Path("OUT"),
        recipe=load_recipe("rtn-w4a16", ["scheme.weights.bits=8", "dtype=float16"]),
        calibration=CalibrationSpec(source="TEXT", num_samples=7, length=33, seed=5),
        device="cpu",
        offline=True,
        resume=True,
        force=True,
        quiet=True,
        activation_budget=1_500_000_000,
    )
    assert json.loads(report.read_text()) == {"jobs": 1}
    assert asked_for(monkeypatch, "quantize", "MODEL", "-o", "OUT", "--json", "-") == QuantizeJob(
        model="MODEL",
        output=Path("OUT"),
        recipe=load_recipe("gptq-w4a16"),
        calibration=CalibrationSpec(source="pydoc", num_samples=128, length=512, seed=0),
    )


def test_every_flag_of_serve_eval_reaches_its_field(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = tmp_path / "r.json"
    arguments = ["serve-eval", "MODEL", *SERVE_EVAL_FLAGS.split(), "--json", str(report)]
    assert asked_for(monkeypatch, *arguments) == ServeEvalOptions(
        model="MODEL",
        baseline="BASE",
        draft=Path("DRAFT"),
        ppl_data="TEXT",
        ppl_protocol="gptq",
        ppl_window=33,
        ppl_limit=3,
        workload="rate:2.5",
        prompt_tokens=17,
        output_tokens=9,
        repeats=2,
        dtype="float16",
        device="cpu",
        seed=5,
        command=" ".join(["compress", *arguments]),
        offline=True,
        quiet=True,
    )
    assert json.loads(report.read_text()) == {"jobs": 1}
    arguments = ["serve-eval", "MODEL", "--json", "-"]
    assert asked_for(monkeypatch, *arguments) == ServeEvalOptions(
        model="MODEL", command="compress serve-eval MODEL --json -"
    )


def test_every_flag_of_train_draft_reaches_its_field(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = tmp_path / "r.json"
    arguments = ["train-draft", "TARGET", *TRAIN_DRAFT_FLAGS.split(), "--json", str(report)]
    assert asked_for(monkeypatch, *arguments) == TrainDraftJob(
        target="TARGET",
        output=Path("OUT"),
        kind="medusa",
        data="TEXT",
        max_minutes=1.5,
        seed=5,
        device="cpu",
        offline=True,
        force=True,
        quiet=True,
    )
    assert json.loads(report.read_text()) == {"jobs": 1}
    arguments = ["train-draft", "TARGET", "-o", "OUT", "--json", "-"]
    assert asked_for(monkeypatch, *arguments) == TrainDraftJob(target="TARGET", output=Path("OUT"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("12", 12), ("500MB", 500_000_000), ("2 gb", 2_000_000_000), ("1.5GiB", 3 << 29)],
)
def test_parse_bytes_knows_the_usual_spellings(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "lots", "-1", "5 IB", "1e9", "500 MB/s"])
def test_parse_bytes_refuses_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a size such as 500MB"):
        parse_bytes(text)


@pytest.mark.parametrize("name", WORK)
def test_report_that_could_not_be_written_is_refused_before_the_work(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = [] if name == "serve-eval" else ["-o", "OUT"]
    jobs: list[Any] = []
    monkeypatch.setattr(WORK[name], jobs.append)
    report = ["--json", str(tmp_path / "gone" / "report.json"), "-q"]
    code, line = fails(capsys, [name, "MODEL", *output, *report])
    assert (code, jobs) == (2, [])
    assert f"no folder {tmp_path / 'gone'}" in line


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, 1), (errno.EDQUOT, 1), (errno.EACCES, 2)],
    ids=["full", "quota", "denied"],
)
def test_full_disk_is_a_failed_run_and_other_file_errors_are_bad_input(
    number: int, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(job: QuantizeJob) -> None:
        raise OSError(number, "the reason", "the place")

    monkeypatch.setattr(WORK["quantize"], work)
    assert fails(capsys, ["quantize", "MODEL", "-o", "OUT"]) == (
        code,
        "compress: error: the reason: the place",
    )
