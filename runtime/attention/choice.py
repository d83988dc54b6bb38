"""The attention backends by name, and the one that suits a device."""

from collections.abc import Callable

from compress.kernels.ops import Ops
from compress.lookup import lookup
from compress.runtime.attention.base import AttentionBackend, AttentionSpec
from compress.runtime.attention.blockwise import BlockwiseAttention
from compress.runtime.attention.pool import KVPool
from compress.runtime.attention.triton_paged import PagedAttention

# name -> make(spec, pool, ops, deterministic)
ATTENTION: dict[str, Callable[[AttentionSpec, KVPool, Ops, bool], AttentionBackend]] = {
    "blockwise": lambda spec, pool, ops, deterministic: BlockwiseAttention(
        spec, pool, deterministic=deterministic
    ),
    "paged": lambda spec, pool, ops, deterministic: PagedAttention(spec, pool, ops),
}


def make_attention(
    name: str, spec: AttentionSpec, pool: KVPool, ops: Ops, *, deterministic: bool = False
) -> AttentionBackend:
    """The backend called `name`; ValueError if it is unknown or cannot do what is asked of it.

    "auto" is blockwise for torch operations on a CPU and paged everywhere else. Triton's paged
    attention is always `deterministic`, torch's never: its products have as many rows as come.
    """
    device = pool.k.device.type
    if name == "auto":
        name = "blockwise" if device == "cpu" and ops.backend == "torch" else "paged"
    make = lookup(ATTENTION, name, "attention backend")
    if name == "blockwise" and device != "cpu":
        raise ValueError(f"attention 'blockwise' runs on a CPU, not on {device!r}; use 'paged'")
    if deterministic and name == "paged" and ops.backend == "torch":
        raise ValueError("attention 'paged' of torch is not deterministic; use 'blockwise'")
    return make(spec, pool, ops, deterministic)
