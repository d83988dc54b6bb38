"""What the tools must know about an architecture that its config does not say. Data only.

A decoder is an embedding, a list of equal blocks, a final norm and a head. Names are those of the
Hugging Face checkpoint; block-level names are relative to one block.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFamily:
    """One architecture. `shared_inputs` is in the order in which a block computes them.

    `residual_writers` are the Linears whose outputs are added to the residual stream. Norms that
    feed Linears, and the final one, multiply by their weight plus `norm_offset` (1 in families
    that store weights around zero).
    """

    architecture: str
    blocks: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    shared_inputs: tuple[SharedInput, ...]
    smoothing_sites: tuple[SmoothingSite, ...]
    residual_writers: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj")
    qk_norm: bool = False
    norm_offset: float = 0.0

    @property
    def block_linears(self) -> tuple[str, ...]:
        """Every Linear of one block, in the order in which the block computes them."""
        return tuple(name for shared in self.shared_inputs for name in shared.linears)


_LLAMA_INPUTS = (
    SharedInput(
        linears=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), norm="input_layernorm"
    ),
    SharedInput(linears=("self_attn.o_proj",)),
    SharedInput(linears=("mlp.gate_proj", "mlp.up_proj"), norm="post_attention_layernorm"),
    SharedInput(linears=("mlp.down_proj",)),
)

_LLAMA_SITES = (
    SmoothingSite(
        producer="input_layernorm",
        consumers=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        parent="self_attn",
    ),
    SmoothingSite(
        producer="self_attn.v_proj",
        consumers=("self_attn.o_proj",),
        parent="self_attn.o_proj",
        heads="self_attn",
    ),
    SmoothingSite(
        producer="post_attention_layernorm",
        consumers=("mlp.gate_proj", "mlp.up_proj"),
        parent="mlp",
    ),
    SmoothingSite(producer="mlp.up_proj", consumers=("mlp.down_proj",), parent="mlp.down_proj"),
)


def _llama_like(architecture: str, *, qk_norm: bool = False) -> ModelFamily:
    return ModelFamily(
        architecture=architecture,
        shared_inputs=_LLAMA_INPUTS,
        smoothing_sites=_LLAMA_SITES,
        qk_norm=qk_norm,
    )


FAMILIES: dict[str, ModelFamily] = {
    family.architecture: family
    for family in (
        _llama_like("LlamaForCausalLM"),
        _llama_like("MistralForCausalLM"),
        _llama_like("Qwen2ForCausalLM"),
        _llama_like("Qwen3ForCausalLM", qk_norm=True),
    )
}


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """The family of a checkpoint's `config.json`; ValueError lists what is supported."""
    architectures = config.get("architectures") or ["(none named in config.json)"]
    return lookup(FAMILIES, architectures[0], "model architecture")
