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

import torch

from compress.kernels.moe_routing import route
from compress.kernels.ops import Ops
from compress.kernels.wna16 import PackedWeight


def moe_mlp(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor | PackedWeight,
    down: torch.Tensor | PackedWeight,
    *,
    top_k: int,
    renormalize: bool,
    ops: Ops,
    activation: str = "silu",
) -> torch.Tensor:
    """Shapes in the module docstring; `activation` as in `gated_mul`. ValueError as the operations
    raise it."""
    weights, ids = ops.topk_softmax(router_logits, top_k, renormalize)
    routing = route(ids, router_logits.shape[1])
    hidden = ops.gated_mul(ops.grouped_matmul(x, gate_up, routing, rows_per_token=1), activation)
    y = ops.grouped_matmul(hidden, down, routing, rows_per_token=top_k)
    return ops.combine(y.view(len(x), top_k, y.shape[1]), weights)
