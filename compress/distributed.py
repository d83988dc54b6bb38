"""Several processes that calibrate one model together, each on its share of the samples.

`torchrun --nproc-per-node N` starts N equal processes, ranks 0 to N - 1, that learn their rank from
the environment. Each runs the forward passes of its share of the batches, statistics are summed,
solves are dealt out by cost, and every rank ends up with the same quantized block:

    first(work)      rank 0 does it, all get the value: what is read, written or decided once
    together()       each does its own part; leaves only when all are done
    add, maximum     reduce a tensor over the ranks, in place; concat: rows in rank order
    from_rank        the value of one rank, for all

Errors: whatever fails in `first` or `together` ends every rank. Nobody enters a reduction that a
failed rank would never join, so nothing hangs. A rank that dies without a word closes its
connections, which ends the others as well.

Bytes: with shares made of whole batches a forward pass has the composition that it has in one
process. Sums are the same but for the order of their terms. All reductions give every rank the same
bits, so what each rank computes from them for itself (transforms) is the same too.

All ranks are on one machine and see the same files. Without a launcher there is one rank, and
every function is the plain work itself.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from compress.errors import CheckFailed, is_out_of_memory, one_line

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = timedelta(days=7)  # rank 0 may write for hours; who dies is noticed without a timeout
_KINDS: dict[str, type[Exception]] = {  # how an error of another rank is raised here
    "check": CheckFailed,
    "input": ValueError,
    "memory": MemoryError,
    "bug": RuntimeError,
}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The processes of one run, seen from the one with `rank`.

    `objects` is the process group for Python values: on the CPU, whatever tensors are on.
    """

    rank: int = 0
    size: int = 1
    objects: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def share(self, num_samples: int, batch_size: int) -> slice:
        """The samples of this rank: whole batches, as many as those of others or one less or more.

        ValueError if there are not enough batches for every rank to have one.
        """
        num_batches = -(-num_samples // batch_size)
        if num_batches < self.size:
            raise ValueError(
                f"{num_samples} samples in batches of {batch_size} make {num_batches}, too few for"
                f" {self.size} processes: use more samples (--calib-samples) or fewer processes"
            )
        start, stop = (num_batches * rank // self.size for rank in (self.rank, self.rank + 1))
        return slice(start * batch_size, min(stop * batch_size, num_samples))

    def first(self, work: Callable[[], T]) -> T:
        """Have rank 0 do `work`; its value on every rank, or its error on every rank."""
        if self.size == 1:
            return work()
        value: Any = None
        error: Exception | None = None
        if self.is_first:
            try:
                value = work()
            except Exception as caught:
                error = caught
        failure, received = self._broadcast((_describe(error), value), 0)
        if error is not None:
            raise error
        if failure is not None:
            raise SystemExit(1)  # rank 0 prints the message
        return cast(T, value if self.is_first else received)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Wait for all ranks at the end of the context; an error on any ends it on every rank."""
        if self.size == 1:
            yield
            return
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        failures: list[Any] = [None] * self.size
        with _peers_alive():
            dist.all_gather_object(failures, _describe(error), group=self.objects)
        if error is not None:
            raise error
        for rank, failure in enumerate(failures):
            if failure is not None:
                if not self.is_first:
                    raise SystemExit(1)  # the rank that failed and rank 0 print the message
                kind, message = failure
                raise _KINDS[kind](f"process {rank}: {message}")

    def from_rank(self, value: T | None, source: int) -> T:
        """The `value` that rank `source` has, on every rank. Tensors must be on the CPU."""
        received = value if self.size == 1 else self._broadcast(value, source)
        return cast(T, value if self.rank == source else received)

    def add(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by its sum over the ranks, in place."""
        self._reduce(tensor, dist.ReduceOp.SUM)

    def maximum(self, tensor: torch.Tensor) -> None:
        """Replace `tensor` by its elementwise maximum over the ranks, in place."""
        self._reduce(tensor, dist.ReduceOp.MAX)

    def concat(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` (n, columns) of all ranks, each with an n of its own, stacked in rank order."""
        if self.size == 1:
            return rows
        counts: list[Any] = [None] * self.size
        with _peers_alive():
            dist.all_gather_object(counts, len(rows), group=self.objects)
            padded = rows.new_zeros(max(counts), rows.shape[1])
            padded[: len(rows)] = rows
            gathered = [torch.empty_like(padded).view(torch.uint8) for _ in range(self.size)]
            dist.all_gather(gathered, padded.view(torch.uint8))
        parts = (part.view(rows.dtype) for part in gathered)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def _reduce(self, tensor: torch.Tensor, operation: Any) -> None:
        if self.size > 1 and tensor.numel():
            with _peers_alive():
                dist.all_reduce(tensor, operation)

    def _broadcast(self, value: Any, source: int) -> Any:
        box = [value if self.rank == source else None]
        with _peers_alive():
            dist.broadcast_object_list(box, source, group=self.objects)
        return box[0]


def launched_rank() -> int:
    """The rank that a launcher gave this process; 0 without one."""
    return int(os.environ["RANK"]) if _is_launched() else 0


@contextmanager
def join_ranks(device: torch.device) -> Iterator[Ranks]:
    """Meet the other processes of a `torchrun` or `accelerate launch`; one rank without them.

    `device` is of the kind that tensors to be reduced are on. ValueError if the processes are not
    all on this machine, or if there are more of them than GPUs.
    """
    if not _is_launched():
        yield Ranks()
        return
    rank, size = launched_rank(), int(os.environ["WORLD_SIZE"])
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if on_this_machine != size:
        raise ValueError(
            f"{size} processes on several machines ({on_this_machine} on this one): they share"
            " files and must run on one machine"
        )
    rank_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        yield Ranks(rank=rank, size=size, objects=dist.new_group(backend="gloo", timeout=_TIMEOUT))
    finally:
        dist.destroy_process_group()


def rank_device(device: torch.device) -> torch.device:
    """The device of this process: GPU number LOCAL_RANK, which becomes the current one.

    `device` itself on the CPU, or without a launcher. ValueError if the GPU is not there, or if
    `device` names one of them, which not all processes can use.
    """
    if device.type != "cuda" or not _is_launched():
        return device
    local = int(os.environ.get("LOCAL_RANK", launched_rank()))
    if device.index is not None:
        raise ValueError(f"device {device}: with several processes each takes its own; use cuda")
    if local >= torch.cuda.device_count():
        raise ValueError(
            f"process {local} has no GPU: {torch.cuda.device_count()} are visible;"
            " start one process for each (--nproc-per-node)"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def deal_out(costs: Sequence[float], num_ranks: int) -> list[int]:
    """A rank for each of `costs`: the dearest first, each to the rank that has least so far."""
    loads = [0.0] * num_ranks
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        owners[item] = min(range(num_ranks), key=lambda rank: loads[rank])
        loads[owners[item]] += costs[item]
    return owners


def _is_launched() -> bool:
    return all(name in os.environ for name in _VARIABLES) and int(os.environ["WORLD_SIZE"]) > 1


def _describe(error: Exception | None) -> tuple[str, str] | None:
    """What the other ranks are told: a key of _KINDS and a message."""
    if error is None:
        return None
    if isinstance(error, CheckFailed):
        return "check", one_line(error)
    if is_out_of_memory(error):
        return "memory", "out of memory"
    if isinstance(error, ValueError | OSError):
        return "input", one_line(error)
    return "bug", f"{type(error).__name__}: {one_line(error)}"


@contextmanager
def _peers_alive() -> Iterator[None]:
    """Say in plain words that a connection broke."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"another process of this run has ended ({error})") from error
