"""The limits and policies of an engine, and what they ask for: a block manager, a scheduler."""

from collections.abc import Callable
from dataclasses import dataclass

from compress.lookup import lookup
from compress.runtime.blocks import BlockManager, ContiguousBlocks
from compress.runtime.scheduler import Scheduler


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Limits and policies of an engine.

    `num_blocks` None sizes the cache for `max_num_seqs` sequences of the longest length, within a
    fraction of the free memory. `max_model_len` None is what the model was made for, or, where
    longer sequences need other rotary factors (longrope), first trained for.
    `token_budget` bounds the rows of a step, and so how long a prompt can hold up decoding.
    `kernels` names a backend in `compress.kernels.ops`, `attention` one in `attention/choice.py`.
    `deterministic` gives a request the same bits alone, in any batch, and however it is cut into
    steps; the 4-bit product of CPUs, which has two ways for few rows and many, is not used then.

    `policy` is "fifo" or "priority". A request that was preempted `max_preemptions` times is not
    preempted again (`scheduler.py`). After `watchdog_steps` steps in a row that could schedule
    nothing all requests fail.

    Mechanisms can be switched off, to see what each brings: `allocation` "contiguous" instead of
    "paged" gives every request room for `max_model_len` at once, `batching` "request" instead of
    "iteration" runs one batch to its end before the next, `prefix_cache` False computes every
    prompt, `chunked_prefill` False computes it in one step.
    """

    block_size: int = 64
    num_blocks: int | None = None
    max_num_seqs: int = 64
    token_budget: int = 2048
    max_model_len: int | None = None
    kernels: str = "auto"
    attention: str = "auto"
    deterministic: bool = False
    policy: str = "fifo"
    max_preemptions: int = 4
    watchdog_steps: int = 16
    allocation: str = "paged"
    batching: str = "iteration"
    prefix_cache: bool = True
    chunked_prefill: bool = True

    def __post_init__(self) -> None:
        lookup(ALLOCATIONS, self.allocation, "allocation")
        if self.allocation == "contiguous" and self.prefix_cache:
            raise ValueError(
                "allocation 'contiguous' cannot share blocks; set prefix_cache=False with it"
            )
        if self.watchdog_steps < 1:
            raise ValueError(f"watchdog_steps must be positive, got {self.watchdog_steps}")


def _paged(num_blocks: int, block_size: int, max_model_len: int) -> BlockManager:
    return BlockManager(num_blocks, block_size)


# Name -> (num_blocks, block_size, max_model_len) -> who owns the blocks.
ALLOCATIONS: dict[str, Callable[[int, int, int], BlockManager]] = {
    "paged": _paged,
    "contiguous": ContiguousBlocks,
}


def make_blocks(config: EngineConfig, num_blocks: int, max_model_len: int) -> BlockManager:
    """The block manager that `config` asks for, over a pool of `num_blocks`."""
    return ALLOCATIONS[config.allocation](num_blocks, config.block_size, max_model_len)


def make_scheduler(config: EngineConfig, blocks: BlockManager, *, prefix_cache: bool) -> Scheduler:
    """The scheduler that `config` asks for; the draft has a say in `prefix_cache`."""
    return Scheduler(
        blocks,
        max_num_seqs=config.max_num_seqs,
        token_budget=config.token_budget,
        policy=config.policy,
        batching=config.batching,
        chunked_prefill=config.chunked_prefill,
        prefix_cache=prefix_cache,
        max_preemptions=config.max_preemptions,
    )
