"""AWQ: give the few channels with large inputs more of the code range; rounding errs less there.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration",
arXiv 2306.00978. With Q the rounding of the Linear's own scheme, each smoothing site is given

    s* = argmin_s || Q(W diag(s)) (diag(s)^-1 X) - W X ||                                   (eq. 4)
    s  = s_x^r                              r on a grid over [0, 1]                         (eq. 5)

where s_x is the mean magnitude of each input channel. With `duo` scaling the weights enter too,
s = s_x^r / (s_w^(1-r) + 1e-4), s_w the mean over rows of |w| / max |w| of its group. s is brought
to sqrt(max s * min s) = 1 and kept within 1e-4 and 1e4. No scale at all is a candidate as well, and
has to be beaten with the full scale search before a site is touched.

`clip` then finds, group by group of each row, the range to which weights should be clipped before
they are rounded, argmin || Q(clip(w)) X - w X ||; no clipping is among the candidates. Queries and
keys are left out: errors in both multiply in the attention scores. It is off by default: on top of
the scale search, which shrinks ranges already, it made the first two blocks of SmolLM2-135M err
more (by 8 % and 2 %, W4 g64, round to nearest) on samples that it had not seen.

Legend: O out_features, I in_features, G groups per row, W columns per group, C channels of a site's
producer, T tokens, K = min(T, W).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict

from compress.calib.collectors import InputStatistics
from compress.calib.methods.fake_quant import cheap_search, round_weight
from compress.calib.methods.scales import ScaleSearch
from compress.calib.methods.smoothing import (
    Choice,
    Chosen,
    SiteProblem,
    Statistics,
    Weights,
    choose_scale,
    live_scale,
    smooth_block,
)
from compress.calib.scene import BlockScene, SiteReport
from compress.scheme import group_width

_MAX_SCALE = 1e4
_CLIP_TOKENS = 512
_NOT_CLIPPED = (".q_proj", ".k_proj", ".qkv_proj")


@dataclass(frozen=True, kw_only=True, slots=True)
class AWQ:
    """`scale` is how weights are rounded when candidates are compared: best as they will be.

    `ratios` is the number of exponents r tried, `max_tokens` the calibration tokens on which
    errors are measured, `duo` whether the weights enter the scales ("both" tries either).
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    kind: Literal["awq"] = "awq"
    ratios: int = 20
    duo: bool | Literal["both"] = True
    clip: bool = False
    clip_steps: int = 10
    clip_max_shrink: float = 0.5
    max_tokens: int = 4096
    scale: ScaleSearch = field(default_factory=ScaleSearch)

    def __post_init__(self) -> None:
        for name, least in (("ratios", 2), ("clip_steps", 1), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.clip_max_shrink < 1:
            raise ValueError(f"clip_max_shrink must be between 0 and 1, got {self.clip_max_shrink}")


def apply_awq(
    weights: Weights, statistics: Statistics, scene: BlockScene, method: AWQ
) -> tuple[dict[str, torch.Tensor], list[SiteReport]]:
    """Changed tensors of the block (local name -> fp32) and a report per site and clipped Linear.

    `weights` are all tensors of the block, fp32. `statistics` are made those of the new inputs.
    """
    changed, reports = smooth_block(
        weights,
        statistics,
        scene,
        lambda problem: _choose(problem, method),
        norms_only=False,
        whole_block=False,
        max_tokens=method.max_tokens,
    )
    if method.clip:
        for shared, stats in statistics.items():
            for name in shared.linears:
                weight = f"{name}.weight"
                if name in scene.schemes and not name.endswith(_NOT_CLIPPED):
                    clipped, report = _clip(
                        name, changed.get(weight, weights[weight]), stats, scene, method
                    )
                    reports.append(report)
                    if report.left_alone is None:
                        changed[weight] = clipped
    return changed, reports


def _choose(problem: SiteProblem, method: AWQ) -> Choice:
    candidates = _candidates(problem, method)
    return choose_scale(problem, candidates, method.scale, inputs=False, must_gain=True)


def _candidates(problem: SiteProblem, method: AWQ) -> Iterator[tuple[Chosen, torch.Tensor]]:
    """Settings and scale (C,) of every point of the grid."""
    x = problem.channels.mean(problem.statistics.mean_abs)
    w = problem.channels.mean(_relative_magnitude(problem))
    dead = (x == 0) | (w == 0)
    for duo in (True, False) if method.duo == "both" else (method.duo,):
        for i in range(method.ratios):
            ratio = i / (method.ratios - 1)
            scale = x**ratio / (w ** (1 - ratio) + 1e-4) if duo else x**ratio
            yield {"ratio": round(ratio, 4), "duo": bool(duo)}, _normalized(scale, dead)


def _normalized(scale: torch.Tensor, dead: torch.Tensor) -> torch.Tensor:
    """`scale` (C,) around one, and one where `dead` (C,)."""
    if bool(dead.all()):
        return torch.ones_like(scale)
    live = scale[~dead].clamp(min=1e-4)
    centre = (live.amax() * live.amin()).sqrt()
    return live_scale((scale.clamp(min=1e-4) / centre).clamp(1 / _MAX_SCALE, _MAX_SCALE), dead)


def _relative_magnitude(problem: SiteProblem) -> torch.Tensor:
    """(I,) mean over the rows of all consumers of |w| / max |w| of its group."""
    rows = []
    for name, weight in problem.weights.items():
        width = group_width(problem.scene.schemes[name].weights, weight.shape[1])
        groups = weight.abs().view(weight.shape[0], -1, width)
        largest = groups.amax(2, keepdim=True).clamp(min=1e-30)
        rows.append((groups / largest).view_as(weight))
    return torch.cat(rows).mean(0)


def _clip(
    name: str, weight: torch.Tensor, statistics: InputStatistics, scene: BlockScene, method: AWQ
) -> tuple[torch.Tensor, SiteReport]:
    """`weight` (O, I) with each group clipped to the range that errs least once it is rounded."""
    scheme = scene.schemes[name].weights
    if scheme.type == "float":
        reason = "float codes need no clipping"
        return weight, SiteReport(producer=name, chosen={}, left_alone=reason)
    factor = _input_factor(statistics.sample, group_width(scheme, weight.shape[1]))
    importance = statistics.mean_square
    out_features, width = weight.shape[0], factor.shape[2]
    groups = weight.view(out_features, -1, width)
    largest = groups.abs().amax(2, keepdim=True)

    def errors(clipped: torch.Tensor, search: ScaleSearch) -> torch.Tensor:
        rounded = round_weight(
            clipped.view_as(weight), importance, scheme, search, scene.scale_dtype
        )
        return _group_errors(rounded.view_as(groups) - groups, factor)

    cheap = cheap_search(method.scale)
    best, shrink = errors(groups, cheap), torch.ones_like(largest)
    for step in range(1, method.clip_steps + 1):
        tried = 1 - method.clip_max_shrink * step / method.clip_steps
        error = errors(_clamp(groups, largest * tried), cheap)
        better = error < best
        best = torch.where(better, error, best)
        shrink[better] = tried
    clipped = _clamp(groups, largest * shrink)
    before, after = errors(groups, method.scale), errors(clipped, method.scale)
    better = after < before
    outputs = statistics.sample.shape[0] * out_features
    report = SiteReport(
        producer=name,
        chosen={"clipped": float(better.float().mean())},
        loss_before=float(before.sum()) / outputs,
        loss_after=float(torch.where(better, after, before).sum()) / outputs,
        left_alone=None if bool(better.any()) else "no clipping is better than none",
    )
    return torch.where(better[..., None], clipped, groups).view_as(weight), report


def _clamp(groups: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    return torch.minimum(torch.maximum(groups, -limit), limit)


def _input_factor(sample: torch.Tensor, width: int) -> torch.Tensor:
    """R (G, K, W) fp32 with R^T R = X^T X for the columns X (T, W) of each group of `sample`.

    It stands for the inputs in every error, at the cost of W tokens at most.
    """
    rows = sample[:: -(-sample.shape[0] // _CLIP_TOKENS)].float()
    groups = rows.view(rows.shape[0], -1, width).transpose(0, 1).contiguous()
    return groups if groups.shape[1] <= width else torch.linalg.qr(groups, mode="r").R


def _group_errors(difference: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """(O, G): || X_g d ||^2 for every row and group d of `difference` (O, G, W)."""
    return torch.einsum("ogw,gkw->ogk", difference, factor).square().sum(2)
