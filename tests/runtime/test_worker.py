"""The thread that owns an engine: what its clients hear, however things go wrong."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from compress.errors import CheckFailed
from compress.runtime.engine_config import EngineConfig
from compress.runtime.llm import LLM
from compress.runtime.request import Completion, SamplingParams
from compress.runtime.text_stream import TextChunk, TextOptions
from compress.runtime.worker import Job, Overloaded, Unavailable, Worker

CONFIG = EngineConfig(block_size=16, num_blocks=65, max_num_seqs=5, token_budget=64)
LONG = SamplingParams(max_tokens=900, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)
SECONDS = 60.0  # for what takes none, on a busy machine


class Client:
    """One job, and what it heard."""

    def __init__(
        self, params: SamplingParams = SHORT, prompt_ids: tuple[int, ...] = (5, 6)
    ) -> None:
        self.starts: list[Exception | None] = []
        self.chunks: list[TextChunk] = []
        self.heard = threading.Event()
        self.over = threading.Event()
        self.job = Job(
            prompt_ids=list(prompt_ids),
            params=params,
            options=TextOptions(),
            started=self._started,
            deliver=self._deliver,
        )

    def _started(self, error: Exception | None) -> None:
        self.starts.append(error)
        if error is not None:
            self.over.set()

    def _deliver(self, chunk: TextChunk) -> None:
        self.chunks.append(chunk)
        self.heard.set()
        if chunk.completion is not None:
            self.over.set()

    def end(self) -> Completion:
        """The only end that it was told of."""
        assert self.over.wait(SECONDS)
        (end,) = [c.completion for c in self.chunks if c.completion is not None]
        assert self.chunks[-1].completion is end
        return end


@pytest.fixture(scope="module")
def llm(llama: Path) -> LLM:
    return LLM(llama, config=CONFIG)


@pytest.fixture
def start(llm: LLM) -> Iterator[Callable[..., Worker]]:
    workers = []

    def make(**options: float) -> Worker:
        workers.append(Worker(llm, **options))  # type: ignore[arg-type]
        workers[-1].start()
        return workers[-1]

    yield make
    for worker in workers:
        worker.stop()
    assert not llm.engine.has_unfinished
    assert llm.engine.blocks.num_free_blocks == llm.engine.blocks.num_blocks


def submit(worker: Worker, *clients: Client) -> None:
    for client in clients:
        worker.submit(client.job)


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def test_jobs_from_several_threads_get_what_generate_gives(
    llm: LLM, start: Callable[..., Worker]
) -> None:
    expected = [llm.generate([5 + i], SHORT)[0].text for i in range(17)]
    worker = start()
    clients = [Client(prompt_ids=(5 + i,)) for i in range(17)]
    threads = [threading.Thread(target=submit, args=(worker, client)) for client in clients]
    for thread in threads:
        thread.start()
    assert [c.end().finish_reason for c in clients] == ["length"] * 17
    assert ["".join(chunk.text for chunk in c.chunks) for c in clients] == expected
    assert [c.starts for c in clients] == [[None]] * 17
    eventually(lambda: worker.num_jobs == 0)


def test_abort_ends_one_and_leaves_the_others(start: Callable[..., Worker]) -> None:
    worker = start()
    gone, kept = Client(LONG), Client()
    submit(worker, gone)
    assert gone.heard.wait(SECONDS)
    submit(worker, kept)
    worker.abort(gone.job)
    assert gone.end().finish_reason == "abort"
    assert kept.end().finish_reason == "length"
    worker.abort(kept.job)  # too late: nothing happens


def test_refused_request_hears_why_and_others_go_on(start: Callable[..., Worker]) -> None:
    worker = start()
    wrong, right = Client(LONG, prompt_ids=(5,) * 500), Client()
    submit(worker, wrong, right)
    assert right.end().finish_reason == "length"
    (error,) = wrong.starts
    assert "1399 tokens need 88 cache blocks, the pool has 65" in str(error)
    assert not wrong.chunks
    assert worker.num_jobs == 0


def test_full_worker_refuses_and_later_takes_again(start: Callable[..., Worker]) -> None:
    worker = start(max_jobs=2)
    first, second, third = Client(LONG), Client(LONG), Client()
    submit(worker, first, second)
    with pytest.raises(Overloaded, match="2 requests are in flight"):
        worker.submit(third.job)
    worker.abort(first.job)
    first.end()
    submit(worker, third)
    assert third.end().finish_reason == "length"
    assert not third.chunks[-1].completion or third.starts == [None]
    worker.abort(second.job)
    second.end()


def test_failed_check_ends_all_in_flight_and_the_worker_goes_on(
    llm: LLM, start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start()
    clients = [Client(LONG), Client(LONG)]
    step, calls = llm.step, iter([1, 2, 3])

    def fail() -> None:
        if next(calls, None) is None:
            monkeypatch.setattr(llm, "step", step)
            raise CheckFailed("the logits are not finite")
        step()

    monkeypatch.setattr(llm, "step", fail)
    submit(worker, *clients)
    for client in clients:
        assert client.end().finish_reason == "error"
        assert client.end().error == "CheckFailed: the logits are not finite"
    again = Client()
    submit(worker, again)
    assert again.end().finish_reason == "length"
    assert worker.problem is None


def test_unforeseen_error_ends_all_and_every_later_request(
    llm: LLM, start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start()
    client = Client(LONG)
    submit(worker, client)
    assert client.heard.wait(SECONDS)

    def fail() -> None:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(llm, "step", fail)
    end = client.end()
    assert (end.finish_reason, end.error) == (
        "error",
        "the engine failed: RuntimeError: device-side assert",
    )
    assert worker.problem == "the engine failed: RuntimeError: device-side assert"
    with pytest.raises(Unavailable, match="device-side assert"):
        worker.submit(Client().job)
    assert client.job.stream is not None
    llm.abort(client.job.stream)  # the thread is gone: nobody else does


def test_stall_fails_requests_with_the_state_and_ends_when_a_step_does(
    llm: LLM, start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start(stall_seconds=0.2)
    release, step = threading.Event(), llm.step

    def hang() -> None:
        release.wait(SECONDS)
        step()

    running, waiting = Client(LONG), Client(LONG)
    monkeypatch.setattr(llm, "step", hang)
    submit(worker, running)
    eventually(lambda: running.starts == [None])
    submit(worker, waiting)  # its start waits for the step, too
    end = running.end()
    assert end.finish_reason == "error"
    assert end.error is not None
    for part in ("no step has ended for", "pool: 65 blocks of 16", "in hang"):
        assert part in end.error
    assert waiting.over.wait(SECONDS)
    assert isinstance(waiting.starts[0], Unavailable)
    assert worker.problem is not None
    assert worker.problem.startswith("no step has ended for")
    with pytest.raises(Unavailable):
        worker.submit(Client().job)
    monkeypatch.setattr(llm, "step", step)
    release.set()
    eventually(lambda: worker.problem is None)
    again = Client()
    submit(worker, again)
    assert again.end().finish_reason == "length"
    assert len([c for c in running.chunks if c.completion]) == 1


def test_stop_aborts_what_is_in_flight(start: Callable[..., Worker]) -> None:
    worker = start()
    client = Client(LONG)
    submit(worker, client)
    assert client.heard.wait(SECONDS)
    worker.stop()
    assert client.end().finish_reason == "abort"
    with pytest.raises(Unavailable, match="shutting down"):
        worker.submit(Client().job)
