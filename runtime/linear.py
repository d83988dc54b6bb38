"""The one place that decides how a Linear is computed, once, when its weight is loaded.

The first row that fits (`products.py` has the implementations; "int per channel" is symmetric):

| weight             | inputs         | kernels, device, dtype | implementation                    |
|--------------------|----------------|------------------------|-----------------------------------|
| int per channel,   | int8 per token | torch, CPU             | `Int8Linear`: a product of        |
| 2 to 8 bits        | or static      |                        | integers, for any number of rows  |
| int per channel,   | int8 per token | triton                 | `W8A8Linear`: the same            |
| 2 to 8 bits        | or static      |                        |                                   |
| float8 per channel | float8 per     | triton                 | `Float8Linear`: a float8 product  |
|                    | token          |                        | summed in fp32                    |
| float8 in blocks   | float8 per     | triton                 | `Float8Linear`: the same          |
| of 128             | token, groups  |                        |                                   |
|                    | of 128         |                        |                                   |
| 2, 3, 4 or 8 bits, | float          | triton                 | `PackedLinear`                    |
| groups of whole    |                |                        |                                   |
| words              |                |                        |                                   |
| 4-bit groups, 32n  | float          | torch, CPU, bfloat16   | `Int4Linear`: the int4 product up |
|                    |                |                        | to 6 rows, more are computed as   |
|                    |                |                        | float, with the dequantized weight|
| float; all others, | float          | CPU, fp32 or bfloat16  | `PrepackedLinear`, if the CPU has |
| dequantized        |                |                        | it                                |
| float; all others, | float          | otherwise              | `PlainLinear`                     |
| dequantized        |                |                        |                                   |
| any                | quantized in   | any                    | `QuantizedInputs` around one of   |
|                    | another way    |                        | the rows for float inputs         |

`QuantizedInputs` does round its input to the codes that the scheme means, and multiplies what they
stand for in the engine's dtype: CPUs have no float8 product, and none of 8-bit inputs with groups
of weights. Scales belong to a token or are static, so no row depends on its batch; `Int8Linear`
and `W8A8Linear`, whose sums are exact, and `Float8Linear`, which sums in one order, give a row the
same bits in every batch.

If the engine is to be deterministic, every row of the table must say as much: then `Int4Linear` is
not used, which has two ways of computing, nor the faster product of a single row in
`PrepackedLinear`, and `PlainLinear` computes in tiles of one height.

8-bit weights with float inputs are dequantized: torch's own product, `_weight_int8pack_mm`, was no
faster than the prepacked bfloat16 one (1/2/4/8 rows of 576 x 49152 on one core of a Zen 4:
4.0/5.1/6.1/12.3 against 3.5/4.5/3.1/4.1 ms) and reads past the end of rows that are no multiple of
16.

T rows, K in_features, N out_features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from compress.artifacts import QuantizedLinear
from compress.kernels.activations import check_activations
from compress.kernels.ops import Ops
from compress.kernels.quantize_float8 import MAX_WIDTH
from compress.kernels.w8a8 import MAX_IN_FEATURES, has_int8_product, is_int8_per_channel
from compress.kernels.w8a8_float8 import BLOCK
from compress.kernels.wna16 import CODES_PER_WORD
from compress.runtime.model import Linear
from compress.runtime.products import (
    Float8Linear,
    Int4Linear,
    Int8Linear,
    PackedLinear,
    QuantizedInputs,
    W8A8Linear,
    float_linear,
)
from compress.scheme import FLOAT8, ActivationScheme, dequantize

Weight = torch.Tensor | QuantizedLinear  # float (N, K), or codes (N, K) with scales

_INT4_GROUP_MULTIPLE = 32  # of the CPU product
_INT4_OUT_MULTIPLE = 16


@dataclass(frozen=True, slots=True)
class _Place:
    """Where and how Linears are computed."""

    dtype: torch.dtype
    device: torch.device
    ops: Ops
    deterministic: bool


def make_linear(
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    activations: Sequence[ActivationScheme | None] | None = None,
    deterministic: bool = False,
) -> Linear:
    """One Linear that gives the outputs of `weights` side by side: (T, K) -> (T, sum of N).

    The weights share their input; `activations` says for each what it is quantized to (None: it
    stays float); a static one needs a QuantizedLinear with an `input_scale`. Fused into a single
    product where the inputs are quantized alike and all weights are packed in one way, or none has
    a product of its own; otherwise every part is made alone and their outputs are concatenated.
    `deterministic` gives a row the same bits in every batch. Raises ValueError for sizes and scales
    that cannot be.
    """
    schemes = list(activations or [None] * len(weights))
    for weight, scheme in zip(weights, schemes, strict=True):
        if scheme is not None:
            check_activations(scheme, _shape(weight)[1], _input_scale(weight))
    if len({_input_key(w, scheme) for w, scheme in zip(weights, schemes, strict=True)}) == 1:
        bias = _join_biases(weights, biases, dtype, device)
        place = _Place(dtype, device, ops, deterministic)
        fused = _fused_linear(weights, bias, schemes[0], place)
        if fused is not None:
            return fused
    parts = [
        make_linear(
            [weight],
            [bias],
            dtype=dtype,
            device=device,
            ops=ops,
            activations=[scheme],
            deterministic=deterministic,
        )
        for weight, bias, scheme in zip(weights, biases, schemes, strict=True)
    ]
    return lambda x: torch.cat([part(x) for part in parts], dim=-1)


def _fused_linear(
    weights: Sequence[Weight],
    bias: torch.Tensor | None,
    activations: ActivationScheme | None,
    place: _Place,
) -> Linear | None:
    """The weights as one product on one input, or None if they need several.

    They do where some are packed in a way that has a product of its own and others are not, or
    where their blocks do not stack.
    """
    fused = _fuse_packed(weights)
    product = None
    if fused is not None:
        device, ops = place.device, place.ops
        if activations is not None and _has_int8_linear(fused, activations, place):
            if ops.backend == "triton":
                return W8A8Linear(fused, bias, activations, device=device, ops=ops)
            return Int8Linear(fused, bias, activations)
        if activations is not None and _has_float8_linear(fused, activations, place):
            return Float8Linear(fused, bias, activations, device=device, ops=ops)
        product = _packed_linear(fused, bias, place)
    elif any(_has_own_product(weight, activations, place) for weight in weights):
        return None
    if product is None:
        dense = [_dense(weight, place) for weight in weights]
        product = float_linear(
            dense[0] if len(dense) == 1 else torch.cat(dense),
            bias,
            deterministic=place.deterministic,
        )
    if activations is None:
        return product
    scale = None if activations.dynamic else _input_scale(weights[0])
    return QuantizedInputs(
        product=product,
        activations=activations,
        input_scale=None if scale is None else scale.to(place.device, torch.float32),
    )


def _has_int8_linear(linear: QuantizedLinear, activations: ActivationScheme, place: _Place) -> bool:
    return (
        activations.type == "int"
        and activations.group_size is None
        and is_int8_per_channel(linear)
        and linear.codes.shape[1] <= MAX_IN_FEATURES
        and (place.ops.backend == "triton" or (place.device.type == "cpu" and has_int8_product()))
    )


def _has_float8_linear(
    linear: QuantizedLinear, activations: ActivationScheme, place: _Place
) -> bool:
    """Whether weights and inputs are float8 with scales of a kind that the product takes."""
    if place.ops.backend != "triton" or linear.codes.dtype != FLOAT8:
        return False
    if activations.type != "float" or not activations.dynamic:
        return False
    out_features, in_features = linear.codes.shape
    if linear.block_size is not None:
        return linear.block_size == activations.group_size == BLOCK
    return (
        linear.scale.shape == (out_features, 1)
        and activations.group_size is None
        and in_features <= MAX_WIDTH
    )


def _has_own_product(weight: Weight, activations: ActivationScheme | None, place: _Place) -> bool:
    """Whether `weight`, made alone, would be computed from its codes."""
    if isinstance(weight, torch.Tensor):
        return False
    if activations is not None and (
        _has_int8_linear(weight, activations, place)
        or _has_float8_linear(weight, activations, place)
    ):
        return True
    return _packed_kind(weight, place) is not None


def _packed_linear(
    linear: QuantizedLinear, bias: torch.Tensor | None, place: _Place
) -> Linear | None:
    """The product of float inputs with packed weights; None where they are dequantized for it."""
    kind = _packed_kind(linear, place)
    if kind is None:
        return None
    if kind == "packed":
        return PackedLinear(linear, bias, dtype=place.dtype, device=place.device, ops=place.ops)
    dense = float_linear(_dense(linear, place), bias, few_rows=False)
    return Int4Linear(linear, bias, dense)


def _packed_kind(linear: QuantizedLinear, place: _Place) -> Literal["packed", "int4"] | None:
    """Which product reads the codes of `linear` as they are."""
    if linear.codes.dtype != torch.int8:
        return None
    if place.ops.backend == "triton":
        per_word = CODES_PER_WORD.get(linear.bits)
        return "packed" if per_word and linear.group_size % per_word == 0 else None
    is_cpu_int4 = (
        linear.bits == 4
        and not place.deterministic  # many rows would be computed in another way
        and place.device.type == "cpu"
        and place.dtype == torch.bfloat16
        and linear.group_size % _INT4_GROUP_MULTIPLE == 0
        and linear.codes.shape[0] % _INT4_OUT_MULTIPLE == 0
    )
    return "int4" if is_cpu_int4 else None


def _fuse_packed(weights: Sequence[Weight]) -> QuantizedLinear | None:
    """The weights stacked along N, or None if they are not packed alike."""
    packed = [weight for weight in weights if isinstance(weight, QuantizedLinear)]
    if len(packed) < len(weights):
        return None
    kinds = {
        (w.bits, w.group_size, w.block_size, w.scale.dtype, w.codes.dtype, w.zero_point is None)
        for w in packed
    }
    block_size = packed[0].block_size
    is_ragged = block_size is not None and any(len(w.codes) % block_size for w in packed[:-1])
    if len(kinds) > 1 or is_ragged:
        return None
    zero_points = [w.zero_point for w in packed if w.zero_point is not None]
    return QuantizedLinear(
        codes=torch.cat([w.codes for w in packed]),
        scale=torch.cat([w.scale for w in packed]),
        zero_point=torch.cat(zero_points) if zero_points else None,
        bits=packed[0].bits,
        block_size=block_size,
        input_scale=packed[0].input_scale,
    )


def _input_key(weight: Weight, scheme: ActivationScheme | None) -> tuple[object, ...]:
    """Equal for two weights if one quantized input serves both."""
    is_static = scheme is not None and not scheme.dynamic
    scale = _input_scale(weight) if is_static else None
    return scheme, None if scale is None else float(scale)


def _input_scale(weight: Weight) -> torch.Tensor | None:
    return weight.input_scale if isinstance(weight, QuantizedLinear) else None


def _shape(weight: Weight) -> torch.Size:
    return weight.codes.shape if isinstance(weight, QuantizedLinear) else weight.shape


def _dense(weight: Weight, place: _Place) -> torch.Tensor:
    dense = dequantize(weight, place.dtype) if isinstance(weight, QuantizedLinear) else weight
    return dense.to(device=place.device, dtype=place.dtype)


def _join_biases(
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """Biases side by side, zeros for a part that has none; None if no part has one."""
    if all(bias is None for bias in biases):
        return None
    parts = [
        torch.zeros(_shape(weight)[0]) if bias is None else bias
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return torch.cat([part.to(device=device, dtype=dtype) for part in parts])
