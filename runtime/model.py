"""One decoder for every supported family: Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma 2, Gemma 3.

    x = embedding[token]                                        (times sqrt(H) in Gemma)
    for each layer:   x += o_proj(attention(rope(norm_qk(qkv(rms_norm(x))))))
                      x += down_proj(act(gate) * up),  gate, up = gate_up(rms_norm(x))
    hidden = rms_norm(x),   logits = head(hidden)

Rows are tokens of any number of sequences; all that ties rows together is in the attention
backend. T rows, H hidden_size, V vocab_size. What families differ in is data: a bias inside a
Linear, a norm or None (of queries and keys, of what attention and the MLP add to x), a window and a
rope per layer, soft caps that are 0 where there are none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from compress.kernels.ops import Ops
from compress.models.checkpoint import Checkpoint
from compress.runtime.attention.base import AttentionBackend, AttentionSpec
from compress.runtime.attention.pool import KVScales
from compress.runtime.batch import Batch
from compress.runtime.config import DecoderConfig
from compress.runtime.embedding import Embedding

Linear = Callable[[torch.Tensor], torch.Tensor]  # (T, in) -> (T, out)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderLayer:
    """Weights of one layer. `qkv` gives queries, keys and values side by side, `gate_up` likewise.

    Norm weights are (H,), or (head_dim,) for `q_norm` and `k_norm`. `post_attention_norm` is that
    of the MLP's input; `attention_output_norm` and `mlp_output_norm` (Gemma) are those of what is
    added to the residual stream.
    """

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    attention_output_norm: torch.Tensor | None = None
    mlp_output_norm: torch.Tensor | None = None


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
    inv_freq: torch.Tensor  # (ropes, R / 2) fp32: one row for each of `config.ropes`
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
        ropes = self._cos_sin(batch.positions)
        x = self.embedding(batch.token_ids)
        if self.config.family.scaled_embedding:  # by a factor rounded as x is: so it was trained
            x = x * float(torch.tensor(self.config.hidden_size**0.5, dtype=x.dtype))
        normed = self._norm(x, self.layers[0].input_norm)
        for i, layer in enumerate(self.layers):
            q, k, v = self._heads(layer, normed)
            q, k = self.ops.rotary(q, k, *ropes[self.config.rope_of[i]])
            attended = layer.o(attention.forward(q, k, v, i).flatten(1))
            if layer.attention_output_norm is not None:
                attended = self._norm(attended, layer.attention_output_norm)
            normed, x = self._add_norm(attended, x, layer.post_attention_norm)
            fed = layer.down(self.ops.gated_mul(layer.gate_up(normed), self.config.activation))
            if layer.mlp_output_norm is not None:
                fed = self._norm(fed, layer.mlp_output_norm)
            is_last = i == len(self.layers) - 1
            following = self.final_norm if is_last else self.layers[i + 1].input_norm
            normed, x = self._add_norm(fed, x, following)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (R, V) fp32 of hidden states (R, H)."""
        logits, cap = self.head(hidden).float(), self.config.logit_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _cos_sin(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tables (T, R / 2) fp32 of each rope, for positions (T,)."""
        angles = positions.float()[:, None] * self.inv_freq[:, None]  # (ropes, T, R / 2)
        tables = []
        for rope, cos, sin in zip(self.config.ropes, angles.cos(), angles.sin(), strict=True):
            tables.append((cos, sin) if rope.scale == 1 else (cos * rope.scale, sin * rope.scale))
        return tables

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        offset = bool(self.config.family.norm_offset)
        return self.ops.rms_norm(x, weight, self.config.rms_norm_eps, unit_offset=offset)

    def _add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, sum), each (T, H)."""
        offset = bool(self.config.family.norm_offset)
        return self.ops.add_rms_norm(
            x, residual, weight, self.config.rms_norm_eps, unit_offset=offset
        )

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
        return self._norm(rows, weight).view(x.shape)


def attention_spec(config: DecoderConfig) -> AttentionSpec:
    """The part of the config that attention needs."""
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        windows=config.windows,
        scale_override=config.attention_scale,
        soft_cap=config.attention_soft_cap,
    )
