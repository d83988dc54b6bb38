"""What is refused, and what is said, before the first block is quantized."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compress import finish as finishing
from compress import quantize as module
from compress.calib.data import CalibrationSpec
from compress.cli import run
from compress.export.inspect import stored_bits
from compress.export.verify import verify_checkpoint
from compress.models.checkpoint import open_checkpoint
from compress.recipe import load_recipe
from compress.run import QuantizeJob
from tests.factory import tiny_model

TEXT = Path(__file__).parents[2] / "LICENSE"
GROUPS = "scheme.weights.group_size=32"


def job(model: Path, output: Path, *overrides: str, recipe: str = "rtn-w4a16") -> QuantizeJob:
    return QuantizeJob(
        model=str(model),
        output=output,
        recipe=load_recipe(recipe, [GROUPS, *overrides]),
        calibration=CalibrationSpec(source=str(TEXT), num_samples=6, length=32, seed=0),
        offline=True,
        quiet=True,
    )


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama") / "m", tied=True)


DOWN_CHANNEL = (
    "scheme.overrides=[{targets: ['re:.*down_proj'], weights: {bits: 4, group_size: 16}}]"
)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("format=gptq", "scheme.kv_cache.strategy=tensor"), "KV cache"),
        (("format=awq", "scheme.kv_cache.strategy=tensor"), "KV cache"),
        (("format=awq", DOWN_CHANNEL), "one"),
        (("format=gptq", "embedding={}"), "embed_tokens"),
        (("budget.bits_per_weight=4", "budget.choices=[4, 9]"), r"budget.choices: .*got 9"),
        (
            ("format=awq", "budget.bits_per_weight=4", "budget.choices=[4, 8]"),
            r"budget.choices: 8 bits in model.layers.0",
        ),
        (("budget.bits_per_weight=1.5",), "even the fewest bits take"),
    ],
)
def test_what_a_format_cannot_hold_is_found_by_planning(
    overrides: tuple[str, ...], message: str, llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        module.plan_job(job(llama, tmp_path / "out", *overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("transforms=[{kind: awq}, {kind: rotation}]",), "rotation comes first"),
        (("budget.bits_per_weight=4", DOWN_CHANNEL), "leave out scheme.overrides"),
        (("budget.bits_per_weight=4", "scheme.activations.type=int"), "integer weights"),
        (("format=gguf",), "unknown format 'gguf'"),
    ],
)
def test_recipes_that_contradict_themselves_are_refused(
    overrides: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe("rtn-w4a16", [GROUPS, *overrides])


def test_two_patterns_for_one_linear_are_refused(llama: Path, tmp_path: Path) -> None:
    overrides = (
        "scheme.overrides=[{targets: ['re:.*down_proj'], weights: {bits: 8}},"
        " {targets: ['model.layers.0.mlp.down_proj'], weights: {bits: 3}}]"
    )
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down_proj is matched by both"):
        module.plan_job(job(llama, tmp_path / "out", overrides))
    nothing = "scheme.overrides=[{targets: ['re:.*experts.*'], weights: {bits: 8}}]"
    with pytest.raises(ValueError, match=r"scheme.overrides: 're:\.\*experts\.\*' matches no"):
        module.plan_job(job(llama, tmp_path / "out", nothing))


def test_fused_linears_need_one_scheme(llama: Path, tmp_path: Path) -> None:
    q_only = "scheme.overrides=[{targets: ['re:.*q_proj'], weights: {bits: 8, group_size: 32}}]"
    with pytest.raises(ValueError, match="fuse them into one matrix"):
        module.plan_job(job(llama, tmp_path / "out", q_only))


def test_an_untied_head_is_in_the_plan(llama: Path, tmp_path: Path) -> None:
    plan = module.plan_job(job(llama, tmp_path / "out", "transforms=[{kind: rotation}]")).plan
    reasons = {row.name: row.reason for row in plan.left_in_float}
    assert reasons["lm_head"] == "output head, untied by the rotation"
    assert any("unties the head" in warning for warning in plan.warnings)
    assert plan.bytes_before == open_checkpoint(llama).num_bytes


def test_head_alone_can_be_quantized(tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM", tmp_path / "m")
    asked = job(source, tmp_path / "out", "embedding={}", "ignore=[model.embed_tokens]")
    report = module.quantize(asked)
    rows = {row["name"]: row for row in report["layers"]}
    assert "model.embed_tokens" not in rows
    assert rows["lm_head"]["scheme"] == "W8A16 channel sym"
    assert 0 < rows["lm_head"]["relative_error"] < 0.01
    assert verify_checkpoint(tmp_path / "out", source).failures == []


def test_a_written_checkpoint_stays_within_its_budget(llama: Path, tmp_path: Path) -> None:
    asked = job(llama, tmp_path / "out", "budget.bits_per_weight=4.4", "dtype=float16")
    plan = module.plan_job(asked).plan
    assert plan.bits_per_weight <= 4.4
    assert len({linear.scheme.weights.bits for linear in plan.linears}) > 1
    report = module.quantize(asked)
    stored = stored_bits(open_checkpoint(tmp_path / "out")).quantized
    shapes = 16 * 8 * len(plan.linears)  # `weight_shape`, two int64 each
    weights = sum(out * inputs for out, inputs in (linear.shape for linear in plan.linears))
    assert stored is not None
    assert stored - shapes / weights <= 4.4
    assert len(report["sensitivities"]) == 8


def test_dry_run_of_a_budget_shows_the_choice(
    llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quantize", str(llama), "--dry-run", "--recipe", "mixed-w3.5", "--set", GROUPS]
    arguments += ["--calib-data", str(TEXT), "--calib-samples", "4", "--calib-length", "32"]
    assert run([*arguments, "--offline"]) == 0
    printed = capsys.readouterr().out
    assert len({word for word in printed.split() if word.startswith("W") and "A16" in word}) > 1


def test_values_that_float16_cannot_hold_are_warned_of(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tiny_model("LlamaForCausalLM", tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3] *= 1e6
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    report = module.quantize(job(source, tmp_path / "out", "format=gptq", "dtype=float16"))
    assert len(report["largest_outputs"]) == 2
    warning = next(text for text in report["warnings"] if "float16 ends at" in text)
    assert warning.startswith("block 1 puts out values up to")
    quiet = module.quantize(job(llama, tmp_path / "small", "format=gptq", "dtype=float16"))
    assert quiet["warnings"] == []


def test_outputs_of_the_last_block_must_be_finite(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tiny_model("LlamaForCausalLM", tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3] = 3e38
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"block 1: .*not finite"):
        module.quantize(job(source, tmp_path / "out"))


def test_constant_input_channels_are_no_trouble(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tiny_model("LlamaForCausalLM", tmp_path / "m")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.input_layernorm.weight"][[2, 50]] = 0  # channels that are always zero
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for transform in ("awq", "smoothquant"):
        out = tmp_path / transform
        asked = job(source, out, f"transforms=[{{kind: {transform}}}]", recipe="gptq-w4a16")
        report = module.quantize(asked)
        assert {row["fallback"] for row in report["layers"]} == {None}
        assert verify_checkpoint(out).failures == []


def test_report_tells_what_stays_in_float_and_where_it_is_fast(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quantize", str(llama), "-o", str(tmp_path / "out"), "--set", GROUPS]
    arguments += ["--calib-data", str(TEXT), "--calib-samples", "2", "--calib-length", "32"]
    assert run([*arguments, "--recipe", "gptq-w4a16", "--offline"]) == 0
    captured = capsys.readouterr()
    out = " ".join(captured.out.split())
    assert "in float: lm_head: output head, tied to the embedding" in out
    assert "smaller there, not faster" in out
    assert "calibrated on" in out
    assert "do not determine" in captured.err  # 64 tokens for 160 inputs: said before the work


def test_finish_counts_the_embedding_among_what_was_planned(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = finishing._write_rest

    def forgetful(run: Any) -> Any:
        file, _ = work(run)
        return file, []

    monkeypatch.setattr(finishing, "_write_rest", forgetful)
    with pytest.raises(Exception, match=r"not as planned: model.embed_tokens"):
        module.quantize(job(llama, tmp_path / "out", "embedding={}"))


def test_an_indefinite_hessian_falls_back_and_says_so() -> None:
    from compress.calib.methods.gptq import inverse_factor

    hessian = torch.diag(torch.tensor([1.0, 1.0, -50.0]))
    hessian[0, 0] = 60.0  # the mean is positive, no damping of the ladder is enough
    factor, damping = inverse_factor(hessian, 0.001)
    assert factor is None
    assert damping == pytest.approx(1.0)
