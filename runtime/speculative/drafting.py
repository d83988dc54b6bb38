"""What the engine asks of a draft, and what it gives up for one."""

import logging
from collections.abc import Sequence

from compress.runtime.engine_config import EngineConfig
from compress.runtime.request import Request
from compress.runtime.speculative.base import DraftContext, DraftProposer

_LOG = logging.getLogger(__name__)


def draft(proposer: DraftProposer, running: Sequence[Request]) -> None:
    """Let `proposer` set the `draft_ids` of the requests that decode and may be speculated on."""
    drafted = [
        request
        for request in running
        if request.is_decoding and request.is_drafted and request.num_remaining_tokens > 1
    ]
    contexts = [
        DraftContext(
            request_id=request.request_id,
            token_ids=request.token_ids,
            # The last token that may be generated is chosen, not drafted.
            max_draft_tokens=request.num_remaining_tokens - 1,
        )
        for request in drafted
    ]
    if contexts:
        proposals = proposer.propose(contexts)
        for request, context, proposal in zip(drafted, contexts, proposals, strict=True):
            request.draft_ids = list(proposal[: context.max_draft_tokens])


def allows_prefix_cache(config: EngineConfig, proposer: DraftProposer | None) -> bool:
    """Whether requests share cached prefixes; a warning if a draft is why they do not.

    What comes from the cache has no hidden states, so a draft that needs all of them rules it out.
    """
    if config.prefix_cache and proposer is not None and proposer.needs_all_positions:
        _LOG.warning("the prefix cache is off: this draft needs the hidden states of every token")
        return False
    return config.prefix_cache
