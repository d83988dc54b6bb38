"""The `quantization_config` of compressed-tensors checkpoints: written, and read back.

`config_groups` names the schemes: each group has `targets` (a module name, `re:` and a regular
expression, or the class name `Linear`), its `format` (see compressed_tensors.py), and how weights
and inputs are quantized. `ignore` lists what stays float in the same notation. Groups of different
formats make the format of the whole "mixed-precision". `kv_cache_scheme` says that the checkpoint
has scales of keys and values (see kv_scales.py).

With one scheme the target is the class name and every float Linear is listed in `ignore`. With
several, each Linear is named, alone or with those of the other blocks: readers rank class names
before the parts of a stacked matrix, so a class name beside other targets would catch those.

A reader that meets anything it does not understand raises ValueError instead of guessing.

Reference: https://github.com/vllm-project/compressed-tensors, release 0.20.1.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from compress.export.compressed_tensors import FLOAT, INT, NAIVE, PACKED, storage_of
from compress.export.patterns import LINEAR, check_expressions, compact, is_embedding, matches
from compress.scheme import (
    PER_CHANNEL,
    ActivationScheme,
    KVCacheScheme,
    LinearScheme,
    WeightScheme,
)

QUANT_METHOD = "compressed-tensors"
VERSION = "0.20.1"  # the release whose layout is written; readers of 3-bit codes depend on it
MIXED = "mixed-precision"
_FIRST_DENSE_VERSION = (0, 17)
# The plain layouts differ in name only: any of the names in a row may say what the first does.
_SAME_LAYOUT = {PACKED: (PACKED,), INT: (INT, NAIVE), FLOAT: (FLOAT, NAIVE), NAIVE: (NAIVE, FLOAT)}

_TOP_KEYS = {
    "quant_method", "version", "format", "ignore", "config_groups", "kv_cache_scheme",
    "sparsity_config", "transform_config", "moe_sparsity_config",
}  # fmt: skip
_TOP_WITHOUT_EFFECT = {
    "quantization_status", "global_compression_ratio",
    "run_compressed", "dequantize", "use_optimized_inference",
}  # fmt: skip
_GROUP_KEYS = {"targets", "weights", "input_activations", "output_activations", "format"}
# What the tensors themselves show, or how the scales were found.
_ARGS_WITHOUT_EFFECT = {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"}

# What the `weights` of a config group may say. `actorder` is the order in which columns were
# rounded; the accepted values leave no trace in the tensors.
_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "type": ("int", "float"),
    "num_bits": tuple(range(2, 9)),
    "symmetric": (True, False),
    "strategy": ("group", "channel", "block"),
    "dynamic": (False, None),
    "actorder": (None, False, "static", "weight"),
}
_ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "type": ("int", "float"),
    "num_bits": (8,),
    "symmetric": (True,),
    "strategy": ("token", "tensor", "group"),
    "dynamic": (False, True, None),
    "actorder": (None, False),
    "block_structure": (None,),
}
_KV_STRATEGIES = {"tensor": "tensor", "attn_head": "head"}
_KV_CACHE: dict[str, tuple[Any, ...]] = {
    "type": ("float",),
    "num_bits": (8,),
    "symmetric": (True,),
    "strategy": tuple(_KV_STRATEGIES),
    "dynamic": (False, None),
    "actorder": (None, False),
    "block_structure": (None,),
    "group_size": (None,),
}


def quantization_config(
    schemes: Mapping[str, LinearScheme], ignore: Sequence[str], kv_cache: KVCacheScheme | None
) -> dict[str, Any]:
    """The value of `quantization_config` in `config.json`.

    `schemes`: every packed module; `ignore`: every Linear that stays float, by its full name:
    readers take any Linear that is not listed for a packed one.
    """
    names_of: dict[LinearScheme, list[str]] = {}
    for name, scheme in schemes.items():
        names_of.setdefault(scheme, []).append(name)
    groups = {
        f"group_{index}": _group(scheme, _targets(names_of, scheme))
        for index, scheme in enumerate(names_of)
    }
    formats = list(dict.fromkeys(group["format"] for group in groups.values()))
    return {
        "quant_method": QUANT_METHOD,
        "version": VERSION,
        "format": formats[0] if len(formats) == 1 else MIXED if formats else "dense",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None if kv_cache is None else _kv_args(kv_cache),
        "sparsity_config": {},
        "transform_config": {},
        "config_groups": groups,
    }


def read_config(quantization: Mapping[str, Any]) -> Callable[[str], LinearScheme | None]:
    """From `quantization_config`, the function module name -> its scheme, or None if it is float.

    Raises ValueError for a quantization that this project does not read, naming key and value.
    """
    _check_whole(quantization)
    schemes: dict[str, LinearScheme] = {}
    for name, group in (quantization.get("config_groups") or {}).items():
        scheme = _read_group(name, group, quantization)
        schemes.update((target, scheme) for target in group.get("targets") or [])
    ignore = list(quantization.get("ignore") or [])
    for entry in (*schemes, *ignore):
        if not isinstance(entry, str):
            raise ValueError(f"quantization_config: {entry!r} is no name or expression")
    check_expressions([*schemes, *ignore])
    # an exact name is more specific than an expression, and that than a class
    classes = ("Linear", "Embedding")
    targets = sorted(schemes, key=lambda target: (target in classes, "re:" in target, target))

    def scheme_for(module_name: str) -> LinearScheme | None:
        if any(matches(module_name, pattern) for pattern in ignore):
            return None
        for target in targets:
            if matches(module_name, target):
                return schemes[target]
        return None

    return scheme_for


def read_kv_cache(quantization: Mapping[str, Any]) -> KVCacheScheme | None:
    """The scheme of the KV cache that `quantization_config` names; ValueError if it is not read."""
    if not (stored := quantization.get("kv_cache_scheme")):
        return None
    args = _checked(stored, "kv_cache_scheme", _KV_CACHE)
    return KVCacheScheme(strategy="head" if args["strategy"] == "attn_head" else "tensor")


def _targets(names_of: Mapping[LinearScheme, Sequence[str]], scheme: LinearScheme) -> list[str]:
    names = names_of[scheme]
    if len(names_of) == 1:
        linears = [LINEAR] if any(not is_embedding(name) for name in names) else []
        return linears + [name for name in names if is_embedding(name)]
    # float Linears need not be kept apart: `ignore` outranks targets
    return compact(names, [n for other, rest in names_of.items() if other != scheme for n in rest])


def _group(scheme: LinearScheme, targets: list[str]) -> dict[str, Any]:
    activations = scheme.activations
    return {
        "targets": targets,
        "format": storage_of(scheme),
        "weights": _weights_args(scheme.weights),
        "input_activations": None if activations is None else _activation_args(activations),
        "output_activations": None,
    }


def _weights_args(weights: WeightScheme) -> dict[str, Any]:
    per_channel = weights.group_size == PER_CHANNEL
    blocks = weights.block_size is not None
    args: dict[str, Any] = {
        "num_bits": weights.bits,
        "type": weights.type,
        "symmetric": weights.symmetric,
        "strategy": "block" if blocks else "channel" if per_channel else "group",
        "group_size": None if per_channel else weights.group_size,
        "dynamic": False,
    }
    return args | ({"block_structure": [weights.block_size] * 2} if blocks else {})


def _activation_args(activations: ActivationScheme) -> dict[str, Any]:
    grouped = "group" if activations.group_size else "token"
    return {
        "num_bits": 8,
        "type": activations.type,
        "symmetric": True,
        "strategy": grouped if activations.dynamic else "tensor",
        "group_size": activations.group_size,
        "dynamic": activations.dynamic,
    }


def _kv_args(kv_cache: KVCacheScheme) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "float",
        "strategy": "attn_head" if kv_cache.strategy == "head" else "tensor",
        "group_size": None,
        "symmetric": True,
        "dynamic": False,
    }


def _check_whole(quantization: Mapping[str, Any]) -> None:
    """Raise ValueError for what applies to the whole checkpoint and is not read here."""
    known = (PACKED, INT, FLOAT, NAIVE, MIXED)
    groups = quantization.get("config_groups")
    if quantization.get("format") not in (known if groups else (*known, "dense")):
        raise ValueError(
            f"quantization format {quantization.get('format')!r} is not supported"
            f" (only {', '.join(known)})"
        )
    for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        if quantization.get(key):
            raise ValueError(f"{key} is not supported, got {quantization[key]!r}")
    if unknown := sorted(quantization.keys() - _TOP_KEYS - _TOP_WITHOUT_EFFECT):
        raise ValueError(f"quantization_config: unknown key {unknown[0]!r}")
    read_kv_cache(quantization)


def _read_group(name: str, group: Any, quantization: Mapping[str, Any]) -> LinearScheme:
    place = f"config group {name!r}"
    if not isinstance(group, Mapping):
        raise ValueError(f"{place}: expected an object, got {group!r}")
    if unknown := sorted(group.keys() - _GROUP_KEYS):
        raise ValueError(f"{place}: unknown key {unknown[0]!r}")
    if group.get("output_activations"):
        raise ValueError(
            f"{place}: output_activations are not supported, got {group['output_activations']!r}"
        )
    weights = _read_weights(group.get("weights") or {}, place)
    stored = group.get("input_activations")
    activations = None if not stored else _read_activations(stored, place)
    scheme = LinearScheme(weights=weights, activations=activations)
    found = group.get("format") or quantization.get("format")
    if found not in _SAME_LAYOUT[storage_of(scheme)]:
        raise ValueError(f"{place}: {scheme.label} in format {found!r} is not supported")
    if storage_of(scheme) == PACKED and 32 % weights.bits:
        _check_dense(place, weights.bits, quantization.get("version"))
    return scheme


def _read_weights(stored: Mapping[str, Any], place: str) -> WeightScheme:
    args = _checked(stored, f"{place}: weights", _WEIGHTS)
    grouped = args["strategy"] == "group"
    return WeightScheme(
        type=args["type"],
        bits=args["num_bits"],
        group_size=(args.get("group_size") or 0) if grouped else PER_CHANNEL,
        symmetric=args["symmetric"],
        block_size=_block_size(args, place),
    )


def _block_size(args: Mapping[str, Any], place: str) -> int | None:
    """Edge of the square blocks of `weights`, None for another strategy."""
    stored = args.get("block_structure")
    if args["strategy"] != "block" and not stored:
        return None
    # older releases wrote "128x128"
    sizes = stored.split("x") if isinstance(stored, str) else list(stored or ())
    if args["strategy"] != "block" or len(sizes) != 2 or int(sizes[0]) != int(sizes[1]):
        raise ValueError(f"{place}: weights.block_structure {stored!r} is not supported")
    return int(sizes[0])


def _read_activations(stored: Mapping[str, Any], place: str) -> ActivationScheme:
    args = _checked(stored, f"{place}: input_activations", _ACTIVATIONS)
    dynamic = bool(args.get("dynamic"))
    if dynamic == (args["strategy"] == "tensor"):
        kind = "dynamic" if dynamic else "static"
        raise ValueError(
            f"{place}: {kind} input_activations of strategy {args['strategy']!r} are not supported"
        )
    grouped = args["strategy"] == "group"
    return ActivationScheme(
        type=args["type"], dynamic=dynamic, group_size=args.get("group_size") if grouped else None
    )


def _checked(
    stored: Mapping[str, Any], place: str, readable: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """`stored` with the package's defaults; ValueError for a key or value that is not read."""
    args = {"type": "int", "num_bits": 8, "symmetric": True, **stored}
    if args.get("strategy") is None:  # left to be inferred, as compressed-tensors does
        group_size = args.get("group_size")
        inferred = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
        args["strategy"] = inferred
    for key, accepted in readable.items():
        if args.get(key) not in accepted:
            raise ValueError(
                f"{place}.{key} {args.get(key)!r} is not supported"
                f" (only {', '.join(map(repr, accepted))})"
            )
    known = readable.keys() | {"group_size", "block_structure"} | _ARGS_WITHOUT_EFFECT
    if unknown := sorted(args.keys() - known):
        raise ValueError(f"{place}: unknown key {unknown[0]!r}")
    return args


def _check_dense(place: str, bits: int, version: str | None) -> None:
    """Codes that straddle words were laid out otherwise before 0.17; only the version tells."""
    numbers = re.match(r"(\d+)\.(\d+)", version or "")
    if numbers is None or tuple(map(int, numbers.groups())) < _FIRST_DENSE_VERSION:
        raise ValueError(
            f"{place}: {bits}-bit codes written by compressed-tensors "
            f"{version or '(no version)'} are not supported (only 0.17 and later)"
        )
