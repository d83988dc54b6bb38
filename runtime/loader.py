"""From a checkpoint folder to a decoder on a device, one layer in memory at a time.

Reads float checkpoints and packed ones in every format of `export/formats.py`. Every tensor that
the decoder uses must be there with its expected shape; what it does not know how to use is an error
as well, because ignoring, say, an unknown bias would give a plausible wrong model.
"""

from collections.abc import Collection, Sequence

import torch

from compress.artifacts import QuantizedLinear
from compress.export.formats import (
    SchemeResolver,
    format_of,
    read_kv_cache,
    read_linear,
    read_scheme,
)
from compress.export.kv_scales import ATTENTION, read_kv_scales
from compress.kernels.ops import Ops
from compress.models.checkpoint import COMPUTED_SUFFIXES, Checkpoint
from compress.models.family import SharedInput
from compress.runtime.attention.pool import KVScales
from compress.runtime.config import DecoderConfig, decoder_config
from compress.runtime.embedding import make_embedding
from compress.runtime.linear import Weight, make_linear
from compress.runtime.model import Decoder, DecoderLayer, Linear
from compress.scheme import ActivationScheme, LinearScheme

_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_KV_SCALES = ("k_scale", "v_scale", "k_proj.output_scale", "v_proj.output_scale")


def load_decoder(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    max_len: int | None = None,
    deterministic: bool = False,
) -> Decoder:
    """Load the model of `checkpoint` for computing in `dtype`; ValueError names what is wrong.

    `max_len` is the longest sequence that will be computed, see `decoder_config`. `deterministic`
    gives a row the same bits in every batch.
    """
    config = decoder_config(checkpoint.config, max_len=max_len)
    reader = _Reader(
        checkpoint, config, dtype=dtype, device=device, ops=ops, deterministic=deterministic
    )
    family = config.family
    table = reader.embedding()
    layers = [reader.layer(f"{family.blocks}.{i}") for i in range(config.num_layers)]
    decoder = Decoder(
        config=config,
        source=checkpoint,
        ops=ops,
        embedding=make_embedding(table, dtype=dtype, device=device),
        layers=layers,
        final_norm=reader.tensor(f"{family.final_norm}.weight", config.hidden_size),
        head=reader.head(table),
        inv_freq=torch.tensor([rope.inv_freq for rope in config.ropes], device=device),
        kv_scales=reader.kv_scales(),
    )
    reader.check_all_read()
    return decoder


def head_rows(decoder: Decoder, token_ids: torch.Tensor) -> torch.Tensor:
    """Rows (n, H) of the output head of `decoder` for `token_ids` (n,), in its dtype.

    They are read from its checkpoint, for the head itself may quantize what it is given.
    """
    dtype, device = decoder.dtype, decoder.device
    reader = _Reader(decoder.source, decoder.config, dtype=dtype, device=device, ops=decoder.ops)
    rows = make_embedding(reader.head_weight(), dtype=dtype, device=device)
    return rows(token_ids.to(device))


class _Reader:
    """Reads the tensors of one checkpoint, remembering which."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
        deterministic: bool = False,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._dtype, self._device, self._ops = dtype, device, ops
        self._deterministic = deterministic
        self._scheme_for: SchemeResolver = read_scheme(checkpoint.config)
        self._unread = {name for name in checkpoint.tensors if not name.endswith(COMPUTED_SUFFIXES)}

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """A float tensor of `shape` on the device, in the dtype of activations."""
        return self._float(name, *shape).to(device=self._device, dtype=self._dtype)

    def layer(self, prefix: str) -> DecoderLayer:
        """The decoder layer whose tensors are called `prefix`.*"""
        config = self._config
        hidden, head_dim = config.hidden_size, config.head_dim
        q_out, kv_out = config.num_heads * head_dim, config.num_kv_heads * head_dim
        qkv_out = [q_out, kv_out, kv_out]
        family = config.family

        def norm(local: str | None, size: int) -> torch.Tensor | None:
            return None if local is None else self.tensor(f"{prefix}.{local}.weight", size)

        def linear(shared: SharedInput, out: Sequence[int] | None, inputs: int | None) -> Linear:
            return self.linear([f"{prefix}.{name}" for name in shared.linears], out, inputs)

        qkv, o, gate_up, down = family.shared_inputs
        if len(qkv.linears) == 1:
            qkv_out = [sum(qkv_out)]
        input_norm, mlp_norm = norm(qkv.norm, hidden), norm(gate_up.norm, hidden)
        assert input_norm is not None and mlp_norm is not None, "these inputs are normed"
        attention_output, mlp_output = family.output_norms or (None, None)
        q_norm, k_norm = _QK_NORMS if family.qk_norm else (None, None)
        return DecoderLayer(
            input_norm=input_norm,
            qkv=linear(qkv, qkv_out, hidden),
            q_norm=norm(q_norm, head_dim),
            k_norm=norm(k_norm, head_dim),
            o=linear(o, [hidden], q_out),
            attention_output_norm=norm(attention_output, hidden),
            post_attention_norm=mlp_norm,
            gate_up=linear(gate_up, None, hidden),
            down=linear(down, [hidden], None),
            mlp_output_norm=norm(mlp_output, hidden),
        )

    def linear(
        self, names: Sequence[str], out_features: Sequence[int] | None, in_features: int | None
    ) -> Linear:
        """The Linears `names`, which share their input, as one; None leaves a size unchecked."""
        weights, activations = zip(*(self._weight(name) for name in names), strict=True)
        for i, (name, weight) in enumerate(zip(names, weights, strict=True)):
            shape = _shape(weight)
            expected = (
                out_features[i] if out_features else shape[0],
                in_features or shape[1],
            )
            self._check_shape(name, shape, expected)
        return self._make(names, weights, [self._bias(name) for name in names], activations)

    def embedding(self) -> Weight:
        """The table of token embeddings: packed, or float as the decoder computes with it."""
        name, config = self._config.family.embedding, self._config
        weight, activations = self._weight(name)
        if activations is not None:
            raise ValueError(
                f"{self._checkpoint.path}: {name} looks tokens up: it has no inputs"
                f" to quantize, got {activations}"
            )
        self._check_shape(name, _shape(weight), (config.vocab_size, config.hidden_size))
        if isinstance(weight, torch.Tensor):  # converted once: a tied head shares the memory
            return weight.to(device=self._device, dtype=self._dtype)
        return weight

    def head(self, table: Weight) -> Linear:
        """The output projection; if they are tied it is the embedding `table`, codes and all."""
        name = self._config.family.head
        if self.is_head_tied():
            return self._make([name], [table], [None], [None])
        return self.linear([name], [self._config.vocab_size], self._config.hidden_size)

    def head_weight(self) -> Weight:
        """The weight of the output projection."""
        if self.is_head_tied():
            return self.embedding()
        return self._weight(self._config.family.head)[0]

    def is_head_tied(self) -> bool:
        """Whether the head is the embedding: the config says so, and there is none beside it."""
        name = self._config.family.head
        is_stored = any(stored.startswith(f"{name}.") for stored in self._checkpoint.tensors)
        return self._config.tie_word_embeddings and not is_stored

    def kv_scales(self) -> KVScales | None:
        """Scales of a float8 cache, None if the config names none."""
        scheme = read_kv_cache(self._checkpoint.config)
        if scheme is None:
            return None
        num_heads, blocks = self._config.num_kv_heads, self._config.family.blocks
        pairs = []
        for layer in range(self._config.num_layers):
            attention = f"{blocks}.{layer}.{ATTENTION}"
            pairs.append(read_kv_scales(self._checkpoint, attention, scheme, num_heads))
            self._unread -= {f"{attention}.{local}" for local in _KV_SCALES}
        k, v = (
            torch.stack([scale.expand(num_heads) for scale in scales])
            .unsqueeze(-1)
            .to(self._device)
            for scales in zip(*pairs, strict=True)
        )
        return KVScales(k=k, v=v)

    def check_all_read(self) -> None:
        """Raise ValueError if a part of the decoder holds tensors that nothing has used.

        What lies outside it, as a module for multi-token prediction, is another reader's.
        """
        family = self._config.family
        blocks = (f"{family.blocks}.{layer}" for layer in range(self._config.num_layers))
        parts = (*blocks, family.embedding, family.final_norm, family.head)
        names = sorted(
            name for name in self._unread if name.startswith(tuple(f"{p}." for p in parts))
        )
        if names:
            raise ValueError(
                f"{self._checkpoint.path}: {len(names)} tensors have no place in"
                f" {self._config.family.architecture}, such as {names[0]!r}"
            )

    def _weight(self, name: str) -> tuple[Weight, ActivationScheme | None]:
        """The weight of the module `name`, and what its inputs are quantized to."""
        scheme = self._scheme_for(name)
        if scheme is None:
            return self._float(f"{name}.weight"), None
        linear = read_linear(self._checkpoint, name, scheme)
        self._unread -= {f"{name}.{local}" for local in self._read_with(scheme)}
        return linear, scheme.activations

    def _read_with(self, scheme: LinearScheme) -> Collection[str]:
        """Local names of the tensors that a module of `scheme` may have."""
        return format_of(self._checkpoint.config).dtypes(scheme)

    def _make(
        self,
        names: Sequence[str],
        weights: Sequence[Weight],
        biases: Sequence[torch.Tensor | None],
        activations: Sequence[ActivationScheme | None],
    ) -> Linear:
        try:
            return make_linear(
                weights,
                biases,
                dtype=self._dtype,
                device=self._device,
                ops=self._ops,
                activations=activations,
                deterministic=self._deterministic,
            )
        except ValueError as error:
            where = ", ".join(names)
            raise ValueError(f"{self._checkpoint.path}: {where}: {error}") from None

    def _bias(self, name: str) -> torch.Tensor | None:
        stored = f"{name}.bias"
        return self._float(stored) if stored in self._checkpoint.tensors else None

    def _float(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._checkpoint.read(name)
        if shape:
            self._check_shape(name, tuple(tensor.shape), shape)
        if tensor.dtype not in _FLOAT_DTYPES:
            raise ValueError(f"{self._checkpoint.path}: {name} has dtype {tensor.dtype}, not float")
        self._unread.discard(name)
        return tensor

    def _check_shape(self, name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise ValueError(
                f"{self._checkpoint.path}: {name} has shape {shape}, expected {expected}"
            )


def _shape(weight: Weight) -> tuple[int, ...]:
    return tuple(weight.codes.shape if isinstance(weight, QuantizedLinear) else weight.shape)
