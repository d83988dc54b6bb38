"""Compile every kernel variant for NVIDIA chips on a machine that has none, and read what came out.

`python -m compress.kernels.bench --offline` prints the results as a table. Registers, spills and
static shared memory are those of `ptxas -v` from the Triton package, occupancy follows from them. A
spill, or more shared memory than the chip has, means that a tile is too large; a missing
instruction means that a layout or a divisibility got lost. `faults` lists these.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from compress.kernels.jit import CompileCase, triton
from compress.kernels.occupancy import SHARED_LIMIT, Occupancy, occupancy

KERNEL_MODULES = (
    "rms_norm",
    "rotary",
    "gated_mul",
    "embedding",
    "block_copy",
    "kv_write",
    "paged_attention",
    "wna16",
    "quantize_tokens",
    "w8a8",
    "logits_processors",
    "sampling",
    "rejection",
    "quantize_float8",
    "w8a8_float8",
    "moe_routing",
    "moe_combine",
    "grouped_matmul",
)

ARCHES = tuple(SHARED_LIMIT)

_PTX_INSTRUCTIONS: dict[str, str] = {
    "mma": r"\bmma\.sync|\bwgmma\.mma_async|\btcgen05\.mma",
    "wgmma": r"\bwgmma\.mma_async",
    "load16": r"\bld\.global\S*\.v4\.b32|\bld\.global\S*\.v2\.b64|\bcp\.async\.cg\.\S+ [^;]*, 0x10",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileResult:
    """What one variant became on one chip.

    `spilled`, `static_shared` and `dynamic_shared` are bytes, `tensor_columns` is the share of the
    512 columns of tensor memory on sm_100; `counts` is how often each kind of instruction occurs.
    """

    module: str
    label: str
    arch: int
    num_warps: int
    registers: int
    spilled: int
    static_shared: int
    dynamic_shared: int
    tensor_columns: int
    counts: dict[str, int]
    meant: list[str]

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return self.static_shared + self.dynamic_shared

    @property
    def occupancy(self) -> Occupancy:
        """What a multiprocessor can hold of the variant."""
        return occupancy(
            self.arch,
            num_warps=self.num_warps,
            registers=self.registers,
            shared=self.shared,
            tensor_columns=self.tensor_columns,
        )

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
    registers, spilled, static_shared = _ptxas(ptx, arch)
    return CompileResult(
        module=module,
        label=case.label,
        arch=arch,
        num_warps=compiled.metadata.num_warps,
        registers=registers,
        spilled=spilled,
        static_shared=static_shared,
        dynamic_shared=compiled.metadata.shared,
        tensor_columns=getattr(compiled.metadata, "tmem_size", None) or 0,
        counts={name: len(re.findall(regex, ptx)) for name, regex in _PTX_INSTRUCTIONS.items()},
        meant=list(case.meant),
    )


def _ptxas(ptx: str, arch: int) -> tuple[int, int, int]:
    """Registers per thread, spilled bytes and bytes of static shared memory of `ptx`."""
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
    static_shared = sum(map(int, re.findall(r"(\d+) bytes smem", report)))
    return (
        max(map(int, registers)),
        sum(int(store) + int(load) for store, load in spills),
        static_shared,
    )


def compile_all(
    arches: tuple[int, ...],
    num_processes: int = 2,
    wanted: Callable[[str, str], bool] = lambda module, label: True,
) -> Iterator[CompileResult]:
    """Compile every variant that is `wanted` for every chip, in the order of the kernel files."""
    work = [
        (module, index, arch)
        for module in KERNEL_MODULES
        for index, case in enumerate(module_cases(module))
        for arch in arches
        if arch in case.arches and wanted(module, case.label)
    ]
    if not work:
        return
    with ProcessPoolExecutor(num_processes) as pool:
        yield from pool.map(compile_case, *zip(*work, strict=True))
