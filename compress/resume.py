"""The state of an unfinished quantization on disk, so that a killed run can go on where it was.

The staging folder of a run holds, besides the part files of finished blocks:

  lock                held (flock) by the process that works on the folder
  state.json          fingerprint of everything the result depends on, rows of the report so far
  activations-N.bin   input of block N, the next one to do
  float-N.bin         the same in the float model, if the method aims at it

`state.json` is replaced atomically after a block's part file and its outputs are complete; it is
the commit point. Whatever a killed run left beyond it is written again, to the same bytes.

A run that is killed after its output has its name leaves a folder that nobody needs; `sweep` knows
it by the fingerprint, which is in the output too. `state.json` is deleted last but for the lock.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from compress.artifacts import LayerReport
from compress.calib.scene import SiteReport
from compress.errors import CheckFailed
from compress.export.writer import PROVENANCE_FILE, replaced_dir
from compress.models.checkpoint import read_json


@dataclass(slots=True)
class BlockResult:
    """What was done to one block: its report, and the tensors that are not as in the source.

    `largest_output` is the largest magnitude that the block computes: what its Linears read and its
    outputs.
    """

    rows: list[LayerReport] = field(default_factory=list)
    sites: list[SiteReport] = field(default_factory=list)
    transformed: list[str] = field(default_factory=list)
    largest_output: float = 0.0


@dataclass(slots=True)
class RunState:
    """Progress of one run in `folder`; `next_block` is None before the first block's input."""

    folder: Path
    fingerprint: str
    next_block: int | None = None
    seconds: float = 0.0
    rows: list[LayerReport] = field(default_factory=list)
    sites: list[SiteReport] = field(default_factory=list)
    transformed: list[str] = field(default_factory=list)
    largest_outputs: list[float] = field(default_factory=list)

    def part_file(self, block: int) -> Path:
        """Where the packed tensors of a block go."""
        return self.folder / f"part-{block:05d}.safetensors"

    def activations_file(self, block: int, chain: str = "quantized") -> Path:
        """Where the input of a block lies, in the quantized or the float model."""
        name = "activations" if chain == "quantized" else chain
        return self.folder / f"{name}-{block:05d}.bin"

    def commit(self, next_block: int, result: BlockResult, seconds: float) -> None:
        """Everything before `next_block` is done; its input no longer needs the one before."""
        self.next_block, self.seconds = next_block, seconds
        self.rows += result.rows
        self.sites += result.sites
        self.transformed += result.transformed
        self.largest_outputs.append(result.largest_output)
        values = {
            "fingerprint": self.fingerprint,
            "next_block": next_block,
            "seconds": seconds,
            "rows": [asdict(row) for row in self.rows],
            "sites": [asdict(site) for site in self.sites],
            "transformed": self.transformed,
            "largest_outputs": self.largest_outputs,
        }
        temporary = self.folder / "state.json.tmp"
        temporary.write_text(json.dumps(values), encoding="utf-8")
        os.replace(temporary, self.folder / "state.json")
        for chain in ("quantized", "float"):
            self.activations_file(next_block - 1, chain).unlink(missing_ok=True)


def fingerprint_of(values: dict[str, Any]) -> str:
    """SHA-256 of `values` as canonical JSON."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


@contextmanager
def open_run(folder: Path, fingerprint: str, *, resume: bool, force: bool) -> Iterator[RunState]:
    """Claim the staging `folder`, new or left by a run with the same `fingerprint`.

    A run that fails before its first commit leaves nothing; later, what was done stays for
    `resume`. Raises ValueError if another process holds the folder, if it holds an unfinished run
    and neither `resume` nor `force` is given, or if that run was of other inputs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        _claim(lock, folder)
        state = _read_state(folder, fingerprint, resume=resume, force=force)
        try:
            yield state
        except BaseException as error:
            if state.next_block is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                again = "repeat the command with --resume"
                if isinstance(error, ValueError | CheckFailed):  # that would only fail again
                    again = f"start over with --force, or remove {folder}"
                error.add_note(f"finished blocks are kept: {again}")
            raise


def _claim(lock: TextIO, folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{folder}: another process is writing this output") from None


def _read_state(folder: Path, fingerprint: str, *, resume: bool, force: bool) -> RunState:
    fresh = RunState(folder=folder, fingerprint=fingerprint)
    if not (folder / "state.json").is_file() or (force and not resume):
        _clear(folder)
        return fresh
    if not resume:
        raise ValueError(f"{folder}: holds an unfinished run; add --resume or --force (start over)")
    state = _parse_state(folder)
    if state.fingerprint != fingerprint:
        raise ValueError(
            f"{folder}: the unfinished run had another model, recipe, calibration set, version,"
            " device or number of processes or threads; repeat its command, or start over with"
            " --force and without --resume"
        )
    return state


def _parse_state(folder: Path) -> RunState:
    """What `commit` wrote. ValueError if it is damaged."""
    file = folder / "state.json"
    try:
        values = read_json(file)
        return RunState(
            folder=folder,
            fingerprint=values["fingerprint"],
            next_block=int(values["next_block"]),
            seconds=float(values["seconds"]),
            rows=[LayerReport(**row) for row in values["rows"]],
            sites=[SiteReport(**site) for site in values["sites"]],
            transformed=[str(name) for name in values["transformed"]],
            largest_outputs=[float(value) for value in values["largest_outputs"]],
        )
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            f"{file}: damaged, the run cannot go on; start over with --force and without --resume"
        ) from None


def _clear(folder: Path) -> None:
    """Delete everything but the lock, `state.json` last: a folder that has it is whole."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name == "state.json"):
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != "lock":
            entry.unlink()


def remove_run(folder: Path) -> None:
    """Delete the staging `folder` of a run whose output is complete."""
    _clear(folder)
    shutil.rmtree(folder)


def sweep(folder: Path, out: Path) -> None:
    """Delete what a run that was killed after `out` had its name left beside it.

    That is its staging `folder` and the checkpoint that it replaced. Nothing is touched while a
    process works on the folder, or if it holds another unfinished run.
    """
    provenance = out / PROVENANCE_FILE
    if not folder.is_dir() or not provenance.is_file():
        return
    with (folder / "lock").open("a") as lock:
        try:
            _claim(lock, folder)
            if (folder / "state.json").is_file():
                made_by = read_json(provenance).get("run_fingerprint")
                if _parse_state(folder).fingerprint != made_by:
                    return
        except ValueError:  # held, or damaged: for those who open the run to say
            return
        shutil.rmtree(replaced_dir(out), ignore_errors=True)
        remove_run(folder)
