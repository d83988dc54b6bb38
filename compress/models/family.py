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
class ModelFamily:
    """One architecture. `shared_inputs` is in the order in which a block computes them."""

    architecture: str
    blocks: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    shared_inputs: tuple[SharedInput, ...]
    qk_norm: bool = False

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

FAMILIES: dict[str, ModelFamily] = {
    family.architecture: family
    for family in (
        ModelFamily(architecture="LlamaForCausalLM", shared_inputs=_LLAMA_INPUTS),
        ModelFamily(architecture="MistralForCausalLM", shared_inputs=_LLAMA_INPUTS),
        ModelFamily(architecture="Qwen2ForCausalLM", shared_inputs=_LLAMA_INPUTS),
        ModelFamily(architecture="Qwen3ForCausalLM", shared_inputs=_LLAMA_INPUTS, qk_norm=True),
    )
}


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """The family of a checkpoint's `config.json`; ValueError lists what is supported."""
    architectures = config.get("architectures") or ["(none named in config.json)"]
    return lookup(FAMILIES, architectures[0], "model architecture")
