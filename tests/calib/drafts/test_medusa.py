"""Medusa heads: what they compute, which labels they learn, how acceptance is counted."""

import pytest
import torch
import torch.nn.functional as F

from compress.calib.drafts.medusa import (
    IGNORED,
    MedusaExamples,
    MedusaHeads,
    Stretch,
    accepted_counts,
    draft_vocabulary,
    head_losses,
    make_examples,
)

HIDDEN = 17


def randomize(heads: MedusaHeads, seed: int = 0) -> MedusaHeads:
    generator = torch.Generator().manual_seed(seed)
    for parameter in heads.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return heads


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_heads_start_as_the_identity(num_heads: int, num_layers: int) -> None:
    hidden = torch.randn(33, HIDDEN)
    states = MedusaHeads(HIDDEN, num_heads, num_layers)(hidden)
    assert torch.equal(states, hidden[:, None].expand(-1, num_heads, -1))


def test_head_is_a_chain_of_residual_layers_of_its_own() -> None:
    heads = randomize(MedusaHeads(HIDDEN, 2, 2))
    hidden = torch.randn(5, HIDDEN)
    weights = dict(heads.named_parameters())
    for head in range(2):
        x = hidden
        for layer in range(2):
            name = f"blocks.{head}.layers.{layer}"
            x = x + F.silu(x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])
        torch.testing.assert_close(heads(hidden)[:, head], x)
    assert len(weights) == 8


def test_labels_are_later_choices() -> None:
    stretch = Stretch(torch.arange(5.0)[:, None], torch.tensor([11, 12, 13, 14, 15]))
    vocabulary = draft_vocabulary([stretch])
    assert vocabulary.tolist() == [12, 13, 14, 15]
    examples = make_examples([stretch, stretch], vocabulary, 3)
    once = [[0, 1, 2], [1, 2, 3], [2, 3, IGNORED], [3, IGNORED, IGNORED]]
    assert examples.labels.tolist() == once * 2
    assert examples.hidden.flatten().tolist() == [0, 1, 2, 3] * 2
    assert examples.is_complete.tolist() == [True, True, False, False] * 2


def test_label_outside_the_vocabulary_is_minus_one() -> None:
    stretch = Stretch(torch.zeros(4, 1), torch.tensor([2, 3, 4, 5]))
    examples = make_examples([stretch], torch.tensor([3, 5]), 2)
    assert examples.labels.tolist() == [[0, -1], [-1, 1], [1, IGNORED]]


@pytest.mark.parametrize("length", [0, 1])
def test_stretch_without_a_later_choice_gives_no_position(length: int) -> None:
    stretch = Stretch(torch.zeros(length, 4), torch.zeros(length, dtype=torch.int64))
    examples = make_examples([stretch], torch.tensor([3]), 3)
    assert examples.hidden.shape == (0, 4)
    assert examples.labels.shape == (0, 3)


def test_loss_of_a_head_is_the_mean_over_its_own_labels() -> None:
    states, projection = torch.randn(4, 2, HIDDEN), torch.randn(7, HIDDEN)
    labels = torch.tensor([[0, 6], [3, IGNORED], [IGNORED, IGNORED], [2, 1]])
    log_probs = (states @ projection.T).log_softmax(-1)
    expected = [
        -(log_probs[0, 0, 0] + log_probs[1, 0, 3] + log_probs[3, 0, 2]) / 3,
        -(log_probs[0, 1, 6] + log_probs[3, 1, 1]) / 2,
    ]
    torch.testing.assert_close(head_losses(states, labels, projection), torch.stack(expected))


def test_head_without_labels_has_no_loss() -> None:
    labels = torch.tensor([[1, IGNORED]])
    losses = head_losses(torch.randn(1, 2, HIDDEN), labels, torch.randn(7, HIDDEN))
    assert losses[0] > 0
    assert losses[1] == 0


def guess_own_index(*labels: list[int]) -> MedusaExamples:
    """Position p of a sequence where untrained heads guess p, p, p."""
    return MedusaExamples(hidden=torch.eye(8)[: len(labels)], labels=torch.tensor(labels))


def test_accepted_counts_stop_at_the_first_wrong_guess() -> None:
    sequences = [
        guess_own_index(labels)
        for labels in ([0, 0, 0], [0, 0, 2], [0, 2, 0], [2, 0, 0], [0, -1, 0])
    ]
    counts = accepted_counts(MedusaHeads(8, 3, 1), sequences, torch.eye(8))
    assert counts.tolist() == [5, 4, 2, 1]


def test_accepted_guesses_are_passed_over() -> None:
    sequence = guess_own_index(
        [0, 0, 7],  # accepts two: the next pass is at position 3
        [1, 1, 1],
        [2, 2, 2],
        [7, 3, 3],  # accepts none
        [4, 7, 4],  # accepts one
        [5, 5, 5],
        [6, 6, IGNORED],  # not counted
        [7, IGNORED, IGNORED],
    )
    counts = accepted_counts(MedusaHeads(8, 3, 1), [sequence, sequence], torch.eye(8))
    assert counts.tolist() == [6, 4, 2, 0]
