"""Compare a checkpoint with the float checkpoint that it was made from.

What was not quantized must be equal, bit for bit or after the cast to the stored dtype. How far
a dequantized weight W_hat may be from its source W is bounded by (Frobenius norms)

    ||W - W_hat||^2 <= 3^2 * sum over weights of s^2 / 12  +  ||W - clamp(W, range)||^2

Rounding to a grid of step s leaves an error that is uniform in [-s/2, s/2], hence of variance
s^2 / 12; the stored scales s carry the bit width, the group size and the outliers of the layer.
Weights outside the range of their group's codes were clipped on purpose. With clipping taken out,
rounding to nearest reaches 1.0 times the root of the first sum and GPTQ, which moves later weights
to make up for earlier ones, 2.0 times (SmolLM2-135M, 2 to 8 bits). A code off by one costs
sqrt(12) = 3.5 times, wrong order, axis or sign far more: 3 tells them apart. Scales far too small
would widen the second term, so the relative error is capped by a constant for each bit width too.

The step of a float8 code is not s but grows with the weight: at most |w| / 8 (3 bits of mantissa),
and 2^-9 s near zero.

The bound holds for methods that round the source's weights. One that rescales, rotates or moves
them first has no W to compare with: it lists those tensors in the provenance, and they are left out
here.
"""

import filecmp
from math import inf

import torch

from compress.artifacts import QuantizedLinear
from compress.export.checks import Check, Subject, result, same_bits
from compress.export.formats import read_linear
from compress.export.inspect import TRANSFORMED_KEY, read_provenance
from compress.export.writer import side_files
from compress.models.checkpoint import Checkpoint
from compress.models.family import family_of
from compress.models.load import trim_heap
from compress.scheme import FLOAT8_MAX, code_range, dequantize, spread_scale

_MAX_ROUNDING_NOISE = 3.0
# Above the largest relative errors of sound layers, GPTQ per channel: 0.93, 0.48, 0.25 and 0.024.
# Those of 5, 6 and 7 bits lie between on the same curve.
_MAX_RELATIVE_ERROR = {2: 1.0, 3: 0.8, 4: 0.6, 5: 0.4, 6: 0.25, 7: 0.15, 8: 0.1}
_FLOAT8_STEP = 2.0**-3  # of a code near w, relative to w
_FLOAT8_LEAST = 2.0**-9  # smallest code above zero
# Keys of config.json that quantizing may change.
_CONFIG_MAY_DIFFER = {"quantization_config", "dtype", "torch_dtype", "transformers_version"}


def compare_config(
    subject: Subject, source: Checkpoint, transformed: frozenset[str] = frozenset()
) -> Check:
    """The architecture, vocabulary and every other key of `config.json` are the source's.

    A rotation unties the head: it is then among the `transformed` tensors.
    """
    mine, theirs = subject.checkpoint.config, source.config
    may_differ = set(_CONFIG_MAY_DIFFER)
    if f"{family_of(source.config).head}.weight" in transformed:
        may_differ.add("tie_word_embeddings")
    problems = [
        f"{key} is {mine.get(key)!r}, the source has {theirs.get(key)!r}"
        for key in sorted((mine.keys() | theirs.keys()) - may_differ)
        if mine.get(key) != theirs.get(key)
    ]
    return result("config", problems, "equal to the source's, quantization and dtype aside")


def transformed_tensors(subject: Subject) -> frozenset[str]:
    """Names of the tensors that the provenance says are not the source's: rescaled or rotated."""
    provenance = read_provenance(subject.checkpoint.path) or {}
    return frozenset(provenance.get(TRANSFORMED_KEY) or ())


def compare_untouched(
    subject: Subject, source: Checkpoint, transformed: frozenset[str] = frozenset()
) -> Check:
    """Every tensor of the source is there and equal, or its Linear is packed; nothing is added.

    Of `transformed` tensors only the presence is checked.
    """
    checkpoint = subject.checkpoint
    packed = {f"{name}.{local}" for name in subject.packed for local in subject.layout(name)}
    replaced = {f"{name}.weight" for name in subject.packed}
    problems, num_cast, num_transformed = [], 0, 0
    kept = [name for name in source.tensors if name not in replaced]
    for name in kept:
        if name not in checkpoint.tensors:
            if name not in subject.optional:
                problems.append(f"{name} of the source is missing")
            continue
        if name in transformed:
            num_transformed += 1
            continue
        mine, theirs = checkpoint.read(name), source.read(name)
        num_cast += mine.dtype != theirs.dtype
        if not same_bits(mine, theirs.to(mine.dtype)):
            problems.append(f"{name} differs from the source")
    known = source.tensors.keys() | packed | subject.kv_scales | transformed
    added = checkpoint.tensors.keys() - known
    problems += [f"{name} is not in the source" for name in sorted(added)]
    num_equal = len(kept) - num_transformed
    passed = f"{num_equal} tensors equal to the source's ({num_cast} after a cast)"
    return result("untouched", problems, passed + _not_compared(num_transformed))


def compare_packed(
    subject: Subject, source: Checkpoint, transformed: frozenset[str] = frozenset()
) -> tuple[Check, dict[str, float]]:
    """Every packed Linear is its source within rounding; also ||W - W_hat|| / ||W|| by name.

    Linears whose weight is among the `transformed` tensors are not compared.
    """
    errors: dict[str, float] = {}
    problems = []
    num_transformed = 0
    for name, scheme in subject.packed.items():
        weight_name = f"{name}.weight"
        if weight_name in transformed:
            num_transformed += 1
            continue
        if not subject.is_intact(name):
            continue
        if (info := source.tensors.get(weight_name)) is None or info.shape != subject.linears[name]:
            problems.append(f"the source has no {weight_name} of shape {subject.linears[name]}")
            continue
        try:
            linear = read_linear(subject.checkpoint, name, scheme)
        except ValueError as error:
            problems.append(str(error))
            continue
        weight = source.read(weight_name).float()
        errors[name] = _relative_error(weight, dequantize(linear))
        bound = relative_error_bound(linear, weight)
        del linear, weight
        trim_heap()  # or the holes that they leave add up, Linear by Linear
        if not errors[name] <= bound:
            problems.append(f"{name} is off by {errors[name]:.3f}, rounding explains {bound:.3f}")
    worst = max(errors.values(), default=0.0)
    passed = f"{len(errors)} Linears within rounding of the source, worst {worst:.3f}"
    return result("weights", problems, passed + _not_compared(num_transformed)), errors


def compare_side_files(subject: Subject, source: Checkpoint) -> Check:
    """Tokenizer, chat template and every other side file of the source, byte for byte."""
    folder = subject.checkpoint.path
    files = side_files(source.path, skip=folder)
    problems = []
    for file in files:
        if not (folder / file).is_file():
            problems.append(f"{file} of the source is missing")
        elif not filecmp.cmp(folder / file, source.path / file, shallow=False):
            problems.append(f"{file} differs from the source")
    return result("side files", problems, f"{len(files)} files equal to the source's")


def relative_error_bound(linear: QuantizedLinear, weight: torch.Tensor) -> float:
    """Largest acceptable ||W - W_hat|| / ||W|| for `weight` (out, in); see the top of this file."""
    if linear.codes.dtype.is_floating_point:
        scale = spread_scale(linear.scale, weight.shape, linear.block_size)
        step = torch.maximum(weight.abs() * _FLOAT8_STEP, scale.abs() * _FLOAT8_LEAST)
        noise = step.double().square().sum() / 12
        inside = weight.clamp(-FLOAT8_MAX * scale.abs(), FLOAT8_MAX * scale.abs())
    else:
        noise = linear.scale.double().square().sum() * linear.group_size / 12
        inside = _clamp_to_range(weight, linear)
    clipped = (weight - inside).double().square().sum()
    bound = (_MAX_ROUNDING_NOISE**2 * noise + clipped).sqrt() / weight.double().norm()
    return min(_MAX_RELATIVE_ERROR[linear.bits], float(bound))


def _not_compared(num_transformed: int) -> str:
    if not num_transformed:
        return ""
    return f"; {num_transformed} rescaled or rotated before rounding, not compared"


def _clamp_to_range(weight: torch.Tensor, linear: QuantizedLinear) -> torch.Tensor:
    """Each weight moved to the nearest value between the ends of its group's codes."""
    lowest, highest = code_range(linear.bits)
    zero = 0 if linear.zero_point is None else linear.zero_point.float()
    scale = linear.scale.float()
    ends = torch.stack([(lowest - zero) * scale, (highest - zero) * scale])
    grouped = weight.view(*scale.shape, linear.group_size)
    # a negative scale swaps the ends
    clamped = grouped.clamp(ends.amin(0)[..., None], ends.amax(0)[..., None])
    return clamped.view_as(weight)


def _relative_error(weight: torch.Tensor, approximation: torch.Tensor) -> float:
    norm, error = float(weight.norm()), float((weight - approximation).norm())
    if norm == 0:
        return 0.0 if error == 0 else inf
    return error / norm
