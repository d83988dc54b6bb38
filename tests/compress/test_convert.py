"""Conversion between formats is exact, complete and atomic, or an error that says why."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from compress import convert as convert_module
from compress.cli import run
from compress.convert import ConvertJob, convert
from compress.errors import CheckFailed
from compress.export.inspect import inspect_checkpoint, read_provenance, write_provenance
from compress.export.verify import verify_checkpoint
from compress.models.checkpoint import open_checkpoint
from compress.scheme import LinearScheme, WeightScheme
from tests.export.samples import LINEARS, W8A8, edit_tensors, failed_checks, packed_model
from tests.factory import tiny_model

W4 = LinearScheme(weights=WeightScheme(group_size=32))
W4_ASYM = LinearScheme(weights=WeightScheme(group_size=32, symmetric=False))
PROVENANCE = {
    "version": "0.1.0",
    "recipe": {"method": {"kind": "rtn"}},
    "calibration": None,
    "source_fingerprint": "abc",
    "report": {"seconds": 1.5},
    "kept_tensors": ["mtp.fc.weight"],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float16 model with tied embeddings, a module of its own and a generation config."""
    folder = tmp_path_factory.mktemp("convert") / "source"
    tiny_model("LlamaForCausalLM", folder, dtype=torch.float16, tied=True)
    edit_tensors(folder, **{"mtp.fc.weight": torch.ones(4, 8, dtype=torch.float16)})
    return folder


def _packed(source: Path, folder: Path, scheme=W4, format_name: str = "compressed-tensors") -> Path:
    packed_model(source, folder, scheme, format_name)
    write_provenance(folder, PROVENANCE)
    return folder


def _convert(source: Path, output: Path, to: str, **options) -> dict:
    return convert(ConvertJob(source=source, output=output, to=to, quiet=True, **options))


def _tensors(folder: Path) -> dict[str, bytes]:
    checkpoint = open_checkpoint(folder)
    return {
        name: checkpoint.read(name).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name in checkpoint.tensors
    }


@pytest.mark.parametrize(
    "scheme, path",
    [
        pytest.param(W4, ["gptq", "gptq_v2", "awq", "compressed-tensors"], id="sym"),
        pytest.param(W4, ["awq", "gptq", "compressed-tensors"], id="sym-by-awq"),
        pytest.param(W4_ASYM, ["gptq_v2", "awq", "compressed-tensors"], id="asym"),
        pytest.param(LinearScheme(weights=WeightScheme(bits=3, group_size=32)),
                     ["gptq", "gptq_v2", "compressed-tensors"], id="w3"),
        pytest.param(
            lambda n: None if "1.mlp" in n or not n.endswith(LINEARS)
            else LinearScheme(weights=WeightScheme(bits=8, group_size=32)) if "o_proj" in n else W4,
            ["gptq", "compressed-tensors"], id="mixed"),
    ],
)  # fmt: skip
def test_a_round_through_the_formats_gives_the_same_bytes(source, tmp_path, scheme, path):
    first = _packed(source, tmp_path / "first", scheme)
    folder = first
    for step, to in enumerate(path):
        report = _convert(folder, tmp_path / str(step), to)
        folder = tmp_path / str(step)
        assert report["to"] == to
        assert inspect_checkpoint(folder)["format"] == to
        assert failed_checks(verify_checkpoint(folder, source)) == {}
    assert _tensors(folder) == _tensors(first)
    old, new = (open_checkpoint(path).config for path in (first, folder))
    groups = [
        {json.dumps(group | {"targets": sorted(group["targets"])}) for group in groups.values()}
        for groups in (c.pop("quantization_config")["config_groups"] for c in (old, new))
    ]
    assert old == new
    assert groups[0] == groups[1]


def test_everything_beside_the_packed_linears_goes_along(source, tmp_path):
    packed = _packed(source, tmp_path / "packed")
    (packed / "notes").mkdir()
    (packed / "notes" / "card.md").write_text("hello")
    _convert(packed, tmp_path / "gptq", "gptq")
    out = tmp_path / "gptq"
    for file in ("generation_config.json", "tokenizer.json", "tokenizer_config.json",
                 "chat_template.jinja", "notes/card.md"):  # fmt: skip
        assert (out / file).read_bytes() == (packed / file).read_bytes(), file
    tensors = open_checkpoint(out).tensors
    assert {"mtp.fc.weight", "model.norm.weight", "model.embed_tokens.weight"} <= tensors.keys()
    assert "lm_head.weight" not in tensors
    quantization = open_checkpoint(out).config["quantization_config"]
    assert json.loads((out / "quantize_config.json").read_text()) == quantization
    assert r"-:^mtp\.fc$" in quantization["dynamic"]
    # and the second copy of the config does not outlive its format
    _convert(out, tmp_path / "awq", "awq")
    assert not (tmp_path / "awq" / "quantize_config.json").exists()


def test_provenance_is_kept_with_where_it_was_converted_from(source, tmp_path):
    packed = _packed(source, tmp_path / "packed")
    _convert(packed, tmp_path / "gptq", "gptq")
    _convert(tmp_path / "gptq", tmp_path / "awq", "awq")
    record = read_provenance(tmp_path / "awq")
    assert {key: record[key] for key in PROVENANCE} == PROVENANCE
    assert [row["format"] for row in record["converted_from"]] == ["compressed-tensors", "gptq"]
    assert record["converted_from"][0]["fingerprint"] == open_checkpoint(packed).fingerprint
    assert record["tensor_sha256"].keys() == open_checkpoint(tmp_path / "awq").tensors.keys()


def test_a_checkpoint_of_another_origin_is_converted_too(source, tmp_path):
    packed_model(source, tmp_path / "packed", W4, "gptq")
    (tmp_path / "packed" / "tokenizer.json").unlink()
    _convert(tmp_path / "packed", tmp_path / "ct", "compressed-tensors")
    record = read_provenance(tmp_path / "ct")
    assert record["recipe"] is None
    assert record["kept_tensors"] == ["mtp.fc.weight"]
    assert failed_checks(verify_checkpoint(tmp_path / "ct")).keys() == {"tokenizer"}


@pytest.mark.parametrize(
    "scheme, to, message",
    [
        (W4_ASYM, "gptq", "cannot hold every zero point"),
        (LinearScheme(weights=WeightScheme(bits=8, group_size=32)), "awq", "4-bit integer"),
        (LinearScheme(weights=WeightScheme(bits=5, group_size=32)), "gptq", "not 5"),
        (W8A8, "gptq", "activations"),
        (W4, "compressed-tensors", "is in the format compressed-tensors already"),
        (W4, "gguf", "unknown format 'gguf'"),
    ],
)
def test_what_the_format_cannot_hold_is_an_error_before_anything_is_written(
    source, tmp_path, scheme, to, message
):
    packed = _packed(source, tmp_path / "packed", scheme)
    with pytest.raises(ValueError, match=message):
        _convert(packed, tmp_path / "out", to)
    assert {path.name for path in tmp_path.iterdir()} == {"packed"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_scales_that_float16_cannot_hold_are_an_error_that_names_the_linear(tmp_path, dtype):
    """bf16 values fit if they are in float16's range: only a tiny one is refused then."""
    source = tiny_model("LlamaForCausalLM", tmp_path / "source", dtype=dtype)
    packed_model(source, tmp_path / "packed", W4)
    name = "model.layers.1.mlp.up_proj"
    scales = open_checkpoint(tmp_path / "packed").read(f"{name}.weight_scale")
    scales[5, 1] = 1e-9
    edit_tensors(tmp_path / "packed", **{f"{name}.weight_scale": scales})
    expected = "is not exact in" if dtype == torch.float32 else f"{name}.*row 5.*underflows"
    with pytest.raises(ValueError, match=expected):
        _convert(tmp_path / "packed", tmp_path / "out", "gptq")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "packed"}


def test_bf16_scales_convert_by_value_where_float16_holds_them(tmp_path):
    source = tiny_model("LlamaForCausalLM", tmp_path / "source", dtype=torch.bfloat16)
    packed_model(source, tmp_path / "packed", W4)
    with pytest.raises(ValueError, match=r"--target vllm: .*rounded to bfloat16"):
        _convert(tmp_path / "packed", tmp_path / "out", "gptq", target="vllm")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "packed"}
    _convert(tmp_path / "packed", tmp_path / "out", "gptq")
    assert failed_checks(verify_checkpoint(tmp_path / "out", source)) == {}


def test_float_and_damaged_checkpoints_are_refused(source, tmp_path):
    with pytest.raises(ValueError, match="nothing is packed"):
        _convert(source, tmp_path / "out", "gptq")
    packed = _packed(source, tmp_path / "packed")
    edit_tensors(packed, **{"model.layers.0.mlp.up_proj.weight_scale": None})
    with pytest.raises(ValueError, match=r"missing model\.layers\.0\.mlp\.up_proj\.weight_scale"):
        _convert(packed, tmp_path / "out", "gptq")


def test_a_module_packed_outside_the_architecture_is_refused(source, tmp_path):
    packed = _packed(source, tmp_path / "packed")
    edit_tensors(packed, **{"mtp.fc.weight_packed": torch.zeros(4, 1, dtype=torch.int32)})
    with pytest.raises(ValueError, match=r"mtp\.fc is packed, but not in a way"):
        _convert(packed, tmp_path / "out", "gptq")


def test_a_part_that_is_not_what_was_meant_stops_the_conversion(source, tmp_path, monkeypatch):
    packed = _packed(source, tmp_path / "packed")
    true_pack = convert_module.pack_linear

    def wrong(name, linear, scheme, format):
        tensors = true_pack(name, linear, scheme, format)
        tensors[f"{name}.qweight"][0, 0] ^= 1
        return tensors

    monkeypatch.setattr(convert_module, "pack_linear", wrong)
    with pytest.raises(CheckFailed, match="the codes on disk are not what was written"):
        _convert(packed, tmp_path / "out", "gptq")
    assert {path.name for path in tmp_path.iterdir()} == {"packed"}


def test_many_parts_make_the_same_checkpoint_as_one(source, tmp_path, monkeypatch):
    packed = _packed(source, tmp_path / "packed")
    _convert(packed, tmp_path / "one", "gptq")
    monkeypatch.setattr(convert_module, "_PART_BYTES", 10_000)
    _convert(packed, tmp_path / "many", "gptq")
    assert _tensors(tmp_path / "one") == _tensors(tmp_path / "many")


def test_an_existing_output_is_replaced_with_force_only(source, tmp_path):
    packed = _packed(source, tmp_path / "packed")
    out = Path(shutil.copytree(packed, tmp_path / "out"))
    with pytest.raises(FileExistsError, match="--force"):
        _convert(packed, out, "gptq")
    assert inspect_checkpoint(out)["format"] == "compressed-tensors"
    _convert(packed, out, "gptq", force=True)
    assert inspect_checkpoint(out)["format"] == "gptq"
    with pytest.raises(ValueError, match="holds the source"):
        _convert(packed, packed, "gptq", force=True)


def test_the_command_converts_or_refuses_for_the_target(source, tmp_path, capsys):
    packed = _packed(source, tmp_path / "packed", W4_ASYM)
    out, report = tmp_path / "out", tmp_path / "report.json"
    arguments = ["convert", str(packed), "--to", "gptq_v2", "-o", str(out)]
    assert run([*arguments, "--target", "vllm"]) == 2
    assert "symmetric GPTQ only" in capsys.readouterr().err
    assert not out.exists()
    assert run([*arguments, "--json", str(report)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "14 modules from compressed-tensors to gptq_v2" in printed
    assert json.loads(report.read_text())["num_linears"] == 14
    assert run([*arguments, "--force", "--target", "tgi"]) == 2
    assert "unknown target 'tgi'" in capsys.readouterr().err
    assert run(arguments) == 2
