"""Compile every kernel variant for NVIDIA chips on a machine that has none, and read what came out.

`python -m compress.kernels.offline` prints, per kernel variant and chip: registers per thread,
spilled bytes, shared memory, and how often the instructions that the variant is meant for occur
in its PTX. `--json` prints the same as JSON, `--arch 90` compiles for one chip only.

Registers and spills are those of `ptxas -v` from the Triton package. A spill, or more shared memory
than the chip has, means that a tile is too large; a missing instruction means that a layout or a
divisibility got lost. `faults` lists these.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

from compress.kernels.jit import CompileCase, triton

KERNEL_MODULES = (
    "rms_norm",
    "rotary",
    "silu_mul",
    "kv_write",
    "paged_attention",
    "wna16",
    "quantize_tokens",
    "w8a8",
    "quantize_float8",
    "w8a8_float8",
)

# Compute capability -> largest dynamic shared memory of one block in bytes (CUDA C programming
# guide, "Technical Specifications per Compute Capability").
SHARED_LIMIT: dict[int, int] = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}

_PTX_INSTRUCTIONS: dict[str, str] = {
    "mma": r"\bmma\.sync|\bwgmma\.mma_async|\btcgen05\.mma",
    "wgmma": r"\bwgmma\.mma_async",
    "load16": r"\bld\.global\S*\.v4\.b32|\bld\.global\S*\.v2\.b64|\bcp\.async\.cg\.\S+ [^;]*, 0x10",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileResult:
    """What one variant became on one chip.

    `spilled` and `shared` are bytes; `counts` is how often each kind of instruction occurs.
    """

    module: str
    label: str
    arch: int
    registers: int
    spilled: int
    shared: int
    counts: dict[str, int]
    meant: list[str]

    @property
    def faults(self) -> list[str]:
        """What is wrong with the variant, in words; empty when it is as meant."""
        found = []
        if self.spilled:
            found.append(f"spills {self.spilled} bytes of registers")
        if self.shared > SHARED_LIMIT[self.arch]:
            found.append(f"{self.shared} bytes of shared memory, limit {SHARED_LIMIT[self.arch]}")
        meant = [name for name in self.meant if name != "wgmma" or self.arch == 90]
        return found + [f"no {name} instruction" for name in meant if not self.counts[name]]


def module_cases(module: str) -> list[CompileCase]:
    """The variants that one kernel file declares."""
    cases: list[CompileCase] = import_module(f"compress.kernels.{module}").compile_cases()
    return cases


def compile_case(module: str, index: int, arch: int) -> CompileResult:
    """Compile variant `index` of `module` for compute capability `arch`, such as 90."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    case = module_cases(module)[index]
    names = case.kernel.arg_names
    pointers = [name for name in names if case.types.get(name, "").startswith("*")]
    source = ASTSource(
        fn=case.kernel,
        signature={
            name: "constexpr" if name in case.constexprs else case.types.get(name, "i32")
            for name in names
        },
        constexprs=dict(case.constexprs),
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name in (*pointers, *case.divisible)
            if name in names
        },
    )
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = compiled.asm["ptx"]
    registers, spilled = _ptxas(ptx, arch)
    return CompileResult(
        module=module,
        label=case.label,
        arch=arch,
        registers=registers,
        spilled=spilled,
        shared=compiled.metadata.shared,
        counts={name: len(re.findall(regex, ptx)) for name, regex in _PTX_INSTRUCTIONS.items()},
        meant=list(case.meant),
    )


def _ptxas(ptx: str, arch: int) -> tuple[int, int]:
    """Registers per thread and spilled bytes that the bundled ptxas reports for `ptx`."""
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    program = folder / ("ptxas-blackwell" if arch >= 100 else "ptxas")
    suffix = "a" if arch >= 90 else ""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "kernel.ptx"
        file.write_text(ptx)
        command = [
            str(program),
            "-v",
            f"--gpu-name=sm_{arch}{suffix}",
            str(file),
            "-o",
            "/dev/null",
        ]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.findall(r"Used (\d+) registers", report)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert registers and spills, f"unexpected report of {program.name}: {report}"
    return max(map(int, registers)), sum(int(store) + int(load) for store, load in spills)


def compile_all(arches: tuple[int, ...], num_processes: int = 2) -> Iterator[CompileResult]:
    """Compile every variant for those of `arches` it is for, in the order of the kernel files."""
    work = [
        (module, index, arch)
        for module in KERNEL_MODULES
        for index, case in enumerate(module_cases(module))
        for arch in arches
        if arch in case.arches
    ]
    with ProcessPoolExecutor(num_processes) as pool:
        yield from pool.map(compile_case, *zip(*work, strict=True))


def main() -> None:
    """Command line; exit code 1 if any variant has a fault."""
    parser = argparse.ArgumentParser(prog="python -m compress.kernels.offline")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--arch", type=int, choices=sorted(SHARED_LIMIT), action="append")
    arguments = parser.parse_args()
    results = compile_all(tuple(arguments.arch or sorted(SHARED_LIMIT)))
    if arguments.json:
        rows = [asdict(result) | {"faults": result.faults} for result in results]
        print(json.dumps(rows))
        sys.exit(any(row["faults"] for row in rows))
    print(f"{'variant':52} {'sm':>4} {'regs':>5} {'spill':>6} {'shared':>7}  instructions")
    num_faulty = 0
    for result in results:
        counts = " ".join(f"{name}={count}" for name, count in result.counts.items())
        print(
            f"{result.module + ' ' + result.label:52} {result.arch:4} {result.registers:5} "
            f"{result.spilled:6} {result.shared:7}  {counts}  {'; '.join(result.faults)}",
            flush=True,
        )
        num_faulty += bool(result.faults)
    sys.exit(num_faulty > 0)


if __name__ == "__main__":
    main()
