"""KL divergence and agreement: by hand on bigram models, by brute force, and by transformers."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.errors import CheckFailed
from compress.evalsuite import fidelity
from compress.evalsuite.fidelity import compare, kl_divergence
from compress.evalsuite.perplexity import SLICE_ROWS, EvaluationData, perplexity
from compress.runtime.engine import Engine
from tests.evalsuite.fake import FakeTarget
from tests.factory import tiny_model


def _data(ids: list[int]) -> EvaluationData:
    return EvaluationData(
        source="test", tokens=torch.tensor(ids), text_sha256="text", tokens_sha256="tokens"
    )


def _random_ids(num: int, vocab: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab, (num,), generator=generator).tolist()


def _distributions(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Log-probabilities (rows, vocab) fp64, peaked like those of a language model."""
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, vocab, generator=generator, dtype=torch.float64)
    return logits.log_softmax(dim=-1)


def _brute_force_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """The definition, in fp64."""
    log_p, log_q = log_p.double(), log_q.double()
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


@pytest.mark.parametrize("step", [1.0, 1e-1, 1e-2, 1e-3], ids="step{}".format)
@pytest.mark.parametrize("vocab", [2, 331, 5000], ids="V{}".format)
def test_kl_divergence_is_accurate_down_to_small_ones(vocab: int, step: float) -> None:
    log_p = _distributions(33, vocab, seed=0)
    log_q = (log_p + step * _distributions(33, vocab, seed=1)).log_softmax(dim=-1)
    expected = _brute_force_kl(log_p, log_q)
    # what is rounded to fp32 is a distribution only nearly
    result = kl_divergence(log_p.float(), log_q.float())
    torch.testing.assert_close(result.double(), expected, rtol=2e-3, atol=2e-7)


@pytest.mark.parametrize("error", [1e-4, -1e-4])
def test_kl_divergence_does_not_take_an_error_of_normalization_for_a_distance(
    error: float,
) -> None:
    log_p = _distributions(17, 331, seed=0)
    result = kl_divergence(log_p.float(), (log_p + error).float())
    assert _brute_force_kl(log_p, log_p + error).abs().min() > 9e-5
    assert result.max() < 1e-7


def test_kl_divergence_is_never_negative_and_zero_for_equals() -> None:
    log_p = _distributions(130, 331, seed=0).float()
    assert kl_divergence(log_p, log_p.clone()).abs().max() == 0
    nearly = log_p + 1e-7 * torch.randn(log_p.shape, generator=torch.Generator().manual_seed(2))
    assert kl_divergence(log_p, nearly).min() >= 0


def test_kl_divergence_leaves_its_arguments_alone() -> None:
    log_p, log_q = _distributions(2, 7, seed=0).float(), _distributions(2, 7, seed=1).float()
    copies = log_p.clone(), log_q.clone()
    kl_divergence(log_p, log_q)
    assert torch.equal(log_p, copies[0])
    assert torch.equal(log_q, copies[1])


def test_compare_by_hand() -> None:
    # after 0 the baseline says (3/4, 1/4), the model (1/4, 3/4); after 1 both say (1/2, 1/2)
    baseline = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    model = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    # predictions are made after (0, 1) and (0, 0): KL is log(3) / 2 after 0, and 0 after 1
    result = compare(
        FakeTarget(log_probs=model),
        FakeTarget(log_probs=baseline),
        _data([0, 1, 1, 0, 0, 1, 1]),
        window=3,
    )
    kl, found = math.log(3) / 2, result.fidelity
    assert found.window_kl == pytest.approx((kl / 2, kl))
    assert found.kl_mean == pytest.approx(0.75 * kl)
    # window means kl/2 and kl: standard deviation kl / (2 sqrt 2), over sqrt 2
    assert found.kl_stderr == pytest.approx(kl / 4)
    assert (found.kl_median, found.kl_max) == pytest.approx((kl, kl))
    assert found.top1_agreement == 0.25
    assert found.top1_stderr == pytest.approx(0.25)  # window means 1/2 and 0
    assert (found.tokens, found.windows) == (4, 2)
    assert found.stderr_method == "windows as clusters"


def test_compare_is_the_divergence_from_the_baseline_and_not_to_it() -> None:
    certain = torch.tensor([[0.9, 0.1], [0.9, 0.1]]).log()
    even = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    targets = FakeTarget(log_probs=even), FakeTarget(log_probs=certain)
    result = compare(*targets, _data([0, 1, 0]), window=3)
    expected = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert result.fidelity.kl_mean == pytest.approx(expected)
    backwards = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert backwards > 1.3 * expected


@pytest.mark.parametrize("window", [17, 130, 2 * SLICE_ROWS + 1, 2 * SLICE_ROWS + 2])
@pytest.mark.parametrize("limit", [1, 3])
def test_compare_equals_brute_force(window: int, limit: int) -> None:
    vocab = 61
    tables = [_distributions(vocab, vocab, seed).float() for seed in (0, 1)]
    ids = _random_ids(3 * window, vocab)
    targets = [FakeTarget(log_probs=table) for table in tables]
    result = compare(*targets, _data(ids), window=window, limit=limit)
    rows = torch.tensor(ids).view(3, window)[:limit, :-1]
    log_q, log_p = (table[rows] for table in tables)  # (limit, window - 1, vocab)
    kl = _brute_force_kl(log_p, log_q)
    same = (log_p.argmax(-1) == log_q.argmax(-1)).double()
    found = result.fidelity
    assert found.kl_mean == pytest.approx(kl.mean().item(), rel=1e-5)
    assert found.kl_median == pytest.approx(np.percentile(kl.numpy(), 50), rel=1e-5)
    assert found.kl_p99 == pytest.approx(np.percentile(kl.numpy(), 99), rel=1e-5)
    assert found.top1_agreement == pytest.approx(same.mean().item())
    spread = kl.mean(1).std() / math.sqrt(3) if limit > 1 else kl.std() / math.sqrt(window - 1)
    assert found.kl_stderr == pytest.approx(spread.item(), rel=1e-4)
    assert found.window_kl == pytest.approx(kl.mean(1).tolist(), rel=1e-5)
    assert ("clusters" if limit > 1 else "independent") in found.stderr_method


def test_compare_gives_the_perplexities_of_each_alone() -> None:
    tables = [_distributions(61, 61, seed).float() for seed in (0, 1)]
    targets = [FakeTarget(log_probs=table) for table in tables]
    data = _data(_random_ids(1000, 61))
    result = compare(*targets, data, window=300)
    assert result.model == perplexity(targets[0], data, window=300)
    assert result.baseline == perplexity(targets[1], data, window=300)


class _Watched:
    """A uniform model that notes in `log` when each slice is made."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def log_probs(self, sequence: list[int], num_rows: int) -> Iterator[torch.Tensor]:
        for start in range(0, len(sequence) - 1, num_rows):
            self.log.append(self.name)
            yield torch.full((min(num_rows, len(sequence) - 1 - start), 5), -math.log(5))


def test_compare_asks_for_a_slice_of_each_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "SLICE_ROWS", 4)
    log: list[str] = []
    model: Any = _Watched("q", log)
    baseline: Any = _Watched("p", log)
    compare(model, baseline, _data([1] * 22), window=11)
    assert "".join(log) == "qpqpqp" * 2  # 4, 4 and 2 predictions in each of two windows


def test_compare_counts_a_step_for_each_model_and_window() -> None:
    counted: list[int] = []

    def tick(steps: int = 1, note: str = "") -> None:
        counted.append(steps)

    target = FakeTarget(log_probs=_distributions(5, 5, 0).float())
    compare(target, target, _data([0, 1, 2, 3] * 5), window=4, tick=tick)
    assert counted == [2] * 5


def test_compare_refuses_two_vocabularies() -> None:
    small, large = (FakeTarget(log_probs=_distributions(5, n, 0).float()) for n in (5, 6))
    with pytest.raises(ValueError, match=r"over 6 and 5 tokens: .* one vocabulary"):
        compare(large, small, _data([0, 1, 2]), window=3)


@pytest.mark.parametrize("which", [0, 1], ids=["model", "baseline"])
def test_compare_names_the_one_that_is_not_finite(which: int) -> None:
    tables = [_distributions(5, 5, seed).float() for seed in (0, 1)]
    tables[which][2, 3] = math.nan
    targets = [FakeTarget(log_probs=table) for table in tables]
    with pytest.raises(CheckFailed, match=f"^{'ab'[which]}: window 1, token 2: the log-prob"):
        compare(*targets, _data([0, 1, 2, 1, 2, 3]), window=3, names=("a", "b"))


def test_compare_fails_on_a_token_that_only_the_model_rules_out() -> None:
    tables = [_distributions(5, 5, seed).float() for seed in (0, 1)]
    tables[0][2, 4] = -math.inf  # 4 never follows 2 in the text: the perplexity does not see it
    targets = [FakeTarget(log_probs=table) for table in tables]
    with pytest.raises(CheckFailed, match=r"^a: window 1, token 2: the KL divergence from b"):
        compare(*targets, _data([0, 1, 2, 1, 2, 3]), window=3, names=("a", "b"))


def _disturb(folder: Path) -> None:
    """Add noise to every matrix of a checkpoint, as quantization does."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            noise = torch.randn(tensor.shape, generator=generator)
            tensors[name] = tensor + 0.1 * tensor.std() * noise
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_compare_through_the_engine_equals_transformers(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    paths = [tiny_model(architecture, tmp_path / name) for name in ("model", "baseline")]
    _disturb(paths[0])
    ids = _random_ids(3 * 130, 331)
    engines = [Engine.load(path, dtype="float32", device="cpu") for path in paths]
    found = compare(*engines, _data(ids), window=130).fidelity
    logits = []
    for path in paths:
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(theirs(torch.tensor(ids).view(3, 130)).logits[:, :-1].double())
    log_q, log_p = (part.log_softmax(dim=-1) for part in logits)
    kl = _brute_force_kl(log_p, log_q)
    assert kl.mean() > 1e-3
    assert found.kl_mean == pytest.approx(kl.mean().item(), rel=1e-4)
    assert found.window_kl == pytest.approx(kl.mean(1).tolist(), rel=1e-4)
    assert found.kl_p99 == pytest.approx(np.percentile(kl.numpy(), 99), rel=1e-4)
    same = (log_p.argmax(-1) == log_q.argmax(-1)).double()
    assert 0.1 < same.mean() < 0.99
    assert found.top1_agreement == pytest.approx(same.mean().item(), abs=1.5 / 387)  # a near tie
