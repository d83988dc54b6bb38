"""The kernels by name: one function per operation and backend, chosen once when an engine starts.

Both backends have the same signatures; shapes are in the docstring of each operation's file. The
files are imported when a backend is selected, so that `torch` works without Triton.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch

from compress.kernels.jit import triton_problem
from compress.lookup import lookup

OPS: dict[str, dict[str, str]] = {
    "rms_norm": {
        "torch": "compress.kernels.rms_norm:rms_norm_torch",
        "triton": "compress.kernels.rms_norm:rms_norm_triton",
    },
    "rotary": {
        "torch": "compress.kernels.rotary:rotary_torch",
        "triton": "compress.kernels.rotary:rotary_triton",
    },
    "gated_mul": {
        "torch": "compress.kernels.gated_mul:gated_mul_torch",
        "triton": "compress.kernels.gated_mul:gated_mul_triton",
    },
    "add_rms_norm": {
        "torch": "compress.kernels.rms_norm:add_rms_norm_torch",
        "triton": "compress.kernels.rms_norm:add_rms_norm_triton",
    },
    "rotary_kv_write": {
        "torch": "compress.kernels.rotary:rotary_kv_write_torch",
        "triton": "compress.kernels.rotary:rotary_kv_write_triton",
    },
    "gated_mul_quantize": {
        "torch": "compress.kernels.gated_mul:gated_mul_quantize_torch",
        "triton": "compress.kernels.gated_mul:gated_mul_quantize_triton",
    },
    "embed_tokens": {
        "torch": "compress.kernels.embedding:embed_tokens_torch",
        "triton": "compress.kernels.embedding:embed_tokens_triton",
    },
    "copy_blocks": {
        "torch": "compress.kernels.block_copy:copy_blocks_torch",
        "triton": "compress.kernels.block_copy:copy_blocks_triton",
    },
    "kv_write": {
        "torch": "compress.kernels.kv_write:kv_write_torch",
        "triton": "compress.kernels.kv_write:kv_write_triton",
    },
    "paged_attention": {
        "torch": "compress.kernels.paged_attention:paged_attention_torch",
        "triton": "compress.kernels.paged_attention:paged_attention_triton",
    },
    "wna16": {
        "torch": "compress.kernels.wna16:wna16_torch",
        "triton": "compress.kernels.wna16:wna16_triton",
    },
    "quantize_tokens": {
        "torch": "compress.kernels.quantize_tokens:quantize_tokens_torch",
        "triton": "compress.kernels.quantize_tokens:quantize_tokens_triton",
    },
    "w8a8": {
        "torch": "compress.kernels.w8a8:w8a8_torch",
        "triton": "compress.kernels.w8a8:w8a8_triton",
    },
    "process_logits": {
        "torch": "compress.kernels.logits_processors:process_logits_torch",
        "triton": "compress.kernels.logits_processors:process_logits_triton",
    },
    "sample": {
        "torch": "compress.kernels.sampling:sample_torch",
        "triton": "compress.kernels.sampling:sample_triton",
    },
    "sampling_probs": {
        "torch": "compress.kernels.sampling:sampling_probs_torch",
        "triton": "compress.kernels.sampling:sampling_probs_triton",
    },
    "accept_chain": {
        "torch": "compress.kernels.rejection:accept_chain_torch",
        "triton": "compress.kernels.rejection:accept_chain_triton",
    },
    "accept_tree": {
        "torch": "compress.kernels.rejection:accept_tree_torch",
        "triton": "compress.kernels.rejection:accept_tree_triton",
    },
    "quantize_float8": {
        "torch": "compress.kernels.quantize_float8:quantize_float8_torch",
        "triton": "compress.kernels.quantize_float8:quantize_float8_triton",
    },
    "w8a8_float8": {
        "torch": "compress.kernels.w8a8_float8:w8a8_float8_torch",
        "triton": "compress.kernels.w8a8_float8:w8a8_float8_triton",
    },
    "topk_softmax": {
        "torch": "compress.kernels.moe_routing:topk_softmax_torch",
        "triton": "compress.kernels.moe_routing:topk_softmax_triton",
    },
    "grouped_matmul": {
        "torch": "compress.kernels.grouped_matmul:grouped_matmul_torch",
        "triton": "compress.kernels.grouped_matmul:grouped_matmul_triton",
    },
    "combine": {
        "torch": "compress.kernels.moe_combine:combine_torch",
        "triton": "compress.kernels.moe_combine:combine_triton",
    },
}
BACKENDS: dict[str, str] = {"torch": "cpu", "triton": "cuda"}  # -> the device type it is for
_AUTO = "auto"


class Ops(NamedTuple):
    """The operations of one backend."""

    backend: str
    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rotary_kv_write: Callable[..., torch.Tensor]
    gated_mul: Callable[..., torch.Tensor]
    gated_mul_quantize: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    embed_tokens: Callable[..., torch.Tensor]
    copy_blocks: Callable[[torch.Tensor, torch.Tensor], None]
    kv_write: Callable[..., None]
    paged_attention: Callable[..., torch.Tensor]
    wna16: Callable[..., torch.Tensor]
    quantize_tokens: Callable[..., Any]
    w8a8: Callable[..., torch.Tensor]
    process_logits: Callable[..., torch.Tensor]
    sample: Callable[..., torch.Tensor]
    sampling_probs: Callable[..., torch.Tensor]
    accept_chain: Callable[..., tuple[torch.Tensor, ...]]
    accept_tree: Callable[..., tuple[torch.Tensor, ...]]
    quantize_float8: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    w8a8_float8: Callable[..., torch.Tensor]
    topk_softmax: Callable[[torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor]]
    grouped_matmul: Callable[..., torch.Tensor]
    combine: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


def select(backend: str, device: torch.device | str) -> Ops:
    """The operations of `backend` (`torch`, `triton`, or `auto`: by the type of `device`).

    Raises ValueError for an unknown backend, a device that `auto` has no backend for, and a
    backend that cannot run on `device`, saying why.
    """
    device = torch.device(device)
    if backend == _AUTO:
        by_device = {device_type: name for name, device_type in BACKENDS.items()}
        backend = lookup(by_device, device.type, "device for backend 'auto'")
    lookup(BACKENDS, backend, "kernel backend")
    problem = triton_problem(device) if backend == "triton" else None
    if problem is not None:
        raise ValueError(f"backend 'triton' cannot be used: {problem}; use backend 'torch'")
    functions = {name: _load(by_backend[backend]) for name, by_backend in OPS.items()}
    return Ops(backend=backend, **functions)


def _load(target: str) -> Callable[..., Any]:
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function
