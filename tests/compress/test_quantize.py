"""The whole quantization on tiny models: what is written and reported."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from compress import quantize as module
from compress.calib.collectors import InputStatistics
from compress.calib.data import CalibrationSpec, load_calibration
from compress.calib.replay import BlockReplay
from compress.export.formats import read_linear, read_scheme
from compress.export.verify import verify_checkpoint
from compress.models.checkpoint import open_checkpoint
from compress.models.family import FAMILIES, SharedInput
from compress.models.load import load_tokenizer
from compress.recipe import load_recipe
from compress.run import QuantizeJob
from compress.runtime.engine import Engine
from compress.scheme import dequantize
from tests.factory import tiny_model

SMALL = ("scheme.weights.group_size=32",)
TEXT = Path(__file__).parents[2] / "LICENSE"


def job(
    model: Path, output: Path, *overrides: str, recipe: str = "gptq-w4a16", **fields: Any
) -> QuantizeJob:
    values: dict[str, Any] = {
        "model": str(model),
        "output": output,
        "recipe": load_recipe(recipe, [*SMALL, *overrides]),
        "calibration": CalibrationSpec(source=str(TEXT), num_samples=6, length=32, seed=0),
        "offline": True,
        "quiet": True,
    }
    return QuantizeJob(**values | fields)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama") / "m", num_layers=3)


def files(folder: Path) -> dict[str, bytes]:
    """Content of every file, without the run times and memory in the provenance."""
    found = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        if file.name == "compress.json":
            values = json.loads(content)
            report = values.pop("report")
            rows = [row | {"seconds": 0} for row in report["layers"]]
            content = json.dumps([values, rows]).encode()
        found[str(file.relative_to(folder))] = content
    return found


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("gptq-w4a16", []),
        ("gptq-w4a16", ["scheme.weights.bits=3"]),
        ("rtn-w4a16", ["scheme.weights.bits=8", "scheme.weights.group_size=-1"]),
        ("rtn-w4a16", ["scheme.weights.bits=2", "dtype=bfloat16"]),
    ],
    ids=["gptq4", "gptq3", "rtn8-channel", "rtn2-bf16"],
)
def test_packed_model_computes_in_transformers_what_it_stands_for(
    architecture: str, recipe: str, overrides: list[str], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    source = tiny_model(architecture, tmp_path / "float", tied=architecture == "Qwen2ForCausalLM")
    out = tmp_path / "packed"
    report = module.quantize(job(source, out, *overrides, recipe=recipe))
    assert verify_checkpoint(out, source).failures == []
    assert {row["fallback"] for row in report["layers"]} == {None}
    assert all(0 < row["relative_error"] < 0.6 for row in report["layers"])

    packed = open_checkpoint(out)
    scheme_for = read_scheme(packed.config)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name, linear in reference.named_modules():
        scheme = scheme_for(name) if isinstance(linear, torch.nn.Linear) else None
        if scheme is not None:
            linear.weight.data = dequantize(read_linear(packed, name, scheme))
    dtype = torch.bfloat16 if "dtype=bfloat16" in overrides else torch.float32
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=dtype)
    tokens = torch.randint(0, 331, (2, 33), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got, expected = loaded(tokens).logits, reference.to(dtype)(tokens).logits
    tolerance = 1e-4 if dtype == torch.float32 else 6e-2
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


class Seen(NamedTuple):
    """A finished run in fp32, and what each of its blocks was calibrated on."""

    job: QuantizeJob
    report: dict[str, Any]
    inputs: list[torch.Tensor]
    statistics: list[dict[SharedInput, InputStatistics]]


@pytest.fixture(scope="module")
def seen(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    inputs, statistics = [], []
    work = BlockReplay.collect

    def collect(
        self: BlockReplay, hidden: torch.Tensor, stats: Any, chain: Any = None, **options: Any
    ) -> Any:
        largest = work(self, hidden, stats, chain, **options)
        inputs.append(hidden.clone())
        statistics.append(dict(stats))
        return largest

    run = job(llama, tmp_path_factory.mktemp("seen") / "out", "scheme.weights.bits=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BlockReplay, "collect", collect)
        patch.setattr(module, "fast_dtype", lambda device: torch.float32)
        report = module.quantize(run)
    return Seen(run, report, inputs, statistics)


def test_blocks_read_what_the_quantized_blocks_before_them_wrote(seen: Seen, llama: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokens = load_calibration(seen.job.calibration, load_tokenizer(llama), offline=True).tokens
    expected = {}
    for path in (llama, seen.job.output):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            expected[path] = model(tokens, output_hidden_states=True).hidden_states
    assert len(seen.inputs) == 3
    for index, got in enumerate(seen.inputs):
        torch.testing.assert_close(got, expected[seen.job.output][index], atol=1e-4, rtol=1e-4)
    for index in (1, 2):
        assert (seen.inputs[index] - expected[llama][index]).abs().max() > 0.1


def test_relative_error_is_that_of_the_output_on_the_sample(seen: Seen, llama: Path) -> None:
    source, packed = open_checkpoint(llama), open_checkpoint(seen.job.output)
    scheme_for = read_scheme(packed.config)
    reported = {row["name"]: row["relative_error"] for row in seen.report["layers"]}
    expected = {}
    for index, statistics in enumerate(seen.statistics):
        for shared, stats in statistics.items():
            for linear in shared.linears:
                name = f"model.layers.{index}.{linear}"
                scheme = scheme_for(name)
                assert scheme is not None
                weight = source.read(f"{name}.weight").double()
                rounded = dequantize(read_linear(packed, name, scheme)).double()
                x = stats.sample.double()
                error = torch.linalg.norm(x @ weight.T - x @ rounded.T)
                expected[name] = float(error / torch.linalg.norm(x @ weight.T))
    assert reported == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("overrides", "tied"),
    [
        ([], False),
        (["scheme.weights.bits=8", "scheme.weights.group_size=-1", "dtype=bfloat16"], False),
        (["scheme.weights.symmetric=false", "dtype=float16"], True),
        ([r"ignore=['re:model\.layers\.0\..*']"], True),
    ],
    ids=["sym", "channel-bf16", "asym-fp16-tied", "ignore-tied"],
)
def test_plan_foresees_the_size(overrides: list[str], tied: bool, tmp_path: Path) -> None:
    source = tiny_model("Qwen2ForCausalLM", tmp_path / "float", tied=tied)
    asked = job(source, tmp_path / "out", *overrides, recipe="rtn-w4a16")
    plan = module.plan_job(asked).plan
    size = module.quantize(asked)["bytes"]
    assert plan.bytes_before == size["before"]
    shapes = 16 * len(plan.linears)  # `weight_shape`, two int64
    assert plan.bytes_after == size["after"] - shapes


def test_asymmetric_checkpoint_passes_every_check(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    module.quantize(job(llama, out, "scheme.weights.symmetric=false", "scheme.weights.bits=3"))
    assert verify_checkpoint(out, llama).failures == []
    assert "model.layers.0.mlp.up_proj.weight_zero_point" in open_checkpoint(out).tensors


def test_report_holds_what_scripts_rely_on(llama: Path, tmp_path: Path) -> None:
    report = module.quantize(job(llama, tmp_path / "out"))
    assert report["bytes"]["after"] < report["bytes"]["before"]
    assert report["bits_per_weight"] == pytest.approx(5.0, abs=0.02)  # 4 + fp32 scale per 32
    assert report["peak_rss_bytes"] > 1e8
    assert report["seconds"] > 0
    assert len(report["layers"]) == 21
    assert set(report["layers"][0]) == {"name", "scheme", "relative_error", "seconds", "fallback"}
    assert report["left_in_float"] == [{"name": "lm_head", "reason": "output head"}]
    provenance = json.loads((tmp_path / "out" / "compress.json").read_text())
    assert len(provenance["calibration"]["sha256"]) == 64
    assert provenance["source_fingerprint"] == open_checkpoint(llama).fingerprint


def test_tensors_outside_the_architecture_are_kept(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tiny_model("LlamaForCausalLM", tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    extra = {"mtp.norm.weight": torch.randn(96), "mtp.fc.weight": torch.randn(96, 192)}
    save_file(tensors | extra, source / "model.safetensors", metadata={"format": "pt"})
    report = module.quantize(job(source, tmp_path / "out"))
    packed = open_checkpoint(tmp_path / "out")
    assert all(torch.equal(packed.read(name), tensor) for name, tensor in extra.items())
    assert "mtp.fc" in packed.config["quantization_config"]["ignore"]
    assert "mtp.fc" in [row["name"] for row in report["left_in_float"]]
    engine = Engine.load(tmp_path / "out", dtype="float32", device="cpu")
    assert len(engine.score([[5, 6, 7]])[0]) == 2
    for against in (None, source):
        assert verify_checkpoint(tmp_path / "out", against).failures == []


@pytest.mark.parametrize("place", ["itself", "parent"])
def test_output_that_would_replace_the_source_is_refused(place: str, tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM", tmp_path / "models" / "m")
    (source.parent / "config.json").write_text("{}")
    out = source if place == "itself" else source.parent
    with pytest.raises(ValueError, match="holds the source"):
        module.quantize(job(source, out, force=True))
    assert open_checkpoint(source).tensors


def test_gptq_error_is_below_rtn(llama: Path, tmp_path: Path) -> None:
    errors = {}
    for recipe in ("gptq-w4a16", "rtn-w4a16"):
        report = module.quantize(job(llama, tmp_path / recipe, recipe=recipe))
        errors[recipe] = sum(row["relative_error"] for row in report["layers"])
    assert errors["gptq-w4a16"] < 0.9 * errors["rtn-w4a16"]


def test_side_files_are_copied(llama: Path, tmp_path: Path) -> None:
    (llama / "notes").mkdir(exist_ok=True)
    (llama / "notes" / "LICENSE").write_text("free")
    module.quantize(job(llama, tmp_path / "out", recipe="rtn-w4a16"))
    for name in ("tokenizer.json", "generation_config.json", "notes/LICENSE"):
        assert (tmp_path / "out" / name).read_bytes() == (llama / name).read_bytes()
