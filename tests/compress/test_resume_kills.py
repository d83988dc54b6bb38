"""Runs that are killed at any moment: what a repeated command makes of what they left."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compress import quantize as module
from compress.calib.replay import BlockReplay
from compress.export.verify import verify_checkpoint
from tests.compress.test_quantize import files, job
from tests.compress.test_quantize_ends import interrupt
from tests.factory import tiny_model
from tests.forked import Forked, start

OPTIONS = ["--set", "scheme.weights.group_size=32", "--calib-samples", "6", "--calib-length", "32"]
NUM_KILLS = 20


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("llama") / "m", num_layers=3)


@pytest.fixture(scope="module")
def whole(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run = start(out.with_name("log"), command(llama, out))
    assert run.wait() == 0, run.output
    return files(out)


def command(model: Path, out: Path, *options: str) -> list[str]:
    return ["quantize", str(model), "-o", str(out), "--offline", *OPTIONS, *options]


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@dataclass(frozen=True)
class Times:
    """Seconds from the start of a run until it begins to finish, and until it has ended."""

    finishing: float
    end: float


def await_finishing(run: Forked, out: Path) -> float:
    """Seconds until the folder of the finished checkpoint appears, or the run has ended."""
    began, folder = time.monotonic(), out.with_name(f".{out.name}.partial") / "checkpoint"
    while not folder.exists() and run.exitcode is None:
        time.sleep(0.001)
    return time.monotonic() - began


def measure(model: Path, folder: Path) -> Times:
    folder.mkdir()
    began = time.monotonic()
    run = start(folder / "log", command(model, folder / "out"))
    finishing = await_finishing(run, folder / "out")
    assert run.wait() == 0, run.output
    return Times(finishing, time.monotonic() - began)


def kill(run: Forked, out: Path, generator: random.Random, times: Times, *, late: bool) -> bool:
    """Kill `run` at a random moment, `late` ones after it began to finish. Whether it was alive."""
    if late:
        await_finishing(run, out)
        time.sleep(generator.uniform(0, times.end - times.finishing))
    else:
        time.sleep(generator.uniform(0, times.end))
    run.process.kill()
    return run.wait() == -signal.SIGKILL


def survive(model: Path, folder: Path, number: int, times: Times) -> tuple[dict[str, bytes], int]:
    """Files of a run that was killed, and resumed until it was done; and how often it was killed.

    Every fourth replaces an older checkpoint. Those with odd numbers are killed late, and every
    third is killed once more when it is resumed.
    """
    generator, out = random.Random(number), folder / "out"
    folder.mkdir()
    force = ["--force"] if number % 4 == 3 else []
    if force:
        out.mkdir()
        (out / "config.json").write_text("{}")
    deaths = 0
    for attempt in range(2 if number % 3 == 0 else 1):
        again = resumption(out, bool(attempt))
        run = start(folder / "log", command(model, out, *force, *again))
        deaths += kill(run, out, generator, times, late=number % 2 == 1)
    last = start(folder / "log", command(model, out, *force, *resumption(out, True)))
    assert last.wait() == 0, f"{number}: {last.output}"
    assert leftovers(folder) == [], f"{number}: {leftovers(folder)}"
    return files(out), deaths


def resumption(out: Path, was_started: bool) -> list[str]:
    """--resume where there is something to resume: a committed state, or the finished output."""
    committed = (out.with_name(f".{out.name}.partial") / "state.json").exists()
    return ["--resume"] if was_started and (committed or (out / "compress.json").exists()) else []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_at_any_moment_ends_in_the_same_bytes(
    llama: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    times = measure(llama, tmp_path / "measured")
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(survive, llama, tmp_path / f"run{number}", number, times)
            for number in range(NUM_KILLS)
        ]
        results = [end.result() for end in ends]
    for number, (found, _) in enumerate(results):
        assert found == whole, f"run {number} differs"
    assert sum(deaths for _, deaths in results) >= NUM_KILLS // 2


def dies(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, work: Callable[..., Any], act: Callable[..., None]) -> Callable[..., Any]:
    """`work`, but its call with this number (from 1) does `act` first."""
    calls: Iterator[int] = iter(range(1, 1 << 30))

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            act()
        return work(*args, **kwargs)

    return wrapper


def dies_before_publishing() -> None:
    module.publish = dies  # type: ignore[attr-defined]


def dies_between_two_renames() -> None:
    """The old checkpoint is aside, the new one has not its name yet."""

    def publish(staging: Path, out: Path, *, force: bool) -> None:
        out.rename(out.with_name(f".{out.name}.replaced"))
        dies()

    module.publish = publish  # type: ignore[attr-defined]


def dies_before_the_old_is_deleted() -> None:
    """Both checkpoints are there, under their final names."""

    def publish(staging: Path, out: Path, *, force: bool) -> None:
        out.rename(out.with_name(f".{out.name}.replaced"))
        staging.rename(out)
        dies()

    module.publish = publish  # type: ignore[attr-defined]


def dies_after_publishing() -> None:
    module.remove_run = dies  # type: ignore[attr-defined]


def dies_while_cleaning_up() -> None:
    """Of the staging folder one part file is gone."""

    def remove_run(folder: Path) -> None:
        next(folder.glob("part-*")).unlink()
        dies()

    module.remove_run = remove_run  # type: ignore[attr-defined]


def dies_at_the_end_of_cleaning_up() -> None:
    """Of the staging folder only the lock is left."""
    shutil.rmtree = at_call(2, shutil.rmtree, dies)  # type: ignore[assignment]


TOO_LATE = (dies_after_publishing, dies_while_cleaning_up, dies_at_the_end_of_cleaning_up)


@pytest.mark.parametrize("prepare", [dies_before_publishing, *TOO_LATE])
def test_a_run_killed_around_publishing_is_complete_when_resumed(
    prepare: Callable[[], None], llama: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert start(tmp_path / "log", command(llama, out), prepare=prepare).wait() == -9
    assert leftovers(tmp_path) == [".out.partial"]
    assert out.exists() == (prepare in TOO_LATE)
    report = tmp_path / "report.json"
    again = start(tmp_path / "log", command(llama, out, "--resume", "--json", str(report)))
    assert again.wait() == 0, again.output
    assert ("complete already" in again.output) == (prepare in TOO_LATE)
    assert len(json.loads(report.read_text())["layers"]) == 21
    assert files(out) == whole
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("prepare", TOO_LATE)
def test_a_run_killed_after_publishing_is_cleaned_up_without_resume(
    prepare: Callable[[], None], llama: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert start(tmp_path / "log", command(llama, out), prepare=prepare).wait() == -9
    again = start(tmp_path / "log", command(llama, out))
    assert again.wait() == 2
    assert "exists already (--force replaces it)" in again.output
    assert files(out) == whole
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("prepare", [dies_between_two_renames, dies_before_the_old_is_deleted])
def test_a_run_killed_while_it_replaces_a_checkpoint_ends_with_one(
    prepare: Callable[[], None], llama: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    arguments = command(llama, out, "--force")
    assert start(tmp_path / "log", arguments, prepare=prepare).wait() == -9
    assert sorted(leftovers(tmp_path)) == [".out.partial", ".out.replaced"]
    again = start(tmp_path / "log", [*arguments, "--resume"])
    assert again.wait() == 0, again.output
    assert files(out) == whole
    assert leftovers(tmp_path) == []


def test_an_unfinished_run_beside_another_output_is_left_alone(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    other = command(llama, out, "--set", "scheme.weights.bits=3")
    assert start(tmp_path / "log", other).wait() == 0
    forced = command(llama, out, "--force")
    assert start(tmp_path / "log", forced, prepare=dies_before_publishing).wait() == -9
    assert start(tmp_path / "log", other).wait() == 2
    assert (tmp_path / ".out.partial" / "state.json").exists()


def terminated_in_second_block() -> None:
    act = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    BlockReplay.propagate = at_call(2, BlockReplay.propagate, act)  # type: ignore[method-assign]


def test_sigterm_keeps_the_state_and_has_its_exit_code(
    llama: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = command(llama, out, "-q")
    stopped = start(tmp_path / "log", arguments, prepare=terminated_in_second_block)
    assert stopped.wait() == 143
    assert stopped.output == (
        "compress: error: terminated; finished blocks are kept: repeat the command with --resume\n"
    )
    assert json.loads((tmp_path / ".out.partial" / "state.json").read_text())["next_block"] == 1
    assert start(tmp_path / "log", [*arguments, "--resume"]).wait() == 0
    assert files(out) == whole


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "half"])
def test_a_damaged_state_is_named_and_starting_over_works(
    content: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, state = tmp_path / "out", tmp_path / ".out.partial" / "state.json"
    interrupt(llama, out, monkeypatch)
    text = state.read_text()
    state.write_text(text[: len(text) // 2] if content == "half" else content)
    with pytest.raises(ValueError, match=r"state.json: damaged.*start over with --force"):
        module.quantize(job(llama, out, resume=True))
    assert state.exists()
    module.quantize(job(llama, out, force=True))
    assert verify_checkpoint(out, llama).ok
    assert leftovers(tmp_path) == []
