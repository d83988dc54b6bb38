"""One decoder for every supported family: Llama, Mistral, Qwen2, Qwen3 (dense).

    x = embedding[token]
    for each layer:   x += o_proj(attention(rope(norm_qk(qkv(rms_norm(x))))))
                      x += down_proj(silu(gate) * up),  gate, up = gate_up(rms_norm(x))
    hidden = rms_norm(x),   logits = head(hidden)

Rows are tokens of any number of sequences; all that ties rows together is in the attention
backend. T rows, H hidden_size, V vocab_size. The biases of Qwen2, the per-head norms of Qwen3 and
the windows of Mistral are data: a bias inside a Linear, a norm or None, a number per layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from compress.kernels.ops import Ops
from compress.models.checkpoint import Checkpoint
from compress.runtime.attention.base import AttentionBackend, AttentionSpec, KVScales
from compress.runtime.batch import Batch
from compress.runtime.config import DecoderConfig
from compress.runtime.embedding import Embedding

Linear = Callable[[torch.Tensor], torch.Tensor]  # (T, in) -> (T, out)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderLayer:
    """Weights of one layer. `qkv` gives queries, keys and values side by side, `gate_up` likewise.

    Norm weights are (H,), or (head_dim,) for `q_norm` and `k_norm`.
    """

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """A loaded model.

    `source` is the checkpoint that the weights came from; `kv_scales` are those that it has for a
    float8 cache, None if it has none.
    """

    config: DecoderConfig
    source: Checkpoint
    ops: Ops
    embedding: Embedding
    layers: Sequence[DecoderLayer]
    final_norm: torch.Tensor
    head: Linear
    inv_freq: torch.Tensor  # (head_dim / 2,) fp32
    kv_scales: KVScales | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.final_norm.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return self.final_norm.dtype

    def forward(self, batch: Batch, attention: AttentionBackend) -> torch.Tensor:
        """Hidden states after the final norm, (T, H): what the head and draft heads read."""
        eps = self.config.rms_norm_eps
        angles = batch.positions.float()[:, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        x = self.embedding(batch.token_ids)
        for i, layer in enumerate(self.layers):
            q, k, v = self._heads(layer, self.ops.rms_norm(x, layer.input_norm, eps))
            q, k = self.ops.rotary(q, k, cos, sin)
            x = x + layer.o(attention.forward(q, k, v, i).flatten(1))
            gate_up = layer.gate_up(self.ops.rms_norm(x, layer.post_attention_norm, eps))
            x = x + layer.down(self.ops.gated_mul(gate_up))
        return self.ops.rms_norm(x, self.final_norm, eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (R, V) fp32 of hidden states (R, H)."""
        return self.head(hidden).float()

    def _heads(
        self, layer: DecoderLayer, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (T, num_heads, D), keys and values (T, num_kv_heads, D), before rotation."""
        config = self.config
        heads = layer.qkv(x).view(len(x), -1, config.head_dim)
        sizes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        q, k, v = heads.split_with_sizes(sizes, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._norm_heads(q, layer.q_norm), self._norm_heads(k, layer.k_norm)
        return q, k, v

    def _norm_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return self.ops.rms_norm(rows, weight, self.config.rms_norm_eps).view(x.shape)


def attention_spec(config: DecoderConfig) -> AttentionSpec:
    """The part of the config that attention needs."""
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        windows=config.windows,
    )
