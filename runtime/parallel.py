"""Several outputs of one prompt: `n` of `best_of`, each sampled with a seed of its own.

The prompt is computed once, by the first output; at the step that ends it the others fork from it
(`Scheduler.fork`): they share its cache blocks, which are copied when one of them writes, and take
their first token from the same hidden state. An output that finds no place among the running ones
waits as a request of its own, and starts on what the prefix cache has of the prompt.
"""

from dataclasses import replace

from compress.runtime.logprobs import LogProbs, join
from compress.runtime.request import Completion, Request
from compress.runtime.sampling_params import SamplingParams, child_seed


class ParallelGroup:
    """The outputs of `parent`; they are its `children`, and none of them knows of the others."""

    def __init__(self, parent: Request) -> None:
        params = parent.params
        assert params is not None and params.seed is not None
        self.parent = parent
        self.prompt_logprobs: LogProbs | None = None
        self._completions: dict[str, Completion] = {}
        count = params.num_sequences
        self._is_ranked = count > params.n
        parent.children = [self._child(i, params, params.seed) for i in range(count)]
        self.unborn = parent.children[1:]
        self._seat(parent.children[0])

    @property
    def is_done(self) -> bool:
        """Whether all outputs have come to their end."""
        return len(self._completions) == len(self.parent.children)

    def unfinished(self) -> list[Request]:
        """The outputs that have not ended, whether or not they have begun."""
        return [c for c in self.parent.children if c.request_id not in self._completions]

    def withdraw(self, child: Request) -> None:
        """Let an output that has not begun never begin."""
        self.unborn.remove(child)
        for other in self.parent.children:
            other.num_forks = min(other.num_forks, len(self.unborn))

    def take_forks(self, first: Request) -> list[Request]:
        """The outputs that fork from `first`, whose prompt is computed."""
        forks, self.unborn, first.num_forks = self.unborn, [], 0
        return forks

    def keep_prompt(self, first: Request) -> None:
        """Take the log-probabilities of the prompt from `first`, which reports it no more."""
        assert first.params is not None
        if first.params.prompt_logprobs is not None:
            self.prompt_logprobs = join(first.prompt_logprobs, first.params.prompt_logprobs)
            first.prompt_logprobs.clear()
            first.params = replace(first.params, prompt_logprobs=None)

    def take_successor(self) -> Request:
        """Who computes the prompt instead of a first output that ended before it could."""
        successor = self.unborn.pop(0)
        self._seat(successor)
        return successor

    def add(self, completion: Completion) -> None:
        """Keep the end of one output."""
        self._completions[completion.request_id] = completion

    def completion(self) -> Completion:
        """That of the parent: the first of the n outputs, with the others as siblings."""
        params = self.parent.params
        assert params is not None
        ends = [self._completions[child.request_id] for child in self.parent.children]
        if self._is_ranked:  # one that failed or was aborted is no answer if there are others
            ends.sort(key=lambda c: (c.finish_reason in ("error", "abort"), -c.mean_logprob))
        known = [c.prompt_logprobs for c in ends if c.prompt_logprobs is not None]
        prompt = self.prompt_logprobs or next(iter(known), None)
        best, *siblings = (replace(c, prompt_logprobs=prompt) for c in ends[: params.n])
        return replace(best, request_id=self.parent.request_id, siblings=tuple(siblings))

    def _seat(self, first: Request) -> None:
        """Let `first` compute the prompt, and report it if that is asked for."""
        assert first.params is not None and self.parent.params is not None
        reported = self.parent.params.prompt_logprobs
        first.params = replace(first.params, prompt_logprobs=reported)
        first.num_forks = len(self.unborn)

    def _child(self, index: int, params: SamplingParams, seed: int) -> Request:
        return Request(
            request_id=f"{self.parent.request_id}/{index}",
            prompt_ids=list(self.parent.prompt_ids),
            params=replace(
                params,
                n=1,
                best_of=None,
                seed=child_seed(seed, index),
                prompt_logprobs=None,
                # What is ranked by its log-probability needs it.
                logprobs=0 if self._is_ranked and params.logprobs is None else params.logprobs,
            ),
            priority=self.parent.priority,
            arrival_time=self.parent.arrival_time,
            parent_id=self.parent.request_id,
            index=index,
        )
