"""AWQ checkpoints in the GEMM layout: the tensors of a Linear, and the config.

A Linear (out, in) with 4-bit codes and G groups per row is stored transposed, its codes and zero
points unsigned, u = q + 8, eight to an int32 word along out in an interleaved order: nibble i of
word c belongs to column 8c + [0, 2, 4, 6, 1, 3, 5, 7][i].

    qweight  int32    (in, out/8)
    qzeros   int32    (G, out/8)     zero points as they are
    scales   float16  (G, out)

    w = (u - zero) * scale

The format always has zero points; a symmetric Linear is stored with 8 everywhere and reads back as
an asymmetric one whose signed zero points are all 0, the same weights.

`quantization_config` has one scheme for every Linear but the head and those whose name contains an
entry of `modules_to_not_convert`.

Reference: https://github.com/casper-hansen/AutoAWQ, https://github.com/mit-han-lab/llm-awq.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from compress.artifacts import QuantizedLinear
from compress.export.packing import pack_to_int32, unpack_from_int32
from compress.export.patterns import is_embedding, is_head
from compress.export.tensors import (
    SCALE_DTYPES,
    Dtypes,
    Layout,
    check_linear,
    check_tensors,
    to_float16,
)
from compress.scheme import KVCacheScheme, LinearScheme, WeightScheme, group_width

QUANT_METHOD = "awq"
BITS = 4
_WORD = 8  # codes per int32
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_INVERSE = (0, 4, 1, 5, 2, 6, 3, 7)
_ZERO = 8  # unsigned zero point of a symmetric Linear

# Keys of the config that change how tensors are read, with the values that this reader knows.
_READABLE: dict[str, tuple[Any, ...]] = {
    "quant_method": (QUANT_METHOD,),
    "bits": (BITS,),
    "version": ("gemm",),
    "zero_point": (True,),
    "desc_act": (None, False),
    "do_fuse": (None, False),
    "modules_to_fuse": (None,),
}
_ALIASES = {"w_bit": "bits", "q_group_size": "group_size"}
_OTHER_KEYS = {"group_size", "modules_to_not_convert"}
_WITHOUT_EFFECT = {"backend", "format", "exllama_config", "fuse_max_seq_len", "sym"}


def refusal(scheme: LinearScheme, shape: tuple[int, int]) -> str | None:
    """Why a Linear of `shape` (out, in) with `scheme` cannot be stored, None if it can."""
    weights = scheme.weights
    if scheme.activations is not None:
        return "AWQ has no place for quantized activations"
    if weights.type != "int" or weights.bits != BITS:
        return f"AWQ has {BITS}-bit integer weights only, not {weights.label}"
    if shape[0] % _WORD:
        return f"AWQ needs a multiple of {_WORD} outputs, got {shape[0]}"
    try:
        group_width(weights, shape[1])
    except ValueError as error:
        return str(error)
    return None


def layout(out_features: int, in_features: int, scheme: LinearScheme) -> Layout:
    """Local name -> shape of each tensor of a Linear; ValueError if it cannot be stored."""
    if reason := refusal(scheme, (out_features, in_features)):
        raise ValueError(reason)
    num_groups = in_features // group_width(scheme.weights, in_features)
    return {
        "qweight": (in_features, out_features // _WORD),
        "qzeros": (num_groups, out_features // _WORD),
        "scales": (num_groups, out_features),
    }


def dtypes(scheme: LinearScheme) -> Dtypes:
    """Local name -> dtypes that the tensor may have. Only float16 scales are written."""
    return {"qweight": (torch.int32,), "qzeros": (torch.int32,), "scales": SCALE_DTYPES}


def pack(linear: QuantizedLinear, scheme: LinearScheme) -> dict[str, torch.Tensor]:
    """Tensors of `linear` by local name; ValueError for what the format cannot hold exactly."""
    check_linear(linear, scheme)
    out_features, in_features = linear.codes.shape
    if reason := refusal(scheme, (out_features, in_features)):
        raise ValueError(reason)
    scales = to_float16(linear.scale)
    zeros = linear.zero_point
    if zeros is None:
        zeros = torch.zeros_like(scales, dtype=torch.int8)
    return {
        "qweight": pack_to_int32(_reorder(linear.codes.T, _ORDER), BITS, 1),
        "qzeros": pack_to_int32(_reorder(zeros.T, _ORDER), BITS, 1),
        "scales": scales.T.contiguous(),
    }


def unpack(tensors: Mapping[str, torch.Tensor], scheme: LinearScheme) -> QuantizedLinear:
    """Inverse of `pack`; ValueError names a tensor that is missing or does not fit `scheme`."""
    if "qweight" not in tensors:
        raise ValueError("missing qweight")
    in_features, words = tensors["qweight"].shape
    out_features = words * _WORD
    check_tensors(tensors, layout(out_features, in_features, scheme), dtypes(scheme))
    codes = unpack_from_int32(tensors["qweight"], BITS, 1, out_features)
    zeros = unpack_from_int32(tensors["qzeros"], BITS, 1, out_features)
    if scheme.weights.symmetric and bool((zeros != 0).any()):
        raise ValueError(f"qzeros of a symmetric Linear must all be {_ZERO}")
    return QuantizedLinear(
        codes=_reorder(codes, _INVERSE).T.contiguous(),
        scale=tensors["scales"].T.contiguous(),
        zero_point=None if scheme.weights.symmetric else _reorder(zeros, _INVERSE).T.contiguous(),
        bits=BITS,
    )


def is_symmetric(qzeros: torch.Tensor) -> bool:
    """Whether the packed zero points (G, out/8) are those of a symmetric Linear."""
    return bool((unpack_from_int32(qzeros, BITS, 1, qzeros.shape[1] * _WORD) == 0).all())


def quantization_config(
    schemes: Mapping[str, LinearScheme], ignore: Sequence[str], kv_cache: KVCacheScheme | None
) -> dict[str, Any]:
    """The value of `quantization_config`; ValueError if AWQ cannot say what is asked for."""
    if kv_cache is not None:
        raise ValueError("AWQ has no place for KV cache scales (compressed-tensors has)")
    weights = {scheme.weights for scheme in schemes.values()}
    group_sizes = {scheme.group_size for scheme in weights}
    if len(group_sizes) != 1 or any(scheme.bits != BITS for scheme in weights):
        labels = ", ".join(sorted({scheme.label for scheme in schemes.values()})) or "none"
        raise ValueError(f"AWQ has one {BITS}-bit scheme for every Linear, got {labels}")
    # readers take an entry for any part of a name
    for name in schemes:
        if is_embedding(name) or is_head(name):
            raise ValueError(f"{name}: AWQ packs neither embedding nor head")
        if hit := next((entry for entry in ignore if entry in name), None):
            raise ValueError(f"{name} is packed, but the float Linear {hit} is part of its name")
    return {
        "quant_method": QUANT_METHOD,
        "bits": BITS,
        "group_size": group_sizes.pop(),
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": list(ignore),
    }


def read_config(quantization: Mapping[str, Any]) -> Callable[[str], LinearScheme | None]:
    """From `quantization_config`, the function module name -> its scheme, or None if it is float.

    Raises ValueError for a key or a value that is not read here.
    """
    config = {_ALIASES.get(key, key): value for key, value in quantization.items()}
    if isinstance(config.get("version"), str):
        config["version"] = config["version"].lower()
    for key, value in config.items():
        if key in _READABLE and value not in _READABLE[key]:
            raise ValueError(f"quantization_config: {key} {value!r} is not supported in AWQ")
        if key not in (_READABLE.keys() | _OTHER_KEYS | _WITHOUT_EFFECT):
            raise ValueError(f"quantization_config: unknown key {key!r} of AWQ")
    if missing := {"bits", "group_size"} - config.keys():
        raise ValueError(f"quantization_config: AWQ needs {', '.join(sorted(missing))}")
    weights = WeightScheme(bits=BITS, group_size=config["group_size"], symmetric=False)
    scheme = LinearScheme(weights=weights)
    ignored = tuple(config.get("modules_to_not_convert") or ())

    def scheme_for(module_name: str) -> LinearScheme | None:
        if is_embedding(module_name) or is_head(module_name):
            return None
        return None if any(entry in module_name for entry in ignored) else scheme

    return scheme_for


def _reorder(columns: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """`columns` (rows, n) with every eight in `order`."""
    rows, num_columns = columns.shape
    return columns.reshape(rows, num_columns // _WORD, _WORD)[..., list(order)].reshape(rows, -1)
