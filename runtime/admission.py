"""How many cache blocks a set of requests will need at the worst moment.

The rule of LightLLM: if all requests advance one token per step until their `max_tokens`, use is
highest just before one of them ends, so the pool has to hold them at these moments only. It is
exact for requests that decode and do not end early.
"""

from collections.abc import Sequence

import numpy as np

from compress.runtime.blocks import BlockManager
from compress.runtime.request import Request


def peak_blocks(
    requests: Sequence[Request], blocks: BlockManager, cached_prefix: Sequence[int] = ()
) -> int:
    """Most blocks in use at once if all `requests` advance one token per step to their end.

    Those that will fork from a request share its full blocks and write as much as it does.
    The last request may be a candidate that owns nothing yet and would share `cached_prefix`.
    A block in several tables counts once, for the request that keeps it longest.
    """
    known = np.array([len(request.token_ids) for request in requests])
    left = np.array([request.max_cached_tokens for request in requests]) - known
    shared = np.array(_counted_elsewhere(requests, left, blocks, cached_prefix))
    ends = np.unique(left)[:, None]  # (E, 1): the steps at which requests end
    whole = np.maximum(-(-(known + ends) // blocks.block_size), blocks.min_blocks)
    forks = np.array([request.num_forks for request in requests])
    shareable = known // blocks.block_size if blocks.can_share else 0
    held = whole - shared + forks * (whole - shareable)
    return int(np.where(left >= ends, held, 0).sum(axis=1).max())


def _counted_elsewhere(
    requests: Sequence[Request],
    left: np.ndarray,
    blocks: BlockManager,
    cached_prefix: Sequence[int],
) -> list[int]:
    """How many of each request's full blocks a request that lives at least as long holds too."""
    counts, seen, wanted = [0] * len(requests), set[int](), set(cached_prefix)
    for i in np.argsort(-left, kind="stable"):
        request = requests[i]
        table = blocks.table(request.request_id)
        if not table and request is requests[-1]:
            table = cached_prefix
        # A block that is not full yet will be copied by whoever writes into it.
        for block in table[: len(request.token_ids) // blocks.block_size]:
            if blocks.references(block) + (block in wanted) < 2:
                break  # what is shared is shared from the start
            counts[i] += block in seen
            seen.add(block)
    return counts
