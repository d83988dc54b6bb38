"""Rotary frequencies of every type of scaling against transformers, old and new spellings."""

from typing import Any

import pytest
import torch

from compress.runtime.rope import Rope, longest_sequence, read_ropes

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 384,
    "num_attention_heads": 6,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": YARN,
    "yarn-mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5},
    "yarn-attention": YARN | {"attention_factor": 1.25},
    "yarn-range": YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn-no-original": {"rope_type": "yarn", "factor": 8.0},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.75},
}
FULL = ("full_attention",)


def rope_of(config: dict[str, Any], head_dim: int = 64, max_len: int | None = None) -> Rope:
    (rope,), index = read_ropes(config, head_dim, FULL, max_len=max_len)
    assert index == (0,)
    return rope


def check(rope: Rope, inv_freq: torch.Tensor, scale: float) -> None:
    torch.testing.assert_close(torch.tensor(rope.inv_freq), inv_freq, rtol=1e-6, atol=0)
    assert rope.scale == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_read_ropes_matches_transformers(rope: dict[str, Any]) -> None:
    from transformers import Phi3Config, Qwen2Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    fields = {k: v for k, v in LLAMA.items() if k != "architectures"}
    parameters = {"rope_type": "default", "rope_theta": 500000.0, **rope}
    classes = (Qwen2Config, Qwen2RotaryEmbedding)
    if "partial_rotary_factor" in rope:  # Qwen2 ignores it
        classes = (Phi3Config, Phi3RotaryEmbedding)
    theirs = classes[1](classes[0](**fields, rope_parameters=dict(parameters)))
    new_style = rope_of(LLAMA | {"rope_parameters": parameters})
    old_style = rope_of(LLAMA | {"rope_theta": 500000.0, "rope_scaling": rope or None})
    for found in (new_style, old_style):
        check(found, theirs.inv_freq, theirs.attention_scaling)


PHI3: dict[str, Any] = LLAMA | {
    "architectures": ["Phi3ForCausalLM"],
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 512,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(24)],
        "long_factor": [1.0 + 2.0 * i for i in range(24)],
    },
}


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("max_len", [None, 512, 513])
def test_longrope_matches_transformers(max_len: int | None, name: str) -> None:
    """The lists by what was asked for; "su" and "yarn" are what Phi-3 called it first."""
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    scaling = PHI3["rope_scaling"] | {"type": name}
    fields = {k: v for k, v in PHI3.items() if k not in ("architectures", "rope_scaling")}
    original = {"original_max_position_embeddings": 512}  # transformers misses it for "su"
    theirs = Phi3RotaryEmbedding(Phi3Config(**fields, rope_scaling=scaling | original))
    theirs(torch.zeros(1), torch.arange(max_len or 512)[None])
    config = PHI3 | {"rope_scaling": scaling}
    check(rope_of(config, max_len=max_len), theirs.inv_freq, theirs.attention_scaling)
    assert theirs.attention_scaling > 1


@pytest.mark.parametrize(
    ("config", "max_len", "longest"),
    [
        (LLAMA, None, 4096),
        (PHI3, None, 512),
        (PHI3, 512, 512),
        (PHI3, 513, 4096),
        (LLAMA | {"rope_scaling": YARN | {"factor": 2.0}}, None, 4096),
        (LLAMA | {"rope_scaling": YARN}, None, 8192),
    ],
    ids=["plain", "longrope", "short", "long", "yarn-in-config", "yarn"],
)
def test_longest_sequence_is_what_the_frequencies_are_for(
    config: dict[str, Any], max_len: int | None, longest: int
) -> None:
    assert longest_sequence(config, max_len) == longest


@pytest.mark.parametrize(
    "spelling",
    [
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
        {
            "rope_theta": 5e5,
            "rope_local_base_freq": 500.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {},
    ],
    ids=["new", "old", "defaults"],
)
def test_gemma3_has_a_rope_for_each_type_of_layer(spelling: dict[str, Any]) -> None:
    from copy import deepcopy

    from transformers import Gemma3TextConfig
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    fields = {k: v for k, v in LLAMA.items() if k != "architectures"}
    theirs = Gemma3RotaryEmbedding(Gemma3TextConfig(**fields, **deepcopy(spelling)))
    config = LLAMA | {"architectures": ["Gemma3ForCausalLM"]} | spelling
    types = ("sliding_attention", "full_attention", "sliding_attention")
    ropes, index = read_ropes(config, 64, types)
    assert index == (0, 1, 0)
    check(ropes[0], theirs.sliding_attention_inv_freq, theirs.sliding_attention_attention_scaling)
    check(ropes[1], theirs.full_attention_inv_freq, theirs.full_attention_attention_scaling)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope_parameters": {"rope_theta": 1e4}, "rope_scaling": ROPES["linear"]},
            "both rope_parameters and rope_scaling",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
        ({"rope_scaling": {"type": "mrope"}}, "unknown rope_type 'mrope'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "lacks 'low_freq_factor'"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "lacks 'short_factor'"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 31}},
            "short_factor has 31 entries, expected 32",
        ),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor 0.01 of head_dim 64"),
    ],
    ids=["two-places", "per-layer", "type", "llama3", "longrope", "entries", "partial"],
)
def test_read_ropes_refuses_what_is_unknown_or_missing(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_ropes(LLAMA | change, 64, FULL)
