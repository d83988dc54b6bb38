"""Reading config.json: rotary scaling against transformers, windows, refusals."""

from typing import Any

import pytest
import torch

from compress.runtime.config import (
    attention_windows,
    decoder_config,
    rotary_frequencies,
    token_ids_of,
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 331,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    "rope", [{}, LINEAR_ROPE, LLAMA3_ROPE], ids=["default", "linear", "llama3"]
)
def test_rotary_frequencies_match_transformers(rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    fields = {k: v for k, v in LLAMA.items() if k not in ("architectures", "rope_theta")}
    parameters = {"rope_type": "default", "rope_theta": 500000.0, **rope}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**fields, head_dim=64, rope_parameters=parameters))
    new_style = rotary_frequencies({"rope_parameters": parameters}, 64)
    old_style = rotary_frequencies({"rope_theta": 500000.0, "rope_scaling": rope or None}, 64)
    torch.testing.assert_close(new_style, theirs.inv_freq, rtol=1e-6, atol=0)
    torch.testing.assert_close(old_style, theirs.inv_freq, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": LINEAR_ROPE}, "both"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
    ],
    ids=["two-places", "per-layer"],
)
def test_rotary_frequencies_refuse_what_is_ambiguous(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotary_frequencies(config, 64)


def test_rotary_frequencies_refuse_an_unknown_type() -> None:
    with pytest.raises(ValueError, match="rope_type 'yarn'"):
        rotary_frequencies({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 64)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 8}, (0, 0, 0)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (0, 0, 0)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": False,
                "max_window_layers": 1,
            },
            (0, 0, 0),
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (0, 8, 8),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, 0, 8),
        ),
    ],
    ids=["llama", "mistral", "mistral-none", "qwen2-off", "qwen2-on", "qwen3-layer-types"],
)
def test_attention_windows_follow_the_family(
    config: dict[str, Any], windows: tuple[int, ...]
) -> None:
    assert attention_windows(config, 3) == windows


def test_decoder_config_fills_in_what_old_configs_leave_out() -> None:
    config = decoder_config({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"})
    assert (config.num_kv_heads, config.head_dim) == (6, 8)
    assert config.dtype == torch.float32
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"num_key_value_heads": 4}, "6 heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
    ids=["family", "act", "heads", "hidden", "eps", "dtype", "factor", "partial"],
)
def test_decoder_config_refuses_what_it_cannot_compute(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        decoder_config(LLAMA | change)


def test_token_ids_of_reads_all_three_spellings() -> None:
    assert [token_ids_of(value) for value in (None, 2, [2, 7])] == [(), (2,), (2, 7)]
