"""The ablation runner on a tiny model, through the real command line.

Where processes of its own do not matter, `compress quantize` runs in this one: torch is imported.
"""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from compress import ablate as module
from compress import cli
from compress.ablate import LADDER, VARIANTS, AblationJob, Variant, ablate, parse_variant, run
from compress.calib.data import CalibrationSpec, evaluation_text
from compress.errors import CheckFailed
from compress.evalsuite.fidelity import compare
from compress.evalsuite.perplexity import tokenize
from compress.evalsuite.serve_eval import ServeEvalOptions, serve_eval
from compress.models.load import load_tokenizer
from compress.recipe import load_recipe
from compress.runtime.engine import Engine
from tests.factory import tiny_model

_GROUPS = ("scheme.weights.group_size=32",)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> AblationJob:
    folder = tmp_path_factory.mktemp("ablate")
    return AblationJob(
        model=str(tiny_model("LlamaForCausalLM", folder / "model")),
        output=folder / "variants",
        variants=(VARIANTS["minmax"], VARIANTS["act-order"]),
        overrides=_GROUPS,
        calibration=CalibrationSpec(source="pydoc", num_samples=4, length=64),
        ppl_window=65,
        ppl_limit=3,
        device="cpu",
        offline=True,
        quiet=True,
    )


class _Calls:
    """What was quantized and measured since."""

    def __init__(self) -> None:
        self.quantized: list[list[str]] = []
        self.measured: list[str] = []

    def run_compress(self, arguments: list[str]) -> int:
        self.quantized.append(arguments)
        return cli.run(arguments)

    def serve_eval(self, options: ServeEvalOptions) -> dict[str, Any]:
        self.measured.append(options.model)
        return serve_eval(options)


@pytest.fixture(autouse=True)
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> _Calls:
    """Count the work, and do it."""
    counted = _Calls()
    if "slow" not in request.keywords:
        monkeypatch.setattr(module, "_run_compress", counted.run_compress)
        monkeypatch.setattr(module, "serve_eval", counted.serve_eval)
    return counted


@pytest.fixture(scope="module")
def report(job: AblationJob) -> dict[str, Any]:
    """One full run, which the tests below find finished."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_run_compress", _Calls().run_compress)
        made = ablate(job, "the command")
    return made


def test_ablate_reports_what_an_evaluation_of_each_checkpoint_gives(
    job: AblationJob, report: dict[str, Any]
) -> None:
    data = tokenize(evaluation_text("pydoc"), load_tokenizer(Path(job.model)), source="pydoc")
    baseline = Engine.load(Path(job.model), dtype="float32", device="cpu")
    assert [row["name"] for row in report["variants"]] == ["minmax", "act-order"]
    for row in report["variants"]:
        checkpoint = job.output / row["name"] / "checkpoint"
        engine = Engine.load(checkpoint, dtype="float32", device="cpu")
        expected = compare(engine, baseline, data, window=65, limit=3)
        assert row["perplexity"]["value"] == pytest.approx(expected.model.value, rel=1e-6)
        assert row["fidelity"]["kl_mean"] == pytest.approx(expected.fidelity.kl_mean, rel=1e-4)
        assert row["fidelity"]["kl_mean"] > 0
        assert 4 < row["size"]["bits_per_weight"] < 32
        assert row["seconds"] > 0
        assert row["peak_rss_bytes"] > 50e6
        assert row["overrides"][0] == _GROUPS[0]
    first, second = report["variants"]
    step = second["fidelity"]["kl_mean"] - first["fidelity"]["kl_mean"]
    assert second["change"]["kl"]["value"] == pytest.approx(step)
    assert report["baseline"]["size"]["bits_per_weight"] == 32
    assert report["protocol"]["command"] == "the command"
    assert json.loads(json.dumps(report, allow_nan=False)) == report


@pytest.mark.slow
def test_ablate_quantizes_in_a_process_of_its_own(job: AblationJob, tmp_path: Path) -> None:
    own = ablate(replace(job, output=tmp_path, variants=job.variants[1:]))
    again = ablate(replace(job, output=tmp_path, variants=job.variants[1:]))
    assert own["variants"] == again["variants"]
    child = own["variants"][0]["peak_rss_bytes"]
    assert 50e6 < child < 4e9
    assert (tmp_path / "act-order" / "checkpoint" / "config.json").is_file()


def test_ablate_does_not_repeat_what_is_finished(
    job: AblationJob, report: dict[str, Any], calls: _Calls
) -> None:
    again = ablate(job)
    assert again["variants"] == report["variants"]
    assert (calls.quantized, calls.measured) == ([], [])
    backwards = ablate(replace(job, variants=job.variants[::-1]))
    assert (calls.quantized, calls.measured) == ([], [])
    old, new = report["variants"][1]["change"], backwards["variants"][1]["change"]
    assert new["kl"]["value"] == pytest.approx(-old["kl"]["value"])


def test_ablate_measures_again_under_another_protocol_without_quantizing(
    job: AblationJob, report: dict[str, Any], calls: _Calls
) -> None:
    shorter = ablate(replace(job, ppl_limit=2, variants=job.variants[:1]))
    assert calls.quantized == []
    assert calls.measured == [str(job.output / "minmax" / "checkpoint")]
    kl = report["variants"][0]["fidelity"]["window_kl"]
    assert shorter["variants"][0]["fidelity"]["window_kl"] == pytest.approx(kl[:2], rel=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"overrides": ("scheme.weights.group_size=16",)},
        {"calibration": CalibrationSpec(source="pydoc", num_samples=5, length=64)},
    ],
    ids=["recipe", "calibration"],
)
def test_ablate_quantizes_again_when_what_it_depends_on_changes(
    job: AblationJob,
    report: dict[str, Any],
    calls: _Calls,
    change: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stop(Exception):
        pass

    def stop(arguments: list[str]) -> None:
        calls.quantized.append(arguments)
        raise Stop

    monkeypatch.setattr(module, "_run_compress", stop)
    folder = job.output / "act-order"
    before = {file: file.read_bytes() for file in folder.glob("*.json")}
    changed = replace(job, variants=job.variants[1:], **change)
    for expected in ([], ["--resume"]):  # the second time it goes on with the first
        with pytest.raises(Stop):
            ablate(changed)
        assert [flag for flag in calls.quantized[-1] if flag == "--resume"] == expected
        assert "--force" in calls.quantized[-1]
    assert not (folder / "quantize.json").exists()
    for file, content in before.items():
        file.write_bytes(content)


def test_ablate_notices_a_calibration_file_with_other_text(
    job: AblationJob, tmp_path: Path
) -> None:
    file = tmp_path / "text.txt"
    settings = []
    for text in ("one", "two"):
        file.write_text(text)
        changed = replace(job, calibration=replace(job.calibration, source=str(file)))
        settings.append(module._settings(changed)["minmax"])
    assert settings[0] != settings[1]


def test_ablate_fails_with_the_command_when_a_quantization_does(
    job: AblationJob, report: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("too short")
    calibration = replace(job.calibration, source=str(empty))
    failing = replace(job, output=tmp_path / "out", calibration=calibration)
    with pytest.raises(CheckFailed, match=r"variant 'minmax': 'compress quantize .* exit code 2"):
        ablate(failing)
    assert "compress: error:" in capfd.readouterr().err
    assert not (tmp_path / "out" / "act-order").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variants": (Variant(name="a", recipe="gptk-w4a16"),)}, "did you mean 'gptq-w4a16'"),
        ({"variants": (Variant(name="a", recipe="rtn-w4a16", overrides=("x=1",)),)}, "unknown key"),
        ({"overrides": ("scheme.weights.group_size=36",)}, "36"),
        ({"ppl_data": "/nowhere/text"}, "/nowhere/text"),
        ({"ppl_window": 5000}, "does not fit the context"),
        ({"model": "/nowhere/model"}, "/nowhere/model"),
    ],
    ids=["recipe", "override", "group", "text", "window", "model"],
)
def test_ablate_refuses_before_any_work(
    job: AblationJob, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        ablate(replace(job, output=tmp_path / "out", **change))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"variants": (VARIANTS["gptq"], VARIANTS["gptq"])}, "'gptq' is given twice"),
        ({"variants": ()}, "no variant"),
        ({"ppl_data": "none"}, "must not be 'none'"),
    ],
)
def test_job_refuses(job: AblationJob, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(job, **change)


def test_parse_variant_reads_a_recipe_with_overrides() -> None:
    found = parse_variant("x.1=my/recipe.yaml, set a.b=[{c: d}, {e: f}],set g=h=i")
    assert found == Variant(
        name="x.1", recipe="my/recipe.yaml", overrides=("a.b=[{c: d}, {e: f}]", "g=h=i")
    )
    assert parse_variant("x=rtn-w4a16") == Variant(name="x", recipe="rtn-w4a16")
    assert parse_variant("gptq") is VARIANTS["gptq"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gptk", "unknown variant 'gptk'; did you mean 'gptq'"),
        ("../x=rtn-w4a16", "the name may hold"),
        (".x=rtn-w4a16", "the name may hold"),
        ("=rtn-w4a16", "the name may hold"),
        ("x=", "expected NAME=RECIPE"),
        ("x=rtn-w4a16,set a.b", "expected NAME=RECIPE"),
    ],
)
def test_parse_variant_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_variant(text)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_a_recipe(name: str) -> None:
    assert load_recipe(VARIANTS[name].recipe, VARIANTS[name].overrides).method


def _leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def test_each_step_of_the_ladder_changes_one_thing() -> None:
    recipes = [load_recipe(VARIANTS[n].recipe, VARIANTS[n].overrides).to_dict() for n in LADDER]
    leaves = [_leaves(recipe) for recipe in recipes]
    changes = [
        [key for key in before.keys() & after.keys() if before[key] != after[key]]
        for before, after in pairwise(leaves)
    ]
    assert [sorted(keys) for keys in changes] == [
        ["method.scale.signed"],
        ["method.scale.steps", "method.scale.weighted"],  # the weighted search
        ["method.kind"],
        ["method.order"],
        ["transforms"],
        ["transforms"],
    ]


def test_command_prints_the_table_and_writes_the_report(
    job: AblationJob,
    report: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "report.json"
    arguments = [job.model, "-o", str(job.output), "--variant", "minmax", "--variant"]
    arguments += ["act-order", "--set", _GROUPS[0], "--ppl-window", "65", "--ppl-limit", "3"]
    arguments += ["--calib-samples", "4", "--calib-length", "64", "--device", "cpu", "--offline"]
    assert run([*arguments, "--json", str(file)]) == 0
    out = capsys.readouterr()
    assert "quantized before" in out.err
    assert "act-order" in out.out
    assert f"{report['variants'][1]['fidelity']['kl_mean']:.5f}" in out.out
    assert json.loads(file.read_text())["variants"] == report["variants"]


@pytest.mark.parametrize(
    "arguments", [["--variant", "gptk"], ["--json", "/nowhere/file"], ["--no-such"]]
)
def test_command_exits_2_on_bad_usage(
    job: AblationJob, tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([job.model, "-o", str(tmp_path / "out"), *arguments]) == 2
    assert "Traceback" not in capsys.readouterr().err
