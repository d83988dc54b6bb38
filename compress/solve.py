"""Round the Linears of a block that read one input: stacked they share one Hessian, solved once."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from compress.artifacts import LayerReport, QuantizedLinear
from compress.calib.collectors import InputStatistics
from compress.calib.methods import ROUNDERS, Method
from compress.calib.methods.scales import least_scale
from compress.kernels.activations import fake_quantize, static_scale
from compress.scheme import ActivationScheme, LinearScheme, dequantize


@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """Linears that read one input, by name, and a report on each in the same order."""

    linears: dict[str, QuantizedLinear]
    rows: list[LayerReport]

    def to(self, device: torch.device) -> "Solved":
        """The same on `device`, each tensor with a storage of its own: views drag along all of it.

        Static input scales stay on the CPU.
        """

        def moved(linear: QuantizedLinear) -> QuantizedLinear:
            zero = linear.zero_point
            return replace(
                linear,
                codes=linear.codes.to(device, copy=True),
                scale=linear.scale.to(device, copy=True),
                zero_point=None if zero is None else zero.to(device, copy=True),
            )

        linears = {name: moved(linear) for name, linear in self.linears.items()}
        return Solved(linears=linears, rows=self.rows)


def solve_shared(
    weights: Mapping[str, torch.Tensor],
    statistics: InputStatistics,
    scheme: LinearScheme,
    method: Method,
    scale_dtype: torch.dtype,
) -> Solved:
    """Quantize `weights`, name of a Linear -> (out, in) fp32, that read what `statistics` saw."""
    started = time.monotonic()
    try:
        linears, fallback = _round(weights, statistics, scheme, method, scale_dtype)
    except ValueError as error:
        raise ValueError(f"{', '.join(weights)}: {error}") from None
    if scheme.activations is not None and not scheme.activations.dynamic:
        input_scale = static_scale(statistics.absmax.max(), scheme.activations).cpu()
        linears = {n: replace(part, input_scale=input_scale) for n, part in linears.items()}
    share = (time.monotonic() - started) / sum(len(weight) for weight in weights.values())
    sample = statistics.sample.float()
    rows = [
        LayerReport(
            name=name,
            scheme=scheme.label,
            relative_error=_relative_error(sample, weight, linears[name], scheme.activations),
            seconds=share * len(weight),
            fallback=fallback or _underflow(weight, linears[name]),
        )
        for name, weight in weights.items()
    ]
    return Solved(linears=linears, rows=rows)


def solve_cost(weights: Mapping[str, torch.Tensor]) -> float:
    """Work of `solve_shared`, up to a factor: factor H (in, in), correct (out, in) by columns."""
    out_features = sum(len(weight) for weight in weights.values())
    in_features = next(iter(weights.values())).shape[1]
    return float(in_features**2 * (in_features + out_features))


def _round(
    weights: Mapping[str, torch.Tensor],
    statistics: InputStatistics,
    scheme: LinearScheme,
    method: Method,
    scale_dtype: torch.dtype,
) -> tuple[dict[str, QuantizedLinear], str | None]:
    """Codes of each of `weights`, stacked unless a scale serves a block: blocks span no Linears."""
    rounder = ROUNDERS[method.kind].fn
    if scheme.weights.block_size is not None:
        alone = {
            name: rounder(weight, statistics, scheme.weights, method, scale_dtype)
            for name, weight in weights.items()
        }
        notes = [note for _, note in alone.values() if note is not None]
        return {name: linear for name, (linear, _) in alone.items()}, next(iter(notes), None)
    stacked, fallback = rounder(
        torch.cat([*weights.values()]), statistics, scheme.weights, method, scale_dtype
    )
    parts = _split_rows(stacked, [len(weight) for weight in weights.values()])
    return dict(zip(weights, parts, strict=True)), fallback


def _underflow(weight: torch.Tensor, linear: QuantizedLinear) -> str | None:
    """How many scales are the smallest that their dtype holds though their weights are not zero."""
    at_limit = linear.scale.float().abs() <= least_scale(linear.scale.dtype)
    if not bool(at_limit.any()) or linear.block_size is not None:
        return None
    lost = at_limit & (weight.view(*linear.scale.shape, -1) != 0).any(2)
    name = str(linear.scale.dtype).removeprefix("torch.")
    count = int(lost.sum())
    return f"{count} groups of weights too small for a {name} scale" if count else None


def _split_rows(stacked: QuantizedLinear, sizes: list[int]) -> list[QuantizedLinear]:
    zero = stacked.zero_point
    return [
        replace(
            stacked,
            codes=stacked.codes[end - size : end],
            scale=stacked.scale[end - size : end],
            zero_point=None if zero is None else zero[end - size : end],
        )
        for size, end in zip(sizes, accumulate(sizes), strict=True)
    ]


def _relative_error(
    sample: torch.Tensor,
    weight: torch.Tensor,
    linear: QuantizedLinear,
    activations: ActivationScheme | None,
) -> float:
    """||X W^T - X_hat W_hat^T|| / ||X W^T||, `sample` X (S, in), 0 if the output is all zero."""
    seen = sample
    if activations is not None:
        seen = fake_quantize(sample, activations, linear.input_scale)
    outputs = sample @ weight.T
    error = torch.linalg.norm(outputs - seen @ dequantize(linear).T)
    return float(error / torch.linalg.norm(outputs).clamp(min=1e-30))
