"""The table of formats: one Linear in all of them, whole checkpoints, scales of the KV cache."""

from dataclasses import replace

import pytest
import torch

from compress.artifacts import QuantizedLinear
from compress.errors import CheckFailed
from compress.export.checks import differing_part, subject_of
from compress.export.formats import (
    FORMATS,
    format_of,
    pack_linear,
    read_kv_cache,
    read_linear,
    read_scheme,
)
from compress.export.inspect import inspect_checkpoint
from compress.export.kv_scales import kv_scale_layout, pack_kv_scales, read_kv_scales
from compress.export.verify import check_part, verify_checkpoint
from compress.export.writer import write_safetensors
from compress.models.checkpoint import open_checkpoint
from compress.scheme import (
    PER_CHANNEL,
    ActivationScheme,
    KVCacheScheme,
    LinearScheme,
    WeightScheme,
    dequantize,
)
from tests.export.samples import (
    FP8,
    LINEARS,
    W8A8,
    edit_config,
    edit_tensors,
    failed_checks,
    packed_model,
    random_linear,
)
from tests.factory import tiny_model

W4 = LinearScheme(weights=WeightScheme(group_size=32))
W4_ASYM = LinearScheme(weights=WeightScheme(group_size=32, symmetric=False))
W8 = LinearScheme(weights=WeightScheme(bits=8, group_size=32))
BLOCKS = LinearScheme(
    weights=WeightScheme(type="float", bits=8, group_size=PER_CHANNEL, block_size=32),
    activations=ActivationScheme(type="float", group_size=32),
)


def mixed(name: str) -> LinearScheme | None:
    """A scheme per Linear, of every layout; o_proj of the second block stays float."""
    if name == "model.layers.1.self_attn.o_proj" or not name.endswith(LINEARS):
        return None
    return BLOCKS if "down" in name else W8A8 if "self_attn" in name else W4


CHECKPOINTS = [
    pytest.param("compressed-tensors", W8A8, id="w8a8"),
    pytest.param(
        "compressed-tensors",
        replace(W8A8, activations=ActivationScheme(dynamic=False)),
        id="w8a8-static",
    ),
    pytest.param("compressed-tensors", FP8, id="fp8"),
    pytest.param("compressed-tensors", BLOCKS, id="fp8-blocks"),
    pytest.param("compressed-tensors", replace(FP8, activations=None), id="fp8-weights"),
    pytest.param("compressed-tensors", mixed, id="mixed"),
    pytest.param("gptq", W4, id="gptq"),
    pytest.param(
        "gptq", lambda n: None if "1.mlp" in n or not n.endswith(LINEARS) else W8 if "o_proj" in n
        else W4, id="gptq-mixed",
    ),
    pytest.param("gptq_v2", W4_ASYM, id="gptq-v2"),
    pytest.param("awq", W4_ASYM, id="awq"),
]  # fmt: skip


@pytest.mark.parametrize("scheme", [W4, W4_ASYM], ids=["sym", "asym"])
def test_one_linear_is_the_same_weights_in_every_format(scheme):
    linear = random_linear(scheme, (64, 96), torch.float16)
    for format in FORMATS.values():
        if format.refusal(scheme, (64, 96)) is None:
            again = format.unpack(format.pack(linear, scheme), scheme)
            assert differing_part(again, linear) is None, format.name


@pytest.mark.parametrize("format_name, scheme", CHECKPOINTS)
def test_a_checkpoint_of_any_format_reads_back_and_passes_its_checks(
    source, tmp_path, format_name, scheme
):
    folder = tmp_path / "packed"
    linears = packed_model(source, folder, scheme, format_name)
    checkpoint = open_checkpoint(folder)
    assert format_of(checkpoint.config).name == format_name
    scheme_for = read_scheme(checkpoint.config)
    for name, linear in linears.items():
        assert differing_part(read_linear(checkpoint, name, scheme_for(name)), linear) is None
    assert subject_of(checkpoint).packed.keys() == linears.keys()
    report = verify_checkpoint(folder, source)
    assert failed_checks(report) == {}
    assert report.relative_errors.keys() == linears.keys()
    assert max(report.relative_errors.values()) < 0.15
    assert (folder / "quantize_config.json").is_file() is format_name.startswith("gptq")


@pytest.mark.parametrize("format_name, scheme", CHECKPOINTS)
def test_inspection_counts_every_format(source, tmp_path, format_name, scheme):
    linears = packed_model(source, tmp_path / "packed", scheme, format_name)
    facts = inspect_checkpoint(tmp_path / "packed")
    assert facts["format"] == format_name
    assert sum(row["num_linears"] for row in facts["schemes"]) == len(linears)
    assert not any("ignored" in row["scheme"] for row in facts["schemes"])
    weights = sum(tensor.numel() for tensor in map(open_checkpoint(source).read,
                                                  open_checkpoint(source).tensors))  # fmt: skip
    assert facts["num_weights"] == weights
    bits = sum(linear.bits * linear.codes.numel() for linear in linears.values()) / sum(
        linear.codes.numel() for linear in linears.values()
    )
    assert bits < facts["bits_per_weight"]["quantized"] < bits + 2


@pytest.mark.parametrize(
    "format_name, scheme, local, change, check",
    [
        ("gptq", W4, "g_idx", lambda t: t.flip(0), "decoding"),
        ("gptq", W4, "qzeros", lambda t: t + 0x11111111, "decoding"),
        ("gptq", W4, "scales", lambda t: t * 0, "scales"),
        ("gptq", W4, "qweight", lambda t: t[:-1], "tensors"),
        ("awq", W4_ASYM, "scales", lambda t: t * float("nan"), "scales"),
        ("awq", W4_ASYM, "qzeros", lambda t: t.half(), "tensors"),
        ("compressed-tensors", W8A8, "weight", lambda t: t.float(), "tensors"),
        ("compressed-tensors", FP8, "weight_scale", lambda t: t * 0, "scales"),
        ("compressed-tensors", FP8, "weight", lambda t: t.to(torch.int8), "tensors"),
    ],
)
def test_verify_names_a_damaged_tensor_of_any_format(
    source, tmp_path, format_name, scheme, local, change, check
):
    folder = tmp_path / "packed"
    packed_model(source, folder, scheme, format_name)
    name = f"model.layers.1.mlp.up_proj.{local}"
    edit_tensors(folder, **{name: change(open_checkpoint(folder).read(name))})
    failed = failed_checks(verify_checkpoint(folder))
    assert check in failed
    assert "model.layers.1.mlp.up_proj" in failed[check]


def test_verify_finds_an_int8_linear_that_the_config_ignores(source, tmp_path):
    packed_model(source, tmp_path / "packed", W8A8)
    config = open_checkpoint(tmp_path / "packed").config["quantization_config"]
    name = "model.layers.1.mlp.up_proj"
    edit_config(tmp_path / "packed", quantization_config=config | {"ignore": ["lm_head", name]})
    assert (
        f"{name} is stored packed"
        in failed_checks(verify_checkpoint(tmp_path / "packed"))["ignore list"]
    )


@pytest.mark.parametrize("scheme", [W8A8, FP8, BLOCKS, mixed("x.mlp.up_proj")])
def test_verify_finds_weights_that_are_not_the_sources(source, tmp_path, scheme):
    folder = tmp_path / "packed"
    packed_model(source, folder, scheme)
    name = "model.layers.1.mlp.up_proj"
    weight = open_checkpoint(source).read(f"{name}.weight")
    wrong = random_linear(scheme, tuple(weight.shape), seed=3)
    edit_tensors(folder, **pack_linear(name, wrong, scheme, FORMATS["compressed-tensors"]))
    failed = failed_checks(verify_checkpoint(folder, source))
    assert failed.keys() == {"weights"}
    assert name in failed["weights"]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_packed_embedding_takes_the_place_of_the_float_one(tmp_path, tied):
    source = tiny_model("LlamaForCausalLM", tmp_path / "float", tied=tied)
    folder = tmp_path / "packed"
    packed_model(source, folder, lambda n: W8 if n == "model.embed_tokens" else
                 W4 if n.endswith(LINEARS) else None)  # fmt: skip
    checkpoint = open_checkpoint(folder)
    assert "model.embed_tokens.weight" not in checkpoint.tensors
    assert ("lm_head.weight" in checkpoint.tensors) is not tied
    assert read_scheme(checkpoint.config)("model.embed_tokens") == W8
    assert failed_checks(verify_checkpoint(folder, source)) == {}


def test_a_packed_head_takes_the_place_of_the_float_one(source, tmp_path):
    packed_model(source, tmp_path / "packed", lambda n: W8 if n == "lm_head" else
                 W4 if n.endswith(LINEARS) else None)  # fmt: skip
    assert failed_checks(verify_checkpoint(tmp_path / "packed", source)) == {}


@pytest.mark.parametrize("strategy", ["tensor", "head"])
def test_kv_scales_round_trip_and_are_checked(source, tmp_path, strategy):
    folder, kv_cache = tmp_path / "packed", KVCacheScheme(strategy=strategy)
    packed_model(source, folder, W4, kv_cache=kv_cache)
    checkpoint = open_checkpoint(folder)
    assert read_kv_cache(checkpoint.config) == kv_cache
    keys, values = read_kv_scales(checkpoint, "model.layers.1.self_attn", kv_cache, 2)
    heads = 2 if strategy == "head" else 1
    assert torch.equal(keys, torch.arange(1, heads + 1) / 11)
    assert torch.equal(values, keys / 2)
    report = verify_checkpoint(folder, source)
    assert failed_checks(report) == {}
    assert "KV scales" in {check.name for check in report.checks}
    assert inspect_checkpoint(folder)["kv_cache"] == f"KV FP8 per {strategy}"


def test_kv_scales_that_are_wrong_or_missing_are_errors(source, tmp_path):
    folder, kv_cache = tmp_path / "packed", KVCacheScheme()
    packed_model(source, folder, W4, kv_cache=kv_cache)
    attention = "model.layers.1.self_attn"
    edit_tensors(folder, **{f"{attention}.k_scale": torch.zeros(1)})
    assert f"{attention}.k_scale" in failed_checks(verify_checkpoint(folder))["KV scales"]
    with pytest.raises(ValueError, match="positive and finite"):
        read_kv_scales(open_checkpoint(folder), attention, kv_cache, 2)
    with pytest.raises(ValueError, match="must be a float of shape"):
        read_kv_scales(open_checkpoint(folder), attention, KVCacheScheme(strategy="head"), 2)
    edit_tensors(folder, **{f"{attention}.k_scale": None})
    assert f"missing {attention}.k_scale" in failed_checks(verify_checkpoint(folder))["tensors"]
    with pytest.raises(ValueError, match="no tensor named"):
        read_kv_scales(open_checkpoint(folder), attention, kv_cache, 2)
    with pytest.raises(ValueError, match="v_scale must be positive"):
        pack_kv_scales(torch.ones(1), torch.tensor([-1.0]), kv_cache)


def test_kv_scales_under_their_older_names_are_read(tmp_path):
    old = {"a.self_attn.k_proj.output_scale": torch.tensor([0.5]),
           "a.self_attn.v_proj.output_scale": torch.tensor([0.25])}  # fmt: skip
    write_safetensors(tmp_path / "model.safetensors", old)
    (tmp_path / "config.json").write_text("{}")
    keys, values = read_kv_scales(open_checkpoint(tmp_path), "a.self_attn", KVCacheScheme(), 3)
    assert (float(keys), float(values)) == (0.5, 0.25)
    assert kv_scale_layout(KVCacheScheme(strategy="head"), 3)["k_scale"] == (3, 1, 1)


def test_verify_finds_one_flipped_bit_by_its_digest(source, tmp_path):
    from compress.export.inspect import write_provenance

    folder = tmp_path / "packed"
    packed_model(source, folder, W4)
    keys = ("version", "recipe", "calibration", "source_fingerprint", "report")
    write_provenance(folder, dict.fromkeys(keys))
    assert failed_checks(verify_checkpoint(folder, source)) == {}
    name = "model.layers.0.mlp.up_proj.weight_packed"
    info = open_checkpoint(folder).tensors[name]
    content = bytearray(info.file.read_bytes())
    content[info.offset + 100] ^= 4
    info.file.write_bytes(content)
    assert failed_checks(verify_checkpoint(folder)) == {
        "digests": f"{name} differs from what was written"
    }
    edit_tensors(folder, **{name: None, "extra": torch.ones(1)})
    detail = failed_checks(verify_checkpoint(folder))["digests"]
    assert f"{name} was written and is missing" in detail
    assert "extra was not written with the others" in detail


def test_verify_leaves_transformed_tensors_out_of_the_comparison(source, tmp_path):
    from compress.export.inspect import write_provenance

    folder = tmp_path / "packed"
    packed_model(source, folder, W4)
    norm, name = "model.layers.0.post_attention_layernorm.weight", "model.layers.0.mlp.up_proj"
    checkpoint = open_checkpoint(folder)
    halved = checkpoint.read(f"{name}.weight_scale") / 2
    changed = {norm: checkpoint.read(norm) * 2, f"{name}.weight_scale": halved}
    edit_tensors(folder, **changed)
    assert failed_checks(verify_checkpoint(folder, source)).keys() == {"untouched", "weights"}
    keys = ("version", "recipe", "calibration", "source_fingerprint", "report")
    record = dict.fromkeys(keys) | {"transformed_tensors": [norm, f"{name}.weight"]}
    write_provenance(folder, record)
    report = verify_checkpoint(folder, source)
    assert failed_checks(report) == {}
    assert name not in report.relative_errors and len(report.relative_errors) == 13
    details = {check.name: check.detail for check in report.checks}
    for check in ("untouched", "weights"):
        assert "; 1 rescaled or rotated before rounding, not compared" in details[check]
    # everything else is compared as before
    edit_tensors(folder, **{"model.norm.weight": torch.ones(96)})
    assert "untouched" in failed_checks(verify_checkpoint(folder, source))


@pytest.mark.parametrize("format_name", ["gptq", "awq"])
def test_check_part_reads_with_the_format_that_it_is_given(tmp_path, format_name):
    format, file = FORMATS[format_name], tmp_path / "part.safetensors"
    linear = random_linear(W4, (64, 96), torch.float16)
    write_safetensors(file, pack_linear("a.proj", linear, W4, format))
    wide = replace(linear, scale=linear.scale.float())  # the same values in another dtype
    check_part(file, {"a.proj": wide}, {"a.proj": W4}, format)
    wrong = QuantizedLinear(codes=linear.codes, scale=-linear.scale, zero_point=None, bits=4)
    with pytest.raises(CheckFailed, match=r"a\.proj: the scales on disk"):
        check_part(file, {"a.proj": wrong}, {"a.proj": W4}, format)
    with pytest.raises(CheckFailed, match="missing weight_shape"):
        check_part(file, {"a.proj": linear}, {"a.proj": W4}, FORMATS["compressed-tensors"])


def test_format_of_names_what_it_does_not_know():
    with pytest.raises(ValueError, match="no quantization_config"):
        format_of({})
    with pytest.raises(ValueError, match="unknown quant_method 'hqq'"):
        format_of({"quantization_config": {"quant_method": "hqq"}})
    assert read_scheme({})("model.layers.0.mlp.up_proj") is None
    assert read_kv_cache({}) is None


# With several schemes, loading dequantized takes the first group's for all of them.
LOADS = [
    pytest.param(W8A8, False, id="w8a8"),
    pytest.param(FP8, False, id="fp8"),
    pytest.param(replace(FP8, activations=None), False, id="fp8-weights"),
    pytest.param(replace(FP8, activations=None), True, id="fp8-weights-dense"),
    pytest.param(BLOCKS, False, id="fp8-blocks"),
    pytest.param(LinearScheme(weights=WeightScheme(bits=5, group_size=32)), False, id="w5"),
    pytest.param(mixed, False, id="mixed"),
    pytest.param(lambda n: W8 if n.endswith(LINEARS) or n == "model.embed_tokens" else None, True,
                 id="tied-embedding"),
]  # fmt: skip


@pytest.mark.parametrize("scheme, dense", LOADS)
def test_transformers_has_the_logits_of_the_dequantized_model(tmp_path, scheme, dense):
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    source = tiny_model("LlamaForCausalLM", tmp_path / "float", tied=True)
    folder = tmp_path / "packed"
    linears = packed_model(source, folder, scheme)
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    for name, linear in linears.items():
        expected.get_submodule(name).weight.data.copy_(dequantize(linear))
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(dequantize=dense),
    ).eval()
    tokens = torch.randint(0, 331, (2, 17), generator=torch.Generator().manual_seed(0))
    for module in model.modules():
        module.quantization_enabled = False  # of activations: weights alone are compared
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)
