"""An engine that makes no progress must say so rather than spin."""

import logging

from compress.runtime.request import Request
from compress.runtime.scheduler import Schedule, Scheduler

_LOG = logging.getLogger(__name__)


class Watchdog:
    """Counts steps in a row that compute nothing although requests wait; `report` says what it saw.

    A step that computes a token is progress: a request loses what it has computed only a limited
    number of times (`scheduler.py`).
    """

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self.report: str | None = None
        self._num_stalled = 0

    def has_progressed(self, scheduler: Scheduler, schedule: Schedule) -> bool:
        """Whether `schedule` computes something; sets `report` if none has for too long."""
        self.report = None
        is_idle = not (scheduler.running or scheduler.waiting)
        self._num_stalled = 0 if schedule.scheduled or is_idle else self._num_stalled + 1
        if self._num_stalled >= self.max_steps:
            self.report = f"{self._num_stalled} steps computed nothing\n{describe(scheduler)}"
            self._num_stalled = 0
            _LOG.error("all requests fail: %s", self.report)
        return bool(schedule.scheduled)


def describe(scheduler: Scheduler) -> str:
    """The state of a scheduler: one line for the pool, one for each request."""
    blocks = scheduler.blocks
    num_owned = blocks.num_blocks - blocks.num_free_blocks
    lines = [
        f"pool: {blocks.num_blocks} blocks of {blocks.block_size}: {num_owned} owned,"
        f" {blocks.num_cached_blocks} cached,"
        f" {blocks.num_free_blocks - blocks.num_cached_blocks} free;"
        f" {len(scheduler.running)} of {scheduler.max_num_seqs} requests run,"
        f" token budget {scheduler.token_budget}"
    ]
    for state, requests in (("running", scheduler.running), ("waiting", scheduler.waiting)):
        lines += [_describe_request(request, state, scheduler) for request in requests]
    return "\n".join(lines)


def _describe_request(request: Request, state: str, scheduler: Scheduler) -> str:
    return (
        f"{state} {request.request_id!r}: {request.num_computed_tokens} of"
        f" {len(request.token_ids)} known tokens computed, at most {request.max_cached_tokens},"
        f" {len(request.draft_ids)} drafted,"
        f" {len(scheduler.blocks.table(request.request_id))} blocks,"
        f" preempted {request.num_preemptions} times"
    )
