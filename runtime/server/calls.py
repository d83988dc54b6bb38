"""The generations of one HTTP request, seen from its event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from compress.runtime.request import Completion, SamplingParams
from compress.runtime.server.protocol import ApiError
from compress.runtime.text_stream import TextChunk, TextOptions
from compress.runtime.worker import Job, Overloaded, Unavailable, Worker


class Calls:
    """Submits `(prompt_ids, params)` pairs to a worker, and brings their text together.

    ApiError if the worker takes no more (429) or cannot serve (503); then nothing is left of them.
    """

    def __init__(
        self,
        worker: Worker,
        requests: Sequence[tuple[list[int], SamplingParams]],
        options: TextOptions,
    ) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[tuple[int, TextChunk]] = asyncio.Queue()
        self._started: list[asyncio.Future[None]] = []
        self._jobs: list[Job] = []
        try:
            for index, (prompt_ids, params) in enumerate(requests):
                self._submit(index, prompt_ids, params, options)
        except (Overloaded, Unavailable) as error:
            self.abort()
            raise _api_error(error) from error

    async def accepted(self) -> None:
        """Wait until the engine has taken all; ApiError, and nothing left of them, if it did not.

        A request that can never fit is refused here (400), with the numbers.
        """
        results = await asyncio.gather(*self._started, return_exceptions=True)
        errors = [result for result in results if isinstance(result, Exception)]
        if errors:
            self.abort()
            raise _api_error(errors[0]) from errors[0]

    async def pieces(self) -> AsyncIterator[tuple[int, TextChunk]]:
        """(index of the request, piece of its text) until all have ended.

        ApiError if one was given up.
        """
        num_open = len(self._jobs)
        while num_open:
            index, chunk = await self._pieces.get()
            if chunk.completion is not None:
                num_open -= 1
                if problem := _given_up(chunk.completion):
                    self.abort()
                    raise problem
            yield index, chunk

    async def collect(self) -> tuple[list[str], list[Completion]]:
        """The whole texts and the ends of all, in the order of the requests."""
        texts = [""] * len(self._jobs)
        ends: dict[int, Completion] = {}
        async for index, chunk in self.pieces():
            texts[index] += chunk.text
            if chunk.completion is not None:
                ends[index] = chunk.completion
        return texts, [ends[index] for index in range(len(texts))]

    def abort(self) -> None:
        """Stop what has not ended."""
        for job in self._jobs:
            self._worker.abort(job)

    def _submit(
        self, index: int, prompt_ids: list[int], params: SamplingParams, options: TextOptions
    ) -> None:
        started: asyncio.Future[None] = self._loop.create_future()
        job = Job(
            prompt_ids=prompt_ids,
            params=params,
            options=options,
            started=partial(self._post, partial(_resolve, started)),
            deliver=lambda chunk: self._post(self._pieces.put_nowait, (index, chunk)),
        )
        self._worker.submit(job)
        self._jobs.append(job)
        self._started.append(started)

    def _post(self, action: Callable[[Any], None], value: Any) -> None:
        """Do something in the event loop, from another thread."""
        try:
            self._loop.call_soon_threadsafe(action, value)
        except RuntimeError:  # the loop is closed: nobody listens any more
            assert self._loop.is_closed(), "only a closed loop takes no calls"


def _resolve(started: "asyncio.Future[None]", error: Exception | None) -> None:
    if started.done():  # its waiter was cancelled
        return
    if error is None:
        started.set_result(None)
    else:
        started.set_exception(error)
        started.exception()  # retrieved: not to be reported if nobody waits for it


def _api_error(error: Exception) -> ApiError:
    if isinstance(error, Overloaded):
        return ApiError(429, str(error), kind="rate_limit_error", code="too_many_requests")
    if isinstance(error, Unavailable):
        return ApiError(503, str(error), kind="server_error", code="unavailable")
    return ApiError(400, str(error), code="request_refused")


def _given_up(completion: Completion) -> ApiError | None:
    """Why a generation has no end of its own, if so. The log has the state that goes with it."""
    reason = (completion.error or "the generation was stopped").splitlines()[0]
    if completion.finish_reason == "error":
        return ApiError(500, reason, kind="server_error", code="engine_error")
    if completion.finish_reason == "abort":
        return ApiError(503, reason, kind="server_error", code="unavailable")
    return None
