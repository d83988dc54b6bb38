"""What the packers of all formats check before they trust tensors: presence, shape and dtype."""

from collections.abc import Mapping
from math import isinf

import torch

from compress.artifacts import QuantizedLinear
from compress.scheme import LinearScheme

SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

Layout = dict[str, tuple[int, ...]]  # local tensor name -> shape
Dtypes = dict[str, tuple[torch.dtype, ...]]  # local tensor name -> what it may be stored in


def check_tensors(tensors: Mapping[str, torch.Tensor], layout: Layout, dtypes: Dtypes) -> None:
    """Raise ValueError for the first tensor of `layout` that is missing or does not fit."""
    for name, shape in layout.items():
        if name not in tensors:
            raise ValueError(f"missing {name}")
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        if tensor.dtype not in dtypes[name]:
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes[name])
            raise ValueError(f"{name} must be {expected}, got {tensor.dtype}")


def check_linear(linear: QuantizedLinear, scheme: LinearScheme) -> None:
    """Raise ValueError unless `linear` is of the kind that `scheme` names."""
    weights = scheme.weights
    static = scheme.activations is not None and not scheme.activations.dynamic
    facts = {
        "bits": (linear.bits, weights.bits),
        "block_size": (linear.block_size, weights.block_size),
        "float codes": (linear.codes.dtype.is_floating_point, weights.type == "float"),
        "zero points": (linear.zero_point is not None, not weights.symmetric),
        "input_scale": (linear.input_scale is not None, static),
    }
    for what, (found, expected) in facts.items():
        if found != expected:
            raise ValueError(f"{what}: the Linear has {found}, {scheme.label} needs {expected}")


def to_float16(scale: torch.Tensor) -> torch.Tensor:
    """`scale` in float16, which must hold every value exactly: the codes were rounded with them.

    Raises ValueError that says which value does not fit and why.
    """
    half = scale.to(torch.float16)
    # a zero or an infinity is what an earlier cast to float16 left of a value that did not fit
    lost = ~half.isfinite() | (half == 0) | (half.double() != scale.double())
    if not lost.any():
        return half
    row, group = lost.nonzero()[0].tolist()
    value, stored = float(scale[row, group]), float(half[row, group])
    problem = "underflows" if stored == 0 else "overflows" if isinf(stored) else "is not exact in"
    raise ValueError(
        f"scale {value:.6g} of row {row}, group {group} {problem} float16"
        " (quantize with `--set dtype=float16`, or keep compressed-tensors)"
    )
