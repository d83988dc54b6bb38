"""`compress generate` and `compress serve` as a user meets them."""

import io
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from compress import serving_cli
from compress.cli import run
from compress.runtime.llm import LLM
from compress.runtime.request import SamplingParams
from tests.compress.serving import ROOT, serving
from tests.compress.test_cli import fails
from tests.factory import tiny_model

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(
        "LlamaForCausalLM", tmp_path_factory.mktemp("cli") / "model", max_position_embeddings=512
    )


def texts(llama: Path, **params: Any) -> tuple[str, str]:
    """What the model makes of "The import": as it is, and as a chat."""
    llm = LLM(llama)
    greedy = SamplingParams(**params)
    chat = llm.chat([{"role": "user", "content": "The import"}], greedy)
    return llm.generate("The import", greedy)[0].text, chat.text


def test_generate_prints_the_text_alone_on_stdout(llama: Path, capsys: Capture) -> None:
    raw, chat = texts(llama, max_tokens=17)
    assert raw != chat
    command = ["generate", str(llama), "The import", "--max-tokens", "17"]
    assert run([*command, "--raw"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{raw}\n"
    effective, speed = captured.err.splitlines()
    assert effective == "raw prompt, greedy, max_tokens 17"
    assert "17 generated (length)" in speed
    assert "tokens/s" in speed
    assert run([*command, "-q"]) == 0  # the model has a template
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (f"{chat}\n", "")


def test_generate_follows_its_options(llama: Path, capsys: Capture, tmp_path: Path) -> None:
    raw, _ = texts(llama, max_tokens=17, temperature=1.3, top_k=9, top_p=0.95, seed=5)
    stop, report = raw[4:7], tmp_path / "report.json"
    command = ["generate", str(llama), "The import", "--raw", "--json", str(report)]
    command += ["--max-tokens", "17", "--temperature", "1.3", "--top-k", "9", "--top-p", "0.95"]
    assert run([*command, "--seed", "5", "--stop", stop, "--stop", "never"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{raw[: raw.index(stop)]}\n"
    assert "temperature 1.3, top_k 9, top_p 0.95, seed 5" in captured.err
    values = json.loads(report.read_text())
    assert values["text"] == raw[: raw.index(stop)]
    assert values["finish_reason"] == "stop"
    assert values["sampling_params"]["seed"] == 5


def test_generate_reads_stdin_and_writes_json_alone(
    llama: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, _ = texts(llama, max_tokens=3)
    monkeypatch.setattr(sys, "stdin", io.StringIO("The import"))
    assert run(["generate", str(llama), "-", "--raw", "--max-tokens", "3", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == raw


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "600"], "exceed max_model_len 512"),
        (["--temperature", "-1"], "temperature must be finite and not negative: -1"),
        (["--raw", "--system", "Be brief."], "needs a chat"),
        (["--draft", "nowhere"], "nowhere"),
    ],
    ids=["too long", "temperature", "system", "draft"],
)
def test_generate_refuses_in_one_line(
    llama: Path, capsys: Capture, options: list[str], message: str
) -> None:
    code, line = fails(capsys, ["generate", str(llama), "a", *options])
    assert code == 2
    assert message in line


def test_ctrl_c_ends_generate_cleanly(llama: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from compress.runtime import llm\n"
        "step, calls = llm.LLM.step, []\n"
        "def interrupted(self):\n"
        "    calls.append(1)\n"
        "    if len(calls) == 9: os.kill(os.getpid(), signal.SIGINT)\n"
        "    step(self)\n"
        "llm.LLM.step = interrupted\n"
        "from compress.cli import run\n"
        f"sys.exit(run(['generate', {str(llama)!r}, 'The import', '--raw', '--max-tokens', '300']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert done.stdout.endswith("\n")
    assert len(done.stdout) > 1  # what came before stays
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == "compress: error: interrupted"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_answers_and_ends_with_a_signal(llama: Path, number: int) -> None:
    with serving(str(llama), "--name", "tiny", "--max-tokens", "9") as server:
        end = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"{server.url}/health") as response:
                    assert json.load(response) == {"status": "ok"}
                break
            except urllib.error.URLError:
                assert time.monotonic() < end
                time.sleep(0.05)
        body = json.dumps({"model": "tiny", "prompt": "a", "ignore_eos": True}).encode()
        request = urllib.request.Request(
            f"{server.url}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 9
        server.process.send_signal(number)
        assert server.process.wait(60) == 0
        server.reader.join()
        assert "Traceback" not in "".join(server.log)


def test_taken_port_is_found_before_the_model_is_loaded(capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, line = fails(capsys, ["serve", "no-such-model", "--port", str(port)])
    assert code == 2
    assert f"Address already in use: 127.0.0.1:{port}" in line


def test_serve_without_its_extra_says_what_to_install(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving_cli, "find_spec", lambda name: None)
    code, line = fails(capsys, ["serve", "demo"])
    assert code == 2
    assert line.endswith("pip install compress-llm[serve]")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--api-key", ""], "API key is empty"),
        (["--max-body", "1 parsec"], "expected a size"),
        (["--port", "70000"], "65535"),
    ],
    ids=["key", "body", "port"],
)
def test_serve_refuses_in_one_line(capsys: Capture, options: list[str], message: str) -> None:
    code, line = fails(capsys, ["serve", "no-such-model", *options])
    assert code == 2
    assert message in line
