"""The protocol card."""

import json
from importlib.metadata import version

import pytest

from compress.evalsuite.card import environment


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
