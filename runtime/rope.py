"""Rotary frequencies of every layer, read from the dictionary of a checkpoint's `config.json`.

Understands `rope_parameters` (transformers 5; for Gemma 3 one set for each type of layer) and
`rope_theta` + `rope_scaling` (before it). The types of scaling, with R the rotated part of a head
(all of it, or `partial_rotary_factor` of it) and f_i = theta^(-2i/R):

  default   f_i
  linear    f_i / factor
  dynamic   f_i up to `max_position_embeddings`; the engine takes no longer sequences
  llama3    slow rotations divided by `factor`, fast ones kept, a blend in between
  yarn      the same with a linear blend over pairs, cos and sin times an attention factor; Peng et
            al., YaRN, arXiv:2309.00071
  longrope  f_i / factor_i, with one list of factors for short contexts and one for long ones, cos
            and sin times an attention factor; Ding et al., LongRoPE, arXiv:2402.13753

transformers takes the long factors of longrope once a sequence outgrows the length that the model
was first trained for, and then computes its whole cache anew. Here an engine has one list for all
its sequences, as keys in its cache may be shared: the long one if it was asked for sequences that
are longer than that (`max_model_len`), the short one otherwise, with longer sequences refused.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from compress.lookup import lookup

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OLD_PHI3_TYPES = ("su", "yarn")  # Phi-3's first names for longrope
_SLIDING = "sliding_attention"
_FULL = "full_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """The angle of pair i at position p is p * inv_freq[i]; cos and sin are multiplied by `scale`.

    `inv_freq` has R / 2 entries: only the first R channels of a head are rotated.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0


def read_ropes(
    config: Mapping[str, Any],
    head_dim: int,
    layer_types: Sequence[str],
    *,
    max_len: int | None = None,
) -> tuple[tuple[Rope, ...], tuple[int, ...]]:
    """The distinct ropes of a model, and the index among them of the rope of each layer.

    `max_len` is the longest sequence that will be computed (None: as the model was first trained
    for), which longrope depends on. ValueError names what is unknown, missing or contradictory.
    """
    ropes: list[Rope] = []
    index: dict[str, int] = {}
    for kind in layer_types:
        if kind not in index:
            rope = _read_rope(config, _parameters(config, kind), head_dim, max_len)
            if rope not in ropes:
                ropes.append(rope)
            index[kind] = ropes.index(rope)
    if len({len(rope.inv_freq) for rope in ropes}) > 1:
        raise ValueError("unsupported: partial_rotary_factor differs between layer types")
    return tuple(ropes), tuple(index[kind] for kind in layer_types)


def longest_sequence(config: Mapping[str, Any], max_len: int | None) -> int:
    """The longest sequence that the model was made for, given that `max_len` was asked for."""
    longest = int(required(config, "max_position_embeddings"))
    parameters = _parameters(config, _FULL)
    kind = _rope_type(parameters)
    if kind == "yarn":
        return max(longest, int(_original(config, parameters) * _factor(config, parameters)))
    if kind == "longrope" and not _is_long(config, parameters, max_len):
        return min(longest, _original(config, parameters))
    return longest


def required(config: Mapping[str, Any], key: str) -> Any:
    """`config[key]`; ValueError if it is absent or null."""
    if config.get(key) is None:
        raise ValueError(f"config.json lacks {key!r}")
    return config[key]


def _parameters(config: Mapping[str, Any], layer_type: str) -> dict[str, Any]:
    """The rope parameters of layers of one type, with theta and the rest in one place."""
    is_per_type = config["architectures"][0] == "Gemma3ForCausalLM"
    current, older = config.get("rope_parameters"), config.get("rope_scaling")
    if current and older and current != older:
        raise ValueError("config has both rope_parameters and rope_scaling, and they differ")
    rope = dict(current or older or {})
    theta = config.get("rope_theta")
    if is_per_type:
        theta = theta or 1_000_000.0
        if layer_type == _SLIDING:  # old configs scale the full layers only
            theta = config.get("rope_local_base_freq") or 10_000.0
            rope = rope if current else {}
        if current:
            rope = dict(required(current, layer_type))
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(f"unsupported rope_parameters per layer type ({', '.join(nested)})")
    if config["architectures"][0] == "Phi3ForCausalLM" and _rope_name(rope) in _OLD_PHI3_TYPES:
        rope["rope_type"] = "longrope"
    rope["rope_theta"] = float(rope.get("rope_theta") or theta or 10_000.0)
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    rope["partial_rotary_factor"] = float(partial or 1.0)
    return rope


def _read_rope(
    config: Mapping[str, Any], rope: Mapping[str, Any], head_dim: int, max_len: int | None
) -> Rope:
    kind, partial = _rope_type(rope), rope["partial_rotary_factor"]
    width = int(head_dim * partial)
    if not 0 < partial <= 1 or width < 2 or width % 2:
        raise ValueError(
            f"unsupported partial_rotary_factor {partial} of head_dim {head_dim}"
            " (supported: an even number of channels, at most all)"
        )
    exponent = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    period = torch.pow(rope["rope_theta"], exponent)
    inv_freq, scale = 1.0 / period, 1.0
    if kind == "linear":
        inv_freq = inv_freq / float(required(rope, "factor"))
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, rope, _original(config, rope))
    elif kind == "yarn":
        inv_freq, scale = _yarn(period, rope, _factor(config, rope), _original(config, rope))
    elif kind == "longrope":
        name = "long_factor" if _is_long(config, rope, max_len) else "short_factor"
        factors = torch.tensor(required(rope, name), dtype=torch.float32)
        if len(factors) != len(period):
            raise ValueError(f"{name} has {len(factors)} entries, expected {len(period)}")
        inv_freq, scale = 1.0 / (factors * period), _longrope_scale(config, rope)
    return Rope(inv_freq=tuple(inv_freq.tolist()), scale=scale)


def _rope_name(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type") or "default"


def _rope_type(rope: Mapping[str, Any]) -> str:
    return lookup({name: name for name in ROPE_TYPES}, _rope_name(rope), "rope_type")


def _original(config: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    """The length that the model was first trained for; what stands outside wins (Phi-3)."""
    key = "original_max_position_embeddings"
    return int(config.get(key) or rope.get(key) or required(config, "max_position_embeddings"))


def _factor(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    if (factor := rope.get("factor")) is not None:
        return float(factor)
    return float(required(config, "max_position_embeddings") / _original(config, rope))


def _is_long(config: Mapping[str, Any], rope: Mapping[str, Any], max_len: int | None) -> bool:
    return max_len is not None and max_len > _original(config, rope)


def _llama3(inv_freq: torch.Tensor, rope: Mapping[str, Any], length: int) -> torch.Tensor:
    """Llama 3.1: divide slow rotations by `factor`, keep fast ones, blend in between."""
    factor, low, high = (
        float(required(rope, key)) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    wavelength = 2 * math.pi / inv_freq
    blend = ((length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inv_freq / factor + blend * inv_freq


def _yarn(
    period: torch.Tensor, rope: Mapping[str, Any], factor: float, length: int
) -> tuple[torch.Tensor, float]:
    """Frequencies and the factor on cos and sin (sections 3.2 and 3.4 of the paper)."""
    num_pairs, theta = len(period), rope["rope_theta"]

    def pair_of(rotations: float) -> float:
        """The pair, as a real number, that turns `rotations` times within `length` positions."""
        return num_pairs * math.log(length / (rotations * 2 * math.pi)) / math.log(theta)

    low = pair_of(float(rope.get("beta_fast") or 32))
    high = pair_of(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    width = high - low or 0.001
    interpolated = ((torch.arange(num_pairs, dtype=torch.float32) - low) / width).clamp(0, 1)
    inv_freq = interpolated / (factor * period) + (1 - interpolated) / period
    if (given := rope.get("attention_factor")) is not None:
        return inv_freq, float(given)
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale and all_dim:
        return inv_freq, _mscale(factor, mscale) / _mscale(factor, all_dim)
    return inv_freq, _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope_scale(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float:
    if (given := rope.get("attention_factor")) is not None:
        return float(given)
    factor, length = _factor(config, rope), _original(config, rope)
    return math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
