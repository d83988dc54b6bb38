"""Quantized Linears and a packed checkpoint for the tests of `export`.

Rounding is plain min-max, written here and not taken from the methods: a format must not depend on
how its codes came about.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compress.artifacts import QuantizedLinear
from compress.export.formats import FORMATS, pack_linear, write_config
from compress.export.kv_scales import pack_kv_scales
from compress.export.verify import VerifyReport
from compress.export.writer import copy_side_files, write_safetensors
from compress.models.checkpoint import open_checkpoint
from compress.scheme import (
    FLOAT8_MAX,
    PER_CHANNEL,
    ActivationScheme,
    KVCacheScheme,
    LinearScheme,
    WeightScheme,
    code_range,
    group_width,
    round_to_codes,
    round_to_float8,
)

SCHEMES = [
    pytest.param(WeightScheme(bits=4, group_size=32), id="w4-g32-sym"),
    pytest.param(WeightScheme(bits=4, group_size=32, symmetric=False), id="w4-g32-asym"),
    pytest.param(WeightScheme(bits=3, group_size=16, symmetric=False), id="w3-g16-asym"),
    pytest.param(WeightScheme(bits=2, group_size=PER_CHANNEL), id="w2-channel-sym"),
    pytest.param(WeightScheme(bits=8, group_size=PER_CHANNEL, symmetric=False), id="w8-channel"),
]
W8A8 = LinearScheme(
    weights=WeightScheme(bits=8, group_size=PER_CHANNEL), activations=ActivationScheme()
)
FP8 = LinearScheme(
    weights=WeightScheme(type="float", bits=8, group_size=PER_CHANNEL),
    activations=ActivationScheme(type="float"),
)
LINEARS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
FUSED_LINEARS = ("self_attn.qkv_proj", "mlp.gate_up_proj")  # of Phi-3


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
    scale = torch.where(scale == 0, 1, scale)  # the embedding of a padding token is all zero
    codes = round_to_codes(weight, scale, zero_point, scheme.bits)
    return QuantizedLinear(codes=codes, scale=scale, zero_point=zero_point, bits=scheme.bits)


def quantize_float8(
    weight: torch.Tensor, scheme: WeightScheme, dtype: torch.dtype = torch.float32
) -> QuantizedLinear:
    """Round `weight` (out, in) to float8 with scales of `dtype` per row or per block."""
    size = scheme.block_size
    if size is None:
        largest = weight.abs().amax(1, keepdim=True)
    else:
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -columns % size, 0, -rows % size)).abs()
        largest = padded.unflatten(0, (-1, size)).unflatten(2, (-1, size)).amax((1, 3))
    scale = (largest.float() / FLOAT8_MAX).to(dtype)
    codes = round_to_float8(weight.float(), scale, size)
    return QuantizedLinear(codes=codes, scale=scale, zero_point=None, bits=8, block_size=size)


def quantize(
    weight: torch.Tensor, scheme: LinearScheme, dtype: torch.dtype = torch.float32
) -> QuantizedLinear:
    """Round `weight` (out, in) as `scheme` says; a static input scale is 0.02."""
    method = quantize_float8 if scheme.weights.type == "float" else quantize_min_max
    linear = method(weight, scheme.weights, dtype)
    if scheme.activations is not None and not scheme.activations.dynamic:
        linear = replace(linear, input_scale=torch.tensor([0.02]))
    return linear


def random_linear(
    scheme: WeightScheme | LinearScheme,
    shape: tuple[int, int] = (17, 36),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> QuantizedLinear:
    """A random quantized Linear of `shape` (out, in)."""
    generator = torch.Generator().manual_seed(seed)
    full = LinearScheme(weights=scheme) if isinstance(scheme, WeightScheme) else scheme
    return quantize(torch.randn(shape, generator=generator), full, dtype)


def packed_model(
    source: Path,
    folder: Path,
    scheme: WeightScheme | LinearScheme | Callable[[str], LinearScheme | None],
    format_name: str = "compressed-tensors",
    kv_cache: KVCacheScheme | None = None,
) -> dict[str, QuantizedLinear]:
    """Write `source` to `folder`, packed; returns the packed Linears by name.

    `scheme` is that of every block Linear, or a function of the name (None: float).
    """
    if isinstance(scheme, WeightScheme):
        scheme = LinearScheme(weights=scheme)
    checkpoint, format = open_checkpoint(source), FORMATS[format_name]
    linears: dict[str, QuantizedLinear] = {}
    schemes: dict[str, LinearScheme] = {}
    tensors: dict[str, torch.Tensor] = {}
    ignore = ["lm_head"]
    for name in checkpoint.tensors:
        module = name.removesuffix(".weight")
        if isinstance(scheme, LinearScheme):
            chosen = scheme if module.endswith(LINEARS + FUSED_LINEARS) else None
        else:
            chosen = scheme(module)
        weight = checkpoint.read(name)
        if chosen is None:
            tensors[name] = weight
            ignore += [module] if module.endswith(LINEARS + FUSED_LINEARS) else []
        else:
            schemes[module] = chosen
            linears[module] = quantize(weight, chosen, format.scale_dtype or weight.dtype)
            tensors |= pack_linear(module, linears[module], chosen, format)
    if kv_cache is not None:
        heads = checkpoint.config["num_key_value_heads"] if kv_cache.strategy == "head" else 1
        for block in range(checkpoint.config["num_hidden_layers"]):
            scales = torch.arange(1, heads + 1) / (10 + block)
            for local, tensor in pack_kv_scales(scales, scales / 2, kv_cache).items():
                tensors[f"model.layers.{block}.self_attn.{local}"] = tensor
    folder.mkdir()
    write_safetensors(folder / "model.safetensors", tensors)
    ignore = [name for name in ignore if name not in schemes]
    quantization = format.config(schemes, ignore, kv_cache)
    write_config(folder, checkpoint.config | {"quantization_config": quantization})
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
