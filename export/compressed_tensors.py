"""The `pack-quantized` format of compressed-tensors: tensors of one Linear, and the config.

Tensors of a Linear (out, in) with b bits and G groups per row, under the Linear's name:

    weight_packed      int32  (out, ceil(in*b/32))   codes, packed along in (see packing.py)
    weight_scale       float  (out, G)               G = 1 for a per-channel scheme
    weight_zero_point  int32  (ceil(out*b/32), G)    asymmetric only, packed along out
    weight_shape       int64  (2,)                   [out, in]; the packing hides it

A symmetric Linear has no `weight_zero_point`: loaders reject the extra tensor.

`config.json` says under `quantization_config` which Linears are packed and how: each group of
`config_groups` has `targets` (a module name, `re:` and a regular expression, or the class name
`Linear`), and `ignore` lists what stays float in the same notation. A reader that meets anything
it does not understand raises ValueError instead of guessing.

Reference: https://github.com/vllm-project/compressed-tensors, release 0.20.1.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from compress.artifacts import QuantizedLinear
from compress.export.packing import num_words, pack_to_int32, unpack_from_int32
from compress.models.checkpoint import Checkpoint
from compress.scheme import PER_CHANNEL, QuantScheme, WeightScheme, group_width

FORMAT = "pack-quantized"
QUANT_METHOD = "compressed-tensors"
VERSION = "0.20.1"  # the release whose layout is written; readers of 3-bit codes depend on it
SUPPORTED_BITS = (2, 3, 4, 8)
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_FIRST_DENSE_VERSION = (0, 17)

SchemeResolver = Callable[[str], WeightScheme | None]


def tensor_layout(
    out_features: int, in_features: int, scheme: WeightScheme
) -> dict[str, tuple[int, ...]]:
    """Local name -> shape of each tensor of a packed Linear; ValueError if groups do not divide."""
    num_groups = in_features // group_width(scheme, in_features)
    layout: dict[str, tuple[int, ...]] = {
        "weight_packed": (out_features, num_words(in_features, scheme.bits)),
        "weight_scale": (out_features, num_groups),
        "weight_shape": (2,),
    }
    if not scheme.symmetric:
        layout["weight_zero_point"] = (num_words(out_features, scheme.bits), num_groups)
    return layout


def pack_linear(linear: QuantizedLinear) -> dict[str, torch.Tensor]:
    """Tensors of `linear` by local name, shapes as in the module docstring."""
    tensors = {
        "weight_packed": pack_to_int32(linear.codes, linear.bits, 1),
        "weight_scale": linear.scale.contiguous(),
        "weight_shape": torch.tensor(linear.codes.shape, dtype=torch.int64),
    }
    if linear.zero_point is not None:
        tensors["weight_zero_point"] = pack_to_int32(linear.zero_point, linear.bits, 0)
    return tensors


def unpack_linear(tensors: Mapping[str, torch.Tensor], scheme: WeightScheme) -> QuantizedLinear:
    """Inverse of `pack_linear`; ValueError names a tensor that is missing or does not fit `scheme`.

    Tensors under other names (a bias) are not looked at.
    """
    for name in ("weight_shape", "weight_scale", "weight_packed"):
        if name not in tensors:
            raise ValueError(f"missing {name}")
    shape = tensors["weight_shape"]
    if shape.dtype != torch.int64 or shape.shape != (2,):
        raise ValueError(f"weight_shape must be int64 (2,), got {shape.dtype} {tuple(shape.shape)}")
    out_features, in_features = (int(size) for size in shape)
    _check_tensors(tensors, tensor_layout(out_features, in_features, scheme))
    zero_point = None
    if not scheme.symmetric:
        words = tensors["weight_zero_point"]
        zero_point = unpack_from_int32(words, scheme.bits, 0, out_features)
    return QuantizedLinear(
        codes=unpack_from_int32(tensors["weight_packed"], scheme.bits, 1, in_features),
        scale=tensors["weight_scale"],
        zero_point=zero_point,
        bits=scheme.bits,
    )


def read_linear(checkpoint: Checkpoint, module_name: str, scheme: WeightScheme) -> QuantizedLinear:
    """The packed Linear `module_name` of `checkpoint`; ValueError names what is wrong with it."""
    stored = {
        name: f"{module_name}.{name}"
        for name in ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    }
    tensors = {
        local: checkpoint.read(name) for local, name in stored.items() if name in checkpoint.tensors
    }
    try:
        return unpack_linear(tensors, scheme)
    except ValueError as error:
        raise ValueError(f"{checkpoint.path}: {module_name} ({scheme.label}): {error}") from None


def quantization_config(scheme: QuantScheme, ignore: Sequence[str]) -> dict[str, Any]:
    """The value of `quantization_config` in `config.json`.

    Every Linear has `scheme` but those in `ignore`, which must list each float Linear by its full
    name: readers take any Linear that is not listed for a packed one.
    """
    weights = scheme.weights
    per_channel = weights.group_size == PER_CHANNEL
    group = {
        "targets": ["Linear"],
        "format": FORMAT,
        "weights": {
            "num_bits": weights.bits,
            "type": "int",
            "symmetric": weights.symmetric,
            "strategy": "channel" if per_channel else "group",
            "group_size": None if per_channel else weights.group_size,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": QUANT_METHOD,
        "version": VERSION,
        "format": FORMAT,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "config_groups": {"group_0": group},
    }


def read_scheme(config: Mapping[str, Any]) -> SchemeResolver:
    """From a whole `config.json`, the function Linear name -> its scheme, or None if it is float.

    A config without `quantization_config` gives None for every Linear. Raises ValueError for a
    quantization that this project does not read, naming the key and its value.
    """
    quantization = config.get("quantization_config")
    if quantization is None:
        return lambda module_name: None
    _check_whole(quantization)
    schemes: dict[str, WeightScheme] = {}
    for name, group in quantization.get("config_groups", {}).items():
        scheme = _read_group(name, group, quantization.get("version"))
        schemes.update((target, scheme) for target in group.get("targets", []))
    ignore = list(quantization.get("ignore") or [])
    _check_patterns([*schemes, *ignore])
    # an exact name is more specific than an expression, and that than the class
    targets = sorted(schemes, key=lambda target: (target == "Linear", "re:" in target, target))

    def scheme_for(module_name: str) -> WeightScheme | None:
        if any(matches(module_name, pattern) for pattern in ignore):
            return None
        for target in targets:
            if matches(module_name, target):
                return schemes[target]
        return None

    return scheme_for


def matches(module_name: str, pattern: str) -> bool:
    """Whether the entry `pattern` of `targets` or `ignore` means the Linear `module_name`."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module_name) is not None
    return pattern in (module_name, "Linear")


def _check_patterns(patterns: Sequence[str]) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix("re:"))
        except re.error as error:
            raise ValueError(f"quantization_config: bad expression {pattern!r} ({error})") from None


def _check_tensors(
    tensors: Mapping[str, torch.Tensor], layout: Mapping[str, tuple[int, ...]]
) -> None:
    if "weight_zero_point" in tensors and "weight_zero_point" not in layout:
        raise ValueError("weight_zero_point in a symmetric Linear")
    for name, shape in layout.items():
        if name not in tensors:
            raise ValueError(f"missing {name}")
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        if name == "weight_scale" and tensor.dtype not in SCALE_DTYPES:
            raise ValueError(f"weight_scale must be a 16 or 32 bit float, got {tensor.dtype}")


def _check_whole(quantization: Mapping[str, Any]) -> None:
    """Raise ValueError for what applies to the whole checkpoint and is not read here."""
    method = quantization.get("quant_method", QUANT_METHOD)
    if method != QUANT_METHOD:
        raise ValueError(f"quant_method {method!r} is not supported (only {QUANT_METHOD!r})")
    if quantization.get("format") != FORMAT:
        raise ValueError(
            f"quantization format {quantization.get('format')!r} is not supported (only {FORMAT!r})"
        )
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if quantization.get(key):
            raise ValueError(f"{key} is not supported, got {quantization[key]!r}")


# What the `weights` of a config group may say. `actorder` is the order in which columns were
# rounded; the accepted values leave no trace in the tensors.
_READABLE_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "type": ("int",),
    "num_bits": SUPPORTED_BITS,
    "symmetric": (True, False),
    "strategy": ("group", "channel"),
    "dynamic": (False, None),
    "actorder": (None, False, "static", "weight"),
    "block_structure": (None,),
}


def _read_group(name: str, group: Any, version: str | None) -> WeightScheme:
    if not isinstance(group, Mapping):
        raise ValueError(f"config group {name!r}: expected an object, got {group!r}")
    for key in ("input_activations", "output_activations"):
        if group.get(key):
            raise ValueError(f"config group {name!r}: {key} are not supported, got {group[key]!r}")
    weights = {"type": "int", "symmetric": True, **(group.get("weights") or {})}
    if weights.get("strategy") is None:  # left to be inferred, as compressed-tensors does
        group_size = weights.get("group_size")
        inferred = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
        weights["strategy"] = inferred
    for key, accepted in _READABLE_WEIGHTS.items():
        if weights.get(key) not in accepted:
            raise ValueError(
                f"config group {name!r}: weights.{key} {weights.get(key)!r} is not supported "
                f"(only {', '.join(map(repr, accepted))})"
            )
    if 32 % weights["num_bits"]:
        _check_dense(name, weights["num_bits"], version)
    per_channel = weights["strategy"] == "channel"
    return WeightScheme(
        bits=weights["num_bits"],
        group_size=PER_CHANNEL if per_channel else weights.get("group_size") or 0,
        symmetric=weights["symmetric"],
    )


def _check_dense(name: str, bits: int, version: str | None) -> None:
    """Codes that straddle words were laid out otherwise before 0.17; only the version tells."""
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if numbers is None or tuple(map(int, numbers.groups())) < _FIRST_DENSE_VERSION:
        raise ValueError(
            f"config group {name!r}: {bits}-bit codes written by compressed-tensors "
            f"{version or '(no version)'} are not supported (only 0.17 and later)"
        )
