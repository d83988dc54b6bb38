"""The tensors of GPTQ checkpoints, versions 1 and 2. The config is in gptq_config.py.

A Linear (out, in) with b bits (2, 3, 4 or 8) and G groups per row is stored transposed, its codes
and zero points unsigned, u = q + 2^(b-1), as dense bit streams (see packing.py):

    qweight  int32    (in*b/32, out)   codes, packed along in
    qzeros   int32    (G, out*b/32)    zero points, packed along out
    scales   float16  (G, out)
    g_idx    int32    (in,)            group of each input column: i // group_size

    w = (u - zero) * scale

A symmetric Linear has the zero point 2^(b-1) everywhere. Version 2 stores zero points as they are.
Version 1 stores them minus one, which a zero point of 0 does not survive: it would wrap around to
2^b - 1, and readers disagree on what that means. So version 1 is written for symmetric Linears
only, and such a value is an error when read. Groups of consecutive columns only: checkpoints whose
columns were sorted into groups (`desc_act`) are an error.

Reference: https://github.com/IST-DASLab/gptq, https://github.com/ModelCloud/GPTQModel.
"""

from collections.abc import Mapping
from functools import partial

import torch

from compress.artifacts import QuantizedLinear
from compress.export.packing import num_words, pack_to_int32, unpack_from_int32
from compress.export.tensors import (
    SCALE_DTYPES,
    Dtypes,
    Layout,
    check_linear,
    check_tensors,
    to_float16,
)
from compress.scheme import LinearScheme, code_range, group_width

BITS = (2, 3, 4, 8)
MULTIPLE = 32  # of in and out, so that no word straddles


def refusal(scheme: LinearScheme, shape: tuple[int, int], *, version: int) -> str | None:
    """Why a Linear of `shape` (out, in) with `scheme` cannot be stored, None if it can."""
    weights = scheme.weights
    if scheme.activations is not None:
        return "GPTQ has no place for quantized activations"
    if weights.type != "int":
        return "GPTQ has integer weights only"
    if weights.bits not in BITS:
        return f"GPTQ has 2, 3, 4 and 8 bits, not {weights.bits}"
    if version == 1 and not weights.symmetric:
        return "gptq cannot hold every zero point (gptq_v2 can)"
    if any(size % MULTIPLE for size in shape):
        return f"GPTQ needs sizes that are multiples of {MULTIPLE}, got {shape[0]} x {shape[1]}"
    try:
        group_width(weights, shape[1])
    except ValueError as error:
        return str(error)
    return None


def layout(out_features: int, in_features: int, scheme: LinearScheme) -> Layout:
    """Local name -> shape of each tensor of a Linear; ValueError if it cannot be stored."""
    if reason := refusal(scheme, (out_features, in_features), version=2):
        raise ValueError(reason)
    bits, num_groups = scheme.weights.bits, in_features // group_width(scheme.weights, in_features)
    return {
        "qweight": (num_words(in_features, bits), out_features),
        "qzeros": (num_groups, num_words(out_features, bits)),
        "scales": (num_groups, out_features),
        "g_idx": (in_features,),
    }


def dtypes(scheme: LinearScheme) -> Dtypes:
    """Local name -> dtypes that the tensor may have. Only float16 scales are written."""
    words = (torch.int32,)
    return {"qweight": words, "qzeros": words, "scales": SCALE_DTYPES, "g_idx": words}


def pack(linear: QuantizedLinear, scheme: LinearScheme, *, version: int) -> dict[str, torch.Tensor]:
    """Tensors of `linear` by local name; ValueError for what the format cannot hold exactly."""
    check_linear(linear, scheme)
    out_features, in_features = linear.codes.shape
    if reason := refusal(scheme, (out_features, in_features), version=version):
        raise ValueError(reason)
    bits = linear.bits
    scales = to_float16(linear.scale)
    if linear.zero_point is None:
        zeros = torch.full_like(scales, _stored_zero(bits, version), dtype=torch.int32)
    else:
        zeros = linear.zero_point.int() + (1 << (bits - 1))
    columns = torch.arange(in_features, dtype=torch.int32, device=scales.device)
    return {
        "qweight": pack_to_int32(linear.codes.T, bits, 0),
        "qzeros": pack_to_int32(_signed(zeros, bits).T, bits, 1),
        "scales": scales.T.contiguous(),
        "g_idx": columns // linear.group_size,
    }


def unpack(
    tensors: Mapping[str, torch.Tensor], scheme: LinearScheme, *, version: int
) -> QuantizedLinear:
    """Inverse of `pack`; ValueError names a tensor that is missing or does not fit `scheme`."""
    bits = scheme.weights.bits
    if "qweight" not in tensors:
        raise ValueError("missing qweight")
    words, out_features = tensors["qweight"].shape
    in_features = words * 32 // bits
    check_tensors(tensors, layout(out_features, in_features, scheme), dtypes(scheme))
    width = group_width(scheme.weights, in_features)
    if not torch.equal(tensors["g_idx"], torch.arange(in_features, dtype=torch.int32) // width):
        raise ValueError("g_idx: columns sorted into groups (desc_act) are not supported")
    stored = unpack_from_int32(tensors["qzeros"], bits, 1, out_features).T
    zeros = stored.int() + (1 << (bits - 1))
    return QuantizedLinear(
        codes=unpack_from_int32(tensors["qweight"], bits, 0, in_features).T.contiguous(),
        scale=tensors["scales"].T.contiguous(),
        zero_point=_zero_point(zeros, scheme, version),
        bits=bits,
    )


def _zero_point(zeros: torch.Tensor, scheme: LinearScheme, version: int) -> torch.Tensor | None:
    """Signed zero points from the unsigned `zeros` (out, G) as stored; None if symmetric."""
    bits = scheme.weights.bits
    if scheme.weights.symmetric:
        expected = _stored_zero(bits, version)
        if bool((zeros != expected).any()):
            found = int(zeros[zeros != expected][0])
            raise ValueError(
                f"qzeros hold {found}, a symmetric {bits}-bit Linear of GPTQ version {version} has"
                f" {expected} (is checkpoint_format right?)"
            )
        return None
    if version == 1:
        zeros = zeros + 1
        if bool((zeros >= 1 << bits).any()):
            raise ValueError("qzeros hold a zero point that version 1 cannot express")
    return _signed(zeros, bits).contiguous()


def _stored_zero(bits: int, version: int) -> int:
    return (1 << (bits - 1)) - (1 if version == 1 else 0)


def _signed(unsigned: torch.Tensor, bits: int) -> torch.Tensor:
    return (unsigned + code_range(bits)[0]).to(torch.int8)


pack_v1, pack_v2 = partial(pack, version=1), partial(pack, version=2)
unpack_v1, unpack_v2 = partial(unpack, version=1), partial(unpack, version=2)
refusal_v1, refusal_v2 = partial(refusal, version=1), partial(refusal, version=2)
