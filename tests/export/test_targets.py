"""What loaders would refuse or misread is said before they are tried."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from compress.export.formats import FORMATS
from compress.export.targets import TARGETS, lint_target
from compress.scheme import (
    PER_CHANNEL,
    ActivationScheme,
    KVCacheScheme,
    LinearScheme,
    WeightScheme,
)
from tests.export.samples import FP8, LINEARS, W8A8

LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "dtype": "bfloat16"}
NAMES = [f"model.layers.{block}.{name}" for block in range(2) for name in LINEARS]
SHAPES = dict.fromkeys(NAMES, (256, 256)) | {"model.embed_tokens": (320, 256)}
W4 = LinearScheme(weights=WeightScheme(group_size=64))
W4_ASYM = LinearScheme(weights=WeightScheme(group_size=64, symmetric=False))
BLOCKS = LinearScheme(
    weights=WeightScheme(type="float", bits=8, group_size=PER_CHANNEL, block_size=128),
    activations=ActivationScheme(type="float", group_size=128),
)


def _weights(**changes: Any) -> LinearScheme:
    return LinearScheme(weights=WeightScheme(**({"group_size": 64} | changes)))


def lint(
    target: str,
    scheme: LinearScheme = W4,
    *,
    format: str = "compressed-tensors",
    schemes: dict[str, LinearScheme] | None = None,
    shapes: dict[str, tuple[int, int]] | None = None,
    scale_dtype: torch.dtype | None = None,
    kv_cache: KVCacheScheme | None = None,
    quantization: dict[str, Any] | None = None,
    **config: Any,
) -> list[str]:
    """The sentences for a two-block Llama with `scheme` in every Linear but for `schemes`."""
    all_schemes = dict.fromkeys(NAMES, scheme) | (schemes or {})
    made = FORMATS[format].config(all_schemes, ["lm_head"], kv_cache) | (quantization or {})
    return lint_target(
        LLAMA | {"quantization_config": made} | config,
        all_schemes,
        SHAPES | (shapes or {}),
        scale_dtype or FORMATS[format].scale_dtype or torch.bfloat16,
        target,
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "scheme", [W4, W8A8, FP8, BLOCKS, replace(FP8, activations=None), _weights(bits=8)]
)
def test_common_schemes_load_everywhere(target, scheme):
    assert lint(target, scheme) == []


@pytest.mark.parametrize("format", ["gptq", "awq"])
@pytest.mark.parametrize("target", TARGETS)
def test_the_common_4_bit_formats_load_everywhere_in_float16(target, format):
    assert lint(target, W4, format=format, dtype="float16") == []


def test_unknown_target_is_an_error():
    with pytest.raises(ValueError, match="unknown target 'vlm'; did you mean 'vllm'"):
        lint("vlm")


UP = "model.layers.0.mlp.up_proj"
FOUND = [
    # packed integers
    ("vllm", _weights(bits=3), {}, None),
    ("sglang", _weights(bits=3), {}, "4 and 8 bits only"),
    ("vllm", _weights(bits=8, symmetric=False), {}, "asymmetric codes of 4 bits only"),
    ("vllm", W4_ASYM, {}, None),
    ("vllm", _weights(group_size=16), {}, "group_size -1, 32, 64 and 128 only"),
    ("vllm", W4, {"shapes": dict.fromkeys(NAMES, (36, 256))}, "multiple of 8 outputs"),
    ("vllm", W4, {"scale_dtype": torch.float32}, "rounded to 16 bits"),
    ("vllm", W8A8, {"scale_dtype": torch.float32}, None),
    ("transformers", W4, {"scale_dtype": torch.float32}, None),
    ("transformers", W4_ASYM, {}, "asymmetric packed codes only with"),
    ("transformers", W4_ASYM, {"schemes": {UP: W4}}, "use one scheme"),
    # activations
    ("vllm", LinearScheme(weights=WeightScheme(bits=8), activations=ActivationScheme()), {},
     "per channel"),
    ("vllm", LinearScheme(weights=WeightScheme(), activations=ActivationScheme()), {}, None),
    ("vllm", LinearScheme(weights=WeightScheme(bits=5), activations=ActivationScheme()), {},
     "weights of 4 or 8 bits"),
    ("vllm", replace(W8A8, weights=replace(W8A8.weights, symmetric=False)), {},
     "need symmetric weights"),
    ("sglang", replace(W8A8, activations=ActivationScheme(group_size=64)), {}, "have no groups"),
    ("vllm", replace(BLOCKS, activations=ActivationScheme(type="float")), {}, "block size"),
    ("vllm", replace(BLOCKS, activations=ActivationScheme(type="float", dynamic=False)), {},
     "block size"),
    ("vllm", replace(FP8, activations=ActivationScheme(type="float", group_size=128)), {},
     "block size"),
    ("vllm", BLOCKS, {"shapes": {UP: (200, 256)}}, "whole blocks"),
    ("vllm", BLOCKS, {"shapes": {UP: (256, 200)}}, "whole blocks"),
    ("vllm", BLOCKS, {"shapes": {"model.layers.0.mlp.down_proj": (200, 256)}}, None),
    # GPTQ and AWQ
    ("vllm", _weights(bits=3), {"format": "gptq", "dtype": "float16"}, "4 and 8 bits only"),
    ("vllm", W4_ASYM, {"format": "gptq_v2", "dtype": "float16"}, "symmetric GPTQ only"),
    ("vllm", W4_ASYM, {"format": "awq", "dtype": "float16"}, None),
    ("vllm", W4, {"format": "gptq", "dtype": "float16", "quantization": {"desc_act": True}},
     "desc_act"),
    ("sglang", W4, {"format": "gptq", "dtype": "float16", "quantization": {"desc_act": True}},
     None),
    ("sglang", _weights(bits=3), {"format": "gptq", "dtype": "float16"}, None),
    ("vllm", W4, {"format": "gptq"}, "rounded to bfloat16"),
    ("sglang", W4, {"format": "awq"}, "rounded to bfloat16"),
    ("vllm", W4, {"scale_dtype": torch.float16}, "rounded to bfloat16"),
    # embedding, KV cache
    ("vllm", W4, {"schemes": {"model.embed_tokens": W4}}, "without its name"),
    ("vllm", W4, {"schemes": {"model.embed_tokens": W4}, "tie_word_embeddings": True}, "tied"),
    ("vllm", W4, {"schemes": {"model.embed_tokens": FP8}}, "integers only"),
    ("sglang", W4, {"schemes": {"model.embed_tokens": W4}}, "silently"),
    ("transformers", W4, {"schemes": {"model.embed_tokens": W4}}, "dequantize=True"),
    ("transformers", W4, {"schemes": {"model.embed_tokens": FP8}}, "use one scheme"),
    ("sglang", W4, {"kv_cache": KVCacheScheme(strategy="head")}, "ignores scales per head"),
    ("sglang", W4, {"kv_cache": KVCacheScheme()}, None),
    ("vllm", W4, {"kv_cache": KVCacheScheme(strategy="head")}, None),
    # stacked Linears
    ("vllm", W4, {"schemes": {UP: W8A8}}, "differ in scheme"),
    ("sglang", W4, {"schemes": {UP: W8A8}}, "differ in scheme"),
    ("transformers", W4, {"schemes": {UP: W8A8}}, None),
]  # fmt: skip


@pytest.mark.parametrize("target, scheme, options, expected", FOUND)
def test_lint_names_what_a_loader_would_not_load(target, scheme, options, expected):
    found = lint(target, scheme, **options)
    if expected is None:
        assert found == []
    else:
        assert len(found) == 1 and expected in found[0]
        assert "model." in found[0] or "quantization_config" in found[0] or "kv_cache" in found[0]


def test_sglang_reads_old_gptq_in_float16_only():
    found = lint("sglang", _weights(bits=3), format="gptq")
    assert any("in float16 only" in sentence for sentence in found)


@pytest.mark.parametrize(
    ("shape", "fits"), [((512, 256), True), ((448, 256), False), ((384, 128), True)], ids=str
)
def test_the_parts_of_a_fused_linear_must_be_whole_blocks(shape, fits):
    """256 queries and 128 keys and values; 96 of them; 128 of each."""
    fused = "model.layers.0.self_attn.qkv_proj"
    outputs = (256, 256) if shape[1] == 256 else (256, 128)
    found = lint(
        "vllm",
        W4,
        schemes={fused: BLOCKS, "model.layers.0.self_attn.o_proj": BLOCKS},
        shapes={fused: shape, "model.layers.0.self_attn.o_proj": outputs},
        architectures=["Phi3ForCausalLM"],
    )
    assert (found == []) if fits else ("whole blocks" in found[0] and fused in found[0])


def test_a_finding_in_many_linears_is_one_sentence():
    assert lint("sglang", _weights(bits=3))[0].startswith(f"{NAMES[0]} and 13 more: ")


@pytest.mark.parametrize(
    "strategy, value, expected",
    [
        ("group", "static", None),
        ("group", "weight", "g_idx"),
        ("channel", "static", "strategy group only"),
    ],
)
def test_act_order_of_other_programs_is_judged(strategy, value, expected):
    size = {"group": 64, "channel": None}[strategy]
    scheme = _weights(group_size=size or PER_CHANNEL)
    config = FORMATS["compressed-tensors"].config(dict.fromkeys(NAMES, scheme), [], None)
    config["config_groups"]["group_0"]["weights"]["actorder"] = value
    found = lint("vllm", scheme, quantization=config)
    assert (found == []) if expected is None else (len(found) == 1 and expected in found[0])
