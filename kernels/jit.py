"""Triton as the kernel files see it, and the description of one compiled variant of a kernel.

Triton is optional: where it is not installed (macOS, Windows) the kernel files still import, so
that their torch functions work, and `triton_problem` says why the Triton ones cannot.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import torch

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    # Enough for `@triton.jit` and `tl.constexpr` to be evaluated when a kernel file is imported.
    triton = SimpleNamespace(jit=lambda function: function)
    tl = SimpleNamespace(constexpr=None)
    TRITON_INSTALLED = False
else:
    TRITON_INSTALLED = True

__all__ = [
    "FLOAT_DTYPES",
    "TRITON_INSTALLED",
    "BenchCase",
    "CompileCase",
    "Instruction",
    "check_one_device",
    "check_rows",
    "check_tensor",
    "tl",
    "triton",
    "triton_problem",
]

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

Instruction = Literal["mma", "wgmma", "load16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCase:
    """One variant of a kernel, as its wrapper would launch it, for compilation without a GPU.

    `types` gives the Triton type of every runtime argument that is not an `i32`; `divisible` names
    the integers that the launcher would find divisible by 16 (pointers always are). `meant` lists
    the instructions that the variant must contain: `mma` (tensor cores of any generation), `wgmma`
    (in its stead on sm_90), `load16` (global memory read 16 bytes at a time).
    """

    kernel: Any
    label: str
    types: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 1
    meant: tuple[Instruction, ...] = field(default=())


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchCase:
    """One operation at one shape, to be timed on a GPU by `bench.py` against plain torch.

    `make(device, dtype)` gives inputs, random and new in each call; `triton` and `plain` take them
    and compute the same, and so does `exact`, in float64, at a cost that may be large. `num_bytes`
    is what must move between memory and chip at least, `num_flops` counts a multiply-add as two.
    `ceiling` is what bounds the speed (`memory`: the card's measured copy bandwidth; `matrix`: its
    measured bfloat16 peak; `matrix8`: twice that), `goal` the fraction of it that is aimed at.
    """

    label: str
    make: Callable[[torch.device, torch.dtype], tuple[Any, ...]]
    triton: Callable[..., Any]
    plain: Callable[..., Any]
    exact: Callable[..., Any]
    num_bytes: int
    num_flops: int
    ceiling: Literal["memory", "matrix", "matrix8"]
    goal: float | None = None


def triton_problem(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on tensors of `device`, or None if they can."""
    if not TRITON_INSTALLED:
        return "triton is not installed"
    if triton.knobs.runtime.interpret:
        return None
    if device.type != "cuda":
        return f"triton kernels need a GPU, not device {str(device)!r} (or TRITON_INTERPRET=1)"
    if not torch.cuda.is_available():
        return "no GPU is visible to torch"
    return None


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Raise ValueError unless `tensor` has `shape` (None: any size) and one of `dtypes`."""
    fits = len(shape) == tensor.dim() and all(
        want is None or want == size for want, size in zip(shape, tensor.shape, strict=True)
    )
    if fits and tensor.dtype in dtypes:
        return
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    found = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    raise ValueError(f"{name} must be {names} of shape ({sizes}), got {found}")


def check_one_device(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError unless all `tensors` (those not None) are on the device of the first."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    (first, expected), *others = present.items()
    for name, tensor in others:
        if tensor.device != expected.device:
            raise ValueError(
                f"{name} must be on {expected.device}, as {first} is, got {tensor.device}"
            )


def check_rows(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless each row `tensor[i]` is contiguous; rows may lie apart."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            raise ValueError(f"{name} must have contiguous rows, got strides {tensor.stride()}")
        expected *= size
