"""Put a float checkpoint into a transformers model piece by piece, never whole.

`build_skeleton` makes the model with every parameter on the meta device (shapes, no memory);
`materialize` fills one submodule from the checkpoint and `dematerialize` empties it again. The
memory of a run is therefore that of the largest piece, whatever the depth of the model.

Buffers that no checkpoint stores (the rotary frequencies) are computed on the CPU while the
skeleton is built, and stay: `materialize` moves those of its submodule to the device.

Tied weights: a name that the checkpoint does not store is read under the name of the tensor that
it is tied to. Within one call tied parameters stay one parameter; across calls they are copies.
"""

import ctypes
import resource
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.errors import is_out_of_memory
from compress.models.checkpoint import COMPUTED_SUFFIXES, TOKENIZER_FILES, Checkpoint
from compress.models.family import family_of, is_tied
from compress.models.source import resolve_model

__all__ = [
    "build_skeleton",
    "check_tensors",
    "dematerialize",
    "load_tokenizer",
    "map_large_tensors",
    "materialize",
    "resolve_model",
]

_MAX_NAMES_SHOWN = 3
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
_MAPPED_BYTES = 4 << 20
_KEPT_BYTES = 32 << 20
_MAPPED_BYTES_UNDER_LIMIT = 256 << 10


def build_skeleton(checkpoint: Checkpoint) -> nn.Module:
    """The causal language model of `checkpoint` on the meta device: eval mode, SDPA attention, or,
    as that has no soft caps, eager attention where the family has them.

    Raises ValueError for an architecture without a family record, for a checkpoint that is
    quantized already, and for a config that transformers refuses.
    """
    attention = "eager" if family_of(checkpoint.config).soft_caps else "sdpa"
    if quantization := checkpoint.config.get("quantization_config"):
        method = quantization.get("quant_method", "unnamed method")
        raise ValueError(
            f"{checkpoint.path}: already quantized ({method}); a float model is needed"
        )

    from accelerate import init_empty_weights  # type: ignore[import-untyped]
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.float32
            )
    except Exception as error:  # config classes raise validation errors of many kinds
        if is_out_of_memory(error):
            raise
        raise ValueError(f"{checkpoint.path / 'config.json'}: unusable ({error})") from error
    skeleton: nn.Module = model.eval().requires_grad_(False)
    return skeleton


def materialize(
    module: nn.Module,
    checkpoint: Checkpoint,
    prefix: str,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> None:
    """Load every parameter and buffer of `module`; its tensor `name` is stored as `prefix + name`.

    `prefix` ends with a dot unless it is empty (`"model.layers.0."`). Floating tensors become
    `dtype`, others keep theirs. Tensors are read one at a time. Raises ValueError, before anything
    is read, if a tensor is missing, has another shape, or has no place in `module`.
    """
    slots = module.state_dict(keep_vars=True)
    sources = {name: _stored_name(checkpoint, prefix + name) for name in slots}
    _check_slots(slots, sources, checkpoint, prefix)
    loaded: dict[str, nn.Parameter | torch.Tensor] = {}
    for name, slot in slots.items():
        source = sources[name]
        if source not in loaded:
            tensor = checkpoint.read(source)
            wanted = dtype if tensor.is_floating_point() else tensor.dtype
            tensor = tensor.to(device=device, dtype=wanted)
            is_parameter = isinstance(slot, nn.Parameter)
            loaded[source] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
        _assign(module, name, loaded[source])
    for name, buffer in module.named_buffers():
        if name not in slots:
            assert not buffer.is_meta, f"{prefix}{name} is not stored and was never computed"
            _assign(module, name, buffer.to(device))


def dematerialize(module: nn.Module) -> None:
    """Give back the memory of `module`: what `materialize` loaded returns to the meta device.

    The memory goes back to the operating system, not only to the allocator.
    """
    for name, slot in module.state_dict(keep_vars=True).items():
        empty = torch.empty_like(slot, device="meta")
        is_parameter = isinstance(slot, nn.Parameter)
        _assign(module, name, nn.Parameter(empty, requires_grad=False) if is_parameter else empty)
    trim_heap()


def load_tokenizer(path: Path) -> Any:
    """The tokenizer saved in folder `path`; never asks the network.

    Raises FileNotFoundError if there is none, ValueError if it cannot be read.
    """
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise FileNotFoundError(f"{path}: no tokenizer (none of {', '.join(TOKENIZER_FILES)})")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        if is_out_of_memory(error):
            raise
        raise ValueError(f"{path}: cannot load the tokenizer ({error})") from error


def _stored_name(checkpoint: Checkpoint, name: str) -> str:
    """`name`, or the name of the tensor it is tied to when only that one is stored."""
    if name in checkpoint.tensors or not is_tied(checkpoint.config):
        return name
    family = family_of(checkpoint.config)
    embedding, head = f"{family.embedding}.weight", f"{family.head}.weight"
    return {head: embedding, embedding: head}.get(name, name)


def check_tensors(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise ValueError if a tensor of the skeleton `model` is missing, or has another shape.

    Within the blocks a tensor without a place is an error too; outside, it is kept as it is.
    """
    family = family_of(checkpoint.config)
    blocks = model.get_submodule(family.blocks)
    assert isinstance(blocks, nn.ModuleList), f"{family.blocks} is not a list of blocks"
    parts = {f"{family.blocks}.{index}.": block for index, block in enumerate(blocks)}
    parts |= {f"{n}.": model.get_submodule(n) for n in (family.embedding, family.final_norm)}
    for prefix, part in parts.items():
        slots = part.state_dict(keep_vars=True)
        sources = {name: _stored_name(checkpoint, prefix + name) for name in slots}
        _check_slots(slots, sources, checkpoint, prefix)


def _check_slots(
    slots: dict[str, torch.Tensor], sources: dict[str, str], checkpoint: Checkpoint, prefix: str
) -> None:
    stored = checkpoint.tensors
    missing = [prefix + name for name in slots if sources[name] not in stored]
    if missing:
        raise ValueError(f"{checkpoint.path}: missing tensors: {_shown(missing)}")
    for name, slot in slots.items():
        shape = stored[sources[name]].shape
        if shape != tuple(slot.shape):
            raise ValueError(
                f"{checkpoint.path}: {sources[name]} has shape {shape}, "
                f"config.json asks for {tuple(slot.shape)}"
            )
    known = {prefix + name for name in slots} | set(sources.values())
    unexpected = [
        name
        for name in stored
        if name.startswith(prefix) and name not in known and not name.endswith(COMPUTED_SUFFIXES)
    ]
    if unexpected:
        raise ValueError(
            f"{checkpoint.path}: tensors without a place in the model: {_shown(unexpected)}"
        )


def _shown(names: list[str]) -> str:
    rest = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def map_large_tensors() -> None:
    """Have glibc map every tensor of 4 MB or more by itself, so that freeing it returns its pages.

    By default it moves sizes up to 32 MB to its heap once one has been freed, where they leave
    holes that add up. Smaller tensors stay in a heap that keeps its free pages until `trim_heap`:
    mapping and clearing the temporaries of every forward pass anew took a fifth of a run. Where the
    address space is limited (ulimit -v) holes count even if their pages are returned: sizes from
    256 KB on are mapped then, and threads share one heap instead of reserving 64 MB each.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    else:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES_UNDER_LIMIT)
        mallopt(_M_ARENA_MAX, 1)


def trim_heap() -> None:
    """Return free heap pages to the operating system.

    glibc serves tensors below 32 MB from its heap, where a freed one leaves a hole that the next
    aligned request of the same size does not fit: resident memory would grow block by block.
    Other C libraries map such sizes one by one and have no such call.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _assign(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, local = name.rpartition(".")
    setattr(module.get_submodule(owner), local, tensor)
