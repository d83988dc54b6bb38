"""Replay of one block on its stored inputs: to see what its Linears read, or to get its outputs.

Legend: N samples, L length, H hidden. Activations (N, L, H) are mapped files (see capture.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from compress.calib.capture import BlockCalls, batches
from compress.calib.collectors import SAMPLE_TOKENS, InputStatistics
from compress.models.family import SharedInput


@torch.no_grad()
def collect_statistics(
    block: nn.Module,
    index: int,
    calls: BlockCalls,
    inputs: torch.Tensor,
    batch_size: int,
    shared_inputs: Sequence[SharedInput],
    *,
    full: bool,
    device: torch.device,
) -> dict[SharedInput, InputStatistics]:
    """Statistics of each of `shared_inputs` over `inputs` (N, L, H); `full` as in collectors.py.

    Raises ValueError naming the Linear if an input of it is not finite.
    """
    num_batches = -(-inputs.shape[0] // batch_size)
    per_batch = max(1, SAMPLE_TOKENS // num_batches)
    statistics = {
        shared: InputStatistics(
            in_features=_linear(block, shared).in_features,
            full=full,
            tokens_per_batch=per_batch,
            device=device,
        )
        for shared in shared_inputs
    }
    with _watching(block, statistics):
        for samples in batches(inputs.shape[0], batch_size):
            calls.call(block, index, inputs[samples].to(device))
    return statistics


@torch.no_grad()
def propagate(
    block: nn.Module,
    index: int,
    calls: BlockCalls,
    inputs: torch.Tensor,
    outputs: torch.Tensor,
    batch_size: int,
    device: torch.device,
) -> None:
    """Fill `outputs` (N, L, H) with what the block makes of `inputs` (N, L, H)."""
    for samples in batches(inputs.shape[0], batch_size):
        outputs[samples] = calls.call(block, index, inputs[samples].to(device)).to(outputs.device)


def _linear(block: nn.Module, shared: SharedInput) -> nn.Linear:
    linear = block.get_submodule(shared.linears[0])
    assert isinstance(linear, nn.Linear), f"{shared.linears[0]} is {type(linear).__name__}"
    return linear


@contextmanager
def _watching(block: nn.Module, statistics: dict[SharedInput, InputStatistics]) -> Iterator[None]:
    """Feed `statistics` from hooks on the first Linear of each shared input."""

    def watch(shared: SharedInput, stats: InputStatistics) -> torch.utils.hooks.RemovableHandle:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            try:
                stats.add(args[0])
            except ValueError as error:
                raise ValueError(f"{shared.linears[0]}: {error}") from None

        return _linear(block, shared).register_forward_pre_hook(hook)

    handles = [watch(shared, stats) for shared, stats in statistics.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
