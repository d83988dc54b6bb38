"""The MLP of a mixture of experts, composed of a backend's operations.

Shapes (T tokens, H hidden, I intermediate, E experts):
  x              (T, H)     contiguous
  router_logits  (T, E)
  gate_up        (E, 2I, H) gate in the first I rows, up in the last I; dense or packed
  down           (E, H, I)  dense or packed
  y              (T, H)     dtype of x, contiguous
Mathematics: y[t] = sum over the top k experts e of weight[t, e] * down[e] (silu(g) * u), with
[g, u] = gate_up[e] x[t]; the experts of a token in the order of their weights.

Jiang et al., Mixtral of Experts, arXiv:2401.04088, section 2.1.
"""

from typing import Any

import torch

from compress.kernels.moe_routing import route
from compress.kernels.wna16 import PackedWeight


def moe_mlp(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor | PackedWeight,
    down: torch.Tensor | PackedWeight,
    *,
    top_k: int,
    renormalize: bool,
    ops: Any,
) -> torch.Tensor:
    """Shapes in the module docstring; `ops` has the functions `topk_softmax`, `grouped_matmul`,
    `silu_mul` and `combine` of one backend. ValueError as they raise it."""
    weights, ids = ops.topk_softmax(router_logits, top_k, renormalize)
    routing = route(ids, router_logits.shape[1])
    hidden = ops.silu_mul(ops.grouped_matmul(x, gate_up, routing, rows_per_token=1))
    y = ops.grouped_matmul(hidden, down, routing, rows_per_token=top_k)
    out: torch.Tensor = ops.combine(y.view(len(x), top_k, y.shape[1]), weights)
    return out
