"""The requests in flight, and the groups and searches that some of them belong to.

What is added by a caller is one of three: a request that is computed itself, the parent of a
`ParallelGroup`, or that of a `BeamSearch`. Each ends as one `Completion` by its own name.
"""

from collections.abc import Callable

from compress.runtime.advance import beam_completion, completion_of
from compress.runtime.attention.pool import KVPool
from compress.runtime.beam import BeamSearch, Candidates, check_search
from compress.runtime.parallel import ParallelGroup
from compress.runtime.request import Completion, Request
from compress.runtime.scheduler import ScheduledRequest, Scheduler


class InFlight:
    """Adds, forks and ends requests; `forget` is told of each one that is computed no more.

    `needs_all_positions` is that of the draft: it keeps forks from being drafted.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: KVPool,
        eos_token_ids: frozenset[int],
        *,
        needs_all_positions: bool,
        forget: Callable[[Request], None],
    ) -> None:
        self.requests: dict[str, Request] = {}  # those that are computed
        self.done: list[Completion] = []  # of groups whose last output was aborted
        self._groups: dict[str, ParallelGroup] = {}
        self._searches: dict[str, BeamSearch] = {}
        self._scheduler = scheduler
        self._pool = pool
        self._eos_token_ids = eos_token_ids
        self._needs_all_positions = needs_all_positions
        self._forget = forget

    @property
    def names(self) -> list[str]:
        """What was added and has no completion yet."""
        alone = [name for name, request in self.requests.items() if request.parent_id is None]
        return [*alone, *self._groups, *self._searches]

    def add(self, request: Request) -> None:
        """Queue a request that was checked; ValueError, changing nothing, if it can never fit."""
        name, params = request.request_id, request.params
        if params is not None and params.beam_width > 1:
            check_search(request, self._scheduler)
            search = BeamSearch(request, self._eos_token_ids)
            self._enlist(search.beams[0])
            self._searches[name] = search
        elif params is not None and params.num_sequences > 1:
            group = ParallelGroup(request)
            self._enlist(request.children[0])
            self._groups[name] = group
        else:
            self._enlist(request)

    def fork(self, parent: Request, child: Request) -> None:
        """Run `child` beside the running `parent`; ValueError if there is no room."""
        child.is_drafted = not self._needs_all_positions
        self._scheduler.fork(parent, child)
        self.requests[child.request_id] = child

    def abort(self, name: str) -> Completion:
        """End what was added as `name`, or one output of a group; ValueError if it is unknown."""
        if name in self.names:
            return self.end(name, "abort")
        for group in self._groups.values():
            for child in group.unfinished():
                if child.request_id == name:
                    return self._abort_child(group, child)
        raise ValueError(f"request {name!r} is not in flight")

    def fork_outputs(self, item: ScheduledRequest) -> list[ScheduledRequest]:
        """Fork the other outputs of a group from the first, if `item` completes its prompt.

        Those that found room take part in the step as if they had computed what `item` did.
        """
        first = item.request
        if (
            not first.num_forks
            or first.is_beam
            or item.start + item.num_tokens < len(first.token_ids)
        ):
            return []
        group = self._groups[str(first.parent_id)]
        return [
            ScheduledRequest(request=child, start=item.start, num_tokens=item.num_tokens)
            for child in group.take_forks(first)
            if self._place(first, child)
        ]

    def keep_prompt(self, first: Request) -> None:
        """Let the group of `first`, which was forked, keep the log-probabilities of the prompt."""
        self._groups[str(first.parent_id)].keep_prompt(first)

    def offer(self, beam: Request, candidates: Candidates) -> None:
        """Give the candidates of a beam to its search."""
        self._searches[str(beam.parent_id)].offer(beam, candidates)

    def advance_searches(self, now: float) -> list[Completion]:
        """A round for every beam search whose beams are all computed; those that are done."""
        ready = [search for search in self._searches.values() if search.is_ready]
        for search in ready:
            self._advance_search(search, now)
        return [self._end_search(search) for search in ready if search.is_done]

    def settle(self, request: Request, reason: str) -> list[Completion]:
        """End a request; its completion, or that of the group that it was the last of."""
        return self._report(request, self._finish(request, reason))

    def end(self, name: str, reason: str, error: str | None = None) -> Completion:
        """End what was added as `name`, with all that belongs to it."""
        if name in self._searches:
            return self._end_search(self._searches[name], reason, error)
        if name not in self._groups:
            return self._finish(self.requests[name], reason, error)
        group = self._groups.pop(name)
        for child in group.unfinished():
            is_computed = child.request_id in self.requests
            finish = self._finish if is_computed else completion_of
            group.add(finish(child, reason, error))
        return group.completion()

    def _enlist(self, request: Request) -> None:
        self._scheduler.add(request)
        self.requests[request.request_id] = request

    def _place(self, parent: Request, child: Request) -> bool:
        """Let `child` run beside `parent` on its blocks if there is room, else wait; which."""
        child.order = parent.order
        if not self._scheduler.can_fork(parent, child):
            self._enlist(child)
            return False
        child.is_drafted = child.is_drafted and not self._needs_all_positions
        self._scheduler.fork(parent, child)
        self.requests[child.request_id] = child
        return True

    def _advance_search(self, search: BeamSearch, now: float) -> None:
        before = search.beams
        forks = search.advance(now)
        kept = [] if search.is_done else search.beams
        for beam in before:  # first, to make room
            if beam not in kept:
                self._remove(beam, is_spoiled=not search.has_candidates(beam))
        for parent, beam in forks:
            self._place(parent, beam)
        search.forget_candidates()

    def _end_search(
        self, search: BeamSearch, reason: str | None = None, error: str | None = None
    ) -> Completion:
        del self._searches[search.parent.request_id]
        for beam in search.beams:
            if beam.request_id in self.requests:
                self._remove(beam)
        return beam_completion(search, reason, error)

    def _abort_child(self, group: ParallelGroup, child: Request) -> Completion:
        if child in group.unborn:
            group.withdraw(child)
            completion = completion_of(child, "abort")
        else:
            completion = self._finish(child, "abort")
        self.done += self._report(child, completion)
        return completion

    def _report(self, request: Request, completion: Completion) -> list[Completion]:
        """What the end of `request` is to those who added something."""
        if request.parent_id is None:
            return [completion]
        group = self._groups[request.parent_id]
        group.add(completion)
        if request.num_forks:
            self._enlist(group.take_successor())
        if not group.is_done:
            return []
        del self._groups[request.parent_id]
        return [group.completion()]

    def _finish(self, request: Request, reason: str, error: str | None = None) -> Completion:
        self._remove(request, is_spoiled=request.error is not None)
        return completion_of(request, reason, error)

    def _remove(self, request: Request, *, is_spoiled: bool = False) -> None:
        """Compute a request no more; the cache blocks of one that is spoiled may hold NaN."""
        if is_spoiled:
            self._pool.clear_blocks(self._scheduler.discard(request))
        else:
            self._scheduler.remove(request)
        self._forget(request)
        del self.requests[request.request_id]
        if not self.requests:
            blocks = self._scheduler.blocks
            blocks.check()
            assert blocks.num_free_blocks == blocks.num_blocks, "an idle engine owns blocks"
