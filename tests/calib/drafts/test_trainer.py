"""The training loop: it learns, it repeats itself exactly, keeps the best and minds the clock."""

import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from compress.calib.drafts import trainer
from compress.calib.drafts.medusa import MedusaExamples, MedusaHeads
from compress.calib.drafts.trainer import Training, TrainingConfig, train_heads

HIDDEN, VOCAB, HEADS = 24, 11, 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """For tiny products more threads only cost time."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def problem(num_positions: int, seed: int = 0) -> MedusaExamples:
    """Labels that are a function of the state: its cluster, shifted by the number of the head."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(99))
    cluster = torch.randint(VOCAB, (num_positions,), generator=generator)
    noise = 0.3 * torch.randn(num_positions, HIDDEN, generator=generator)
    labels = torch.stack([(cluster + head) % VOCAB for head in range(HEADS)], dim=1)
    return MedusaExamples(hidden=centers[cluster] + noise, labels=labels)


def projection() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7))


def train(
    *, seed: int = 0, seconds: float = 60.0, on_step: Any = None, **config: Any
) -> tuple[MedusaHeads, Training]:
    heads = MedusaHeads(HIDDEN, HEADS, 1)
    fields: dict[str, Any] = {
        "learning_rate": 3e-2,
        "batch_size": 33,
        "max_rounds": 12,
        "min_round_steps": 1,
    }
    training = train_heads(
        heads,
        problem(500),
        [problem(130, seed=1), problem(33, seed=2)],
        projection(),
        TrainingConfig(seed=seed, **fields | config),
        deadline=time.monotonic() + seconds,
        on_step=on_step or (lambda share, held_out, losses: None),
    )
    return heads, training


def test_training_lowers_the_loss_and_learns_what_can_be_known() -> None:
    _, training = train()
    first, last = training.history[1].loss, training.history[-1].loss
    assert first is not None and last is not None
    assert all(after < 0.3 * before for before, after in zip(first, last, strict=True))
    before, after = training.history[0].held_out, training.history[training.best].held_out
    assert before.length < 1.5
    assert min(after.per_head) > 0.95
    assert after.length > 3.8


def test_acceptance_length_is_the_sum_of_cumulative_products() -> None:
    _, training = train(max_rounds=2)
    for entry in training.history:
        products = [math.prod(entry.held_out.per_head[: k + 1]) for k in range(HEADS)]
        assert entry.held_out.length == pytest.approx(1 + sum(products))


def test_equal_seeds_give_equal_weights_and_other_seeds_do_not() -> None:
    first, again, other = (train(seed=seed, max_rounds=2)[0] for seed in (4, 4, 5))
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        assert not torch.equal(tensor, other.state_dict()[name])


def test_the_weights_of_the_best_round_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    lengths = iter([1.0, 2.0, 3.0, 2.5, 2.9, 1.0])

    def evaluate(run: Any, sequences: Any) -> trainer.Acceptance:
        seen.append({name: t.clone() for name, t in run._heads.state_dict().items()})
        return trainer.Acceptance(per_head=(1.0, 0.0, 0.0), length=next(lengths))

    monkeypatch.setattr(trainer._Run, "evaluate", evaluate)
    heads, training = train(patience=2)
    assert (training.best, len(training.history), training.stopped) == (2, 5, "no improvement")
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensor, seen[2][name])


def test_plan_is_cut_to_what_fits_the_time() -> None:
    shares: list[float] = []

    def slow(share: float, held_out: trainer.Acceptance, losses: torch.Tensor) -> None:
        shares.append(share)
        time.sleep(0.004)

    started = time.monotonic()
    _, training = train(seconds=1.0, max_rounds=1000, patience=1000, on_step=slow)
    assert time.monotonic() - started < 30  # the whole plan would take far longer
    assert training.stopped == "time"
    assert shares == sorted(shares)
    assert shares[-1] > 0.5, "the plan was far from what fitted"
    assert sum(entry.steps for entry in training.history) == len(shares) < 1000 * 16


def test_few_positions_are_passed_over_several_times_a_round() -> None:
    _, training = train(max_rounds=3, batch_size=200, min_round_steps=10)
    assert [entry.steps for entry in training.history] == [0, 12, 12, 12]  # 4 passes of 3 steps


def test_no_time_gives_untrained_heads() -> None:
    heads, training = train(seconds=-1.0)
    assert (len(training.history), training.best, training.stopped) == (1, 0, "time")
    assert all(not tensor.any() for tensor in heads.state_dict().values())


def test_loss_weighs_head_i_by_decay_to_the_i(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of plain gradient descent moves each head in proportion to its weight."""

    def descent(parameters: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr)

    monkeypatch.setattr("torch.optim.AdamW", descent)
    one_step = {"max_rounds": 1, "batch_size": 500, "warmup_steps": 1, "learning_rate": 1e-4}
    equal, decayed = (train(decay=decay, **one_step)[0] for decay in (1.0, 0.25))
    for i in range(HEADS):
        ours, theirs = decayed.blocks[i].layers[0].bias, equal.blocks[i].layers[0].bias
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, 0.25**i * theirs, rtol=1e-3, atol=0)


def test_learning_rate_warms_up_and_falls_along_a_half_cosine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates: list[float] = []

    class Watched(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            rates.append(self.param_groups[0]["lr"])
            super().step(closure)

    monkeypatch.setattr("torch.optim.AdamW", Watched)
    train(max_rounds=3, patience=9, warmup_steps=10, learning_rate=0.5)
    total = 3 * 16
    cosine = [0.25 * (1 + math.cos(math.pi * step / total)) for step in range(total)]
    rise = [min((step + 1) / 10, 1.0) for step in range(total)]
    assert rates == pytest.approx([a * b for a, b in zip(cosine, rise, strict=True)])
    assert rates[0] == pytest.approx(0.05)
    assert max(rates) == rates[9]
    assert rates[-1] < 0.01 * rates[9]
