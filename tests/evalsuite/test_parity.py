"""Perplexity through the engine against transformers on the same windows, fp32."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from compress.calib.data import CalibrationSpec, evaluation_text
from compress.evalsuite.perplexity import Perplexity, perplexity, tokenize
from compress.models.family import FAMILIES
from compress.models.load import load_tokenizer, resolve_model
from compress.quantize import quantize
from compress.recipe import load_recipe
from compress.run import QuantizeJob
from compress.runtime.engine import Engine
from tests.factory import tiny_model

_PROMISED = 1e-3  # relative, the figure that users are told
_TINY = 1e-5  # what two fp32 implementations of a small model can be held to


def _engine_perplexity(path: Path, text: str, *, window: int, limit: int) -> Perplexity:
    engine = Engine.load(path, dtype="float32", device="cpu")
    data = tokenize(text, load_tokenizer(path), source="text")
    return perplexity(engine, data, window=window, limit=limit)


@torch.inference_mode()
def _transformers_perplexity(path: Path, text: str, *, window: int, limit: int) -> float:
    """The mean over all windows of the loss of each token but the first, written out plainly."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    total, count = 0.0, 0
    for start in range(0, limit * window, window):
        piece = ids[None, start : start + window]
        logits = model(piece, use_cache=False).logits[0, :-1]
        total += F.cross_entropy(logits.double(), piece[0, 1:], reduction="sum").item()
        count += window - 1
    return float(torch.tensor(total / count).exp())


def _quantize(model: str, output: Path, **calibration: int) -> Path:
    quantize(
        QuantizeJob(
            model=model,
            output=output,
            recipe=load_recipe("rtn-w4a16", ["scheme.weights.group_size=32"]),
            calibration=CalibrationSpec(source="pydoc", **calibration),
            device="cpu",
            offline=True,
            quiet=True,
        )
    )
    return output


@pytest.mark.parametrize("architecture", list(FAMILIES))
def test_perplexity_equals_transformers(architecture: str, tmp_path: Path) -> None:
    path, text = tiny_model(architecture, tmp_path, tied=True), evaluation_text("pydoc")
    result = _engine_perplexity(path, text, window=130, limit=3)
    assert result.tokens == 3 * 129
    expected = _transformers_perplexity(path, text, window=130, limit=3)
    assert result.value == pytest.approx(expected, rel=_TINY)


def test_perplexity_of_a_packed_model_equals_transformers(tmp_path: Path) -> None:
    source = tiny_model("LlamaForCausalLM", tmp_path / "source")
    packed = _quantize(str(source), tmp_path / "packed", num_samples=2, length=32)
    text = evaluation_text("pydoc")
    result = _engine_perplexity(packed, text, window=130, limit=3)
    expected = _transformers_perplexity(packed, text, window=130, limit=3)
    assert result.value == pytest.approx(expected, rel=_TINY)
    unpacked = _engine_perplexity(source, text, window=130, limit=3)
    assert result.window_nll != pytest.approx(unpacked.window_nll, rel=_PROMISED)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True], ids=["float", "packed"])
def test_perplexity_of_the_demo_model_equals_transformers(packed: bool, tmp_path: Path) -> None:
    path = resolve_model("demo", offline=True)
    if packed:
        path = _quantize("demo", tmp_path / "packed", num_samples=1, length=64)
    text = evaluation_text("pydoc")
    result = _engine_perplexity(path, text, window=2048, limit=2)
    expected = _transformers_perplexity(path, text, window=2048, limit=2)
    assert result.value == pytest.approx(expected, rel=_PROMISED)
