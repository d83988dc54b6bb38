"""Inputs of the first block, and replay of one block, for any transformers decoder.

The skeleton of the model runs once per batch of calibration tokens with its embedding real and
every block replaced by a recorder: it notes the arguments that the model passes besides the hidden
states (masks, position embeddings, ...) and passes the hidden states on untouched. So each block
can later be called alone, just as the model would call it, without code per architecture.

Activations are files, (num_samples, length, hidden): they survive the process, and a resumed run
goes on from them. Mapped into memory they are used without a copy, but what was touched counts as
memory of the process until the kernel wants it back; read and written a batch at a time
(`ActivationFile`) they take the memory of one batch.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

_CACHE_ARGUMENTS = ("cache", "past_key_values", "past_key_value")  # newest transformers first
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCalls:
    """Arguments of every block besides the hidden states: `by_batch_size[size][block]`."""

    by_batch_size: dict[int, list[Arguments]]

    @property
    def cache_argument(self) -> str:
        """Under which name the model gives its KV cache to a block."""
        _, kwargs = next(iter(self.by_batch_size.values()))[0]
        for name in _CACHE_ARGUMENTS:
            if name in kwargs:
                return name
        raise ValueError(f"the blocks take no KV cache (none of {', '.join(_CACHE_ARGUMENTS)})")

    def call(
        self, block: nn.Module, index: int, hidden: torch.Tensor, **extra: Any
    ) -> torch.Tensor:
        """Output (batch, length, hidden) of block `index` for `hidden` of that shape.

        `extra` replaces keyword arguments of the model's own call.
        """
        args, kwargs = self.by_batch_size[hidden.shape[0]][index]
        output = block(hidden, *args, **(kwargs | extra))
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationFile:
    """Activations `shape` (N, L, H) in `file`, from its sample `start` on; none are in memory.

    `[samples]` reads a slice of samples into a fresh tensor, and writes one from any device.
    """

    file: Path
    shape: tuple[int, int, int]
    dtype: torch.dtype
    start: int = 0

    def __getitem__(self, samples: slice) -> torch.Tensor:
        first, count = self._span(samples)
        rows = torch.empty(count, *self.shape[1:], dtype=self.dtype)
        raw = rows.view(-1).view(torch.uint8).numpy().data
        with self.file.open("rb", buffering=0) as stream:
            stream.seek(self._offset(first))
            done = 0
            while done < len(raw):
                read = stream.readinto(raw[done:])
                if not read:
                    raise ValueError(f"{self.file}: cut short")
                done += read
        return rows

    def __setitem__(self, samples: slice, rows: torch.Tensor) -> None:
        first, count = self._span(samples)
        assert tuple(rows.shape) == (count, *self.shape[1:]), f"{rows.shape} for {count} samples"
        host = rows.to(device="cpu", dtype=self.dtype).contiguous()
        raw = host.view(-1).view(torch.uint8).numpy().data
        with self.file.open("r+b", buffering=0) as stream:
            stream.seek(self._offset(first))
            done = 0
            while done < len(raw):
                done += stream.write(raw[done:])

    def _span(self, samples: slice) -> tuple[int, int]:
        first, stop, step = samples.indices(self.shape[0])
        assert step == 1, "samples are read in order"
        return first, stop - first

    def _offset(self, sample: int) -> int:
        return (self.start + sample) * self.shape[1] * self.shape[2] * self.dtype.itemsize


Activations = torch.Tensor | ActivationFile


class _LastBlockReached(Exception):
    """Stops the forward pass of the skeleton: nothing after the blocks is needed."""


def create_activations(file: Path, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Make `file` and reserve its space on the disk, or OSError: a mapped file must not run out."""
    with file.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, torch.Size(shape).numel() * dtype.itemsize)


def open_activations(
    file: Path,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    samples: slice = slice(None),
    mapped: bool = True,
) -> Activations:
    """The activations of `samples` in `file`, which holds `shape` (N, L, H)."""
    numel = torch.Size(shape).numel()
    num_bytes = numel * dtype.itemsize
    if file.stat().st_size != num_bytes:
        raise ValueError(f"{file}: {file.stat().st_size} bytes, expected {num_bytes}")
    if mapped:
        whole = torch.from_file(str(file), shared=True, size=numel, dtype=dtype).view(shape)
        return whole[samples]
    start, stop, _ = samples.indices(shape[0])
    return ActivationFile(
        file=file, shape=(stop - start, shape[1], shape[2]), dtype=dtype, start=start
    )


@torch.no_grad()
def record_block_calls(
    decoder: nn.Module,
    blocks: nn.ModuleList,
    tokens: torch.Tensor,
    batch_size: int,
    device: torch.device,
    consume: Callable[[slice, torch.Tensor], None] | None,
    share: slice = slice(None),
) -> BlockCalls:
    """Run `decoder` on `tokens` (num_samples, length) with recorders in place of its `blocks`.

    `consume(samples, hidden)` gets the input of the first block for each batch of samples in
    `share`, whole batches, and counts samples from its start. None, and what is outside the share,
    runs only as many batches as are needed to see the arguments for each batch size.
    """
    first, stop, _ = share.indices(tokens.shape[0])
    seen: dict[int, list[Arguments]] = {}
    for samples in batches(tokens.shape[0], batch_size):
        size = samples.stop - samples.start
        is_wanted = consume is not None and first <= samples.start < stop
        if size in seen and not is_wanted:
            continue
        with _recording(blocks) as record, suppress(_LastBlockReached):
            decoder(input_ids=tokens[samples].to(device), use_cache=False)
        assert len(record.arguments) == len(blocks), "the model did not call every block once"
        seen.setdefault(size, record.arguments)
        if consume is not None and is_wanted:
            consume(slice(samples.start - first, samples.stop - first), record.first_input)
    return BlockCalls(by_batch_size=seen)


def batches(num_samples: int, batch_size: int) -> Iterator[slice]:
    """Consecutive slices of at most `batch_size` samples."""
    for start in range(0, num_samples, batch_size):
        yield slice(start, min(start + batch_size, num_samples))


@dataclass(slots=True)
class _Record:
    first_input: torch.Tensor
    arguments: list[Arguments]


@contextmanager
def _recording(blocks: nn.ModuleList) -> Iterator[_Record]:
    """Replace the forward of every block by a recorder for the time of the context."""
    record = _Record(first_input=torch.empty(0), arguments=[])

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not record.arguments:
            record.first_input = hidden
        record.arguments.append((args, kwargs))
        if len(record.arguments) == len(blocks):
            raise _LastBlockReached
        return hidden

    for block in blocks:
        block.__dict__["forward"] = forward
    try:
        yield record
    finally:
        for block in blocks:
            del block.__dict__["forward"]
