"""Serve Medusa heads: one hidden state in, a chain of guesses out (see calib/drafts/medusa.py).

All requests of a step go through the heads in one batch: (R, H) -> (R, K, H) by one batched
product per layer, then (R * K, H) -> (R * K, Vd) by rows of the target's output head, prepared once
like any Linear of the target. The only state is the last hidden state of each request.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from compress.export.draft import MedusaDraft, read_medusa
from compress.runtime.linear import make_linear
from compress.runtime.loader import head_rows
from compress.runtime.model import Decoder, Linear
from compress.runtime.speculative.base import DraftContext


class MedusaProposer:
    """Guesses a chain of at most K tokens per request, the argmax of each head."""

    needs_all_positions = False  # the newest hidden state is enough

    def __init__(self, draft: MedusaDraft, target: Decoder) -> None:
        heads, layers = range(draft.num_heads), range(draft.num_layers)

        def stacked(layer: int, kind: str) -> torch.Tensor:
            parts = [draft.tensors[f"blocks.{head}.layers.{layer}.{kind}"] for head in heads]
            return torch.stack(parts).to(device=target.device, dtype=target.dtype)

        # Per layer: (K, H, H), transposed for x W^T, and (K, 1, H).
        self._weights = [stacked(layer, "weight").transpose(1, 2) for layer in layers]
        self._biases = [stacked(layer, "bias").unsqueeze(1) for layer in layers]
        self._project: Linear = target.head
        self._token_map: torch.Tensor | None = None
        if draft.token_map is not None:
            self._token_map = draft.token_map.to(target.device)
            rows = head_rows(target, draft.token_map)
            self._project = make_linear(
                [rows], [None], dtype=target.dtype, device=target.device, ops=target.ops
            )
        self._last_hidden: dict[str, torch.Tensor] = {}

    def observe(self, request_id: str, start: int, hidden: torch.Tensor) -> None:
        """Keep the state of the newest position; a copy, not a view of the whole step."""
        if len(hidden):
            self._last_hidden[request_id] = hidden[-1].clone()

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """See `DraftProposer`; chains are as long as the longest one that may be used."""
        states = torch.stack([self._last_hidden[context.request_id] for context in contexts])
        longest = max(context.max_draft_tokens for context in contexts)
        guesses = self._guess(states, longest).tolist()
        return [
            chain[: context.max_draft_tokens]
            for context, chain in zip(contexts, guesses, strict=True)
        ]

    def reset(self, request_id: str) -> None:
        """Forget the request."""
        self._last_hidden.pop(request_id, None)

    def _guess(self, states: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Token ids (R, min(K, num_tokens)) for hidden states (R, H)."""
        num_heads = min(len(self._biases[0]), num_tokens)
        x = states.expand(num_heads, -1, -1)
        for weight, bias in zip(self._weights, self._biases, strict=True):
            x = x + F.silu(torch.baddbmm(bias[:num_heads], x, weight[:num_heads]))
        logits = self._project(x.reshape(-1, x.shape[-1]))
        tokens = logits.argmax(dim=-1).view(num_heads, -1).T
        return tokens if self._token_map is None else self._token_map[tokens]


def load_medusa(folder: Path, target: Decoder) -> MedusaProposer:
    """The proposer for the draft in `folder`, which must have been trained for this very target.

    Raises what `read_medusa` raises, and ValueError if the draft is another target's: heads read
    the hidden states of the weights that they were trained on, down to how these were quantized.
    """
    draft = read_medusa(folder)
    for name in ("hidden_size", "vocab_size"):
        theirs, ours = getattr(draft, name), getattr(target.config, name)
        if theirs != ours:
            raise ValueError(f"{folder}: a draft for {name} {theirs}, but the target has {ours}")
    if draft.target_fingerprint != target.source.fingerprint:
        raise ValueError(
            f"{folder}: trained for another target, with fingerprint"
            f" {draft.target_fingerprint[:16]}...; {target.source.path} has"
            f" {target.source.fingerprint[:16]}..."
        )
    return MedusaProposer(draft, target)
