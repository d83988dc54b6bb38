"""Tiny models shared by the runtime tests."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests.factory import tiny_model

_ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "LlamaForCausalLM"},
    "llama-tied": {"architecture": "LlamaForCausalLM", "tied": True},
    "llama3-rope": {"architecture": "LlamaForCausalLM", "rope_parameters": _ROPE_LLAMA3},
    "llama-biased": {"architecture": "LlamaForCausalLM", "attention_bias": True, "mlp_bias": True},
    "mistral": {"architecture": "MistralForCausalLM"},
    "mistral-window": {"architecture": "MistralForCausalLM", "sliding_window": 21},
    "qwen2": {"architecture": "Qwen2ForCausalLM"},
    "qwen2-window": {
        "architecture": "Qwen2ForCausalLM",
        "use_sliding_window": True,
        "sliding_window": 21,
        "max_window_layers": 1,
    },
    "qwen3": {"architecture": "Qwen3ForCausalLM"},
}


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The saved tiny model called by a key of MODELS; the vocabulary has 331 tokens."""

    @lru_cache
    def make(name: str) -> Path:
        fields = dict(MODELS[name])
        architecture = fields.pop("architecture")
        return tiny_model(architecture, tmp_path_factory.mktemp(name), vocab=331, **fields)

    return make


@pytest.fixture(scope="session")
def llama(model_path: Callable[[str], Path]) -> Path:
    """A Llama: 2 layers, 6 heads over 2, an untied head."""
    return model_path("llama")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for `model_name` on every model."""
    if "model_name" in metafunc.fixturenames:
        metafunc.parametrize("model_name", MODELS)
