"""Tiny random models of every supported architecture, complete enough for the whole command line.

Sizes are odd on purpose: hidden 96 (whole groups of 32, not of 64), three query heads per key/value
head, an intermediate size and a vocabulary that are not powers of two, and, for Qwen3 and Gemma, a
head_dim that is not hidden / heads. Norm weights and biases are random as well: with their initial
ones and zeros a forgotten multiply or add would go unnoticed.
"""

from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "[{{ message['role'] }}] {{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
_HEAD_DIMS = {
    "Qwen3ForCausalLM": 32,
    "Gemma2ForCausalLM": 32,
    "Gemma3ForCausalLM": 32,
}
_GEMMA = {"query_pre_attn_scalar": 24}  # not the head_dim
_FIELDS: dict[str, dict[str, Any]] = {
    # caps that random scores and logits do reach
    "Gemma2ForCausalLM": _GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0},
    "Gemma3ForCausalLM": _GEMMA | {"layer_types": None, "sliding_window_pattern": 2},
}
_TRAINING_TOPICS = ("assignment", "comparisons", "execmodel", "import")


def tiny_model(
    architecture: str,
    directory: Path,
    *,
    num_layers: int = 2,
    tied: bool = False,
    vocab: int = 331,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **config: Any,
) -> Path:
    """Save a random `architecture` (such as `LlamaForCausalLM`) and its tokenizer to `directory`.

    `tied` shares the embedding with the head; `config` overrides fields of the transformers config
    (`hidden_size=...`). Equal arguments give equal files. Returns `directory`.
    """
    import transformers

    model_class = getattr(transformers, architecture)
    config = _FIELDS.get(architecture, {}) | config
    fields: dict[str, Any] = {
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": _HEAD_DIMS.get(architecture, 16),
        "max_position_embeddings": 4096,
        "initializer_range": 0.08,
        "sliding_window": 21 if architecture.startswith("Gemma") else None,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(model_class.config_class(**(fields | config)))
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(0.2 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    tiny_tokenizer(vocab).save_pretrained(directory)
    return directory


@lru_cache
def tiny_tokenizer(vocab: int = 331) -> Any:
    """A byte-level BPE tokenizer with `vocab` entries, bos 0 and eos 1, and a chat template.

    Like Llama's it puts bos first when special tokens are asked for.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics[name] for name in _TRAINING_TOPICS), trainer)
    assert tokenizer.get_vocab_size() == vocab, f"vocab must be at least 258, got {vocab}"
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        chat_template=_CHAT_TEMPLATE,
    )
