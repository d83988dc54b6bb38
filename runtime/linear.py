"""The one place that decides how a Linear is computed, once, when its weight is loaded.

| weight       | kernels, device, dtype      | implementation                                    |
|--------------|-----------------------------|---------------------------------------------------|
| float        | any, CPU, fp32 or bfloat16  | `PrepackedLinear` if the CPU has it               |
| float        | otherwise                   | `PlainLinear`                                     |
| 4-bit packed | triton                      | `PackedLinear`                                    |
| 4-bit packed | torch, CPU, bfloat16        | `Int4Linear`: the int4 product up to 6 rows, more |
|              |                             | are computed as float with the dequantized weight |
| packed       | otherwise                   | dequantized, then as float                        |

Speed on CPUs is bought with memory: `PrepackedLinear` keeps the weight in the layout that oneDNN
multiplies fastest and, for bfloat16, also row-major, which is faster for a single row; `Int4Linear`
keeps the prepacked weight beside its 4-bit codes, because the int4 product is bound by arithmetic
and loses to the float product from about 7 rows on.

T rows, K in_features, N out_features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from compress.artifacts import QuantizedLinear
from compress.export.packing import pack_to_int32
from compress.kernels.ops import Ops
from compress.kernels.w4a16 import Int4Cpu, pack_int4_cpu, w4a16_cpu
from compress.runtime.model import Linear
from compress.scheme import dequantize

Weight = torch.Tensor | QuantizedLinear  # float (N, K), or codes (N, K) with scales

_INT4_MAX_ROWS = 6
_INT4_GROUP_MULTIPLE = 32  # of the CPU product
_INT4_OUT_MULTIPLE = 16
_WORD = 8  # 4-bit codes per int32
_TYPICAL_PREFILL_ROWS = 512  # with this hint oneDNN's layout is best for many rows, equal for few
_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlainLinear:
    """x W^T + b with the weight (N, K) as it is."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class PrepackedLinear:
    """x W^T + b on a CPU through oneDNN, with the weight laid out for it in advance."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, few_rows: bool = True
    ) -> None:
        self._prepacked = torch.ops.mkldnn._reorder_linear_weight(
            weight.contiguous(), _TYPICAL_PREFILL_ROWS
        )
        keeps_both = few_rows and weight.dtype == torch.bfloat16
        self._row_major = weight if keeps_both else None
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._row_major is not None and len(x) == 1:
            return _gemv(x, self._row_major, self._bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._prepacked, self._bias, "none", [], ""
        )
        return y


class Int4Linear:
    """x W^T + b on a CPU in bfloat16 with 4-bit groups: int4 product for few rows."""

    def __init__(self, linear: QuantizedLinear, bias: torch.Tensor | None) -> None:
        self._packed: Int4Cpu = pack_int4_cpu(linear)
        dense = dequantize(linear, torch.bfloat16)
        self._dense = _float_linear([dense], bias, _CPU, few_rows=False)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > _INT4_MAX_ROWS:
            return self._dense(x)
        y = w4a16_cpu(x, self._packed)
        return y if self._bias is None else y.add_(self._bias)


class PackedLinear:
    """x W^T + b with 4-bit groups that are unpacked inside the product, `ops.w4a16`."""

    def __init__(
        self,
        linear: QuantizedLinear,
        bias: torch.Tensor | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
    ) -> None:
        self._words = pack_to_int32(linear.codes, linear.bits, 1).to(device)
        scale = linear.scale.to(device=device, dtype=dtype)
        self._scale = scale.t().contiguous().t()  # stored (G, N): read coalesced
        self._zero_point = None if linear.zero_point is None else linear.zero_point.to(device)
        self._bias = bias
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._ops.w4a16(x, self._words, self._scale, self._zero_point)
        return y if self._bias is None else y.add_(self._bias)


def make_linear(
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
) -> Linear:
    """One Linear that gives the outputs of `weights` side by side: (T, K) -> (T, sum of N).

    The weights share their input. Fused into a single product where all are float, or packed in one
    way; otherwise every part is made alone and their outputs are concatenated.
    """
    bias = _join_biases(weights, biases, dtype, device)
    if all(isinstance(weight, torch.Tensor) for weight in weights):
        return _float_linear([_dense(w, dtype, device) for w in weights], bias, device)
    fused = _fuse_packed(weights)
    if fused is not None:
        return _packed_linear(fused, bias, dtype=dtype, device=device, ops=ops)
    parts = [
        make_linear([weight], [part_bias], dtype=dtype, device=device, ops=ops)
        for weight, part_bias in zip(weights, biases, strict=True)
    ]
    return lambda x: torch.cat([part(x) for part in parts], dim=-1)


def _packed_linear(
    linear: QuantizedLinear,
    bias: torch.Tensor | None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
) -> Linear:
    out_features = linear.codes.shape[0]
    if linear.bits == 4 and ops.backend == "triton" and linear.group_size % _WORD == 0:
        return PackedLinear(linear, bias, dtype=dtype, device=device, ops=ops)
    is_cpu_int4 = (
        linear.bits == 4
        and ops.backend == "torch"
        and device.type == "cpu"
        and dtype == torch.bfloat16
        and linear.group_size % _INT4_GROUP_MULTIPLE == 0
        and out_features % _INT4_OUT_MULTIPLE == 0
    )
    if is_cpu_int4:
        return Int4Linear(linear, bias)
    return _float_linear([_dense(linear, dtype, device)], bias, device)


def _float_linear(
    parts: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    device: torch.device,
    *,
    few_rows: bool = True,
) -> Linear:
    weight = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    if device.type == "cpu" and _can_prepack(weight.dtype):
        return PrepackedLinear(weight, bias, few_rows=few_rows)
    return PlainLinear(weight=weight, bias=bias)


def _can_prepack(dtype: torch.dtype) -> bool:
    """Whether this CPU has a oneDNN product with prepacked weights for `dtype`."""
    if not torch._C._has_mkldnn:
        return False
    has_bfloat16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16)


def _fuse_packed(weights: Sequence[Weight]) -> QuantizedLinear | None:
    """The weights stacked along N, or None if they are not packed alike."""
    packed = [weight for weight in weights if isinstance(weight, QuantizedLinear)]
    if len(packed) < len(weights):
        return None
    kinds = {(w.bits, w.group_size, w.scale.dtype, w.zero_point is None) for w in packed}
    if len(kinds) > 1:
        return None
    zero_points = [w.zero_point for w in packed if w.zero_point is not None]
    return QuantizedLinear(
        codes=torch.cat([w.codes for w in packed]),
        scale=torch.cat([w.scale for w in packed]),
        zero_point=torch.cat(zero_points) if zero_points else None,
        bits=packed[0].bits,
    )


def _dense(weight: Weight, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    dense = dequantize(weight, dtype) if isinstance(weight, QuantizedLinear) else weight
    return dense.to(device=device, dtype=dtype)


def _join_biases(
    weights: Sequence[Weight],
    biases: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """Biases side by side, zeros for a part that has none; None if no part has one."""
    if all(bias is None for bias in biases):
        return None
    parts = []
    for weight, bias in zip(weights, biases, strict=True):
        rows = len(weight) if isinstance(weight, torch.Tensor) else len(weight.codes)
        parts.append(torch.zeros(rows) if bias is None else bias)
    return torch.cat([part.to(device=device, dtype=dtype) for part in parts])


def _gemv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """F.linear of one bfloat16 row, kept away from oneDNN.

    For a single row torch's own matrix-vector product reads the weight about 1.4 times faster than
    the oneDNN product that `F.linear` would choose; the only way to reach it is the global switch.
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return F.linear(x, weight, bias)
    finally:
        torch._C._set_mkldnn_enabled(enabled)
