"""Reading config.json: windows, soft caps, defaults of families, refusals."""

from typing import Any

import pytest
import torch

from compress.runtime.config import (
    attention_windows,
    decoder_config,
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
GEMMA2: dict[str, Any] = LLAMA | {
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 32,
    "sliding_window": 8,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
GEMMA3: dict[str, Any] = GEMMA2 | {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


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
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": None}, (0, 0, 0)),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 8}, (8, 0, 8)),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "sliding_window": 8,
                "sliding_window_pattern": 3,
            },
            (8, 8, 0),
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (0, 8, 0),
        ),
    ],
    ids=[
        "llama",
        "mistral",
        "mistral-none",
        "qwen2-off",
        "qwen2-on",
        "qwen3-layer-types",
        "phi3",
        "phi3-none",
        "gemma2",
        "gemma3",
        "gemma3-pattern",
        "gemma3-layer-types",
    ],
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


def test_decoder_config_of_gemma_follows_its_own_keys() -> None:
    config = decoder_config(GEMMA2)
    assert config.attention_scale == 0.25  # 1 / sqrt(16), not of the head_dim
    assert (config.attention_soft_cap, config.logit_soft_cap) == (50.0, 30.0)
    assert config.activation == "gelu_tanh"
    assert config.tie_word_embeddings  # what absence means in this family
    assert not decoder_config(GEMMA2 | {"tie_word_embeddings": False}).tie_word_embeddings
    assert decoder_config(GEMMA2 | {"attn_logit_softcapping": None}).attention_soft_cap == 0
    assert (decoder_config(GEMMA3).attention_soft_cap, decoder_config(GEMMA3).head_dim) == (0, 32)


def test_decoder_config_ignores_keys_of_other_families() -> None:
    others = {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 4, "hidden_activation": "x"}
    config = decoder_config(LLAMA | others)
    assert (config.attention_soft_cap, config.attention_scale) == (0, 8**-0.5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "unsupported hidden_act 'gelu'"),
        ({"num_key_value_heads": 4}, "6 heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "unknown rope_type 'ntk'"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5"),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor 0.4 of head_dim 8"),
        (GEMMA2 | {"hidden_activation": "gelu"}, "unsupported hidden_activation 'gelu'"),
        (GEMMA2 | {"head_dim": None}, "lacks 'head_dim'"),
        (GEMMA2 | {"query_pre_attn_scalar": None}, "lacks 'query_pre_attn_scalar'"),
        (GEMMA2 | {"attn_logit_softcapping": -2}, "attn_logit_softcapping -2"),
        (GEMMA2 | {"sliding_window": None}, "lacks 'sliding_window'"),
        (GEMMA2 | {"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        (GEMMA2 | {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, "unsupported attn_logit_softcapping 50.0"),
        (GEMMA3 | {"final_logit_softcapping": 30.0}, "unsupported final_logit_softcapping 30.0"),
        (GEMMA3 | {"rope_parameters": {"rope_theta": 1e4}}, "lacks 'sliding_attention'"),
    ],
)
def test_decoder_config_refuses_what_it_cannot_compute(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        decoder_config(LLAMA | change)


def test_decoder_config_refuses_gemma_without_a_word_on_soft_caps() -> None:
    config = {key: value for key, value in GEMMA2.items() if key != "attn_logit_softcapping"}
    with pytest.raises(ValueError, match="lacks 'attn_logit_softcapping'"):
        decoder_config(config)


def test_token_ids_of_reads_all_three_spellings() -> None:
    assert [token_ids_of(value) for value in (None, 2, [2, 7])] == [(), (2,), (2, 7)]
