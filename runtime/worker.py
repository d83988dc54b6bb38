"""The thread that owns an engine, for servers: requests come in from other threads, text goes out.

Only this thread touches the engine. Others leave commands in a queue; the thread carries them out
between steps, sleeps while there is nothing to do, and hands text to the callback of each request.

How it fails. A request that the engine refuses fails alone. A check that fails in a step (logits
that are not finite) or a lack of memory ends all requests in flight, with the message, and the
thread goes on. Any other exception is a bug or a broken device: all requests end, the worker is
dead, and says so to everyone who asks. A second thread watches: if no step ends for
`stall_seconds` although there is work, all requests end with the state of the scheduler and the
stack of the thread, and the worker is stalled until a step ends after all.
"""

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from compress.errors import CheckFailed, is_out_of_memory
from compress.runtime.llm import LLM
from compress.runtime.request import Completion, SamplingParams
from compress.runtime.text_stream import TextChunk, TextOptions, TextStream
from compress.runtime.watchdog import describe

_LOG = logging.getLogger(__name__)
_STOP_SECONDS = 10.0  # to wait for the step in progress


class Overloaded(Exception):
    """Too many requests are in flight already; later there may be room."""


class Unavailable(Exception):
    """The worker cannot serve: it is dead, stalled, or stopping. The message says why."""


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """One request on its way through a worker.

    `started` is called once with None when the engine has taken the request, or with the ValueError
    by which it refused. Then `deliver` gets the pieces of its text, the last one with a completion.
    Both are called from threads of the worker, and must not block.
    """

    prompt_ids: list[int]
    params: SamplingParams
    options: TextOptions
    started: Callable[[Exception | None], None]
    deliver: Callable[[TextChunk], None]
    submit_time: float = field(default_factory=time.perf_counter)
    stream: TextStream | None = None
    has_started: bool = False
    is_done: bool = False


class Worker:
    """Runs an LLM in a thread of its own. `on_finish` hears of every request's end.

    At most `max_jobs` requests are taken at a time.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_jobs: int = 256,
        stall_seconds: float = 300.0,
        on_finish: Callable[[Completion], None] = lambda completion: None,
    ) -> None:
        if max_jobs < 1 or stall_seconds <= 0:
            raise ValueError(
                f"need max_jobs >= 1 and stall_seconds > 0, got {max_jobs} and {stall_seconds}"
            )
        self.llm = llm
        self.max_jobs = max_jobs
        self.stall_seconds = stall_seconds
        self._on_finish = on_finish
        self._commands: deque[Callable[[], None]] = deque()
        self._jobs: dict[Job, None] = {}  # taken and not done, in order of arrival
        self._changed = threading.Condition()  # guards all that is below and the two above
        self._failure: str | None = None  # why it is dead
        self._stall: str | None = None  # why it is stalled
        self._is_stopping = False
        self._last_progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="engine-watch", daemon=True)

    def start(self) -> None:
        """Start both threads."""
        self._thread.start()
        self._watcher.start()

    def stop(self) -> None:
        """End all requests ("abort") and the threads, after the step in progress."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._thread.join(_STOP_SECONDS)
        self._watcher.join(_STOP_SECONDS)

    @property
    def problem(self) -> str | None:
        """Why no request can be served now, in one line; None if all is well."""
        with self._changed:
            return self._problem()

    @property
    def num_jobs(self) -> int:
        """Requests that were taken and have not ended."""
        with self._changed:
            return len(self._jobs)

    def submit(self, job: Job) -> None:
        """Take a request. Raises Overloaded or Unavailable, and then never calls its callbacks."""
        with self._changed:
            if problem := self._problem():
                raise Unavailable(problem)
            if len(self._jobs) >= self.max_jobs:
                raise Overloaded(f"{len(self._jobs)} requests are in flight, the limit")
            if not self._jobs:
                self._last_progress = time.monotonic()
            self._jobs[job] = None
            self._command(partial(self._start_job, job))

    def abort(self, job: Job) -> None:
        """Stop a request, if it has not ended; its blocks are free after the step in progress."""
        with self._changed:
            if not job.is_done:
                self._command(partial(self._abort_job, job))

    def _problem(self) -> str | None:
        if self._is_stopping:
            return "the server is shutting down"
        reason = self._failure or self._stall
        return reason.splitlines()[0] if reason else None

    def _command(self, action: Callable[[], None]) -> None:
        self._commands.append(action)
        self._changed.notify_all()

    # In the engine's thread.

    def _run(self) -> None:
        try:
            while self._wait():
                self._obey()
                if self.llm.engine.has_unfinished:
                    self._step()
                with self._changed:
                    self._last_progress, self._stall = time.monotonic(), None
        except Exception as error:
            reason = f"the engine failed: {type(error).__name__}: {error}"
            _LOG.exception("%s", reason)
            with self._changed:
                self._failure = reason
            self._end_all("error", reason)
        else:
            self._drop(self._end_all("abort", "the server is shutting down"))

    def _wait(self) -> bool:
        """Sleep until there is something to do; False if that is to stop."""
        with self._changed:
            while not (self._is_stopping or self._commands or self.llm.engine.has_unfinished):
                self._changed.wait()
            return not self._is_stopping

    def _obey(self) -> None:
        while True:
            with self._changed:
                if not self._commands:
                    return
                action = self._commands.popleft()
            action()

    def _step(self) -> None:
        try:
            self.llm.step()
        except Exception as error:
            if not (isinstance(error, CheckFailed) or is_out_of_memory(error)):
                raise
            _LOG.exception("a step failed, and with it all requests")
            self._drop(self._end_all("error", f"{type(error).__name__}: {error}"))

    def _start_job(self, job: Job) -> None:
        if job.is_done:
            return
        request = self.llm.request(job.prompt_ids, job.params)
        request.arrival_time = job.submit_time
        try:
            job.stream = self.llm.submit(request, job.options, partial(self._deliver, job))
        except ValueError as error:
            self._close(job)
            job.started(error)
        else:
            with self._changed:
                job.has_started = True
            job.started(None)

    def _abort_job(self, job: Job) -> None:
        if job.stream is not None:
            self.llm.abort(job.stream)
        elif self._close(job):
            job.started(Unavailable("the request was aborted"))

    def _drop(self, jobs: Sequence[Job]) -> None:
        """Have the engine forget jobs that were ended without it."""
        for job in jobs:
            if job.stream is not None:
                self.llm.abort(job.stream)

    def _deliver(self, job: Job, chunk: TextChunk) -> None:
        if chunk.completion is None:
            if not job.is_done:
                job.deliver(chunk)
        elif self._close(job):
            self._on_finish(chunk.completion)
            job.deliver(chunk)

    # In any thread.

    def _close(self, job: Job) -> bool:
        """Mark a job as done; whether it was not."""
        with self._changed:
            self._jobs.pop(job, None)
            was_open, job.is_done = not job.is_done, True
        return was_open

    def _end_all(self, finish_reason: str, reason: str) -> list[Job]:
        """End every job without the engine's help; the jobs."""
        with self._changed:
            jobs = list(self._jobs)
        for job in jobs:
            if not self._close(job):
                continue
            if not job.has_started:
                job.started(Unavailable(reason.splitlines()[0]))
                continue
            completion = _given_up(job, finish_reason, reason)
            self._on_finish(completion)
            job.deliver(TextChunk(text="", token_ids=[], completion=completion))
        return jobs

    # In the watcher's thread.

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(min(self.stall_seconds / 4, 1.0))
                if self._is_stopping or self._failure:
                    return
                quiet = time.monotonic() - self._last_progress
                is_stalled = bool(self._jobs) and quiet > self.stall_seconds
                if is_stalled:
                    self._stall = f"no step has ended for {quiet:.1f} s"
            if is_stalled:
                report = f"{self._stall}\n{self._state()}"
                _LOG.error("all requests fail: %s", report)
                jobs = self._end_all("error", report)
                with self._changed:
                    self._command(partial(self._drop, jobs))  # when the step ends

    def _state(self) -> str:
        """The scheduler and the stack of the engine's thread, read while it may be running."""
        try:
            state = describe(self.llm.engine.scheduler)
        except Exception as error:  # a table that changed under the reader
            state = f"the scheduler cannot be read ({error})"
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else "no stack: the thread is gone"
        return f"{state}\n{stack}"


def _given_up(job: Job, finish_reason: str, reason: str) -> Completion:
    """The end of a job whose engine does not answer."""
    return Completion(
        request_id=job.stream.request.request_id if job.stream else "",
        prompt_tokens=len(job.prompt_ids),
        token_ids=[],
        finish_reason=finish_reason,
        arrival_time=job.submit_time,
        token_times=[],
        error=reason,
    )
