"""Inputs of the first block, and replay of one block, for any transformers decoder.

The skeleton of the model runs once per batch of calibration tokens with its embedding real and
every block replaced by a recorder: it notes the arguments that the model passes besides the hidden
states (masks, position embeddings, ...) and passes the hidden states on untouched. So each block
can later be called alone, just as the model would call it, without code per architecture.

Activations are files mapped into memory, (num_samples, length, hidden): they need no memory of
their own, survive the process, and a resumed run goes on from them.
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


class _LastBlockReached(Exception):
    """Stops the forward pass of the skeleton: nothing after the blocks is needed."""


def open_activations(
    file: Path, shape: tuple[int, int, int], dtype: torch.dtype, *, create: bool = False
) -> torch.Tensor:
    """Map `file` as a tensor of `shape`. `create` first reserves its disk space, or OSError."""
    numel = torch.Size(shape).numel()
    num_bytes = numel * dtype.itemsize
    if create:
        with file.open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, num_bytes)
    elif file.stat().st_size != num_bytes:
        raise ValueError(f"{file}: {file.stat().st_size} bytes, expected {num_bytes}")
    return torch.from_file(str(file), shared=True, size=numel, dtype=dtype).view(shape)


@torch.no_grad()
def record_block_calls(
    decoder: nn.Module,
    blocks: nn.ModuleList,
    tokens: torch.Tensor,
    batch_size: int,
    device: torch.device,
    consume: Callable[[slice, torch.Tensor], None] | None,
) -> BlockCalls:
    """Run `decoder` on `tokens` (num_samples, length) with recorders in place of its `blocks`.

    `consume(samples, hidden)` gets the input of the first block for each batch of samples; None
    runs only as many batches as are needed to see the arguments for each batch size.
    """
    seen: dict[int, list[Arguments]] = {}
    for samples in batches(tokens.shape[0], batch_size):
        size = samples.stop - samples.start
        if consume is None and size in seen:
            continue
        with _recording(blocks) as record, suppress(_LastBlockReached):
            decoder(input_ids=tokens[samples].to(device), use_cache=False)
        assert len(record.arguments) == len(blocks), "the model did not call every block once"
        seen.setdefault(size, record.arguments)
        if consume is not None:
            consume(samples, record.first_input)
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
