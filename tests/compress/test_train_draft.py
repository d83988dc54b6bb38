"""The whole draft training on tiny targets: it serves, it repeats itself, it refuses bad input."""

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress import quantize as quantizing
from compress import train_draft as module
from compress.calib.data import CalibrationSpec
from compress.calib.drafts.medusa import Stretch
from compress.calib.drafts.trainer import TrainingConfig
from compress.export.writer import write_safetensors
from compress.recipe import load_recipe
from compress.run import QuantizeJob
from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.request import SamplingParams
from tests.factory import tiny_model

TEXT = Path(__file__).parents[2] / "LICENSE"
VOCAB = 331
CYCLE = 24  # tokens 2 .. 25, each followed by the next


@pytest.fixture(autouse=True)
def small_scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short sequences, a short plan, and one thread: for tiny products more only cost time."""
    monkeypatch.setattr(module, "PROMPT_TOKENS", 16)
    monkeypatch.setattr(module, "OUTPUT_TOKENS", 32)
    monkeypatch.setattr(module, "MAX_SEQUENCES", 40)
    config = partial(TrainingConfig, learning_rate=3e-3, batch_size=128, max_rounds=4)
    monkeypatch.setattr(module, "TrainingConfig", config)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama") / "m")


@pytest.fixture(scope="module")
def packed(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "m"
    quantizing.quantize(
        QuantizeJob(
            model=str(llama),
            output=out,
            recipe=load_recipe("rtn-w4a16", ["scheme.weights.group_size=32"]),
            calibration=CalibrationSpec(source=str(TEXT), num_samples=4, length=32),
            offline=True,
            quiet=True,
        )
    )
    return out


@pytest.fixture(scope="module")
def cycling(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that always says the next token of a cycle: its layers add nothing to the state."""
    folder = tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("cycling") / "m")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    tensors["model.norm.weight"].fill_(1)
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"].zero_()
    cycle = torch.arange(2, 2 + CYCLE)
    head[cycle.roll(-1)] = torch.nn.functional.normalize(embedding[cycle], dim=1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def job(target: Path, output: Path, **fields: Any) -> module.TrainDraftJob:
    values: dict[str, Any] = {
        "target": str(target),
        "output": output,
        "data": str(TEXT),
        "max_minutes": 2.0,
        "dtype": "float32",
        "device": "cpu",
        "offline": True,
        "quiet": True,
    }
    return module.TrainDraftJob(**values | fields)


def generate(target: Path, draft: Path | None, dtype: str = "float32") -> tuple[Any, Engine]:
    engine = Engine.load(target, dtype=dtype, config=EngineConfig(num_blocks=32), draft=draft)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (1, 17, 33)]
    completions = engine.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    return [completion.token_ids for completion in completions], engine


@pytest.mark.parametrize("kind", ["float", "packed"])
def test_draft_serves_its_target_without_changing_the_output(
    kind: str, llama: Path, packed: Path, tmp_path: Path
) -> None:
    target = {"float": llama, "packed": packed}[kind]
    report = module.train_draft(job(target, tmp_path / "draft"))
    expected, _ = generate(target, None)
    got, engine = generate(target, tmp_path / "draft")
    assert got == expected
    assert engine.stats.accepted_tokens > 0
    first, last = report["history"][1]["loss"], report["history"][-1]["loss"]
    assert all(after < before for before, after in zip(first, last, strict=True))


def test_draft_of_a_deterministic_target_is_accepted(cycling: Path, tmp_path: Path) -> None:
    report = module.train_draft(job(cycling, tmp_path / "draft"))
    assert report["history"][0]["held_out"]["length"] < 1.5
    assert report["predicted_acceptance_length"] > 3.5
    expected, _ = generate(cycling, None)
    got, engine = generate(cycling, tmp_path / "draft")
    assert got == expected
    assert set(got[0][2:]) == set(range(2, 2 + CYCLE))
    assert engine.stats.accepted_tokens > 0.85 * engine.stats.drafted_tokens
    assert engine.stats.num_steps < 20, "40 tokens one by one take 40 steps"


def test_held_out_sequences_are_not_trained_on(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every state is marked with the number of its sequence; a mark may be on one side only."""
    work = module.collect

    def mark(*args: Any, **kwargs: Any) -> list[module.Continuation]:
        def marked(stretch: Stretch, number: int) -> Stretch:
            return Stretch(torch.full_like(stretch.hidden, number), stretch.choices)

        return [
            module.Continuation(*(marked(stretch, number) for stretch in pair))
            for number, pair in enumerate(work(*args, **kwargs))
        ]

    def train(heads: Any, training: Any, held_out: Any, *args: Any, **kwargs: Any) -> None:
        learnt = set(training.hidden[:, 0].tolist())
        tested = {number for part in held_out for number in part.hidden[:, 0].tolist()}
        raise Split(learnt, tested)

    monkeypatch.setattr(module, "collect", mark)
    monkeypatch.setattr(module, "train_heads", train)
    with pytest.raises(Split) as caught:
        module.train_draft(job(llama, tmp_path / "draft"))
    learnt, tested = caught.value.args
    assert not learnt & tested
    assert learnt | tested == set(range(40))
    assert len(tested) == 4


class Split(Exception):
    """Which sequences a training would learn from, and which it would be tested on."""


def test_report_says_what_was_done_and_is_saved(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    report = module.train_draft(job(llama, out, num_heads=2, seed=3))
    assert json.loads((out / "draft.json").read_text()) == report
    assert {file.name for file in out.iterdir()} == {
        "config.json",
        "draft.json",
        "model.safetensors",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["draft"]
    assert (report["kind"], report["seed"]) == ("medusa", 3)
    assert report["stopped"] in ("done", "no improvement")
    assert report["data"]["prompts"] == report["sequences"] == 40
    assert len(report["data"]["sha256"]) == 64
    assert report["peak_rss_bytes"] > 0 < report["seconds"]
    first, second = report["held_out_acceptance"]
    assert report["predicted_acceptance_length"] == pytest.approx(1 + first + first * second)
    assert report["history"][report["best_round"]]["held_out"]["per_head"] == [first, second]


def test_equal_seeds_give_equal_files_and_other_seeds_do_not(cycling: Path, tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        module.train_draft(job(cycling, tmp_path / name, seed=seed))
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


def test_draft_of_the_float_target_is_refused_for_the_packed_one(
    llama: Path, packed: Path, tmp_path: Path
) -> None:
    module.train_draft(job(llama, tmp_path / "draft"))
    with pytest.raises(ValueError, match="trained for another target"):
        Engine.load(packed, config=EngineConfig(num_blocks=1), draft=tmp_path / "draft")


def test_budget_covers_everything_and_uses_what_there_is(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SEQUENCES", 100_000)
    monkeypatch.setattr(module, "OUTPUT_TOKENS", 2000)  # 64 sequences of it take far longer
    started = time.monotonic()
    report = module.train_draft(job(llama, tmp_path / "draft", max_minutes=0.1))
    assert time.monotonic() - started < 90  # the whole plan would take hours
    assert report["stopped"] in ("time", "no improvement")
    assert 0 < report["sequences"] < report["data"]["prompts"]
    _, engine = generate(llama, tmp_path / "draft")
    assert engine.stats.drafted_tokens > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "medusae"}, "unknown draft kind 'medusae'; did you mean 'medusa'"),
        ({"dtype": "bf16"}, "unknown dtype 'bf16'"),
        ({"max_minutes": 0.0}, "max_minutes must be positive and finite, got 0"),
        ({"max_minutes": float("nan")}, "max_minutes must be positive and finite, got nan"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"seed": -1}, "seed must not be negative, got -1"),
    ],
)
def test_bad_values_are_named_at_once(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job(Path("unused"), Path("unused"), **fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "the text is empty"), ("Too short a text.", "tokens are too few to train on")],
    ids=["empty", "short"],
)
def test_bad_text_is_refused(text: str, message: str, llama: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.txt"
    data.write_text(text)
    with pytest.raises(ValueError, match=message):
        module.train_draft(job(llama, tmp_path / "draft", data=str(data)))
    assert [path.name for path in tmp_path.iterdir()] == ["data.txt"]


def test_missing_text_and_target_are_named(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere: no such text file"):
        module.train_draft(job(llama, tmp_path / "draft", data="nowhere"))
    with pytest.raises(FileNotFoundError, match="gone: no such checkpoint"):
        module.train_draft(job(tmp_path / "gone", tmp_path / "draft"))


def test_budget_too_small_to_train_is_an_error(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_minutes = 1e-05"):
        module.train_draft(job(llama, tmp_path / "draft", max_minutes=1e-5))
    assert not list(tmp_path.iterdir())


def test_too_little_output_to_test_on_is_an_error(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OUTPUT_TOKENS", 4)
    with pytest.raises(ValueError, match="too little to test the heads on: 4 positions, need 100"):
        module.train_draft(job(llama, tmp_path / "draft"))
    assert not list(tmp_path.iterdir())


def test_existing_output_is_replaced_only_with_force(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    out.mkdir()
    (out / "config.json").write_text("{}")
    with pytest.raises(FileExistsError, match="--force"):
        module.train_draft(job(llama, out))
    assert (out / "config.json").read_text() == "{}"
    module.train_draft(job(llama, out, force=True))
    assert (out / "model.safetensors").is_file()


def test_output_that_would_replace_the_target_is_refused(llama: Path) -> None:
    with pytest.raises(ValueError, match="holds the source"):
        module.train_draft(job(llama, llama, force=True))
    assert (llama / "tokenizer.json").is_file()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failure_while_writing_leaves_nothing(
    error: BaseException, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(folder: Path, *args: Any) -> None:
        write_safetensors(folder / "model.safetensors", {"x": torch.zeros(1)})
        raise error

    monkeypatch.setattr(module, "write_medusa", write)
    with pytest.raises(type(error)):
        module.train_draft(job(llama, tmp_path / "draft"))
    assert not list(tmp_path.iterdir())
