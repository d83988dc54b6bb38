"""What `paged_attention` is timed on: the attention of an 8B Llama, against SDPA on dense tensors.

The inputs of a case are those of `paged_attention`, the same keys and values dense, (S, Hk, L, D),
and the mask that plain torch needs, (S, 1, Q, L) bool or None.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from compress.kernels.jit import BenchCase
from compress.kernels.kv_codes import quantize_heads

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 32, 8, 128, 64
_SCALE = _HEAD_DIM**-0.5


class _Shape(NamedTuple):
    """`batch` sequences of `context` tokens, the last `query` of which are new."""

    batch: int
    query: int
    context: int
    tree: bool = False
    codes: torch.dtype | None = None


def attention_bench(paged_attention: Callable[..., torch.Tensor]) -> list[BenchCase]:
    """Decoding, a prompt, and the verification of a tree of drafts."""
    shapes = {
        "decode 64 x 4096": (_Shape(64, 1, 4096), "memory", 0.85),
        "decode 64 x 4096, int8": (_Shape(64, 1, 4096, codes=torch.int8), "memory", None),
        "decode 1 x 32768": (_Shape(1, 1, 32768), "memory", None),
        "prompt 8192": (_Shape(1, 8192, 8192), "matrix", 0.65),
        "verify trees of 16, 16 x 4096": (_Shape(16, 16, 4096, tree=True), "memory", None),
    }

    def fused(*inputs: Any) -> torch.Tensor:
        *args, k_scale, v_scale, tree, _k, _v, _mask = inputs
        longest = len(args[0]) // len(args[4])
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        return paged_attention(*args, scale=_SCALE, max_query_len=longest, tree_mask=tree, **scales)

    cases = []
    for label, (shape, ceiling, goal) in shapes.items():
        num_pairs = shape.batch * shape.query * shape.context
        if shape.query == shape.context:
            num_pairs = shape.batch * shape.query * (shape.query + 1) // 2
        num_keys = shape.batch * shape.context * _KV_HEADS
        rows = shape.batch * shape.query * _HEADS
        per_key = 2 * (_HEAD_DIM + 4) if shape.codes else 4 * _HEAD_DIM
        cases.append(
            BenchCase(
                label=label,
                make=partial(_make, shape),
                triton=fused,
                plain=_plain,
                exact=_exact,
                num_bytes=num_keys * per_key + 4 * rows * _HEAD_DIM,
                num_flops=4 * num_pairs * _HEADS * _HEAD_DIM,
                ceiling=ceiling,  # type: ignore[arg-type]
                goal=goal,
            )
        )
    return cases


def _make(shape: _Shape, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    batch, query, context = shape[:3]
    num_blocks = context // _BLOCK_SIZE
    tables = torch.randperm(batch * num_blocks, device=device).int().view(batch, num_blocks)
    q = torch.randn(batch * query, _HEADS, _HEAD_DIM, device=device, dtype=dtype)
    dense_shape = (batch, _KV_HEADS, context, _HEAD_DIM)
    dense, pools, scales = [], [], []
    for _ in "kv":
        values = torch.randn(dense_shape, device=device, dtype=dtype)
        codes, scale = values, None
        if shape.codes:
            codes, scale = quantize_heads(values.flatten(1, 2), shape.codes)
            values = (codes * scale[..., None]).to(dtype).view(dense_shape)
            scale = _paged(scale.view(*dense_shape[:3], 1), tables).squeeze(-1)
        dense.append(values)
        pools.append(_paged(codes.view(dense_shape), tables))
        scales.append(scale)
    contexts = torch.full((batch,), context, dtype=torch.int32, device=device)
    starts = torch.arange(0, batch * query + 1, query, dtype=torch.int32, device=device)
    tree, mask = None, None
    if shape.tree:
        tree, seen = _tree(query)
        mask = torch.ones(query, context, dtype=torch.bool)
        mask[:, context - query :] = seen
        tree, mask = tree.repeat(batch).to(device), mask.to(device).expand(batch, 1, -1, -1)
    return (q, *pools, tables, contexts, starts, *scales, tree, *dense, mask)


def _paged(x: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """Dense (S, Hk, L, D) as a pool (NB, Hk, BS, D) with these block tables."""
    batch, heads, context, width = x.shape
    blocks = x.view(batch, heads, -1, _BLOCK_SIZE, width).transpose(1, 2)
    pool = x.new_empty(batch * context // _BLOCK_SIZE, heads, _BLOCK_SIZE, width)
    pool[tables.flatten().long()] = blocks.flatten(0, 1)
    return pool


def _tree(query: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of a binary heap, (Q,) int64, and the same as (Q, Q) bool."""
    masks = [1]
    for i in range(1, query):
        masks.append(masks[(i - 1) // 2] | 1 << i)
    seen = [[bool(mask >> j & 1) for j in range(query)] for mask in masks]
    return torch.tensor(masks), torch.tensor(seen)


def _plain(*inputs: Any) -> torch.Tensor:
    k, v, mask = inputs[-3:]
    q = inputs[0].view(len(k), -1, _HEADS, _HEAD_DIM).transpose(1, 2)
    is_causal = mask is None and q.shape[2] > 1
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=_SCALE, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(inputs[0].shape)


def _exact(*inputs: Any) -> torch.Tensor:
    """One head of one sequence at a time, which bounds the memory."""
    k, v, mask = inputs[-3:]
    q = inputs[0].view(len(k), -1, _HEADS, _HEAD_DIM)
    y = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for s in range(len(k)):
        for head in range(_HEADS):
            kv_head = head * _KV_HEADS // _HEADS
            scores = q[s, :, head].double() @ k[s, kv_head].double().T * _SCALE
            seen = torch.ones_like(scores, dtype=torch.bool)
            seen = seen.tril(scores.shape[1] - scores.shape[0]) if mask is None else mask[s, 0]
            scores.masked_fill_(~seen, float("-inf"))
            y[s, :, head] = torch.softmax(scores, dim=-1) @ v[s, kv_head].double()
    return y.view(inputs[0].shape)
