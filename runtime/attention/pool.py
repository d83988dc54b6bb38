"""The paged key-value cache.

The pool of one layer is (num_blocks, num_kv_heads, block_size, head_dim), the same on every device.
Block 64 suits both sides: one tile of a GPU kernel, one matrix of a batched product on a CPU.

Keys, after the rotary embedding, and values may be stored in 8 bits, as codes with scales; every
query attends to what the codes stand for, a prompt to its own keys as well.

- With one scale for the keys and one for the values of each layer and KV head, found by calibration
  and stored in the checkpoint (float8_e4m3fn). They are linear in attention and taken out of it:
  backends see queries times k_scale, the codes themselves, and their output times v_scale.
- With one scale for each token and KV head, from the values themselves (int8 or float8_e4m3fn, see
  `kernels/kv_codes.py`). They lie in pools of their own, (num_blocks, num_kv_heads, block_size).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from compress.kernels.activations import float8_codes
from compress.kernels.kv_codes import codes_in, quantize_heads
from compress.lookup import lookup
from compress.runtime.attention.base import AttentionSpec
from compress.scheme import FLOAT8

KV_DTYPES = dict.fromkeys(("auto", "model", "fp8", "int8"))  # see `choose_storage`
_CPU_MEMORY_FRACTION = 0.25  # of what is available, for the cache when its size is not given
_GPU_MEMORY_FRACTION = 0.8
_SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class KVScales:
    """Scales of a float8 cache: `k` and `v`, each (num_layers, num_kv_heads, 1) fp32."""

    k: torch.Tensor
    v: torch.Tensor

    def encode(
        self, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes float8_e4m3fn of keys and values (T, num_kv_heads, head_dim)."""
        return float8_codes(k, self.k[layer]), float8_codes(v, self.v[layer])

    def scale_queries(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Queries (T, num_heads, head_dim) for keys that are codes, in the dtype of q."""
        return _scale_heads(q, self.k[layer])

    def scale_outputs(self, out: torch.Tensor, layer: int) -> torch.Tensor:
        """Outputs (T, num_heads, head_dim) of values that were codes, in the dtype of `out`."""
        return _scale_heads(out, self.v[layer])


@dataclass(frozen=True, kw_only=True, slots=True)
class KVStorage:
    """How keys and values are stored: in `dtype`, with static `scales`, `per_token` ones, or none.

    A dtype of 8 bits has one of the two kinds of scales.
    """

    dtype: torch.dtype
    scales: KVScales | None = None
    per_token: bool = False

    def block_bytes(self, spec: AttentionSpec, block_size: int) -> int:
        """Bytes of one block over all layers, scales included."""
        per_row = spec.head_dim * self.dtype.itemsize + self.per_token * _SCALE_BYTES
        return 2 * spec.num_kv_heads * block_size * per_row * len(spec.windows)


def choose_storage(kv_dtype: str, dtype: torch.dtype, stored: KVScales | None) -> KVStorage:
    """The storage that `kv_dtype` asks for, in a model that computes in `dtype`.

    "model" is `dtype`; "fp8" is float8_e4m3fn with the scales of the checkpoint, `stored`, or, if
    it has none, one per token and head; "int8" has always those; "auto" is "fp8" for a checkpoint
    with scales and else "model".
    """
    plain = KVStorage(dtype=dtype)
    calibrated = stored and KVStorage(dtype=FLOAT8, scales=stored)
    by_name = {
        "auto": calibrated or plain,
        "model": plain,
        "fp8": calibrated or KVStorage(dtype=FLOAT8, per_token=True),
        "int8": KVStorage(dtype=torch.int8, per_token=True),
    }
    return lookup(by_name, kv_dtype, "kv_dtype")


@dataclass(frozen=True, slots=True)
class KVPool:
    """`k[layer]`, `v[layer]`: the pools, each (num_blocks, num_kv_heads, block_size, head_dim).

    They are in `storage.dtype`; queries are in `dtype`. `k_scale[layer]` and `v_scale[layer]` are
    (num_blocks, num_kv_heads, block_size) fp32 where scales belong to tokens.
    """

    k: torch.Tensor
    v: torch.Tensor
    dtype: torch.dtype
    storage: KVStorage
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def layer(self, index: int) -> "PoolLayer":
        """The part of one layer."""
        k_scale = None if self.k_scale is None else self.k_scale[index]
        v_scale = None if self.v_scale is None else self.v_scale[index]
        return PoolLayer(self.k[index], self.v[index], k_scale, v_scale, self.dtype)

    def copy_blocks(
        self,
        copies: Sequence[tuple[int, int]],
        copy: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        """Copy block source to block destination, in every layer, for each pair, by `copy`."""
        if copies:
            pairs = torch.tensor(copies, device=self.k.device)
            for pool in (self.k, self.v, self.k_scale, self.v_scale):
                if pool is not None:
                    copy(pool, pairs)

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Zero blocks that hold NaN or infinity, before they get a new owner."""
        if blocks:
            for pool in (self.k, self.v, self.k_scale, self.v_scale):
                if pool is not None:  # as bytes, because float8 has no fill on every device
                    pool.view(torch.uint8)[:, torch.tensor(blocks, device=pool.device)] = 0


@dataclass(frozen=True, slots=True)
class PoolLayer:
    """The pools of one layer, without the index of the layer; what is read is in `dtype`."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    dtype: torch.dtype

    def write(
        self, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values (T, num_kv_heads, head_dim) at `rows`; what they became.

        `rows` (T * num_kv_heads,) are those of `pool_rows`. Keys and values come as they are, or
        already as codes if their scales are not those of tokens.
        """
        k = _store(self.k, self.k_scale, k, rows, self.dtype)
        v = _store(self.v, self.v_scale, v, rows, self.dtype)
        return k, v

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "PoolLayer":
        """The layer of the pools that `change` makes of these, scales included."""
        k_scale = None if self.k_scale is None else change(self.k_scale)
        v_scale = None if self.v_scale is None else change(self.v_scale)
        return PoolLayer(change(self.k), change(self.v), k_scale, v_scale, self.dtype)

    def read(self, blocks: slice | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (n, num_kv_heads, block_size, head_dim) of a range, or of block ids."""
        return (
            _read(self.k, self.k_scale, blocks, self.dtype),
            _read(self.v, self.v_scale, blocks, self.dtype),
        )


def pool_rows(slots: torch.Tensor, num_kv_heads: int, block_size: int) -> torch.Tensor:
    """Rows (T * num_kv_heads,) of a pool seen as (-1, head_dim), for tokens at `slots` (T,)."""
    first = slots // block_size * (num_kv_heads * block_size) + slots % block_size
    heads = torch.arange(num_kv_heads, device=slots.device) * block_size
    return (first[:, None] + heads).flatten()


def _store(
    pool: torch.Tensor,
    scales: torch.Tensor | None,
    x: torch.Tensor,
    rows: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    if scales is None:
        _copy_rows(pool, rows, x)
        return codes_in(x, dtype)
    codes, scale = quantize_heads(x, pool.dtype)
    _copy_rows(pool, rows, codes)
    scales.view(-1).index_copy_(0, rows, scale.flatten())
    return _values(codes, scale, dtype)


def _copy_rows(pool: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> None:
    if pool.dtype.itemsize == 1:  # of float8, which has no indexed copy
        pool, x = pool.view(torch.uint8), x.view(torch.uint8)
    # half the time of an indexed assignment by block and offset
    pool.view(-1, pool.shape[-1]).index_copy_(0, rows, x.reshape(-1, pool.shape[-1]))


def _read(
    pool: torch.Tensor,
    scales: torch.Tensor | None,
    blocks: slice | torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    codes = pool[blocks] if isinstance(blocks, slice) else pool.index_select(0, blocks)
    return codes_in(codes, dtype) if scales is None else _values(codes, scales[blocks], dtype)


def _values(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes_in(codes, torch.float32).mul_(scale.unsqueeze(-1)).to(dtype)


def allocate_pool(
    spec: AttentionSpec,
    num_blocks: int,
    block_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    storage: KVStorage | None = None,
) -> KVPool:
    """A zeroed pool for queries in `dtype`, stored as `storage` says or, if None, in `dtype`.

    Zeros matter: unwritten slots have weight 0, and 0 * NaN is not 0.
    """
    storage = storage or KVStorage(dtype=dtype)
    rows = (len(spec.windows), num_blocks, spec.num_kv_heads, block_size)
    k, v = (_zeros((*rows, spec.head_dim), storage.dtype, device) for _ in "kv")
    if not storage.per_token:
        return KVPool(k, v, dtype, storage)
    k_scale, v_scale = (_zeros(rows, torch.float32, device) for _ in "kv")
    return KVPool(k, v, dtype, storage, k_scale, v_scale)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Unlike torch.zeros, numpy.zeros takes no memory before a block is first written.
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


def affordable_blocks(block_bytes: int, device: torch.device, *, wanted: int) -> int:
    """`wanted` cache blocks, or as many as fit a fraction of the free memory of `device`."""
    if device.type == "cuda":
        budget = int(torch.cuda.mem_get_info(device)[0] * _GPU_MEMORY_FRACTION)
    else:
        budget = int(psutil.virtual_memory().available * _CPU_MEMORY_FRACTION)
    if budget < block_bytes:
        raise ValueError(
            f"no memory for the cache: a block takes {block_bytes} bytes, {budget} are left for it"
        )
    return min(wanted, budget // block_bytes)


def _scale_heads(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`x` (T, num_heads, head_dim) times the `scale` (num_kv_heads, 1) of the head it reads."""
    by_kv_head = x.view(len(x), len(scale), -1, x.shape[2])  # (T, num_kv_heads, group, head_dim)
    return (by_kv_head * scale[:, None]).to(x.dtype).view(x.shape)
