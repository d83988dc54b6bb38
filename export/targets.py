"""What a program that loads checkpoints would refuse or silently misread, known before it is tried.

The rules are those of vLLM 0.33, SGLang 0.5.23 and transformers 5.24 with compressed-tensors
0.20.1. Each rule is a function of the case (config, schemes, shapes) and gives one sentence for
each thing that it finds, with the module and what to do about it. `TARGETS` says which rules hold
for which program.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from compress.export.compressed_tensors import INT, PACKED, storage_of
from compress.export.formats import format_of, read_kv_cache
from compress.export.patterns import is_embedding
from compress.lookup import lookup
from compress.models.family import FAMILIES, is_tied
from compress.scheme import PER_CHANNEL, LinearScheme

_KERNEL_GROUPS = (PER_CHANNEL, 32, 64, 128)
_KERNEL_OUT_MULTIPLE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    config: Mapping[str, Any]  # the whole config.json
    schemes: Mapping[str, LinearScheme]  # every packed module
    shapes: Mapping[str, tuple[int, int]]  # (out, in) of those, and of others
    scale_dtype: torch.dtype
    format: str

    @property
    def dtype(self) -> str | None:
        """The dtype that programs compute in by default."""
        return self.config.get("dtype") or self.config.get("torch_dtype")

    @property
    def is_gptq(self) -> bool:
        return self.format.startswith("gptq")

    def packed(self) -> Iterator[tuple[str, LinearScheme]]:
        """Those that are stored as compressed-tensors' pack-quantized."""
        if self.format == "compressed-tensors":
            yield from ((n, s) for n, s in self.schemes.items() if storage_of(s) == PACKED)


Rule = Callable[[_Case], Iterator[str]]


def lint_target(
    config: Mapping[str, Any],
    schemes: Mapping[str, LinearScheme],
    shapes: Mapping[str, tuple[int, int]],
    scale_dtype: torch.dtype,
    target: str,
) -> list[str]:
    """What `target` (a key of `TARGETS`) would refuse or misread in such a checkpoint.

    `config` is the whole `config.json`; `schemes` are those of the packed modules and `shapes`
    their (out, in), by full name; `scale_dtype` is the dtype of their scales on disk.
    """
    rules = lookup(TARGETS, target, "target")
    case = _Case(
        config=config,
        schemes=schemes,
        shapes=shapes,
        scale_dtype=scale_dtype,
        format=format_of(config).name,
    )
    return [sentence for rule in rules for sentence in rule(case)]


def _stacked(case: _Case) -> Iterator[str]:
    """Serving engines stack the Linears that read one input into one matrix."""
    family = FAMILIES.get((case.config.get("architectures") or [""])[0])
    if family is None:
        return
    for block in range(int(case.config["num_hidden_layers"])):
        for shared in family.shared_inputs:
            names = [f"{family.blocks}.{block}.{name}" for name in shared.linears]
            if len({case.schemes.get(name) for name in names}) > 1:
                yield (
                    f"{', '.join(names)} are stacked into one matrix and differ in scheme:"
                    " give all of them the same"
                )


def _vllm_packed(case: _Case) -> Iterator[str]:
    odd = [n for n, s in case.packed() if not s.weights.symmetric and s.weights.bits != 4]
    if odd:
        yield f"{_some(odd)}: vLLM reads asymmetric codes of 4 bits only; use symmetric true"


def _activations(case: _Case) -> Iterator[str]:
    """The kernels for quantized activations take fewer kinds than the layout."""
    kinds: dict[str, list[str]] = {}
    for name, scheme in case.schemes.items():
        weights, activations = scheme.weights, scheme.activations
        if case.format != "compressed-tensors" or activations is None:
            continue
        if storage_of(scheme) == INT:
            if not weights.symmetric:
                kinds.setdefault("8-bit activations need symmetric weights", []).append(name)
            if activations.group_size:
                kinds.setdefault("8-bit integer activations have no groups", []).append(name)
            if weights.bits not in (4, 8):
                reason = "8-bit activations need weights of 4 or 8 bits"
                kinds.setdefault(reason, []).append(name)
            if weights.bits == 8 and weights.group_size != PER_CHANNEL:
                reason = "8-bit weights with activations are per channel (group_size -1)"
                kinds.setdefault(reason, []).append(name)
        elif weights.block_size != activations.group_size:
            reason = "float8 blocks need dynamic activations in groups of the block size, and"
            kinds.setdefault(f"{reason} rows none", []).append(name)
    for reason, names in kinds.items():
        yield f"{_some(names)}: {reason}"


def _blocks(case: _Case) -> Iterator[str]:
    """A stacked matrix has one grid of blocks, so each part of it must be whole blocks.

    A fused one is cut into its parts, which are loaded as if they had been stacked.
    """
    family = FAMILIES.get((case.config.get("architectures") or [""])[0])
    stacks = family.shared_inputs if family else ()
    stacked = {name for shared in stacks if len(shared.linears) > 1 for name in shared.linears}
    fused = [site for site in family.smoothing_sites if site.part] if family else []
    bad = []
    for name, scheme in case.schemes.items():
        if (size := scheme.weights.block_size) is None:
            continue
        out_features, in_features = case.shapes[name]
        is_stacked = any(name.endswith(f".{local}") for local in stacked)
        sizes = [in_features, *([out_features] if is_stacked else [])]
        for site in fused:
            block = name.removesuffix(site.producer)
            if name != block and (reader := case.shapes.get(block + site.consumers[0])):
                first = site.first_row(out_features, reader[1])
                sizes += [first, out_features - first]
        if any(length % size for length in sizes):
            bad.append(name)
    if bad:
        yield (
            f"{_some(bad)}: inputs, and outputs of stacked or fused Linears, must be whole blocks;"
            " use float8 per channel"
        )


def _kernels(case: _Case) -> Iterator[str]:
    """Weight-only integer kernels of serving engines."""
    only_weights = [
        (name, scheme.weights, case.shapes[name])
        for name, scheme in case.schemes.items()
        if scheme.activations is None and scheme.weights.type == "int" and not is_embedding(name)
    ]
    if groups := [name for name, w, _ in only_weights if w.group_size not in _KERNEL_GROUPS]:
        yield f"{_some(groups)}: kernels exist for group_size -1, 32, 64 and 128 only"
    if narrow := [name for name, _, shape in only_weights if shape[0] % _KERNEL_OUT_MULTIPLE]:
        yield (
            f"{_some(narrow)}: kernels need a multiple of {_KERNEL_OUT_MULTIPLE} outputs;"
            " leave it in float (ignore)"
        )


def _vllm_gptq(case: _Case) -> Iterator[str]:
    if not case.is_gptq:
        return
    bad = [n for n, s in case.schemes.items() if s.weights.bits not in (4, 8)]
    if bad:
        yield f"{_some(bad)}: vLLM reads GPTQ of 4 and 8 bits only; use compressed-tensors"
    if bad := [n for n, s in case.schemes.items() if not s.weights.symmetric]:
        yield f"{_some(bad)}: vLLM reads symmetric GPTQ only; use compressed-tensors"
    quantization = case.config["quantization_config"]
    if quantization.get("desc_act") and quantization.get("group_size") != PER_CHANNEL:
        yield "quantization_config: vLLM refuses desc_act true with groups; write desc_act false"


def _sglang_gptq(case: _Case) -> Iterator[str]:
    slow = [n for n, s in case.schemes.items() if s.weights.bits < 4 or not s.weights.symmetric]
    if case.is_gptq and slow and case.dtype != "float16":
        yield f"{_some(slow)}: SGLang reads such GPTQ in float16 only; serve with --dtype float16"


def _sglang_packed(case: _Case) -> Iterator[str]:
    if bad := [n for n, s in case.packed() if s.weights.bits not in (4, 8)]:
        yield f"{_some(bad)}: SGLang reads packed codes of 4 and 8 bits only; use 4 or 8"


def _half_scales(case: _Case) -> Iterator[str]:
    """Serving engines hold the scales of weight-only Linears in the dtype that they compute in."""
    if case.scale_dtype == torch.float16 and case.dtype == "bfloat16":
        yield (
            "quantization_config: the float16 scales would be rounded to bfloat16;"
            " serve with --dtype float16"
        )
    elif case.scale_dtype == torch.float32 and (names := [n for n, _ in case.packed()]):
        yield (
            f"{_some(names)}: the float32 scales would be rounded to 16 bits;"
            " quantize with dtype bfloat16 or float16"
        )


def _actorder(case: _Case) -> Iterator[str]:
    groups = case.config["quantization_config"].get("config_groups") or {}
    for name, group in groups.items():
        weights = group.get("weights") or {}
        if weights.get("actorder") and weights.get("strategy") != "group":
            yield f"config group {name!r}: actorder is for strategy group only; write null"
        elif weights.get("actorder") == "weight":
            yield f"config group {name!r}: actorder 'weight' makes some loaders expect g_idx;" + (
                " write 'static' or null"
            )


def _vllm_embedding(case: _Case) -> Iterator[str]:
    for name in filter(is_embedding, case.schemes):
        if is_tied(case.config):
            yield f"{name}: vLLM cannot use a packed embedding as the tied head; leave it in float"
        elif storage_of(case.schemes[name]) != PACKED:
            yield f"{name}: vLLM packs embeddings as integers only, without activations"
        else:
            yield (
                f"{name}: vLLM looks most architectures' embedding up without its name and misses"
                " that it is packed (KeyError); leave it in float"
            )


def _sglang_embedding(case: _Case) -> Iterator[str]:
    for name in filter(is_embedding, case.schemes):
        yield f"{name}: SGLang drops a packed embedding silently; leave it in float"


def _sglang_kv_cache(case: _Case) -> Iterator[str]:
    kv_cache = read_kv_cache(case.config)
    if kv_cache is not None and kv_cache.strategy == "head":
        yield "kv_cache_scheme: SGLang ignores scales per head; use kv_cache.strategy tensor"


def _transformers(case: _Case) -> Iterator[str]:
    """Loading packed fails for some, loading dequantized (`dequantize=True`) for others."""
    if case.format == "awq" and case.dtype != "float16":
        yield "quantization_config: transformers runs AWQ in float16 only; write dtype float16"
    if case.format != "compressed-tensors":
        return
    only_dense = [name for name, scheme in case.packed() if not scheme.weights.symmetric]
    why = "asymmetric packed codes"
    if not only_dense:
        only_dense = [name for name in case.schemes if is_embedding(name)]
        why = "a packed embedding"
    if not only_dense:
        return
    if len(set(case.schemes.values())) > 1:
        yield (
            f"{_some(only_dense)}: transformers loads {why} with dequantize=True only, and several"
            " schemes without it only; use one scheme, or symmetric true and a float embedding"
        )
    else:
        yield (
            f"{_some(only_dense)}: transformers loads {why} only with"
            " quantization_config=CompressedTensorsConfig(dequantize=True)"
        )


def _some(names: Iterable[str]) -> str:
    first, *rest = names
    return f"{first} and {len(rest)} more" if rest else first


TARGETS: dict[str, tuple[Rule, ...]] = {
    "vllm": (
        _stacked,
        _vllm_packed,
        _activations,
        _blocks,
        _kernels,
        _vllm_gptq,
        _half_scales,
        _actorder,
        _vllm_embedding,
    ),
    "sglang": (
        _stacked,
        _sglang_packed,
        _activations,
        _blocks,
        _kernels,
        _sglang_gptq,
        _half_scales,
        _actorder,
        _sglang_embedding,
        _sglang_kv_cache,
    ),
    "transformers": (_transformers, _actorder),
}
