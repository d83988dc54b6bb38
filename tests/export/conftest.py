"""One small model per session, and packed copies of it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from compress.scheme import WeightScheme
from tests.export.samples import packed_model
from tests.factory import tiny_model

SCHEME = WeightScheme(bits=4, group_size=32)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float Llama checkpoint with an untied head and a tokenizer."""
    return tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("source") / "llama")


@pytest.fixture(scope="session")
def pristine(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`source` packed symmetrically at 4 bits; tests must not write to it."""
    folder = tmp_path_factory.mktemp("packed") / "llama"
    packed_model(source, folder, SCHEME)
    return folder


@pytest.fixture
def packed(pristine: Path, tmp_path: Path) -> Path:
    """A copy of `pristine` to damage."""
    return Path(shutil.copytree(pristine, tmp_path / "packed"))


@pytest.fixture
def pack(source: Path, tmp_path: Path) -> Callable[[WeightScheme], Path]:
    """Pack `source` with another scheme."""

    def make(scheme: WeightScheme) -> Path:
        packed_model(source, tmp_path / "packed", scheme)
        return tmp_path / "packed"

    return make
