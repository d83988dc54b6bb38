"""The `quantization_config` of GPTQ checkpoints, also written as `quantize_config.json`.

One scheme (`bits`, `group_size`, `sym`) holds for every Linear of the blocks. `lm_head` says
whether the head is packed too. `dynamic` lists exceptions: a regular expression that is matched
from the start of a module's name -> the keys that differ; the first expression that matches counts.
`-:` in front means that the modules stay float, `+:` (or nothing) that the keys hold.

Serving engines look up the name of the matrix into which they stack q, k and v or gate and up, so
the expressions written here match that name too.

Reference: GPTQModel's `dynamic`, https://github.com/ModelCloud/GPTQModel.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from compress import __version__
from compress.export.gptq import BITS
from compress.export.patterns import compact, is_embedding, is_head, with_stacked
from compress.scheme import KVCacheScheme, LinearScheme, WeightScheme

QUANT_METHOD = "gptq"
VERSIONS = {"gptq": 1, "gptq_v2": 2}  # `checkpoint_format` -> version of the zero points
SIDE_FILE = "quantize_config.json"

# Keys that change how tensors are read, with the values that this reader knows.
_READABLE: dict[str, tuple[Any, ...]] = {
    "quant_method": (QUANT_METHOD,),
    "method": (None, QUANT_METHOD),
    "bits": BITS,
    "sym": (True, False),
    "desc_act": (None, False, True),  # whether columns are sorted is seen in g_idx
    "lm_head": (None, False, True),
    "pack_dtype": (None, "int32"),
    "rotation": (None,),
    "is_marlin_format": (None, False),
    "checkpoint_format": (None, *VERSIONS),
    "format": (None, *VERSIONS),
}
_OTHER_KEYS = {"group_size", "dynamic", "modules_in_block_to_quantize"}
# How the codes came about, or how a program should run them: no trace in the tensors.
_WITHOUT_EFFECT = {
    "true_sequential", "static_groups", "damp_percent", "damp_auto_increment", "meta", "mse",
    "act_group_aware", "model_name_or_path", "model_file_base_name", "tokenizer", "dataset",
    "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "batch_size",
    "pad_token_id", "max_input_length", "cache_block_outputs", "backend", "use_exllama",
    "exllama_config", "disable_exllama", "use_cuda_fp16",
}  # fmt: skip
_DYNAMIC_KEYS = ("bits", "group_size", "sym")


def quantization_config(
    schemes: Mapping[str, LinearScheme],
    ignore: Sequence[str],
    kv_cache: KVCacheScheme | None,
    *,
    checkpoint_format: str,
) -> dict[str, Any]:
    """The value of `quantization_config`; ValueError if GPTQ cannot say what is asked for."""
    if kv_cache is not None:
        raise ValueError("GPTQ has no place for KV cache scales (compressed-tensors has)")
    if embedding := next(filter(is_embedding, schemes), None):
        raise ValueError(f"{embedding}: GPTQ does not pack the embedding")
    if not schemes:
        raise ValueError("no Linear is packed: nothing to describe")
    base = Counter(schemes.values()).most_common(1)[0][0].weights
    config: dict[str, Any] = {
        "quant_method": QUANT_METHOD,
        **_keys(base),
        "desc_act": False,
        "lm_head": any(is_head(name) for name in schemes),
        "checkpoint_format": checkpoint_format,
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"compress:{__version__}"]},
    }
    if dynamic := _dynamic(schemes, ignore, base):
        config["dynamic"] = dynamic
    return config


def read_config(quantization: Mapping[str, Any]) -> Callable[[str], LinearScheme | None]:
    """From `quantization_config`, the function module name -> its scheme, or None if it is float.

    Raises ValueError for a key or a value that is not read here.
    """
    _check_keys(quantization)
    base = {key: quantization[key] for key in _DYNAMIC_KEYS}
    inside = _flat(quantization.get("modules_in_block_to_quantize"))
    dynamic = quantization.get("dynamic") or {}
    rules = [_read_rule(pattern, keys, base) for pattern, keys in dynamic.items()]
    default = _scheme(base)

    def scheme_for(module_name: str) -> LinearScheme | None:
        if is_embedding(module_name):
            return None
        if is_head(module_name):
            if not quantization.get("lm_head"):
                return None
        elif inside and not any(f".{module_name}".endswith(f".{name}") for name in inside):
            return None
        for expression, scheme in rules:
            if expression.match(module_name):
                return scheme
        return default

    return scheme_for


def checkpoint_format(quantization: Mapping[str, Any]) -> str:
    """`gptq` or `gptq_v2`; ValueError for another."""
    found = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
    if found not in VERSIONS:
        raise ValueError(f"GPTQ checkpoint_format {found!r} is not supported (only {[*VERSIONS]})")
    return str(found)


def _dynamic(
    schemes: Mapping[str, LinearScheme], ignore: Sequence[str], base: WeightScheme
) -> dict[str, dict[str, Any]]:
    """The exceptions to `base`, those that stay float first."""
    rules: dict[str, dict[str, Any]] = {}
    floats = [name for name in ignore if not is_head(name)]
    for entry in compact(floats, schemes):
        rules[f"-:{with_stacked(entry)}"] = {}
    others = {name: s.weights for name, s in schemes.items() if s.weights != base}
    for weights in dict.fromkeys(others.values()):
        names = [name for name, other in others.items() if other == weights]
        rest = [name for name in [*schemes, *floats] if name not in set(names)]
        keys = {key: v for key, v in _keys(weights).items() if v != _keys(base)[key]}
        rules |= {f"+:{with_stacked(entry)}": keys for entry in compact(names, rest)}
    return rules


def _keys(weights: WeightScheme) -> dict[str, Any]:
    return {"bits": weights.bits, "group_size": weights.group_size, "sym": weights.symmetric}


def _scheme(keys: Mapping[str, Any]) -> LinearScheme:
    weights = WeightScheme(
        bits=keys["bits"], group_size=keys["group_size"], symmetric=bool(keys["sym"])
    )
    return LinearScheme(weights=weights)


def _check_keys(quantization: Mapping[str, Any]) -> None:
    for key, value in quantization.items():
        if key in _READABLE and value not in _READABLE[key]:
            raise ValueError(f"quantization_config: {key} {value!r} is not supported in GPTQ")
        if key not in (_READABLE.keys() | _OTHER_KEYS | _WITHOUT_EFFECT):
            raise ValueError(f"quantization_config: unknown key {key!r} of GPTQ")
    if missing := set(_DYNAMIC_KEYS) - quantization.keys():
        raise ValueError(f"quantization_config: GPTQ needs {', '.join(sorted(missing))}")


def _read_rule(
    pattern: str, keys: Mapping[str, Any], base: Mapping[str, Any]
) -> tuple[re.Pattern[str], LinearScheme | None]:
    """One entry of `dynamic`: its expression, and the scheme that it gives (None: float)."""
    is_float = pattern.startswith("-:")
    try:
        expression = re.compile(pattern.removeprefix("-:").removeprefix("+:"))
    except re.error as error:
        raise ValueError(f"quantization_config: bad expression {pattern!r} ({error})") from None
    if is_float:
        return expression, None
    for key, value in keys.items():
        if key in _READABLE and value not in _READABLE[key]:
            raise ValueError(f"dynamic {pattern!r}: {key} {value!r} is not supported in GPTQ")
        if key not in {*_DYNAMIC_KEYS, "desc_act", *_WITHOUT_EFFECT}:
            raise ValueError(f"dynamic {pattern!r}: unknown key {key!r}")
    return expression, _scheme({**base, **keys})


def _flat(names: Any) -> list[str]:
    """`modules_in_block_to_quantize`: names, or lists of names."""
    flat: list[str] = []
    for entry in names or ():
        flat += [entry] if isinstance(entry, str) else list(entry)
    return flat


config_v1 = partial(quantization_config, checkpoint_format="gptq")
config_v2 = partial(quantization_config, checkpoint_format="gptq_v2")
