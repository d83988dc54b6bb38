"""The protocol card: everything a reader needs to repeat a measurement, or to distrust it.

A speed is a joint product of method, model, load, machine and protocol; none of the figures of a
report is published without the card. All values are plain JSON types. What cannot be found out on a
machine (a CPU's marketing name, a GPU where there is none) is null, never guessed.
"""

import hashlib
import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

_PACKAGES = ("compress-llm", "torch", "triton", "transformers", "numpy")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS")


def environment(command: str) -> dict[str, Any]:
    """The part of the card that does not depend on the model; `command` is the line to repeat."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "hardware": hardware(),
        "threads": threads(),
        "software": software(),
        "load_average_at_start": load_average(),
    }


def hardware() -> dict[str, Any]:
    """CPU model, physical cores, CPUs this process may use, memory in bytes, and GPUs."""
    return {
        "cpu": cpu_model(),
        "architecture": platform.machine(),
        "physical_cores": psutil.cpu_count(logical=False),
        "usable_cpus": usable_cpus(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus(),
    }


def cpu_model() -> str | None:
    """The CPU's name as Linux reports it, else as Python's platform module does."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or None


def usable_cpus() -> int | None:
    """Logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def gpus() -> list[dict[str, Any]]:
    """Name, memory and compute capability of every CUDA device; empty where there is none."""
    if not torch.cuda.is_available():
        return []
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {
            "name": device.name,
            "memory_bytes": device.total_memory,
            "compute_capability": f"{device.major}.{device.minor}",
        }
        for device in devices
    ]


def threads() -> dict[str, Any]:
    """Threads torch uses inside and between operations, and the variables that steer OpenMP."""
    return {
        "intra_op": torch.get_num_threads(),
        "inter_op": torch.get_num_interop_threads(),
        **{name: os.environ.get(name) for name in _THREAD_VARIABLES},
    }


def software() -> dict[str, str | None]:
    """Versions of Python, the operating system and the packages that decide speed and results."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def load_average() -> list[float] | None:
    """Runnable processes over the last 1, 5 and 15 minutes: who else was using the machine."""
    return [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None


def folder_sha256(folder: Path) -> str:
    """SHA-256 over the names and contents of all files below `folder`."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(file.relative_to(folder).as_posix().encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()
