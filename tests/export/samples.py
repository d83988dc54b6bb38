"""Quantized Linears and a packed checkpoint for the tests of `export`.

Rounding is plain min-max, written here and not taken from the methods: a format must not depend on
how its codes came about.
"""

import json
from pathlib import Path

import pytest
import torch

from compress.artifacts import QuantizedLinear
from compress.export.compressed_tensors import pack_linear, quantization_config
from compress.export.verify import VerifyReport
from compress.export.writer import copy_side_files, write_json, write_safetensors
from compress.models.checkpoint import open_checkpoint
from compress.scheme import (
    PER_CHANNEL,
    QuantScheme,
    WeightScheme,
    code_range,
    group_width,
    round_to_codes,
)

SCHEMES = [
    pytest.param(WeightScheme(bits=4, group_size=32), id="w4-g32-sym"),
    pytest.param(WeightScheme(bits=4, group_size=32, symmetric=False), id="w4-g32-asym"),
    pytest.param(WeightScheme(bits=3, group_size=16, symmetric=False), id="w3-g16-asym"),
    pytest.param(WeightScheme(bits=2, group_size=PER_CHANNEL), id="w2-channel-sym"),
    pytest.param(WeightScheme(bits=8, group_size=PER_CHANNEL, symmetric=False), id="w8-channel"),
]
LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def quantize_min_max(
    weight: torch.Tensor, scheme: WeightScheme, dtype: torch.dtype = torch.float32
) -> QuantizedLinear:
    """Round `weight` (out, in) to nearest with scales of `dtype` from each group's extremes."""
    low, high = code_range(scheme.bits)
    width = group_width(scheme, weight.shape[1])
    grouped = weight.float().view(weight.shape[0], -1, width)
    zero_point = None
    if scheme.symmetric:
        scale = (grouped.abs().amax(-1) / ((high - low) / 2)).to(dtype)
    else:
        smallest, largest = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scale = ((largest - smallest) / (high - low)).to(dtype)
        zero_point = torch.round(low - smallest / scale.float()).clamp(low, high).to(torch.int8)
    codes = round_to_codes(weight, scale, zero_point, scheme.bits)
    return QuantizedLinear(codes=codes, scale=scale, zero_point=zero_point, bits=scheme.bits)


def random_linear(
    scheme: WeightScheme,
    shape: tuple[int, int] = (17, 36),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> QuantizedLinear:
    """A random quantized Linear of `shape` (out, in)."""
    generator = torch.Generator().manual_seed(seed)
    return quantize_min_max(torch.randn(shape, generator=generator), scheme, dtype)


def packed_model(source: Path, folder: Path, scheme: WeightScheme) -> dict[str, QuantizedLinear]:
    """Write `source` to `folder` with every block Linear packed; returns the Linears by name."""
    checkpoint = open_checkpoint(source)
    linears: dict[str, QuantizedLinear] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name in checkpoint.tensors:
        module = name.removesuffix(".weight")
        if module.endswith(LINEARS):
            weight = checkpoint.read(name)
            linears[module] = quantize_min_max(weight, scheme, weight.dtype)
            packed = pack_linear(linears[module])
            tensors |= {f"{module}.{local}": tensor for local, tensor in packed.items()}
        else:
            tensors[name] = checkpoint.read(name)
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    quantization = quantization_config(QuantScheme(weights=scheme), ignore=["lm_head"])
    write_json(folder / "config.json", checkpoint.config | {"quantization_config": quantization})
    copy_side_files(source, folder)
    return linears


def edit_config(folder: Path, **changes: object) -> None:
    """Replace top-level entries of `config.json`; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace or add tensors of `model.safetensors`; None removes one."""
    checkpoint = open_checkpoint(folder)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors} | changes
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_safetensors(folder / "model.safetensors", present)


def failed_checks(report: VerifyReport) -> dict[str, str]:
    """Name -> detail of the checks that failed."""
    return {check.name: check.detail for check in report.checks if not check.ok}
