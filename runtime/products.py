"""The implementations of a Linear. `linear.py` says which one serves which weight.

Speed on CPUs is bought with memory: `PrepackedLinear` keeps the weight in the layout that oneDNN
multiplies fastest and, for bfloat16, also row-major, which is faster for a single row; `Int4Linear`
keeps the prepacked weight beside its 4-bit codes, because the int4 product is bound by arithmetic
and loses to the float product from about 7 rows on.

T rows, K in_features, N out_features. Every class maps x (T, K) to (T, N) in the dtype of x.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from compress.artifacts import QuantizedLinear
from compress.kernels.activations import dynamic_scale, fake_quantize, int8_codes
from compress.kernels.int4_cpu import Int4Cpu, pack_int4_cpu, w4a16_cpu
from compress.kernels.ops import Ops
from compress.kernels.w8a8 import Int8Cpu, pack_int8_cpu, to_uint8, w8a8_cpu
from compress.kernels.wna16 import pack_weight
from compress.scheme import ActivationScheme

Product = Callable[[torch.Tensor], torch.Tensor]

_INT4_MAX_ROWS = 6
_MIN_ROWS = 2  # of oneDNN's products, to be independent of the number of rows
_TILE_ROWS = {"cpu": 16, "cuda": 256}  # of libraries that promise nothing
_TYPICAL_PREFILL_ROWS = 512  # with this hint oneDNN's layout is best for many rows, equal for few


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
    """x W^T + b on a CPU in bfloat16 with 4-bit groups: int4 product for few rows, else `dense`."""

    def __init__(self, linear: QuantizedLinear, bias: torch.Tensor | None, dense: Product) -> None:
        self._packed: Int4Cpu = pack_int4_cpu(linear)
        self._dense = dense
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > _INT4_MAX_ROWS:
            return self._dense(x)
        y = w4a16_cpu(x, self._packed)
        return y if self._bias is None else y.add_(self._bias)


class Int8Linear:
    """x W^T + b on a CPU with x in int8 as well: a product of integers, exact for any rows.

    Scales and bias are applied in fp32, and the result is rounded once.
    """

    def __init__(
        self, linear: QuantizedLinear, bias: torch.Tensor | None, activations: ActivationScheme
    ) -> None:
        self._packed: Int8Cpu = pack_int8_cpu(linear)
        self._bias = None if bias is None else bias.float()
        self._activations = activations
        self._static_scale: torch.Tensor | None = None
        if not activations.dynamic:
            assert linear.input_scale is not None, "a static scheme without input_scale"
            self._static_scale = linear.input_scale.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values = x.float()
        scale = self._static_scale
        if scale is None:
            scale = dynamic_scale(values, self._activations)
        y = w8a8_cpu(to_uint8(int8_codes(values, scale)), self._packed).mul_(scale)
        return (y if self._bias is None else y.add_(self._bias)).to(x.dtype)


class W8A8Linear:
    """x W^T + b with x in int8 as well, `ops.w8a8`: exact for any rows, rounded once."""

    def __init__(
        self,
        linear: QuantizedLinear,
        bias: torch.Tensor | None,
        activations: ActivationScheme,
        *,
        device: torch.device,
        ops: Ops,
    ) -> None:
        self._codes = linear.codes.to(device).contiguous()
        self._scale = linear.scale.to(device, torch.float32).flatten()
        self._bias = None if bias is None else bias.to(device, torch.float32)
        self._static_scale: torch.Tensor | None = None
        if not activations.dynamic:
            assert linear.input_scale is not None, "a static scheme without input_scale"
            self._static_scale = linear.input_scale.to(device, torch.float32)
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._static_scale is None:
            codes, scale = self._ops.quantize_tokens(x)
        else:
            codes = int8_codes(x.float(), self._static_scale).to(torch.int8)
            scale = self._static_scale.expand(len(x)).contiguous()
        return self._ops.w8a8(codes, scale, self._codes, self._scale, self._bias, x.dtype)


class Float8Linear:
    """x W^T + b in float8, `ops.w8a8_float8`: a scale per row of x and of W, or per block of both.

    The scales and the bias are applied in fp32, and the result is rounded once.
    """

    def __init__(
        self,
        linear: QuantizedLinear,
        bias: torch.Tensor | None,
        activations: ActivationScheme,
        *,
        device: torch.device,
        ops: Ops,
    ) -> None:
        scale = linear.scale if linear.block_size is not None else linear.scale.flatten()
        self._codes = linear.codes.to(device).contiguous()
        self._scale = scale.to(device, torch.float32).contiguous()
        self._bias = None if bias is None else bias.to(device, torch.float32)
        self._group_size = activations.group_size
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        codes, scale = self._ops.quantize_float8(x, group_size=self._group_size)
        return self._ops.w8a8_float8(codes, scale, self._codes, self._scale, self._bias, x.dtype)


class PackedLinear:
    """x W^T + b with groups of 2, 3, 4 or 8 bits, unpacked inside the product `ops.wna16`."""

    def __init__(
        self,
        linear: QuantizedLinear,
        bias: torch.Tensor | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        ops: Ops,
    ) -> None:
        self._weight = pack_weight(linear, dtype, device)
        self._bias = bias
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._ops.wna16(x, self._weight)
        return y if self._bias is None else y.add_(self._bias)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedInputs:
    """`product` of x after x was quantized and dequantized. `input_scale` (1,) if it is static."""

    product: Product
    activations: ActivationScheme
    input_scale: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(fake_quantize(x, self.activations, self.input_scale))


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedRows:
    """`product` on tiles of exactly `num_rows` rows, or of at least as many if `at_least`.

    A matrix library chooses by the number of rows how it adds up a product. With one number for all
    a row has the same bits in every batch; the tiles end in rows of zeros.
    """

    product: Product
    num_rows: int
    at_least: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.at_least and len(x) >= self.num_rows:
            return self.product(x)
        num_tiles = -(-len(x) // self.num_rows)
        padded = x.new_zeros(num_tiles * self.num_rows, x.shape[1])
        padded[: len(x)] = x
        tiles = [self.product(tile) for tile in torch.split(padded, self.num_rows)]
        return (tiles[0] if num_tiles == 1 else torch.cat(tiles))[: len(x)]


def float_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    few_rows: bool = True,
    deterministic: bool = False,
) -> Product:
    """x W^T + b with a float weight (N, K); `few_rows` False: it will not be called with one.

    `deterministic` gives a row the same bits in every batch. oneDNN's prepacked products do, except
    that it adds up the product of a single long row in another order.
    """
    device = weight.device.type
    if device == "cpu" and _can_prepack(weight.dtype):
        product = PrepackedLinear(weight, bias, few_rows=few_rows and not deterministic)
        if deterministic:
            return FixedRows(product=product, num_rows=_MIN_ROWS, at_least=True)
        return product
    plain = PlainLinear(weight=weight, bias=bias)
    if deterministic:
        return FixedRows(product=plain, num_rows=_TILE_ROWS[device])
    return plain


def _can_prepack(dtype: torch.dtype) -> bool:
    """Whether this CPU has a oneDNN product with prepacked weights for `dtype`."""
    if not torch._C._has_mkldnn:
        return False
    has_bfloat16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16)


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
