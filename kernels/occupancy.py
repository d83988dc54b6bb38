"""How many warps of a kernel can be resident on one multiprocessor, and what limits them.

The rules are those of `cuda_occupancy.h` of the CUDA toolkit, on which NVIDIA's occupancy
calculators rest, with the sizes of the CUDA C programming guide, "Technical Specifications per
Compute Capability". Registers are given to each warp in units of 256, from the quarter of the
multiprocessor that the warp runs on, so that each quarter holds whole warps. A block takes its
shared memory in units of 128 bytes, and 1 KB more for the system. On sm_100 a block also takes
columns of tensor memory: a power of two, at least 32, of 512.
"""

from dataclasses import dataclass

_WARP = 32
_QUARTERS = 4
_REGISTERS = 65536
_REGISTER_UNIT = 256
_SHARED_UNIT = 128
_SHARED_RESERVED = 1024
_MAX_THREADS = 2048
_MAX_BLOCKS = 32
_MAX_BLOCK_THREADS = 1024
_TENSOR_COLUMNS = 512

MAX_WARPS = _MAX_THREADS // _WARP

# Compute capability -> bytes of shared memory of a multiprocessor; a block can have 1 KB less.
SHARED_MEMORY: dict[int, int] = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}
SHARED_LIMIT: dict[int, int] = {
    arch: size - _SHARED_RESERVED for arch, size in SHARED_MEMORY.items()
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Occupancy:
    """Blocks and warps that one multiprocessor holds at once.

    `limits` lists what would have to grow for another block: `registers`, `shared memory`,
    `tensor memory`, `threads` or `blocks`.
    """

    blocks: int
    warps: int
    limits: tuple[str, ...]

    @property
    def fraction(self) -> float:
        """Resident warps over the largest possible number."""
        return self.warps / MAX_WARPS


def occupancy(
    arch: int, *, num_warps: int, registers: int, shared: int, tensor_columns: int = 0
) -> Occupancy:
    """Occupancy of blocks of `num_warps` warps on compute capability `arch`, such as 90.

    `registers` are per thread, `shared` bytes per block, static and dynamic together. No block at
    all means that the kernel cannot be launched.
    """
    per_warp = _round_up(registers * _WARP, _REGISTER_UNIT)
    warps_of_quarter = _REGISTERS // _QUARTERS // per_warp if per_warp else MAX_WARPS
    allotted = _round_up(shared + _SHARED_RESERVED, _SHARED_UNIT)
    blocks_by = {
        "registers": warps_of_quarter * _QUARTERS // num_warps,
        "shared memory": SHARED_MEMORY[arch] // allotted,
        "threads": MAX_WARPS // num_warps if num_warps * _WARP <= _MAX_BLOCK_THREADS else 0,
        "blocks": _MAX_BLOCKS,
    }
    if tensor_columns:
        allotted_columns = max(32, 1 << (tensor_columns - 1).bit_length())
        blocks_by["tensor memory"] = _TENSOR_COLUMNS // allotted_columns
    blocks = min(blocks_by.values())
    limits = tuple(name for name, most in blocks_by.items() if most == blocks)
    return Occupancy(blocks=blocks, warps=blocks * num_warps, limits=limits)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
