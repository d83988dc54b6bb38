"""Replay of one block on its stored inputs: to see what its Linears read, or to get its outputs.

Two chains of activations may run through the model: that of the quantized blocks, whose inputs the
Linears will meet, and, for methods that aim at it, that of the float model. Keys and values are
seen exactly as a cache would store them, by a cache that only looks.

Legend: N samples, L length, H hidden. Activations (N, L, H) lie in files (see capture.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from compress.calib.capture import Activations, BlockCalls, batches
from compress.calib.collectors import SAMPLE_TOKENS, InputStatistics
from compress.models.family import SharedInput
from compress.models.load import trim_heap

_TRIM_EVERY = 64  # batches; every 16 took 5 % more time

Statistics = dict[SharedInput, InputStatistics]


class _AllSeen(Exception):
    """Stops a block whose Linears have read all that is wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FloatChain:
    """The same block in the float model: `inputs` and `outputs` (N, L, H), and its own weights.

    `weights` maps names to tensors in the block's dtype and device.
    """

    inputs: Activations
    outputs: Activations
    weights: Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockReplay:
    """One block with all that is needed to call it on batches of its stored inputs."""

    block: nn.Module
    index: int
    calls: BlockCalls
    batch_size: int
    device: torch.device

    def new_statistics(
        self,
        shared_inputs: Sequence[SharedInput],
        num_samples: int,
        *,
        full: bool,
        magnitudes: bool = False,
        cross: bool = False,
    ) -> Statistics:
        """Empty statistics for each of `shared_inputs`; the flags are those of collectors.py."""
        per_batch = max(1, SAMPLE_TOKENS // -(-num_samples // self.batch_size))
        return {
            shared: InputStatistics(
                in_features=self._linear(shared).in_features,
                full=full,
                magnitudes=magnitudes,
                cross=cross,
                tokens_per_batch=per_batch,
                device=self.device,
            )
            for shared in shared_inputs
        }

    @torch.no_grad()
    def collect(
        self,
        inputs: Activations,
        statistics: Statistics,
        chain: FloatChain | None = None,
        *,
        to_end: bool = False,
    ) -> torch.Tensor:
        """Add to `statistics` what the Linears read when the block runs on `inputs` (N, L, H).

        The block runs until all have been read; `to_end` goes on and checks its outputs as well.
        Returns the largest magnitude of what was seen, () fp32. With `chain` the block also runs on
        the chain's inputs with its weights: its outputs are stored and what the Linears read there
        is the float side of the cross moments. Raises ValueError if an input of a Linear, which is
        named, or an output of the block is not finite.
        """
        ahead: dict[SharedInput, torch.Tensor] = {}
        largest = torch.zeros((), device=self.device)
        for samples in self._batches(inputs):
            if chain is not None:
                with (
                    self._watching(statistics, lambda shared, x: ahead.update({shared: x})),
                    _weights_of(self.block, chain.weights),
                ):
                    outputs = self._run(chain.inputs[samples])
                chain.outputs[samples] = outputs
            seen: dict[SharedInput, torch.Tensor] = {}

            def see(shared: SharedInput, x: torch.Tensor, seen: Any = seen) -> None:
                statistics[shared].add(x, ahead.get(shared))
                seen[shared] = _magnitude(x)
                if len(seen) == len(statistics) and not to_end:
                    raise _AllSeen

            with self._watching(statistics, see), suppress(_AllSeen):
                largest = torch.maximum(largest, _magnitude(self._run(inputs[samples])))
            largest = torch.stack([largest, *seen.values()]).amax()
        return _finite(largest)

    @torch.no_grad()
    def propagate(
        self, inputs: Activations, outputs: Activations | None, cache: "KVRanges | None" = None
    ) -> torch.Tensor:
        """Fill `outputs` (N, L, H) with what the block makes of `inputs` (N, L, H).

        `cache` looks at the keys and values on the way; `outputs` None runs for that alone. Returns
        the largest magnitude of the outputs, () fp32; ValueError if one is not finite.
        """
        largest = torch.zeros((), device=self.device)
        for samples in self._batches(inputs):
            result = self._run(inputs[samples], cache)
            largest = torch.maximum(largest, _magnitude(result))
            if outputs is not None:
                outputs[samples] = result
        return _finite(largest)

    def _run(self, hidden: torch.Tensor, cache: "KVRanges | None" = None) -> torch.Tensor:
        extra: dict[str, Any] = {} if cache is None else {self.calls.cache_argument: cache}
        return self.calls.call(self.block, self.index, hidden.to(self.device), **extra)

    def _batches(self, inputs: Activations) -> Iterator[slice]:
        """Samples of each batch; now and then what the heap keeps is given back, or its holes add
        up over many batches."""
        for number, samples in enumerate(batches(inputs.shape[0], self.batch_size)):
            if number % _TRIM_EVERY == _TRIM_EVERY - 1:
                trim_heap()
            yield samples

    def _linear(self, shared: SharedInput) -> nn.Linear:
        linear = self.block.get_submodule(shared.linears[0])
        assert isinstance(linear, nn.Linear), f"{shared.linears[0]} is {type(linear).__name__}"
        return linear

    @contextmanager
    def _watching(self, statistics: Statistics, see: Any) -> Iterator[None]:
        """Call `see(shared, input)` from hooks on the first Linear of each shared input."""

        def watch(shared: SharedInput) -> torch.utils.hooks.RemovableHandle:
            def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
                try:
                    see(shared, args[0])
                except ValueError as error:
                    raise ValueError(f"{shared.linears[0]}: {error}") from None

            return self._linear(shared).register_forward_pre_hook(hook)

        handles = [watch(shared) for shared in statistics]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@dataclass(slots=True)
class KVRanges:
    """Stands for a KV cache in one block's call; keeps the largest |k| and |v| of each KV head.

    `keys` and `values` are (num_kv_heads,) fp32, None before the first call.
    """

    keys: torch.Tensor | None = field(default=None)
    values: torch.Tensor | None = field(default=None)

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention calls to store keys and values (batch, num_kv_heads, length, head_dim)."""
        self.keys = _larger(self.keys, keys)
        self.values = _larger(self.values, values)
        return keys, values


def _finite(largest: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(largest):
        raise ValueError("the block's outputs are not finite on calibration data")
    return largest


def _magnitude(x: torch.Tensor) -> torch.Tensor:
    """Largest |x|, () fp32; NaN if one is. Several times faster than abs and amax in bfloat16."""
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high).float()


def _larger(known: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
    seen = states.abs().amax((0, 2, 3)).float()
    return seen if known is None else torch.maximum(known, seen)


@contextmanager
def _weights_of(block: nn.Module, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give `block` other `weights` (by parameter name) for the time of the context."""
    parameters = {name: block.get_parameter(name) for name in weights}
    own = {name: parameter.data for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.data = weights[name]
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]
