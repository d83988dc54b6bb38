"""The architecture of a decoder, read from the dictionary of a checkpoint's `config.json`.

Whatever would change the result and is not supported raises ValueError with the offending value.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from compress.devices import DTYPES
from compress.lookup import lookup
from compress.models.family import ModelFamily, family_of

_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes and switches of a decoder. `windows[layer]` 0 is full attention.

    `inv_freq` (head_dim / 2,) fp32: the rotary angle of pair i at position p is p * inv_freq[i].
    `eos_token_ids` end a generation. `max_positions` is the longest sequence it was made for.
    """

    family: ModelFamily
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_positions: int
    inv_freq: tuple[float, ...]
    windows: tuple[int, ...]
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a `config.json` of a supported family; ValueError names what is missing or unknown."""
    family = family_of(config)
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"unsupported hidden_act {activation!r} (supported: silu)")
    hidden_size, num_heads = (
        _required(config, "hidden_size"),
        _required(config, "num_attention_heads"),
    )
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads cannot share {num_kv_heads} key/value heads")
    head_dim = config.get("head_dim") or hidden_size // num_heads
    num_layers = _required(config, "num_hidden_layers")
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    return DecoderConfig(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_required(config, "vocab_size"),
        rms_norm_eps=float(_required(config, "rms_norm_eps")),
        max_positions=_required(config, "max_position_embeddings"),
        inv_freq=tuple(rotary_frequencies(config, head_dim).tolist()),
        windows=attention_windows(config, num_layers),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=token_ids_of(config.get("eos_token_id")),
        dtype=lookup(DTYPES, str(stored).removeprefix("torch."), "model dtype"),
    )


def rotary_frequencies(config: Mapping[str, Any], head_dim: int) -> torch.Tensor:
    """Inverse frequencies (head_dim / 2,) fp32, with the scaling that the config asks for.

    Understands `rope_parameters` (transformers 5) and `rope_theta` + `rope_scaling` (before it).
    """
    current, older = config.get("rope_parameters"), config.get("rope_scaling")
    if current and older and current != older:
        raise ValueError("config has both rope_parameters and rope_scaling, and they differ")
    rope = current or older or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"unsupported rope_parameters per layer type ({', '.join(rope)})")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise ValueError(f"unsupported rope_type {kind!r} (supported: {', '.join(_ROPE_TYPES)})")
    if float(rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1:
        raise ValueError("unsupported partial_rotary_factor (supported: 1)")
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / torch.pow(theta, exponent)
    if kind == "linear":
        return inv_freq / float(_required(rope, "factor"))
    if kind == "llama3":
        return _llama3_frequencies(inv_freq, rope)
    return inv_freq


def attention_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The sliding window of each layer, 0 where a layer sees every earlier token."""
    architecture, window = config["architectures"][0], config.get("sliding_window")
    if architecture == "MistralForCausalLM":
        return (window or 0,) * num_layers
    # Qwen2 and Qwen3 store a window that applies only with the switch, and only to some layers.
    if not window or not config.get("use_sliding_window", False):
        return (0,) * num_layers
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", num_layers)
        types = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    sizes = {"full_attention": 0, "sliding_attention": window}
    return tuple(lookup(sizes, kind, "attention layer type") for kind in types)


def _llama3_frequencies(inv_freq: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: divide slow rotations by `factor`, keep fast ones, blend in between."""
    factor, low, high, length = (
        float(_required(rope, key))
        for key in (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        )
    )
    wavelength = 2 * math.pi / inv_freq
    blend = ((length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / factor + blend * inv_freq


def _required(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ValueError(f"config.json lacks {key!r}")
    return config[key]


def token_ids_of(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
