"""Log-probabilities of given tokens, read off in chunks of rows."""

import torch

from compress.runtime.model import Decoder
from compress.runtime.scheduler import ScheduledRequest

_LOGITS_BYTES = 64 * 2**20  # of fp32 logits at a time


def append_scores(decoder: Decoder, item: ScheduledRequest, states: torch.Tensor) -> None:
    """Append the log-probability of the token after each computed row of a scored request.

    `states` (n, H) are the hidden states of the rows of `item`; if the request wants the states
    themselves, it gets these instead.
    """
    first, request = item.start + 1, item.request
    if request.hidden is not None:
        request.hidden.append(states)
        return
    targets = torch.tensor(request.prompt_ids[first : first + item.num_tokens])
    num_rows = max(_LOGITS_BYTES // (4 * decoder.config.vocab_size), 1)
    for first_row in range(0, len(states), num_rows):
        part = slice(first_row, first_row + num_rows)
        logits = decoder.logits(states[part])
        picked = logits.gather(1, targets[part].to(logits.device)[:, None])[:, 0]
        request.log_probs.append((picked - logits.logsumexp(dim=-1)).cpu())
