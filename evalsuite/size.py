"""How large a checkpoint is, counted from its files: bytes, parameters, bits per weight.

Bits per weight are bytes * 8 / parameters with everything that is stored: codes, scales, zero
points, the float embedding, norms, file headers. A parameter is one number of the model as a float
checkpoint would store it; tied weights that are stored once count once. The second figure, over the
quantized Linears alone, is what the scheme costs (4-bit g64 with 16-bit scales: 4.25).

A quantized Linear is one with `weight_packed` and `weight_shape` (int64, [out, in]) beside it.
"""

from typing import Any

from compress.export.compressed_tensors import read_scheme
from compress.models.checkpoint import Checkpoint

_PACKED = ".weight_packed"
_STORAGE = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape")


def checkpoint_size(checkpoint: Checkpoint) -> dict[str, Any]:
    """`bytes` of the weight files, `parameters`, `bits_per_weight`, the same for packed Linears."""
    files = {info.file for info in checkpoint.tensors.values()}
    num_bytes = sum(file.stat().st_size for file in files)
    packed = packed_linears(checkpoint)
    storage = {f"{name}.{local}" for name in packed for local in _STORAGE}
    packed_parameters = sum(_logical_numel(checkpoint, name) for name in packed)
    packed_bytes = sum(info.nbytes for name, info in checkpoint.tensors.items() if name in storage)
    float_parameters = sum(
        info.nbytes // info.dtype.itemsize
        for name, info in checkpoint.tensors.items()
        if name not in storage
    )
    parameters = packed_parameters + float_parameters
    return {
        "bytes": num_bytes,
        "parameters": parameters,
        "bits_per_weight": num_bytes * 8 / parameters,
        "quantized_linears": len(packed),
        "quantized_parameters": packed_parameters,
        "quantized_bits_per_weight": packed_bytes * 8 / packed_parameters if packed else None,
    }


def packed_linears(checkpoint: Checkpoint) -> list[str]:
    """Names of the Linears that are stored as packed codes."""
    return [name.removesuffix(_PACKED) for name in checkpoint.tensors if name.endswith(_PACKED)]


def scheme_label(checkpoint: Checkpoint) -> str:
    """What the weights are, such as `W4A16 g64 sym`, or the dtypes of a float checkpoint."""
    packed = packed_linears(checkpoint)
    if packed:
        scheme_for = read_scheme(checkpoint.config)
        schemes = {scheme for name in packed if (scheme := scheme_for(name)) is not None}
        return ", ".join(sorted(scheme.label for scheme in schemes))
    dtypes = {str(info.dtype).removeprefix("torch.") for info in checkpoint.tensors.values()}
    return f"float ({', '.join(sorted(dtypes))})"


def _logical_numel(checkpoint: Checkpoint, name: str) -> int:
    out_features, in_features = checkpoint.read(f"{name}.weight_shape").tolist()
    return int(out_features * in_features)
