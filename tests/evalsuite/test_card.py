"""The protocol card."""

import json
import sys
from importlib.metadata import version

import pytest

from compress.evalsuite.card import command_line, environment


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["/opt/bin/compress", "serve-eval", "demo"], "compress serve-eval demo"),
        (["/src/compress/__main__.py", "serve-eval"], "python -m compress serve-eval"),
        (["compress", "serve-eval", "my model"], "compress serve-eval 'my model'"),
    ],
    ids=["installed", "module", "quoted"],
)
def test_command_line_can_be_pasted(argv: list[str], line: str) -> None:
    assert command_line(argv) == line


def test_environment_names_machine_and_software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["compress", "serve-eval", "demo"])
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    card = json.loads(json.dumps(environment(), allow_nan=False))
    assert card["command"] == "compress serve-eval demo"
    assert card["software"]["torch"] == version("torch")
    assert card["software"]["compress-llm"] == version("compress-llm")
    assert card["threads"]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert card["threads"]["intra_op"] >= 1
    assert card["hardware"]["usable_cpus"] >= 1
    assert card["hardware"]["memory_bytes"] > 2**28
    assert card["date"].endswith("+00:00")


def test_environment_says_null_for_a_package_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("compress.evalsuite.card._PACKAGES", ("no-such-package",))
    assert environment()["software"]["no-such-package"] is None
