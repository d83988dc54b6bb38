"""Causal attention with a soft cap on its scores, tile by tile of queries, in plain torch.

    y = softmax(c tanh(q k^T scale / c)) v        over the keys that a query sees

N sequences, H key/value heads, G query heads for each, Q query rows, L keys, D head_dim. The
queries are the last Q of L positions. Only the scores of one tile of queries are in memory, in
fp32; keys that no query of the tile sees are not read.

Gemma Team, Gemma 2: Improving Open Language Models at a Practical Size, arXiv:2408.00118.
"""

import torch

_SCORES_BYTES = 16 * 2**20  # of one tile


def capped_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    soft_cap: float,
    window: int,
) -> torch.Tensor:
    """q (N, H * G, Q, D), k and v (N, H, L, D) in one dtype -> (N, H * G, Q, D) in that dtype.

    A query sees itself and earlier keys, the last `window` of them unless that is 0.
    """
    count, num_heads, query_len, head_dim = q.shape
    num_kv_heads, context_len = k.shape[1:3]
    offset = context_len - query_len
    group = num_heads // num_kv_heads
    rows = max(1, _SCORES_BYTES // (4 * count * num_heads * context_len))
    out = torch.empty_like(q)
    for start in range(0, query_len, rows):
        stop = min(start + rows, query_len)
        first = max(0, offset + start - window + 1) if window else 0
        seen = slice(first, offset + stop)
        tile = q[:, :, start:stop].reshape(count, num_kv_heads, -1, head_dim)
        keys = k[:, :, seen].transpose(2, 3)
        if q.dtype == torch.float16:  # the unscaled product can exceed its range
            tile, keys = tile.float(), keys.float()
        scores = torch.matmul(tile, keys).float()
        scores = scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap)
        hidden = _hidden(offset + start, offset + stop, first, window, q.device)
        by_row = scores.view(count, num_kv_heads, group, stop - start, -1)
        by_row.masked_fill_(hidden, float("-inf"))
        probs = scores.softmax(dim=-1).to(q.dtype)
        attended = torch.matmul(probs, v[:, :, seen])
        out[:, :, start:stop] = attended.view(count, num_heads, stop - start, head_dim)
    return out


def _hidden(start: int, stop: int, first: int, window: int, device: torch.device) -> torch.Tensor:
    """(stop - start, stop - first) bool: True where the query at a position does not see a key."""
    query = torch.arange(start, stop, device=device)[:, None]
    key = torch.arange(first, stop, device=device)
    hidden = key > query
    return hidden | (query - key >= window) if window else hidden
