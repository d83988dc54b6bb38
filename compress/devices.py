"""Which device and which dtype a run computes in, when the user does not say."""

import resource
from pathlib import Path

import psutil
import torch

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far.

    Linux's own figure: `ru_maxrss` of a child starts from the size of the process that forked it.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_memory_bytes() -> int:
    """What this process could still take: the free memory, or less under a limit (ulimit -v)."""
    available = psutil.virtual_memory().available
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        available = min(available, max(limit - psutil.Process().memory_info().vms, 0))
    return int(available)


def pick_device(name: str) -> torch.device:
    """`auto` is the first GPU if there is one; a GPU asked for by name must be there."""
    if name not in ("auto", "cpu") and not name.startswith("cuda"):
        raise ValueError(f"unknown device {name!r} (available: auto, cpu, cuda, cuda:N)")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {name!r}: no GPU is visible to torch {torch.__version__}")
    return torch.device(name)


def fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it in hardware, else float32."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32
