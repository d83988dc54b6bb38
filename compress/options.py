"""Arguments that several commands share, and the report that they write as JSON."""

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

settings = {"verbose": False}
_PREFIXES = (("", 0), ("K", 1), ("M", 2), ("G", 3), ("T", 4))


def _set_verbose(value: bool) -> None:
    settings["verbose"] = settings["verbose"] or value


def _check_json(file: Path | None) -> Path | None:
    """Refuse a report file that could not be written, before the work that it reports."""
    if file is None or to_stdout(file):
        return file
    if not file.resolve().parent.is_dir():
        raise typer.BadParameter(f"no folder {file.resolve().parent}")
    if file.is_dir() or not os.access(file if file.exists() else file.resolve().parent, os.W_OK):
        raise typer.BadParameter(f"cannot write {file}")
    return file


def parse_bytes(text: str) -> int:
    """`500MB`, `2 GB`, `1GiB` or a plain number in bytes. BadParameter for anything else."""
    units = {"": 1, **{f"{name}B": 1000**power for name, power in _PREFIXES}}
    units |= {f"{name}IB": 1024**power for name, power in _PREFIXES[1:]}
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?I?B|)", text.strip().upper())
    if match is None or match[2] not in units:
        raise typer.BadParameter(f"{text!r}: expected a size such as 500MB or 2GB")
    return int(float(match[1]) * units[match[2]])


Model = Annotated[str, typer.Argument(help="Folder, .gguf file, hub id, or `demo`.")]
Checkpoint = Annotated[Path, typer.Argument(help="Checkpoint folder.")]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", help="Write the report to this file (- for stdout).", callback=_check_json
    ),
]
Target = Annotated[
    str | None,
    typer.Option(help="Refuse what vllm, sglang or transformers would not load or misread."),
]
ActivationBudget = Annotated[
    int | None,
    typer.Option(
        parser=parse_bytes,
        metavar="SIZE",
        help="Memory for activations, such as 500MB; past it they stay on disk.",
        show_default="a quarter of the free memory",
    ),
]
Offline = Annotated[bool, typer.Option("--offline", help="Never use the network.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress, no tables.")]
Verbose = Annotated[
    bool,
    typer.Option("-v", "--verbose", help="Tracebacks on errors.", callback=_set_verbose),
]


def write_json(file: Path | None, values: dict[str, Any]) -> None:
    """Write the report of a command where `--json` asks for it, if it does."""
    text = json.dumps(values, indent=2, allow_nan=False)
    if to_stdout(file):
        print(text)
    elif file is not None:
        from compress.export.writer import open_atomic

        is_device = file.exists() and not file.is_file()  # /dev/null, a pipe: not to be replaced
        with file.open("wb") if is_device else open_atomic(file.resolve()) as stream:
            stream.write((text + "\n").encode())


def to_stdout(file: Path | None) -> bool:
    """Whether `--json -` asks for the report on stdout, and nothing else there."""
    return file is not None and str(file) == "-"
