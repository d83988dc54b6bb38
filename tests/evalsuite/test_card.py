"""The protocol card."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from compress.evalsuite.card import environment, folder_sha256


def test_environment_names_machine_and_software(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    card = json.loads(json.dumps(environment("compress serve-eval demo"), allow_nan=False))
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
    assert environment("compress serve-eval demo")["software"]["no-such-package"] is None


def test_folder_sha256_covers_names_and_contents(tmp_path: Path) -> None:
    for name, content in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(content)
    first, same, other = (folder_sha256(tmp_path / name) for name in "abc")
    assert first == same != other
    (tmp_path / "b" / "weights").rename(tmp_path / "b" / "renamed")
    assert folder_sha256(tmp_path / "b") != first
