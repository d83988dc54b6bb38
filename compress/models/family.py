"""What the tools must know about an architecture that its config does not say. Data only.

A decoder is an embedding, a list of equal blocks, a final norm and a head. Names are those of the
Hugging Face checkpoint; block-level names are relative to one block.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from compress.lookup import lookup


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedInput:
    """Linears of a block that read the same tensor, and the norm that produces it (if one does)."""

    linears: tuple[str, ...]
    norm: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SmoothingSite:
    """A place where a scale per channel can move between two layers without changing the block.

    Channel j of what `producer` (a norm or a Linear) puts out is divided by s_j, column j of every
    Linear in `consumers` is multiplied by it. `consumers` are all the modules that read that
    output, and whatever lies between is linear in each channel. `parent` is the smallest module
    that holds all consumers: its output is where errors are measured.

    `heads` names the module with the `head_dim` of the producer's channels when several query heads
    share one key/value head: the consumer then has a whole number of heads for each of the
    producer's, which all get the scales of that one.
    """

    producer: str
    consumers: tuple[str, ...]
    parent: str
    heads: str | None = None
    part: Literal["", "values", "up"] = ""

    def first_row(self, num_rows: int, in_features: int) -> int:
        """The first row meant of a producer of `num_rows`; its consumers read `in_features`."""
        counts = {"": num_rows, "values": (num_rows - in_features) // 2, "up": in_features}
        return num_rows - counts[self.part]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """One architecture. `shared_inputs` is in the order in which a block computes them: those of
    attention, its output, those of the MLP, its output.

    `residual_writers` are the Linears whose outputs are added to the residual stream; with
    `output_norms` (of attention, of the MLP) those outputs are normed first. Norms multiply by
    their weight plus `norm_offset` (1 in families that store weights around zero, which also round
    after that product instead of before it). `qk_norm`: queries and keys are normed per head.

    `soft_caps`, `scaled_embedding`: whether the config's soft caps hold, and whether embeddings are
    multiplied by sqrt(hidden_size). `activation_key` and `default_activation` are where the config
    names the MLP's activation and what its absence means, `default_tied` what that of
    `tie_word_embeddings` means.
    """

    architecture: str
    blocks: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    shared_inputs: tuple[SharedInput, ...]
    smoothing_sites: tuple[SmoothingSite, ...]
    residual_writers: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj")
    output_norms: tuple[str, str] | None = None
    qk_norm: bool = False
    norm_offset: float = 0.0
    soft_caps: bool = False
    scaled_embedding: bool = False
    activation_key: str = "hidden_act"
    default_activation: str = "silu"
    default_tied: bool = False

    @property
    def block_linears(self) -> tuple[str, ...]:
        """Every Linear of one block, in the order in which the block computes them."""
        return tuple(name for shared in self.shared_inputs for name in shared.linears)


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_FUSED_QKV = ("self_attn.qkv_proj",)
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_FUSED_GATE_UP = ("mlp.gate_up_proj",)


def _inputs(
    qkv: tuple[str, ...], gate_up: tuple[str, ...], mlp_norm: str
) -> tuple[SharedInput, ...]:
    return (
        SharedInput(linears=qkv, norm="input_layernorm"),
        SharedInput(linears=("self_attn.o_proj",)),
        SharedInput(linears=gate_up, norm=mlp_norm),
        SharedInput(linears=("mlp.down_proj",)),
    )


def _sites(
    qkv: tuple[str, ...], gate_up: tuple[str, ...], mlp_norm: str
) -> tuple[SmoothingSite, ...]:
    """Values and the up projection are the last in their lists, and last in a fused matrix."""
    return (
        SmoothingSite(producer="input_layernorm", consumers=qkv, parent="self_attn"),
        SmoothingSite(
            producer=qkv[-1],
            consumers=("self_attn.o_proj",),
            parent="self_attn.o_proj",
            heads="self_attn",
            part="values" if len(qkv) == 1 else "",
        ),
        SmoothingSite(producer=mlp_norm, consumers=gate_up, parent="mlp"),
        SmoothingSite(
            producer=gate_up[-1],
            consumers=("mlp.down_proj",),
            parent="mlp.down_proj",
            part="up" if len(gate_up) == 1 else "",
        ),
    )


def _llama_like(architecture: str, *, qk_norm: bool = False) -> ModelFamily:
    parts = (_QKV, _GATE_UP, "post_attention_layernorm")
    return ModelFamily(
        architecture=architecture,
        shared_inputs=_inputs(*parts),
        smoothing_sites=_sites(*parts),
        qk_norm=qk_norm,
    )


def _phi3() -> ModelFamily:
    parts = (_FUSED_QKV, _FUSED_GATE_UP, "post_attention_layernorm")
    return ModelFamily(
        architecture="Phi3ForCausalLM",
        shared_inputs=_inputs(*parts),
        smoothing_sites=_sites(*parts),
    )


def _gemma(architecture: str, *, qk_norm: bool = False, soft_caps: bool = False) -> ModelFamily:
    """Gemma 2 and 3, where `post_attention_layernorm` norms the output of attention."""
    parts = (_QKV, _GATE_UP, "pre_feedforward_layernorm")
    return ModelFamily(
        architecture=architecture,
        shared_inputs=_inputs(*parts),
        smoothing_sites=_sites(*parts),
        output_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        qk_norm=qk_norm,
        norm_offset=1.0,
        soft_caps=soft_caps,
        scaled_embedding=True,
        activation_key="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        default_tied=True,
    )


FAMILIES: dict[str, ModelFamily] = {
    family.architecture: family
    for family in (
        _llama_like("LlamaForCausalLM"),
        _llama_like("MistralForCausalLM"),
        _llama_like("Qwen2ForCausalLM"),
        _llama_like("Qwen3ForCausalLM", qk_norm=True),
        _phi3(),
        _gemma("Gemma2ForCausalLM", soft_caps=True),
        _gemma("Gemma3ForCausalLM", qk_norm=True),
    )
}


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's `config.json` ties the head to the embedding."""
    tied = config.get("tie_word_embeddings")
    family = FAMILIES.get((config.get("architectures") or [""])[0])
    return bool(family and family.default_tied) if tied is None else bool(tied)


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """The family of a checkpoint's `config.json`; ValueError lists what is supported."""
    architectures = config.get("architectures") or ["(none named in config.json)"]
    return lookup(FAMILIES, architectures[0], "model architecture")
