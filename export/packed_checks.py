"""Checks of the packed modules of a checkpoint, one module in memory at a time."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from compress.export.checks import Check, Subject, result, same_bits
from compress.export.formats import read_linear

_SCALES = ("weight_scale", "scales")
_SHAPE, _ZERO_POINT = "weight_shape", "weight_zero_point"


def check_packed(subject: Subject) -> list[Check]:
    """Shapes, zero points, scales and unused bits of every packed module, and that it decodes."""
    passed = {
        "scales": "finite and not zero",
        "zero points": "present exactly in asymmetric Linears",
        "shapes": "weight_shape is that of the model",
        "decoding": "every packed module decodes",
        "padding": "bits past the last code are zero",
    }
    problems: dict[str, list[str]] = {check: [] for check in passed}
    for name in subject.packed:
        for check, problem in _problems(subject, name):
            problems[check].append(problem)
    return [result(check, problems[check], passed[check]) for check in passed]


def _problems(subject: Subject, name: str) -> Iterator[tuple[str, str]]:
    """(check, problem) for one packed module."""
    assert subject.format is not None, "a float checkpoint has no packed module"
    checkpoint, scheme = subject.checkpoint, subject.packed[name]
    layout = subject.layout(name)
    if (_ZERO_POINT in layout) != (f"{name}.{_ZERO_POINT}" in checkpoint.tensors):
        verb = "lacks" if _ZERO_POINT in layout else "has"
        yield "zero points", f"{name} ({scheme.label}) {verb} {_ZERO_POINT}"
        return
    if not subject.is_intact(name):
        return
    if _SHAPE in layout:
        shape = tuple(checkpoint.read(f"{name}.{_SHAPE}").tolist())
        if shape != subject.linears[name]:
            yield "shapes", f"{name}.{_SHAPE} is {shape}, expected {subject.linears[name]}"
            return
    try:
        linear = read_linear(checkpoint, name, scheme, subject.format)
    except ValueError as error:
        yield "decoding", str(error)
        return
    local_scale = next(local for local in _SCALES if local in layout)
    if not linear.scale.isfinite().all() or (linear.scale == 0).any():
        yield "scales", f"{name}.{local_scale} holds zero, NaN or infinity"
    if linear.input_scale is not None and not 0 < float(linear.input_scale) < float("inf"):
        yield "scales", f"{name}.input_scale is not positive and finite"
    # scales have no unused bits; ones let those pass that could not be written again
    plain = replace(linear, scale=torch.ones_like(linear.scale))
    for local, again in subject.format.pack(plain, scheme).items():
        if local in _SCALES or local == "input_scale":
            continue
        if not same_bits(again, checkpoint.read(f"{name}.{local}")):
            yield "padding", f"{name}.{local} has bits set past its last code"
