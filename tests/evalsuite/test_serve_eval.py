"""The whole evaluation on tiny models, through the real engine."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from compress.cli import run
from compress.errors import CheckFailed
from compress.evalsuite.report import cautions, print_report
from compress.evalsuite.serve_eval import ServeEvalOptions, serve_eval
from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.speculative.base import PROPOSERS
from tests.factory import tiny_model, tiny_tokenizer

_RATES = ("prefill_tokens_per_s", "decode_tokens_per_s")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two models that differ, one with another tokenizer, and a text."""
    folder = tmp_path_factory.mktemp("models")
    context = {"max_position_embeddings": 96}
    tiny_model("LlamaForCausalLM", folder / "model", **context)
    tiny_model("Qwen3ForCausalLM", folder / "baseline", num_layers=3, seed=1, **context)
    tiny_model("LlamaForCausalLM", folder / "other", vocab=260, **context)
    (folder / "text.txt").write_text(
        "".join(f"The import statement {i} says {i * i}.\n" for i in range(40))
    )
    names = ("model", "baseline", "other", "text.txt")
    return {name.partition(".")[0]: str(folder / name) for name in names}


@pytest.fixture(scope="module")
def options(models: dict[str, str]) -> ServeEvalOptions:
    return ServeEvalOptions(
        model=models["model"],
        baseline=models["baseline"],
        ppl_data=models["text"],
        ppl_window=33,
        ppl_limit=5,
        workload="batch:3,rate:500x5",
        prompt_tokens=17,
        output_tokens=5,
        repeats=2,
        dtype="float32",
        device="cpu",
        command="compress serve-eval model",
        offline=True,
        quiet=True,
    )


@pytest.fixture(scope="module")
def report(options: ServeEvalOptions) -> dict[str, Any]:
    """One full run, shared by the tests that only look at it."""
    return serve_eval(options)


def test_serve_eval_reports_every_promised_key(report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report, allow_nan=False)) is not None
    for part in (report, report["baseline"]):
        assert part["perplexity"]["value"] > 1
        assert part["perplexity"]["stderr"] > 0
        assert part["perplexity"]["tokens"] == 5 * 32
        assert (part["perplexity"]["windows"], part["perplexity"]["window"]) == (5, 33)
        assert len(part["perplexity"]["data_sha256"]) == 64
        assert [entry["workload"] for entry in part["throughput"]] == ["batch:3", "rate:500x5"]
        for entry in part["throughput"]:
            for rate in _RATES:
                assert len(entry[rate]["runs"]) == 2
                assert min(entry[rate]["runs"]) <= entry[rate]["median"]
                assert entry[rate]["std"] >= 0
            assert all(cpus >= 0 for cpus in entry["foreign_cpus"])
    assert report["perplexity"]["value"] != report["baseline"]["perplexity"]["value"]
    fidelity = report["fidelity"]
    assert fidelity["kl_mean"] > fidelity["kl_median"] > 0
    assert 0 <= fidelity["top1_agreement"] < 1
    assert (fidelity["tokens"], fidelity["windows"]) == (5 * 32, 5)
    size, other = report["size"], report["baseline"]["size"]
    assert 0 < size["bytes"] < other["bytes"]
    assert size["bits_per_weight"] == 32


def test_serve_eval_ratios_pair_model_and_baseline(report: dict[str, Any]) -> None:
    ours, theirs = report["perplexity"]["value"], report["baseline"]["perplexity"]["value"]
    assert report["ratio"]["perplexity"]["value"] == pytest.approx(ours / theirs)
    for index, entry in enumerate(report["ratio"]["throughput"]):
        for rate in _RATES:
            runs = report["throughput"][index][rate]["runs"]
            others = report["baseline"]["throughput"][index][rate]["runs"]
            expected = [run / other for run, other in zip(runs, others, strict=True)]
            assert entry[rate]["runs"] == pytest.approx(expected)


def test_serve_eval_card_says_how(report: dict[str, Any], models: dict[str, str]) -> None:
    card = report["protocol"]
    assert card["command"] == "compress serve-eval model"
    assert card["model"]["path"] == models["model"]
    assert card["model"]["scheme"] == "float (float32)"
    assert (card["model"]["dtype"], card["baseline"]["dtype"]) == ("float32", "float32")
    assert len(card["model"]["fingerprint"]) == 64
    assert card["model"]["fingerprint"] != card["baseline"]["fingerprint"]
    assert (card["perplexity"]["window"], card["perplexity"]["stride"]) == (33, 33)
    assert card["perplexity"]["bos"].startswith("none")
    assert card["throughput"]["prompt_tokens"] == 17
    assert card["throughput"]["repeats"] == 2
    assert card["engine"]["max_model_len"] == 33
    assert card["software"]["torch"]


def test_serve_eval_report_prints(report: dict[str, Any]) -> None:
    console = Console(width=120, record=True)
    print_report(report, console)
    text = console.export_text()
    assert "KL to baseline, nats" in text
    assert "decode tokens/s, batch:3" in text
    assert "ttft p50 / p99 ms, rate:500x5" in text
    assert "compress serve-eval model" in text


def test_serve_eval_perplexity_repeats_exactly(
    report: dict[str, Any], options: ServeEvalOptions
) -> None:
    alone = serve_eval(replace(options, baseline=None, workload="none"))
    assert alone["perplexity"] == report["perplexity"]
    assert alone["throughput"] == []
    assert not {"baseline", "fidelity", "ratio", "speculation"} & alone.keys()


def test_serve_eval_without_perplexity_prompts_with_random_tokens(
    options: ServeEvalOptions,
) -> None:
    result = serve_eval(replace(options, baseline=None, ppl_data="none", workload="batch:1"))
    assert result["perplexity"] is None
    assert "perplexity" not in result["protocol"]
    assert result["protocol"]["throughput"]["prompts"] == "random tokens"


def test_serve_eval_baseline_of_itself_has_ratio_one(options: ServeEvalOptions) -> None:
    result = serve_eval(replace(options, baseline=options.model, workload="none"))
    assert result["ratio"]["perplexity"] == {"value": 1.0, "stderr": 0.0}
    assert result["ratio"]["bytes"] == 1.0
    assert (result["fidelity"]["kl_max"], result["fidelity"]["top1_agreement"]) == (0.0, 1.0)


def test_serve_eval_without_perplexity_has_no_fidelity(options: ServeEvalOptions) -> None:
    result = serve_eval(replace(options, ppl_data="none", workload="batch:1"))
    assert result["fidelity"] is None
    assert result["ratio"]["perplexity"] is None


def test_serve_eval_of_vocabularies_of_two_sizes_has_no_fidelity(
    options: ServeEvalOptions, tmp_path: Path
) -> None:
    """As of a model whose embedding was padded: same tokenizer, more rows."""
    padded = tiny_model("LlamaForCausalLM", tmp_path / "padded", vocab=340)
    tiny_tokenizer().save_pretrained(padded)
    result = serve_eval(replace(options, baseline=str(padded), workload="none"))
    assert result["baseline"]["perplexity"]["value"] > 1
    assert result["fidelity"] is None
    assert "fidelity" not in result["protocol"]["perplexity"]
    assert any("vocabulary" in caution for caution in cautions(result))


@pytest.fixture
def indifferent(tmp_path: Path) -> str:
    """A model that finds all 331 tokens equally likely, and greedily takes token 0."""
    folder = tiny_model("LlamaForCausalLM", tmp_path / "indifferent")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_serve_eval_with_a_draft_reports_acceptance_and_equal_outputs(
    options: ServeEvalOptions, indifferent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROPOSERS, "ConstantDraft", "tests.evalsuite.fake:load_constant_draft")
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text('{"architectures": ["ConstantDraft"]}')
    result = serve_eval(
        replace(options, model=indifferent, baseline=None, draft=draft, output_tokens=9)
    )
    assert result["perplexity"]["value"] == pytest.approx(331)
    speculation = result["speculation"]
    # 1 token from the prefill, then two iterations of three drafted tokens and the target's own
    assert speculation["acceptance_length"] == 4.0
    assert speculation["identical_outputs"] == 1.0
    for entry, alone, speedup in zip(
        speculation["throughput"], result["throughput"], speculation["speedup"], strict=True
    ):
        assert entry["acceptance_length"] == 4.0
        pairs = zip(entry[_RATES[1]]["runs"], alone[_RATES[1]]["runs"], strict=True)
        assert speedup[_RATES[1]]["runs"] == pytest.approx([a / b for a, b in pairs])
    assert result["protocol"]["draft"]["path"] == str(draft)
    console = Console(width=120, record=True)
    print_report(result, console)
    assert "model + draft" in console.export_text()


@pytest.fixture
def broken(tmp_path: Path) -> str:
    """A model whose final norm makes every logit NaN."""
    folder = tiny_model("LlamaForCausalLM", tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize("role", ["model", "baseline"])
def test_serve_eval_fails_when_speed_is_of_a_model_without_finite_logits(
    options: ServeEvalOptions, broken: str, role: str
) -> None:
    change: dict[str, Any] = {"ppl_data": "none", "workload": "batch:1", role: broken}
    with pytest.raises(CheckFailed, match=f"^{role} {broken}: the logits .* are not finite"):
        serve_eval(replace(options, **change))


@pytest.mark.parametrize("role", ["model", "baseline"])
def test_serve_eval_names_the_model_whose_perplexity_is_not_finite(
    options: ServeEvalOptions, broken: str, role: str
) -> None:
    change: dict[str, Any] = {"workload": "none", role: broken}
    with pytest.raises(CheckFailed, match=f"^{broken}: window 0, token 1: the log-probability"):
        serve_eval(replace(options, **change))


def test_serve_eval_command_exits_1_on_a_model_without_finite_logits(
    broken: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    sizes = ["--prompt-tokens", "9", "--output-tokens", "3", "--repeats", "1"]
    asked = [broken, "--ppl-data", "none", "--workload", "batch:1", *sizes, "--json", str(file)]
    assert run(["serve-eval", *asked, "-q"]) == 1
    assert f"model {broken}: the logits" in capsys.readouterr().err
    assert not file.exists()


def test_serve_eval_refuses_an_unknown_kind_of_draft_before_it_loads_an_engine(
    options: ServeEvalOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was loaded")

    monkeypatch.setattr("compress.evalsuite.serve_eval.Engine.load", load)
    (tmp_path / "config.json").write_text('{"architectures": ["MedusaModl"]}')
    with pytest.raises(ValueError, match="'MedusaModl'; did you mean 'MedusaModel'"):
        serve_eval(replace(options, draft=tmp_path))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "/nowhere/model"}, FileNotFoundError, "/nowhere/model"),
        ({"baseline": "/nowhere/model"}, FileNotFoundError, "/nowhere/model"),
        ({"draft": Path("/nowhere/draft")}, FileNotFoundError, "/nowhere/draft"),
        ({"ppl_data": "/nowhere/text"}, FileNotFoundError, "/nowhere/text"),
        ({"model": "some/name"}, ValueError, "--offline"),
        ({"ppl_window": 100}, ValueError, "ppl_window = 100 does not fit the context"),
        ({"prompt_tokens": 95}, ValueError, r"output_tokens = 100 does not fit .*= 96\)"),
        ({"ppl_window": 5000}, ValueError, "does not fill one window of 5000"),
        ({"ppl_limit": 0}, ValueError, "at least 1, got 0"),
        ({"workload": "batch:5000"}, ValueError, "does not hold 5000 different prompts"),
    ],
)
def test_serve_eval_refuses(
    options: ServeEvalOptions, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        serve_eval(replace(options, **change))


def test_serve_eval_names_a_baseline_of_too_short_a_context(
    options: ServeEvalOptions, tmp_path: Path
) -> None:
    short = tiny_model("LlamaForCausalLM", tmp_path / "short", max_position_embeddings=32)
    with pytest.raises(ValueError, match=f"does not fit the context of {short} .*= 32"):
        serve_eval(replace(options, baseline=str(short)))


@pytest.mark.parametrize("fast", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_serve_eval_auto_dtype_is_one_for_model_and_baseline(
    fast: torch.dtype, options: ServeEvalOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the checkpoints store, here float32 and float16."""
    half = tiny_model("LlamaForCausalLM", tmp_path / "half", dtype=torch.float16)
    monkeypatch.setattr("compress.evalsuite.serve_eval.fast_dtype", lambda device: fast)
    asked = replace(options, baseline=str(half), dtype="auto", workload="none", ppl_limit=1)
    card = serve_eval(asked)["protocol"]
    name = str(fast).removeprefix("torch.")
    assert (card["model"]["dtype"], card["baseline"]["dtype"]) == (name, name)


def test_serve_eval_refuses_models_that_tokenize_differently(
    options: ServeEvalOptions, models: dict[str, str]
) -> None:
    with pytest.raises(ValueError, match="differently: their perplexities"):
        serve_eval(replace(options, baseline=models["other"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ppl_protocol": "gptk"}, "did you mean 'gptq'"),
        ({"workload": "batch"}, "workload 'batch' is not understood"),
        ({"dtype": "float33"}, "did you mean 'float32'"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"prompt_tokens": 0}, "prompt_tokens must be at least 1, got 0"),
        ({"output_tokens": 1}, "output_tokens must be at least 2, got 1"),
        ({"workload": "none", "draft": Path("d")}, "a draft is measured while generating"),
        ({"workload": "none", "ppl_data": "none"}, "nothing to measure"),
    ],
)
def test_options_refuse(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServeEvalOptions(**{"model": "demo", **change})


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_serve_eval_refuses_a_device_that_is_not_there(options: ServeEvalOptions) -> None:
    with pytest.raises(ValueError, match="no GPU"):
        serve_eval(replace(options, device="cuda"))


@pytest.mark.parametrize(
    ("given", "scored", "timed"), [(None, True, False), (True, True, True), (False, False, False)]
)
def test_scores_are_deterministic_and_speed_is_the_fastest_unless_asked(
    given: bool | None,
    scored: bool,
    timed: bool,
    options: ServeEvalOptions,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    load = Engine.load

    def spy(*args: Any, config: EngineConfig, **kwargs: Any) -> Engine:
        seen.append(config.deterministic)
        return load(*args, config=config, **kwargs)

    monkeypatch.setattr(Engine, "load", spy)
    chosen = replace(options, deterministic=given, baseline=None, workload="batch:1", repeats=1)
    report = serve_eval(chosen)
    assert seen == [scored, timed]
    assert report["protocol"]["perplexity"]["deterministic"] == scored
    assert report["protocol"]["engine"]["deterministic"] == timed
