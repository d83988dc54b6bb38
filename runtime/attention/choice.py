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
_AUTO = {"cpu": "blockwise", "cuda": "paged"}


def make_attention(name: str, spec: AttentionSpec, pool: KVPool, ops: Ops) -> AttentionBackend:
    """The backend called `name` ("auto": by the device of `pool`); ValueError if it cannot run."""
    device = pool.k.device.type
    if name == "auto":
        name = lookup(_AUTO, device, "device for attention 'auto'")
    make = lookup(ATTENTION, name, "attention backend")
    if name == "blockwise" and device != "cpu":
        raise ValueError(f"attention 'blockwise' runs on a CPU, not on {device!r}; use 'paged'")
    return make(spec, pool, ops)
