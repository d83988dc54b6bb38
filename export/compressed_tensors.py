"""The tensors of compressed-tensors checkpoints. The config is in ct_config.py.

Three layouts, chosen by the scheme of a Linear (out, in) with b bits and G groups per row (G = 1
per channel); all tensors lie under the Linear's name:

    pack-quantized     integer weights, inputs in float
      weight_packed      int32  (out, ceil(in*b/32))   codes, packed along in (see packing.py)
      weight_scale       float  (out, G)
      weight_zero_point  int32  (ceil(out*b/32), G)    asymmetric only, packed along out
      weight_shape       int64  (2,)                   [out, in]; the packing hides it

    int-quantized      integer weights, 8-bit inputs
      weight             int8   (out, in)              signed codes, one a byte whatever b is
      weight_scale       float  (out, G)
      weight_zero_point  int8   (out, G)               asymmetric only
      input_scale        float  (1,)                   static inputs only

    float-quantized    float8 weights, float8 inputs; naive-quantized if the inputs stay float
      weight             float8_e4m3fn  (out, in)
      weight_scale       float  (out, 1), or with B x B blocks (ceil(out/B), ceil(in/B))
      input_scale        float  (1,)                   static inputs only

A symmetric Linear has no `weight_zero_point`: loaders reject the extra tensor.

Reference: https://github.com/vllm-project/compressed-tensors, release 0.20.1.
"""

from collections.abc import Mapping

import torch

from compress.artifacts import QuantizedLinear
from compress.export.packing import num_words, pack_to_int32, unpack_from_int32
from compress.export.tensors import SCALE_DTYPES, Dtypes, Layout, check_linear, check_tensors
from compress.scheme import FLOAT8, LinearScheme, group_width

PACKED, INT, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"


def storage_of(scheme: LinearScheme) -> str:
    """The name of the layout that holds a Linear of `scheme`."""
    if scheme.weights.type == "float":
        return NAIVE if scheme.activations is None else FLOAT
    return PACKED if scheme.activations is None else INT


def refusal(scheme: LinearScheme, shape: tuple[int, int]) -> str | None:
    """Why a Linear of `shape` (out, in) with `scheme` cannot be stored, None if it can."""
    weights, activations = scheme.weights, scheme.activations
    if activations is not None and activations.type != weights.type:
        return f"{weights.type} weights with {activations.type} activations have no layout"
    if activations is not None and activations.group_size and shape[1] % activations.group_size:
        return f"activations.group_size {activations.group_size} does not divide {shape[1]} inputs"
    try:
        layout(*shape, scheme)
    except ValueError as error:
        return str(error)
    return None


def layout(out_features: int, in_features: int, scheme: LinearScheme) -> Layout:
    """Local name -> shape of each tensor of a Linear; ValueError if groups do not divide."""
    weights = scheme.weights
    scales = _scale_shape(out_features, in_features, scheme)
    if storage_of(scheme) == PACKED:
        tensors: Layout = {
            "weight_packed": (out_features, num_words(in_features, weights.bits)),
            "weight_scale": scales,
            "weight_shape": (2,),
        }
        if not weights.symmetric:
            tensors["weight_zero_point"] = (num_words(out_features, weights.bits), scales[1])
        return tensors
    tensors = {"weight": (out_features, in_features), "weight_scale": scales}
    if not weights.symmetric:
        tensors["weight_zero_point"] = scales
    if scheme.activations is not None and not scheme.activations.dynamic:
        tensors["input_scale"] = (1,)
    return tensors


def dtypes(scheme: LinearScheme) -> Dtypes:
    """Local name -> dtypes that the tensor may have."""
    packed = storage_of(scheme) == PACKED
    return {
        "weight_packed": (torch.int32,),
        "weight": (FLOAT8 if scheme.weights.type == "float" else torch.int8,),
        "weight_scale": SCALE_DTYPES,
        "weight_shape": (torch.int64,),
        "weight_zero_point": (torch.int32 if packed else torch.int8,),
        "input_scale": SCALE_DTYPES,
    }


def pack(linear: QuantizedLinear, scheme: LinearScheme) -> dict[str, torch.Tensor]:
    """Tensors of `linear` by local name, shapes as in the module docstring."""
    check_linear(linear, scheme)
    scale = {"weight_scale": linear.scale.contiguous()}
    if storage_of(scheme) == PACKED:
        tensors = {
            "weight_packed": pack_to_int32(linear.codes, linear.bits, 1),
            **scale,
            "weight_shape": torch.tensor(linear.codes.shape, dtype=torch.int64),
        }
        if linear.zero_point is not None:
            tensors["weight_zero_point"] = pack_to_int32(linear.zero_point, linear.bits, 0)
        return tensors
    tensors = {"weight": linear.codes.contiguous(), **scale}
    if linear.zero_point is not None:
        tensors["weight_zero_point"] = linear.zero_point.contiguous()
    if linear.input_scale is not None:
        tensors["input_scale"] = linear.input_scale.reshape(1)
    return tensors


def unpack(tensors: Mapping[str, torch.Tensor], scheme: LinearScheme) -> QuantizedLinear:
    """Inverse of `pack`; ValueError names a tensor that is missing or does not fit `scheme`.

    Tensors under other names (a bias) are not looked at.
    """
    shape = _stored_shape(tensors, scheme)
    if "weight_zero_point" in tensors and scheme.weights.symmetric:
        raise ValueError("weight_zero_point in a symmetric Linear")
    check_tensors(tensors, layout(*shape, scheme), dtypes(scheme))
    bits, zero_point = scheme.weights.bits, tensors.get("weight_zero_point")
    if storage_of(scheme) == PACKED:
        codes = unpack_from_int32(tensors["weight_packed"], bits, 1, shape[1])
        if zero_point is not None:
            zero_point = unpack_from_int32(zero_point, bits, 0, shape[0])
    else:
        codes = tensors["weight"]
    static = scheme.activations is not None and not scheme.activations.dynamic
    return QuantizedLinear(
        codes=codes,
        scale=tensors["weight_scale"],
        zero_point=zero_point,
        bits=bits,
        block_size=scheme.weights.block_size,
        input_scale=tensors["input_scale"].float() if static else None,
    )


def _scale_shape(out_features: int, in_features: int, scheme: LinearScheme) -> tuple[int, int]:
    if (size := scheme.weights.block_size) is not None:
        return -(-out_features // size), -(-in_features // size)
    return out_features, in_features // group_width(scheme.weights, in_features)


def _stored_shape(tensors: Mapping[str, torch.Tensor], scheme: LinearScheme) -> tuple[int, int]:
    """(out, in) as the tensors say it."""
    is_packed = storage_of(scheme) == PACKED
    name = "weight_shape" if is_packed else "weight"
    if name not in tensors:
        raise ValueError(f"missing {name}")
    stored = tensors[name]
    if not is_packed:
        if stored.ndim != 2:
            raise ValueError(f"weight must have two dimensions, got {tuple(stored.shape)}")
        return stored.shape[0], stored.shape[1]
    if stored.dtype != torch.int64 or stored.shape != (2,):
        raise ValueError(f"weight_shape must be int64 (2,), got {stored.dtype} {(*stored.shape,)}")
    out_features, in_features = (int(size) for size in stored)
    return out_features, in_features
