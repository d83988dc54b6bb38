"""The table of checkpoint formats, and what reads a packed module in whatever format it is in.

Every format stores the same triple (codes, scale, zero point) of a Linear; they differ in the names
and layout of the tensors and in the config. A format is a row of functions, no class:

    layout(out, in, scheme)         local tensor name -> shape; ValueError if it cannot be stored
    dtypes(scheme)                  local tensor name -> dtypes that it may be stored in
    pack(linear, scheme)            local tensor name -> tensor
    unpack(tensors, scheme)         the inverse
    refusal(scheme, (out, in))      why it cannot hold such a Linear, or None
    config(schemes, ignore, kv)     the value of `quantization_config`
    read_config(quantization)       its inverse, as a function module name -> scheme or None
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compress.artifacts import QuantizedLinear
from compress.export import awq, compressed_tensors, ct_config, gptq, gptq_config
from compress.export.tensors import Dtypes, Layout
from compress.export.writer import write_json
from compress.lookup import lookup
from compress.models.checkpoint import Checkpoint
from compress.scheme import KVCacheScheme, LinearScheme

SchemeResolver = Callable[[str], LinearScheme | None]


class Format(NamedTuple):
    """One checkpoint format; see the top of this file.

    `scale_dtype` is the one dtype that scales have on disk, None if they have the model's.
    """

    name: str
    layout: Callable[[int, int, LinearScheme], Layout]
    dtypes: Callable[[LinearScheme], Dtypes]
    pack: Callable[[QuantizedLinear, LinearScheme], dict[str, torch.Tensor]]
    unpack: Callable[[Mapping[str, torch.Tensor], LinearScheme], QuantizedLinear]
    refusal: Callable[[LinearScheme, tuple[int, int]], str | None]
    config: Callable[
        [Mapping[str, LinearScheme], Sequence[str], KVCacheScheme | None], dict[str, Any]
    ]
    read_config: Callable[[Mapping[str, Any]], SchemeResolver]
    scale_dtype: torch.dtype | None


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        Format(
            name="compressed-tensors",
            layout=compressed_tensors.layout,
            dtypes=compressed_tensors.dtypes,
            pack=compressed_tensors.pack,
            unpack=compressed_tensors.unpack,
            refusal=compressed_tensors.refusal,
            config=ct_config.quantization_config,
            read_config=ct_config.read_config,
            scale_dtype=None,
        ),
        Format(
            name="gptq",
            layout=gptq.layout,
            dtypes=gptq.dtypes,
            pack=gptq.pack_v1,
            unpack=gptq.unpack_v1,
            refusal=gptq.refusal_v1,
            config=gptq_config.config_v1,
            read_config=gptq_config.read_config,
            scale_dtype=torch.float16,
        ),
        Format(
            name="gptq_v2",
            layout=gptq.layout,
            dtypes=gptq.dtypes,
            pack=gptq.pack_v2,
            unpack=gptq.unpack_v2,
            refusal=gptq.refusal_v2,
            config=gptq_config.config_v2,
            read_config=gptq_config.read_config,
            scale_dtype=torch.float16,
        ),
        Format(
            name="awq",
            layout=awq.layout,
            dtypes=awq.dtypes,
            pack=awq.pack,
            unpack=awq.unpack,
            refusal=awq.refusal,
            config=awq.quantization_config,
            read_config=awq.read_config,
            scale_dtype=torch.float16,
        ),
    )
}

# Tensors that only packed modules have, and the one that each has exactly once.
CODE_TENSORS = ("weight_packed", "qweight")
PACKED_TENSORS = {
    "weight_packed": "codes",
    "qweight": "codes",
    "weight_scale": "scales",
    "scales": "scales",
    "weight_zero_point": "zero points",
    "qzeros": "zero points",
    "weight_shape": "shapes",
    "g_idx": "group indices",
    "input_scale": "activation scales",
}


def format_of(config: Mapping[str, Any]) -> Format:
    """The format that a whole `config.json` names; ValueError for a float or unknown one."""
    quantization = config.get("quantization_config")
    if not quantization:
        raise ValueError("no quantization_config: a float checkpoint has no format")
    method = quantization.get("quant_method", ct_config.QUANT_METHOD)
    if method == gptq_config.QUANT_METHOD:
        method = gptq_config.checkpoint_format(quantization)
    try:
        return lookup(FORMATS, method, "quant_method")
    except ValueError as error:
        raise ValueError(f"quantization_config: {error}") from None


def read_scheme(config: Mapping[str, Any]) -> SchemeResolver:
    """From a whole `config.json`, the function module name -> its scheme, or None if it is float.

    A config without `quantization_config` gives None for every module. Raises ValueError for a
    quantization that this project does not read, naming the key and its value.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return lambda module_name: None
    return format_of(config).read_config(quantization)


def read_kv_cache(config: Mapping[str, Any]) -> KVCacheScheme | None:
    """The scheme of the KV cache that a whole `config.json` names, None for a float cache."""
    quantization = config.get("quantization_config")
    if quantization is None or format_of(config).name != "compressed-tensors":
        return None
    return ct_config.read_kv_cache(quantization)


def read_linear(
    checkpoint: Checkpoint, name: str, scheme: LinearScheme, format: Format | None = None
) -> QuantizedLinear:
    """The packed module `name` of `checkpoint`, in `format` or the one that its config names.

    ValueError names the module and what is wrong with it.
    """
    format = format or format_of(checkpoint.config)
    stored = {local: f"{name}.{local}" for local in format.dtypes(scheme)}
    tensors = {
        local: checkpoint.read(full) for local, full in stored.items() if full in checkpoint.tensors
    }
    try:
        return format.unpack(tensors, scheme)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {name} ({scheme.label}): {error}") from None


def pack_linear(
    name: str, linear: QuantizedLinear, scheme: LinearScheme, format: Format
) -> dict[str, torch.Tensor]:
    """Full name -> tensor of the packed module `name`; ValueError names the module."""
    try:
        tensors = format.pack(linear, scheme)
    except ValueError as error:
        raise ValueError(f"{name} ({scheme.label}, {format.name}): {error}") from None
    return {f"{name}.{local}": tensor for local, tensor in tensors.items()}


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write `config.json`, and the second copy of its quantization that GPTQ tools look for."""
    write_json(folder / "config.json", config)
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") == gptq_config.QUANT_METHOD:
        write_json(folder / gptq_config.SIDE_FILE, quantization)
