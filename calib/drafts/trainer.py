"""The training loop of draft heads: seeded, with early stopping, within a deadline.

AdamW over shuffled positions; the learning rate rises over the first steps and then falls along a
half cosine to zero at the last planned step. After every round, a pass over the positions or
several if they are few, the held-out sequences are decoded, and the weights with the largest
acceptance length are kept.

The plan is a number of rounds. Once the first steps have been timed, a plan that would not end
before the deadline is cut to the steps that fit, so that the cosine still comes down to zero. A run
that was not cut depends on nothing but its arguments: equal arguments give equal weights.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from compress.calib.drafts.medusa import (
    MedusaExamples,
    MedusaHeads,
    accepted_counts,
    head_losses,
)

_TIMED_STEPS = 10  # the plan is made from the time of these, without the first
_SAFETY = 0.9  # share of the time left that the plan may fill


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """How to train. `decay`: head i has weight decay^i in the loss.

    A round is the fewest passes with at least `min_round_steps` steps. Training ends early once
    `patience` rounds in a row were worse than the best one (of equals, the latest).
    """

    seed: int
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    decay: float = 0.8
    batch_size: int = 256
    max_rounds: int = 10
    min_round_steps: int = 100
    warmup_steps: int = 20
    patience: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """What greedy verification accepts when held-out sequences are decoded with the draft.

    per_head  a_i: share of right guesses of head i in passes where all heads before it were right
    length    1 + sum over k of prod_{i <= k} a_i: tokens per pass of the target, its own included
    """

    per_head: tuple[float, ...]
    length: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One round of training; entry 0 of a history is the state before training, loss None.

    `loss` is the mean cross-entropy of each head during the round, in nats.
    """

    steps: int
    seconds: float
    loss: tuple[float, ...] | None
    held_out: Acceptance


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """`best` is the entry of `history` whose weights were kept.

    `stopped` is why it ended: "done" (all rounds), "no improvement" or "time".
    """

    history: tuple[Round, ...]
    best: int
    stopped: str


def train_heads(
    heads: MedusaHeads,
    training: MedusaExamples,
    held_out: Sequence[MedusaExamples],
    projection: torch.Tensor,
    config: TrainingConfig,
    *,
    deadline: float,
    on_step: Callable[[float, Acceptance, torch.Tensor], None],
) -> Training:
    """Train `heads` in place; afterwards they hold the weights of the best round.

    projection (Vd, H) is on the device of the heads, the examples may be on the host; each entry of
    `held_out` holds consecutive positions of one sequence. `deadline` is
    a value of `time.monotonic()`. `on_step` is told the share of the plan that is done, the latest
    acceptance and the losses (K,) of the step.
    """
    run = _Run(heads, training, projection, config, deadline)
    history = [
        Round(steps=0, seconds=0.0, loss=None, held_out=run.evaluate(held_out)),
    ]
    best, best_weights = 0, copy.deepcopy(heads.state_dict())
    stopped = ""
    while run.step < run.planned_steps:
        started, first, losses = time.monotonic(), run.step, []
        for batch in run.batches():
            losses.append(run.train(batch))
            on_step(run.step / run.planned_steps, history[-1].held_out, losses[-1])
        if not losses:
            break
        result = Round(
            steps=run.step - first,
            seconds=time.monotonic() - started,
            loss=tuple(torch.stack(losses).mean(dim=0).tolist()),
            held_out=run.evaluate(held_out),
        )
        history.append(result)
        if result.held_out.length >= history[best].held_out.length:
            best, best_weights = len(history) - 1, copy.deepcopy(heads.state_dict())
        elif len(history) - 1 - best >= config.patience:
            stopped = "no improvement"
            break
    heads.load_state_dict(best_weights)
    stopped = stopped or ("time" if run.was_cut else "done")
    return Training(history=tuple(history), best=best, stopped=stopped)


class _Run:
    """The state of a training: optimizer, order of positions, plan."""

    def __init__(
        self,
        heads: MedusaHeads,
        training: MedusaExamples,
        projection: torch.Tensor,
        config: TrainingConfig,
        deadline: float,
    ) -> None:
        self._heads, self._projection, self._config = heads, projection, config
        self._training = training
        self._deadline = deadline
        self._order = torch.Generator().manual_seed(config.seed)
        self._optimizer = torch.optim.AdamW(
            heads.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        num_heads = training.labels.shape[1]
        self._weights = config.decay ** torch.arange(num_heads, device=projection.device)
        steps_per_pass = math.ceil(len(training) / config.batch_size)
        self._passes = math.ceil(config.min_round_steps / steps_per_pass)
        self._steps_per_round = self._passes * steps_per_pass
        self.step = 0
        self.planned_steps = config.max_rounds * self._steps_per_round
        self.was_cut = False  # by the deadline
        self._timed_from = 0.0
        self._evaluation_seconds = 0.0

    def batches(self) -> Iterator[torch.Tensor]:
        """Row numbers of one round in random order, ending early at the plan or the deadline."""
        passes = [
            torch.randperm(len(self._training), generator=self._order) for _ in range(self._passes)
        ]
        for rows in (r for order in passes for r in torch.split(order, self._config.batch_size)):
            if time.monotonic() > self._deadline:
                self.was_cut, self.planned_steps = True, self.step
            if self.step >= self.planned_steps:
                return
            yield rows

    def train(self, rows: torch.Tensor) -> torch.Tensor:
        """One step; the loss of each head, (K,) on the host."""
        device = self._projection.device
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * self._schedule()
        hidden = self._training.hidden[rows].to(device).float()
        losses = head_losses(
            self._heads(hidden), self._training.labels[rows].to(device), self._projection
        )
        self._optimizer.zero_grad()
        torch.autograd.backward((losses * self._weights).sum())
        self._optimizer.step()
        self.step += 1
        self._replan()
        return losses.detach().cpu()

    def evaluate(self, sequences: Sequence[MedusaExamples]) -> Acceptance:
        """Test the heads on `sequences`, in which at least one position has all labels."""
        started = time.monotonic()
        counts = accepted_counts(self._heads, sequences, self._projection).double()
        self._evaluation_seconds = time.monotonic() - started
        per_head = counts[1:] / counts[:-1].clamp(min=1)
        return Acceptance(per_head=tuple(per_head.tolist()), length=float(counts.sum() / counts[0]))

    def _schedule(self) -> float:
        """Factor on the learning rate for the next step."""
        warmup = min(1.0, (self.step + 1) / self._config.warmup_steps)
        return warmup * 0.5 * (1 + math.cos(math.pi * self.step / self.planned_steps))

    def _replan(self) -> None:
        """After the timed steps, cut the plan to what fits before the deadline."""
        now = time.monotonic()
        if self.step == 1:
            self._timed_from = now
        if self.step != _TIMED_STEPS:
            return
        training_seconds = (now - self._timed_from) / (_TIMED_STEPS - 1) * self._steps_per_round
        rounds = (self._deadline - now) * _SAFETY / (training_seconds + self._evaluation_seconds)
        affordable = self.step + int(rounds * self._steps_per_round)
        if affordable < self.planned_steps:
            self.was_cut, self.planned_steps = True, affordable
