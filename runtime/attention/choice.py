"""The attention backends by name, and the one that suits a device."""

from collections.abc import Callable

from compress.kernels.ops import Ops
from compress.lookup import lookup
from compress.runtime.attention.base import AttentionBackend, AttentionSpec, KVPool
from compress.runtime.attention.blockwise import BlockwiseAttention
from compress.runtime.attention.triton_paged import PagedAttention

ATTENTION: dict[str, Callable[[AttentionSpec, KVPool, Ops], AttentionBackend]] = {
    "blockwise": lambda spec, pool, ops: BlockwiseAttention(spec, pool),
    "paged": PagedAttention,
}


def make_attention(name: str, spec: AttentionSpec, pool: KVPool, ops: Ops) -> AttentionBackend:
    """The backend called `name`; ValueError if it is unknown or cannot run where `pool` is.

    "auto" is blockwise for torch operations on a CPU and paged everywhere else.
    """
    device = pool.k.device.type
    if name == "auto":
        name = "blockwise" if device == "cpu" and ops.backend == "torch" else "paged"
    make = lookup(ATTENTION, name, "attention backend")
    if name == "blockwise" and device != "cpu":
        raise ValueError(f"attention 'blockwise' runs on a CPU, not on {device!r}; use 'paged'")
    return make(spec, pool, ops)
