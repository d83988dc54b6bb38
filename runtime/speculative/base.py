"""The interface between the engine and whatever guesses tokens ahead of it.

A proposer guesses a chain of tokens after the last known one. The engine computes the last known
token and the guesses in one pass, chooses at each of those positions the token that it would have
chosen anyway, and accepts the guesses as far as they are equal to these choices. Outputs are
therefore those of the engine alone, whatever is proposed: for greedy decoding, and for sampling as
well, because the noise of a sampled token depends on its position and not on the way it came about.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import torch

from compress.lookup import lookup
from compress.models.checkpoint import read_json
from compress.runtime.model import Decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftContext:
    """A sequence that may be speculated on: everything known of it, and the most guesses to make.

    `token_ids` ends with a token that the target has chosen and not yet computed.
    """

    request_id: str
    token_ids: Sequence[int]
    max_draft_tokens: int


class DraftProposer(Protocol):
    """Guesses tokens. May keep state per request; `observe` feeds it and `reset` drops it.

    A proposer with `needs_all_positions` hears of every position of a request, from 0 on. For its
    sake the engine computes whole prompts, without the prefix cache, and does not ask it about
    forked requests, whose beginning was computed for another. The others hear of what is computed:
    a request may start at any position, but at least the last one before a proposal is there.
    """

    @property
    def needs_all_positions(self) -> bool:
        """Whether hidden states that the prefix cache or a fork saved would be missed."""

    def observe(self, request_id: str, start: int, hidden: torch.Tensor) -> None:
        """Hear of `hidden` (n, H): final-norm states of the target at positions [start, start + n).

        Called after every step for every request that advanced, prompt chunks included, with only
        those positions whose tokens are certain. Positions come without gaps; they start from 0,
        or where the prefix cache or the fork ended, and start again after a preemption.
        """

    def propose(self, contexts: Sequence[DraftContext]) -> list[list[int]]:
        """One chain per context, at most its `max_draft_tokens` long; an empty one is fine.

        `observe` has been called for the position before the last token of each context, and, with
        `needs_all_positions`, for all before it.
        """

    def reset(self, request_id: str) -> None:
        """Forget the request: it ended, or was preempted."""


# Architecture in the draft's config.json -> function (folder, target) -> DraftProposer.
PROPOSERS: dict[str, str] = {
    "MedusaModel": "compress.runtime.speculative.medusa:load_medusa",
}


def proposer_entry(path: Path) -> str:
    """`module:function` that loads the draft of `path`; ValueError if its kind is unknown."""
    config = read_json(path / "config.json")
    architectures = config.get("architectures") or ["(none named in config.json)"]
    return lookup(PROPOSERS, architectures[0], "draft architecture")


def load_proposer(path: Path, target: Decoder) -> DraftProposer:
    """The proposer saved in folder `path`, for `target`; ValueError if its kind is unknown."""
    module, function = proposer_entry(path).split(":")
    load = cast(Callable[[Path, Decoder], DraftProposer], getattr(import_module(module), function))
    return load(path, target)
