"""Medusa heads: guess several tokens ahead from one hidden state, without touching the target.

    z_i = R_i(h_t),   R_i = L layers  x <- x + SiLU(W x + b),   W = b = 0 at the start
    head i guesses  argmax over the draft vocabulary of  U z_i  as token t + 2 + i,  i = 0 .. K - 1

h_t is the target's hidden state after the final norm at position t, from which its own head chooses
token t + 1; U are rows of that same output head, frozen and shared (Medusa-1). At the start
z_i = h_t: every head guesses token t + 1 again, and learns from there.

The draft vocabulary is the Vd tokens that occurred as labels in training, in ascending order:
guesses are as good as with all V tokens (others would not have been learnt) and cost Vd / V of the
product, which is nearly all of the cost of a small target's draft.

Loss: sum over heads of decay^i * cross-entropy, mean over the positions that have a label.

N positions, H hidden size, K heads, L layers per head.
Cai et al., Medusa, arXiv:2401.10774; in training, head i there counts from 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

IGNORED = -100  # label of a position that has none


class ResidualStack(nn.Module):
    """One head without its projection: L times x + SiLU(W x + b), (..., H) -> (..., H)."""

    def __init__(self, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        # One Linear per layer: `[layer] * num_layers` would be the same layer again and again.
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """K heads; parameters are named `blocks.{i}.layers.{l}.weight` (H, H) and `.bias` (H,)."""

    def __init__(self, hidden_size: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            ResidualStack(hidden_size, num_layers) for _ in range(num_heads)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """States (N, K, H), to be multiplied by the target's head, of hidden states (N, H)."""
        return torch.stack([block(hidden) for block in self.blocks], dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MedusaExamples:
    """Positions to learn from or to test on.

    hidden  (N, H)  float  the target's state at position t
    labels  (N, K)  int64  index in the draft vocabulary of token t + 2 + i, or IGNORED
    """

    hidden: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.hidden)

    @property
    def is_complete(self) -> torch.Tensor:
        """(N,) bool: whether every head has a label."""
        return (self.labels != IGNORED).all(dim=1)


class Stretch(NamedTuple):
    """Consecutive positions of one sequence.

    hidden   (n, H) float  the target's state at each
    choices  (n,) int64    the token that the target chooses after each
    """

    hidden: torch.Tensor
    choices: torch.Tensor


def draft_vocabulary(stretches: Sequence[Stretch]) -> torch.Tensor:
    """The tokens that are labels somewhere: ascending ids, (Vd,) int64."""
    vocabulary: torch.Tensor = torch.unique(torch.cat([choices[1:] for _, choices in stretches]))
    return vocabulary


def make_examples(
    stretches: Sequence[Stretch], vocabulary: torch.Tensor, num_heads: int
) -> MedusaExamples:
    """Every position whose first head has a label: head i learns the choice 1 + i positions later.

    A label outside `vocabulary` becomes -1, which no head can guess: an error in an evaluation.
    """
    hidden, labels = [stretches[0].hidden[:0]], [torch.empty(0, num_heads, dtype=torch.int64)]
    for states, choices in stretches:
        if len(choices) < 2:
            continue
        count = len(choices) - 1
        padded = torch.cat([choices, torch.full((num_heads,), IGNORED)])
        windows = padded[1:].unfold(0, num_heads, 1)[:count].contiguous()
        index = torch.searchsorted(vocabulary, windows).clamp_(max=len(vocabulary) - 1)
        index[vocabulary[index] != windows] = -1
        index[windows == IGNORED] = IGNORED
        hidden.append(states[:count])
        labels.append(index)
    return MedusaExamples(hidden=torch.cat(hidden), labels=torch.cat(labels))


def head_losses(
    states: torch.Tensor, labels: torch.Tensor, projection: torch.Tensor
) -> torch.Tensor:
    """Mean cross-entropy of each head, (K,) fp32, in nats.

    states (N, K, H), labels (N, K); projection (Vd, H), in whose dtype logits are computed.
    """
    num_positions, num_heads, _ = states.shape
    logits = F.linear(states.to(projection.dtype).flatten(0, 1), projection)
    losses = F.cross_entropy(
        logits.float(), labels.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(num_positions, num_heads)
    return losses.sum(0) / (labels != IGNORED).sum(0).clamp(min=1)


@torch.no_grad()
def accepted_counts(
    heads: MedusaHeads, sequences: Sequence[MedusaExamples], projection: torch.Tensor
) -> torch.Tensor:
    """Decode `sequences` as an engine would; passes that accepted at least k guesses, (K + 1,).

    Each of `sequences` holds consecutive positions. A pass that accepts n guesses moves on by
    n + 1 positions, so easy stretches take few passes: a mean over all positions would count them
    too often and promise too much. Entry 0 is the number of passes; those too close to the end of
    a sequence to have all labels are left out.
    """
    counts = torch.zeros(sequences[0].labels.shape[1] + 1, dtype=torch.int64)
    for examples in sequences:
        states = heads(examples.hidden.to(projection.device).float())
        guesses = F.linear(states.to(projection.dtype), projection).argmax(dim=-1).cpu()
        accepted = (guesses == examples.labels).cumprod(dim=1).sum(dim=1).tolist()
        num_complete = int(examples.is_complete.sum())
        position = 0
        while position < num_complete:
            counts[: accepted[position] + 1] += 1
            position += accepted[position] + 1
    return counts
