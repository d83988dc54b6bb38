"""The command line as a user meets it: exit codes, one-line errors, nothing half-written."""

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import compress
from compress.cli import run
from compress.render import print_inspection
from tests.factory import tiny_model

ROOT = Path(__file__).parents[2]
TEXT = str(ROOT / "LICENSE")
SMALL = ["--set", "scheme.weights.group_size=32", "--calib-data", TEXT]
SMALL += ["--calib-samples", "4", "--calib-length", "32", "--offline"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("cli") / "model")


def fails(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[int, str]:
    """(exit code, the error line); asserts that there is exactly one."""
    code = run(arguments)
    lines = [line for line in capsys.readouterr().err.splitlines() if "compress: error:" in line]
    assert len(lines) == 1
    return code, lines[0]


def test_quantize_verify_inspect(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tmp_path / "out", tmp_path / "report.json"
    assert run(["quantize", str(llama), "-o", str(out), "--json", str(report), *SMALL]) == 0
    assert "14 Linears at 5.0" in " ".join(capsys.readouterr().out.split())
    values = json.loads(report.read_text())
    keys = {"seconds", "peak_rss_bytes", "bytes", "bits_per_weight", "layers", "left_in_float"}
    assert keys <= values.keys()
    assert run(["verify", str(out), "--against", str(llama)]) == 0
    assert "FAILED" not in capsys.readouterr().out
    assert run(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["architecture"] == "LlamaForCausalLM"


def test_verify_fails_on_a_changed_tensor(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    out = tmp_path / "out"
    assert run(["quantize", str(llama), "-o", str(out), "-q", *SMALL]) == 0
    tensors = load_file(out / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    code, line = fails(capsys, ["verify", str(out), "--against", str(llama)])
    assert code == 1
    assert "checks failed" in line


def test_dry_run_prints_the_plan_and_writes_nothing(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    assert run(["quantize", str(llama), "--dry-run", "--json", "-", *SMALL]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["layers"]) == 14
    assert run(["quantize", str(llama), "--dry-run", *SMALL]) == 0
    assert "output head" in capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize", "no/such/folder", "-o", "OUT"], "no/such/folder"),
        (["quantize", "MODEL"], "-o"),
        (["quantize", "MODEL", "-o", "OUT", "--recipe", "gtpq-w4a16"], "did you mean 'gptq-w4a16'"),
        (
            ["quantize", "MODEL", "-o", "OUT", "--set", "method.kidn=rtn"],
            "method.kidn: unknown key",
        ),
        (["quantize", "MODEL", "-o", "OUT", "--set", "method.kind=gtpq"], "unknown method 'gtpq'"),
        (["quantize", "MODEL", "-o", "OUT"], "q_proj (96 inputs)"),
        (["quantize", "MODEL", "-o", "OUT", "--device", "tpu", *SMALL], "unknown device 'tpu'"),
        (["quantize", "MODEL", "-o", "OUT", "--calib-samples", "x"], "--calib-samples"),
        (["quantize", "owner/name", "-o", "OUT", "--offline"], "offline"),
        (["serve-eval", "no/such/folder"], "no/such/folder"),
        (["serve-eval", "MODEL", "--workload", "bath:1"], "bath:1"),
        (["serve-eval", "MODEL", "--ppl-protocol", "gtpq"], "did you mean 'gptq'"),
        (["serve-eval", "MODEL", "--dtype", "int8"], "int8"),
        (["train-draft", "no/such/folder", "-o", "OUT"], "no/such/folder"),
        (["train-draft", "MODEL", "-o", "OUT", "--kind", "medsua"], "medsua"),
        (["verify", "no/such/folder"], "no/such/folder"),
        (["inspect", "no/such/folder"], "no/such/folder"),
        (["recipes", "show", "gptq"], "unknown recipe 'gptq'"),
        (["quantise"], "quantise"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_usage_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"MODEL": str(llama), "OUT": str(tmp_path / "out")}
    code, line = fails(capsys, [places.get(word, word) for word in arguments])
    assert code == 2
    assert message in line
    assert list(tmp_path.iterdir()) == []


def test_empty_calibration_text(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("  \n")
    out = tmp_path / "out"
    code, line = fails(
        capsys,
        [
            "quantize",
            str(llama),
            "-o",
            str(out),
            *SMALL,
            "--calib-data",
            str(tmp_path / "empty.txt"),
        ],
    )
    assert code == 2
    assert "empty.txt" in line
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]


def test_existing_output_is_not_overwritten(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    arguments = ["quantize", str(llama), "-o", str(tmp_path / "out"), *SMALL]
    code, line = fails(capsys, arguments)
    assert code == 2
    assert "--force" in line
    code, line = fails(capsys, [*arguments, "--force"])  # not a checkpoint: never deleted
    assert code == 2
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep"


@pytest.mark.parametrize("keep", [0, 20, 5000], ids=["empty", "in-header", "in-data"])
def test_corrupt_safetensors_is_named(
    keep: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("LlamaForCausalLM", tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    code, line = fails(capsys, ["quantize", str(model), "-o", str(tmp_path / "out"), *SMALL])
    assert code == 2
    assert "model.safetensors" in line
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_verbose_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    run(["inspect", "no/such/folder", "-v"])
    assert "Traceback" in capsys.readouterr().err
    run(["inspect", "no/such/folder"])
    assert "Traceback" not in capsys.readouterr().err


def test_recipes_copy_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    assert run(["recipes", "copy", "gptq-w4a16", str(file)]) == 0
    assert file.read_text() == (ROOT / "recipes" / "gptq-w4a16.yaml").read_text()
    file.write_text("edited")
    code, line = fails(capsys, ["recipes", "copy", "gptq-w4a16", str(file)])
    assert (code, file.read_text()) == (2, "edited")
    assert "mine.yaml" in line


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "compress", *arguments]


def test_help_answers_without_importing_torch() -> None:
    code = "import sys, compress.cli as cli; cli.run(['quantize', '--help'])"
    code += "; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_full_disk_is_one_line(llama: Path, tmp_path: Path) -> None:
    """A file size limit stands in for a full disk: writes past it fail in the same way."""
    out = tmp_path / "out"
    limited = ["bash", "-c", 'trap "" XFSZ; ulimit -f 40; exec "$@"', "bash"]
    done = subprocess.run(
        [*limited, *command("quantize", str(llama), "-o", str(out), *SMALL)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode in (1, 2)
    assert "compress: error: " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not out.exists()


@pytest.mark.slow
def test_interrupt_and_kill_leave_a_run_that_resumes(tmp_path: Path) -> None:
    model = tiny_model("LlamaForCausalLM", tmp_path / "model", num_layers=40)
    arguments = command("quantize", str(model), *SMALL)
    subprocess.run([*arguments, "-o", str(tmp_path / "whole"), "-q"], check=True, cwd=ROOT)
    out, state = tmp_path / "out", tmp_path / ".out.partial" / "state.json"
    for number, (sent, code) in enumerate([(signal.SIGINT, 130), (signal.SIGKILL, -9)]):
        again = ["--resume"] if number else []
        # A parent that a shell runs in the background passes on an ignored SIGINT.
        process = subprocess.Popen(
            [*arguments, "-o", str(out), *again],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        reached = 4 + 8 * number
        while not state.exists() or json.loads(state.read_text())["next_block"] < reached:
            assert process.poll() is None, "the run ended before it could be stopped"
            time.sleep(0.01)
        process.send_signal(sent)
        _, errors = process.communicate()
        assert process.returncode == code
        assert not out.exists()
        if sent == signal.SIGINT:
            assert errors.splitlines()[-1].startswith("compress: error: interrupted; finished")
    subprocess.run([*arguments, "-o", str(out), "--resume", "-q"], check=True, cwd=ROOT)
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
def test_peak_memory_does_not_grow_with_depth(tmp_path: Path) -> None:
    """2 and 8 layers of the same width: the peak may differ by less than a tenth."""
    peaks = []
    for num_layers in (2, 8):
        model = tiny_model(
            "LlamaForCausalLM",
            tmp_path / f"model{num_layers}",
            num_layers=num_layers,
            hidden_size=1024,
            intermediate_size=2816,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=64,
        )
        report = tmp_path / f"report{num_layers}.json"
        out = tmp_path / f"out{num_layers}"
        arguments = ["quantize", str(model), "-o", str(out), "--json", str(report), "-q", *SMALL]
        subprocess.run(command(*arguments), check=True, cwd=ROOT)
        values = json.loads(report.read_text())
        peaks.append(values["peak_rss_bytes"])
        assert 0.5 < values["planned_peak_rss_bytes"] / peaks[-1] < 2
    assert peaks[1] < 1.1 * peaks[0]


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"compress {compress.__version__}\n"


def test_inspection_is_written_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    print_inspection({"a": None, "b": True, "c": [1, 2], "d": [], "e": [{"x": 1, "y": None}]})
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["a: none", "b: yes", "c: 1, 2", "d: none", "e:", "  - x 1, y none"]
