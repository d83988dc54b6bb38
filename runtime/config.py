"""The architecture of a decoder, read from the dictionary of a checkpoint's `config.json`.

Whatever would change the result and is not supported raises ValueError with the offending value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from compress.devices import DTYPES
from compress.lookup import lookup
from compress.models.family import ModelFamily, family_of, is_tied
from compress.runtime.rope import Rope, longest_sequence, read_ropes, required

ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # of config.json -> of the ops
_FULL, _SLIDING = "full_attention", "sliding_attention"
_ALL_SLIDING = ("MistralForCausalLM", "Phi3ForCausalLM")
_ALTERNATING = {"Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6}  # -> every how many are full


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Sizes and switches of a decoder. `windows[layer]` 0 is full attention.

    `rope_of[layer]` is the index of the layer's rope in `ropes`. Scores are multiplied by
    `attention_scale`; scores and logits x become c tanh(x / c) where their soft cap c is not 0.
    `activation` is that of the gate. `eos_token_ids` end a generation. `max_positions` is the
    longest sequence it was made for.
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
    ropes: tuple[Rope, ...]
    rope_of: tuple[int, ...]
    windows: tuple[int, ...]
    attention_scale: float
    attention_soft_cap: float
    logit_soft_cap: float
    activation: str
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype


def decoder_config(config: Mapping[str, Any], *, max_len: int | None = None) -> DecoderConfig:
    """Read a `config.json` of a supported family; ValueError names what is missing or unknown.

    `max_len` is the longest sequence that will be computed, which the factors of longrope depend
    on; None asks for no more than the model was first trained for.
    """
    family = family_of(config)
    _refuse_unsupported(config)
    hidden_size, num_heads = (
        required(config, "hidden_size"),
        required(config, "num_attention_heads"),
    )
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} heads cannot share {num_kv_heads} key/value heads")
    head_dim = config.get("head_dim") or hidden_size // num_heads
    if family.scaled_embedding:  # Gemma's default has nothing to do with the other sizes
        head_dim = required(config, "head_dim")
    num_layers = required(config, "num_hidden_layers")
    layer_types = attention_layer_types(config, num_layers)
    ropes, rope_of = read_ropes(config, head_dim, layer_types, max_len=max_len)
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
    return DecoderConfig(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=required(config, "vocab_size"),
        rms_norm_eps=float(required(config, "rms_norm_eps")),
        max_positions=longest_sequence(config, max_len),
        ropes=ropes,
        rope_of=rope_of,
        windows=attention_windows(config, num_layers),
        attention_scale=_attention_scale(config, family, head_dim),
        attention_soft_cap=_soft_cap(config, family, "attn_logit_softcapping"),
        logit_soft_cap=_soft_cap(config, family, "final_logit_softcapping"),
        activation=_activation(config, family),
        tie_word_embeddings=is_tied(config),
        eos_token_ids=token_ids_of(config.get("eos_token_id")),
        dtype=lookup(DTYPES, str(stored).removeprefix("torch."), "model dtype"),
    )


def attention_layer_types(config: Mapping[str, Any], num_layers: int) -> tuple[str, ...]:
    """For each layer "full_attention", or "sliding_attention" if it sees a window only."""
    architecture, window = config["architectures"][0], config.get("sliding_window")
    types = config.get("layer_types")
    if architecture in _ALTERNATING:
        pattern = config.get("sliding_window_pattern") or _ALTERNATING[architecture]
        types = types or [_FULL if (i + 1) % pattern == 0 else _SLIDING for i in range(num_layers)]
    elif architecture in _ALL_SLIDING:
        types = [_SLIDING if window else _FULL] * num_layers
    elif not window or not config.get("use_sliding_window", False):
        # Qwen2 and Qwen3 store a window that applies only with the switch, to some layers only.
        types = [_FULL] * num_layers
    elif types is None:
        first = config.get("max_window_layers", num_layers)
        types = [_FULL if i < first else _SLIDING for i in range(num_layers)]
    if len(types) != num_layers:
        raise ValueError(f"layer_types names {len(types)} layers, the model has {num_layers}")
    known = {kind: kind for kind in (_FULL, _SLIDING)}
    return tuple(lookup(known, kind, "attention layer type") for kind in types)


def attention_windows(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The sliding window of each layer, 0 where a layer sees every earlier token."""
    types = attention_layer_types(config, num_layers)
    sizes = {_FULL: 0}
    if _SLIDING in types:
        sizes[_SLIDING] = int(required(config, "sliding_window"))
    return tuple(sizes[kind] for kind in types)


def _activation(config: Mapping[str, Any], family: ModelFamily) -> str:
    key = family.activation_key
    name = config.get(key) or family.default_activation
    if name not in ACTIVATIONS:
        raise ValueError(f"unsupported {key} {name!r} (supported: {', '.join(ACTIVATIONS)})")
    return ACTIVATIONS[name]


def _soft_cap(config: Mapping[str, Any], family: ModelFamily, key: str) -> float:
    """The cap, 0 for none. Families whose code in transformers ignores it must not name one."""
    if not family.soft_caps:
        if family.scaled_embedding and config.get(key):
            raise ValueError(
                f"unsupported {key} {config[key]} in {family.architecture} (supported: null)"
            )
        return 0.0
    if key not in config:
        raise ValueError(f"config.json lacks {key!r} (null for none)")
    cap = float(config[key] or 0.0)
    if cap < 0:
        raise ValueError(f"unsupported {key} {cap} (supported: positive numbers, null)")
    return cap


def _attention_scale(config: Mapping[str, Any], family: ModelFamily, head_dim: int) -> float:
    if family.scaled_embedding:  # Gemma: the size is not always that of a head
        head_dim = required(config, "query_pre_attn_scalar")
    return float(head_dim**-0.5)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("use_bidirectional_attention"):
        raise ValueError("unsupported use_bidirectional_attention true (supported: false)")


def token_ids_of(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
