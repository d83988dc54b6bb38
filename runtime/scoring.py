"""Log-probabilities of the tokens of a prompt, read off in chunks of rows."""

import torch

from compress.runtime.logprobs import chunks, pick
from compress.runtime.model import Decoder
from compress.runtime.scheduler import ScheduledRequest


def append_scores(decoder: Decoder, item: ScheduledRequest, states: torch.Tensor) -> None:
    """Append the log-probability of the prompt token after each computed row that has one.

    `states` (n, H) are the hidden states of the rows of `item`; if the request wants the states
    themselves, it gets these instead. Nothing is done for a request that reports no prompt.
    """
    request, num_top = item.request, item.request.num_top_of_prompt
    if request.hidden is not None:
        request.hidden.append(states)
        return
    if num_top is None:
        return
    first = item.start + 1
    targets = torch.tensor(
        request.prompt_ids[first : first + item.num_tokens], dtype=torch.int64, device=states.device
    )
    for part in chunks(len(targets), decoder.config.vocab_size):
        log_probs = decoder.logits(states[: len(targets)][part]).log_softmax(dim=-1)
        request.prompt_logprobs.append(pick(log_probs, targets[part], num_top))
