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
_ROPE_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_ROPE_LONG = {  # 12 of the 16 channels of a head are rotated
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
}
_ROPE_GEMMA3 = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "LlamaForCausalLM"},
    "llama-tied": {"architecture": "LlamaForCausalLM", "tied": True},
    "llama3-rope": {
        "architecture": "LlamaForCausalLM",
        "rope_parameters": _ROPE_LLAMA3,
        "head_dim": 48,
    },
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
    "yarn-rope": {"architecture": "Qwen2ForCausalLM", "rope_parameters": _ROPE_YARN},
    "phi3": {"architecture": "Phi3ForCausalLM"},
    "phi3-window": {"architecture": "Phi3ForCausalLM", "sliding_window": 21, "tied": True},
    "phi3-longrope": {
        "architecture": "Phi3ForCausalLM",
        "rope_parameters": _ROPE_LONG,
        "original_max_position_embeddings": 512,
    },
    "gemma2": {"architecture": "Gemma2ForCausalLM", "tied": True},
    "gemma2-biased": {"architecture": "Gemma2ForCausalLM", "attention_bias": True},
    "gemma3": {"architecture": "Gemma3ForCausalLM", "tied": True},
    "gemma3-scaled-rope": {
        "architecture": "Gemma3ForCausalLM",
        "rope_parameters": _ROPE_GEMMA3,
        "head_dim": 256,
    },
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
