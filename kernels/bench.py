"""Time every kernel on the GPU beside plain torch, or show how it compiles for one.

`python -m compress.kernels.bench` first measures what the card can do (bandwidth of a large copy,
speed of a bfloat16 product of 8192^3), then takes each `BenchCase` of the kernel files: its result
must be as close to the exact one as that of plain torch, then both are timed. A goal that is missed
is marked; a wrong result makes the exit code 1. `--offline` prints registers, shared memory and
occupancy of every tile for sm_80, sm_90 and sm_100 instead; there a fault makes the exit code 1.
Both print one table and write it as JSON. Without a GPU the exit code is 2.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch

from compress.kernels.jit import TRITON_INSTALLED, BenchCase, triton
from compress.kernels.measure import GIB, Machine, Row, bench, measure_ceilings
from compress.kernels.occupancy import MAX_WARPS
from compress.kernels.offline import (
    ARCHES,
    KERNEL_MODULES,
    CompileResult,
    compile_all,
    module_cases,
)
from compress.kernels.timing import CudaTimer

_CEILING_NAMES = {"memory": "copy", "matrix": "matrix", "matrix8": "2x matrix"}


def declared_cases() -> list[tuple[str, BenchCase]]:
    """(kernel file, case) of every kernel file that declares cases."""
    modules = {name: import_module(f"compress.kernels.{name}") for name in KERNEL_MODULES}
    return [
        (name, case)
        for name, module in modules.items()
        if hasattr(module, "bench_cases")
        for case in module.bench_cases()
    ]


def gpu() -> Machine:
    """The current GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return Machine(
        device=device,
        dtype=torch.bfloat16,
        timer=CudaTimer(),
        cache_bytes=torch.cuda.get_device_properties(device).L2_cache_size,
        memory_bytes=min(8 * GIB, free_bytes // 4),
    )


def describe(machine: Machine) -> dict[str, Any]:
    """Versions, and what the card says of itself; without `nvidia-smi`, less of it."""
    described: dict[str, Any] = {
        "name": machine.device.type,
        "torch": torch.__version__,
        "triton": triton.__version__ if TRITON_INSTALLED else None,
        "dtype": str(machine.dtype).removeprefix("torch."),
    }
    if machine.device.type != "cuda":
        return described
    properties = torch.cuda.get_device_properties(machine.device)
    described |= {
        "name": properties.name,
        "capability": f"sm_{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "cuda": torch.version.cuda,
    }
    program = shutil.which("nvidia-smi")
    asked = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")
    if program:
        card = "GPU-" + str(properties.uuid).removeprefix("GPU-")
        command = [program, f"--id={card}", f"--query-gpu={','.join(asked)}"]
        command.append("--format=csv,noheader")
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            values = (value.strip() for value in answer.stdout.split(","))
            described |= dict(zip(asked, values, strict=False))
    return described


_HEADER = (
    f"{'operation':52} {'us':>9} {'MB':>8} {'GFLOP':>8} {'copy':>6} {'matrix':>6}"
    f" {'goal':>14} {'torch us':>9} {'faster':>7}  result"
)


def line(row: Row) -> str:
    """`row` as it is printed."""
    goal = "" if row.goal is None else f"{row.goal:.0%} {_CEILING_NAMES[row.ceiling]}"
    times = f"{'':9} {row.num_bytes / 1e6:8.1f} {row.num_flops / 1e9:8.1f} {'':13}"
    beside = f"{'':17}"
    if row.timing:
        times = (
            f"{row.timing.seconds * 1e6:9.1f} {row.num_bytes / 1e6:8.1f} {row.num_flops / 1e9:8.1f}"
            f" {row.timing.of_copy:6.1%} {row.timing.of_matrix:6.1%}"
        )
        faster = row.timing.plain_seconds / row.timing.seconds
        beside = f"{row.timing.plain_seconds * 1e6:9.1f} {faster:6.2f}x"
    status: str = row.status
    if row.timing and row.status == "below goal":
        status += f" ({row.timing.of_goal:.0%})"
    note = f": {row.note.splitlines()[0]}" if row.note else ""
    return f"{row.module + ' ' + row.label:52} {times} {goal:>14} {beside}  {status}{note}"


def run_bench(
    cases: Sequence[tuple[str, BenchCase]], machine: Machine, file: Path
) -> Literal[0, 1]:
    """Print the table of `cases` line by line and write `file`; 1 if a result was wrong."""
    began = time.perf_counter()
    described = describe(machine)
    print(", ".join(f"{key} {value}" for key, value in described.items()))
    ceilings = measure_ceilings(machine)
    print(
        f"measured: copy {ceilings.bytes_per_second / 1e12:.2f} TB/s, {described['dtype']} product"
        f" of {machine.matrix_size}^3 {ceilings.flops_per_second / 1e12:.1f} TFLOP/s\n{_HEADER}",
        flush=True,
    )
    rows = []
    for row in bench(cases, machine, ceilings):
        print(line(row), flush=True)
        rows.append(row)
    seconds = time.perf_counter() - began
    found = {
        "device": described,
        "ceilings": asdict(ceilings),
        "seconds": seconds,
        "rows": [asdict(row) for row in rows],
    }
    file.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    statuses = [row.status for row in rows]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in dict.fromkeys(statuses))
    print(f"{counts}; {seconds:.0f} s; written to {file}")
    return 1 if {"wrong", "failed"} & set(statuses) else 0


def run_offline(
    arches: tuple[int, ...], wanted: Callable[[str, str], bool], file: Path
) -> Literal[0, 1]:
    """Print the table of compiled variants line by line and write `file`; 1 if one has a fault."""
    print(
        f"{'variant':60} {'chip':>7} {'regs':>5} {'spill':>6} {'shared':>9} {'blocks':>6}"
        f" {'warps':>6} {'occupancy':>9} {'mma':>5} {'load16':>6}  limited by; faults"
    )
    rows = []
    for result in compile_all(arches, os.cpu_count() or 1, wanted):
        print(offline_line(result), flush=True)
        held = asdict(result.occupancy) | {"fraction": result.occupancy.fraction}
        rows.append(asdict(result) | {"occupancy": held, "faults": result.faults})
    file.write_text(json.dumps(rows, indent=1) + "\n")
    num_faulty = sum(bool(row["faults"]) for row in rows)
    print(f"{len(rows)} variants, {num_faulty} with faults; written to {file}")
    return 1 if num_faulty else 0


def offline_line(result: CompileResult) -> str:
    """`result` as it is printed."""
    held = result.occupancy
    shared = f"{result.static_shared}+{result.dynamic_shared}"
    remarks = "; ".join([", ".join(held.limits), *result.faults])
    return (
        f"{result.module + ' ' + result.label:60} {f'sm_{result.arch}':>7} {result.registers:5}"
        f" {result.spilled:6} {shared:>9} {held.blocks:6} {f'{held.warps}/{MAX_WARPS}':>6}"
        f" {held.fraction:9.0%} {result.counts['mma']:5} {result.counts['load16']:6}  {remarks}"
    )


def main(
    argv: Sequence[str] | None = None,
    *,
    machine: Machine | None = None,
    cases: Sequence[tuple[str, BenchCase]] | None = None,
) -> int:
    """Command line; the exit code. `machine` and `cases` stand in for a GPU's in tests."""
    parser = argparse.ArgumentParser(prog="python -m compress.kernels.bench")
    parser.add_argument(
        "--offline", action="store_true", help="compile every tile; needs no GPU and times nothing"
    )
    parser.add_argument(
        "--arch", type=int, choices=ARCHES, action="append", help="with --offline: this chip only"
    )
    parser.add_argument(
        "--only", metavar="PATTERN", default="*", help="lines that contain it; may have wildcards"
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="default kernels-bench.json, kernels-offline.json"
    )
    arguments = parser.parse_args(argv)
    file = arguments.json or Path(f"kernels-{'offline' if arguments.offline else 'bench'}.json")
    if not file.parent.is_dir():
        parser.error(f"--json: {str(file.parent)!r} is no folder")
    if arguments.arch and not arguments.offline:
        parser.error("--arch belongs to --offline: a kernel is timed on the chip that is there")

    def wanted(module: str, label: str) -> bool:
        return fnmatch(f"{module} {label}", f"*{arguments.only}*")

    problem = _problem(offline=arguments.offline) if machine is None else None
    if problem:
        print(problem, file=sys.stderr)
        return 2
    if arguments.offline:
        variants = [(name, case.label) for name in KERNEL_MODULES for case in module_cases(name)]
        if not any(wanted(*variant) for variant in variants):
            parser.error(f"--only: nothing matches {arguments.only!r}")
        return run_offline(tuple(arguments.arch or ARCHES), wanted, file)
    chosen = [
        (module, case) for module, case in cases or declared_cases() if wanted(module, case.label)
    ]
    if not chosen:
        parser.error(f"--only: nothing matches {arguments.only!r}")
    return run_bench(chosen, machine or gpu(), file)


def _problem(*, offline: bool) -> str | None:
    """Why kernels cannot be compiled, or not be timed unless `offline`, in one line."""
    if not TRITON_INSTALLED:
        return "triton is not installed: kernels can be neither compiled nor timed"
    if not offline and not torch.cuda.is_available():
        return "no GPU is visible to torch: only --offline, which compiles for one, works here"
    if triton.knobs.runtime.interpret:
        return "TRITON_INTERPRET is set: interpreted kernels are neither compiled nor timed"
    return None


if __name__ == "__main__":
    sys.exit(main())
