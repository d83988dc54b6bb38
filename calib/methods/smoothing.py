"""Scales that move from the input of Linears to the layer that produces it.

For any s > 0, diag(s) W^T applied to x / s is W^T applied to x: the columns of W are multiplied by
s, and the division is folded into the producer of x (norm weight, or rows and bias of a Linear).
The float block computes what it did, but rounding now errs less where s is large. AWQ and
SmoothQuant differ only in how they choose s.

Legend: C channels of the producer, I in_features and O out_features of a consumer. I = C, or, where
query heads share a value head, I = C * repeats: columns (kv head, query head, channel of a head).

A channel without any input (or that no consumer weighs) keeps s = 1: there is nothing to balance.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from compress.calib.collectors import InputStatistics
from compress.calib.methods.fake_quant import cheap_search, round_weight
from compress.calib.methods.scales import ScaleSearch
from compress.calib.scene import (
    BlockScene,
    RecordedCall,
    SiteReport,
    block_output,
    check_consumers,
    check_unchanged,
    first_output,
    record_calls,
)
from compress.kernels.activations import fake_quantize, static_scale
from compress.models.family import SharedInput, SmoothingSite
from compress.scheme import ActivationScheme

Statistics = Mapping[SharedInput, InputStatistics]
Weights = Mapping[str, torch.Tensor]
Chosen = dict[str, float | bool | str]
_NUM_FINALISTS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Channels:
    """How the C channels of a producer map onto the I columns of its consumers."""

    head_dim: int
    repeats: int

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """(C,) -> (I,): every query head gets the values of its value head."""
        heads = values.view(-1, 1, self.head_dim)
        return heads.expand(-1, self.repeats, -1).reshape(-1)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """(I,) -> (C,): mean over the query heads that share a value head."""
        return values.view(-1, self.repeats, self.head_dim).mean(1).flatten()

    def amax(self, values: torch.Tensor) -> torch.Tensor:
        """(I,) -> (C,): largest value over the query heads that share a value head."""
        return values.view(-1, self.repeats, self.head_dim).amax(1).flatten()


@dataclass(frozen=True, kw_only=True, slots=True)
class SiteProblem:
    """All that the choice of a scale for one site may look at.

    `weights` (O, I) fp32 by consumer; `statistics` of their common input; `calls` of the module
    `measured`, whose output is compared.
    """

    scene: BlockScene
    site: SmoothingSite
    channels: Channels
    weights: dict[str, torch.Tensor]
    statistics: InputStatistics
    measured: str
    calls: list[RecordedCall]

    @torch.no_grad()
    def loss(self, scale: torch.Tensor | None, search: ScaleSearch, *, inputs: bool) -> float:
        """Mean squared error of the measured output once the consumers are rounded.

        `scale` (C,) or None for ones. With `inputs` the inputs of consumers whose scheme quantizes
        activations are rounded as well. Inputs stay those of the unscaled block, so the rounded
        weights are divided by the scale again.
        """
        wide = self._wide(scale)
        module = self.scene.module.get_submodule(self.measured)
        dtype = next(module.parameters()).dtype
        tensors = {
            f"{name}.weight".removeprefix(f"{self.measured}."): rounded.to(dtype)
            for name, rounded in self._rounded(wide, search)
        }
        total, count = 0.0, 0
        with self._rounding_inputs(wide if inputs else None):
            for call in self.calls:
                output = first_output(functional_call(module, tensors, call.args, call.kwargs))
                error = (output.float() - call.output.float()).square_()
                total, count = total + float(error.sum()), count + error.numel()
        return total / count

    def _wide(self, scale: torch.Tensor | None) -> torch.Tensor:
        """(I,) fp32."""
        if scale is None:
            return torch.ones_like(self.statistics.mean_square)
        return self.channels.spread(scale)

    def _rounded(
        self, wide: torch.Tensor, search: ScaleSearch
    ) -> Iterator[tuple[str, torch.Tensor]]:
        importance = self.statistics.mean_square / wide.square()
        for name, weight in self.weights.items():
            scheme = self.scene.schemes[name].weights
            rounded = round_weight(
                weight * wide, importance, scheme, search, self.scene.scale_dtype
            )
            yield name, rounded / wide

    @contextmanager
    def _rounding_inputs(self, wide: torch.Tensor | None) -> Iterator[None]:
        """Round what consumers read, as their schemes say; None leaves all of it in float."""
        handles = []
        for name in self.weights:
            scheme = self.scene.schemes[name].activations
            if wide is None or scheme is None:
                continue
            largest = (self.statistics.absmax / wide).amax()
            consumer = self.scene.module.get_submodule(name)
            handles.append(consumer.register_forward_pre_hook(_input_hook(scheme, wide, largest)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A scale (C,) for a site, or None with the reason; and what is reported about it."""

    scale: torch.Tensor | None = None
    chosen: Chosen = field(default_factory=dict)
    loss_before: float | None = None
    loss_after: float | None = None
    left_alone: str | None = None


def smooth_block(
    weights: Weights,
    statistics: Statistics,
    scene: BlockScene,
    choose: Callable[[SiteProblem], Choice],
    *,
    norms_only: bool,
    whole_block: bool,
    max_tokens: int,
) -> tuple[dict[str, torch.Tensor], list[SiteReport]]:
    """Let `choose` find a scale for every site of the block, and fold it in.

    `weights` are all tensors of the block, local name -> fp32. Returns the changed ones and a
    report per site; `statistics` are made those of the scaled inputs, in place. Losses compare the
    output of the block if `whole_block`, else that of each site's parent, over `max_tokens` tokens.

    Raises ValueError if a module that reads a scaled output is not on record, or the block computes
    something else than before.
    """
    sites, reports = _usable_sites(scene, weights, norms_only)
    if not sites:
        return {}, reports
    check_consumers(scene, sites)
    calls = record_calls(scene, {"" if whole_block else s.parent for s in sites}, max_tokens)
    changed: dict[str, torch.Tensor] = {}
    scales: dict[SmoothingSite, torch.Tensor] = {}
    for site in sites:
        measured = "" if whole_block else site.parent
        shared = statistics_of(statistics, site)
        problem = SiteProblem(
            scene=scene,
            site=site,
            channels=_channels(scene, site, weights),
            weights={name: weights[f"{name}.weight"] for name in site.consumers},
            statistics=shared[0],
            measured=measured,
            calls=calls[measured],
        )
        choice = choose(problem)
        if choice.scale is not None:
            choice = _folded(problem, choice, {**weights, **changed}, changed)
        if choice.scale is not None:
            scales[site] = choice.scale
            for stats in shared:
                stats.divide(problem.channels.spread(choice.scale))
        reports.append(_report(site, choice))
    _check_block(scene, weights, changed, scales)
    return changed, reports


def statistics_of(statistics: Statistics, site: SmoothingSite) -> list[InputStatistics]:
    """Those of every entry that names a consumer of `site`: all of them read one tensor."""
    found = [
        stats
        for shared, stats in statistics.items()
        if not set(site.consumers).isdisjoint(shared.linears)
    ]
    assert found, f"no statistics for {', '.join(site.consumers)}"
    return found


def fold_scale(
    site: SmoothingSite,
    weights: Weights,
    scale: torch.Tensor,
    channels: Channels,
    norm_offset: float = 0.0,
) -> dict[str, torch.Tensor]:
    """The tensors of `site` with `scale` (C,) moved from the consumers' inputs to the producer.

    A norm that multiplies by w + norm_offset stores (w + norm_offset) / s - norm_offset.
    """
    name = f"{site.producer}.weight"
    producer = weights[name]
    if producer.dim() == 1:
        folded = {name: (producer + norm_offset) / scale - norm_offset}
    else:
        folded = {name: _divide_last(producer, scale[:, None])}
    bias = f"{site.producer}.bias"
    if bias in weights:
        folded[bias] = _divide_last(weights[bias], scale)
    wide = channels.spread(scale)
    for consumer in site.consumers:
        folded[f"{consumer}.weight"] = weights[f"{consumer}.weight"] * wide
    return folded


def _divide_last(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`rows` with the last of them, as many as `scale` has, divided by it: all, unless fused."""
    first = len(rows) - len(scale)
    return torch.cat((rows[:first], rows[first:] / scale)) if first else rows / scale


def live_scale(scale: torch.Tensor, *dead: torch.Tensor) -> torch.Tensor:
    """`scale` (C,) with ones where any of the masks `dead` (C,) is set."""
    for mask in dead:
        scale = torch.where(mask, 1.0, scale)
    return scale


def choose_scale(
    problem: SiteProblem,
    candidates: Iterable[tuple[Chosen, torch.Tensor]],
    search: ScaleSearch,
    *,
    inputs: bool,
    must_gain: bool,
) -> Choice:
    """The candidate (settings, scale (C,)) with the least loss; no scale if none has a finite one.

    All are compared with a cheap setting of `search`, the best few once more with `search` itself.
    With `must_gain` the winner also has to be better than no scale. `inputs` as in `loss`.
    """
    finite = [(c, s) for c, s in candidates if bool(torch.isfinite(s).all())]
    before = problem.loss(None, search, inputs=inputs)
    losses = [problem.loss(scale, cheap_search(search), inputs=inputs) for _, scale in finite]
    ranking = sorted((loss, i) for i, loss in enumerate(losses) if isfinite(loss))
    finals = [
        (problem.loss(finite[i][1], search, inputs=inputs), i) for _, i in ranking[:_NUM_FINALISTS]
    ]
    finals = [final for final in finals if isfinite(final[0])]
    if not finals:
        return Choice(loss_before=before, left_alone="no scale with a finite loss")
    after, winner = min(finals)
    if must_gain and not after < before:
        reason = f"no scale is better than none (best {after:.3g})"
        return Choice(loss_before=before, left_alone=reason)
    chosen, scale = finite[winner]
    return Choice(scale=scale, chosen=chosen, loss_before=before, loss_after=after)


def _usable_sites(
    scene: BlockScene, weights: Weights, norms_only: bool
) -> tuple[list[SmoothingSite], list[SiteReport]]:
    """Sites whose consumers are all quantized, and reports on the others."""
    sites, reports = [], []
    for site in scene.family.smoothing_sites:
        if norms_only and weights[f"{site.producer}.weight"].dim() != 1:
            continue
        kept = [name for name in site.consumers if name not in scene.schemes]
        if kept:
            reason = f"not quantized: {', '.join(kept)}"
            reports.append(SiteReport(producer=site.producer, chosen={}, left_alone=reason))
        else:
            sites.append(site)
    return sites, reports


def _channels(scene: BlockScene, site: SmoothingSite, weights: Weights) -> Channels:
    widths = {weights[f"{name}.weight"].shape[1] for name in site.consumers}
    width, num_rows = max(widths), weights[f"{site.producer}.weight"].shape[0]
    count = num_rows - site.first_row(num_rows, width)
    if widths == {count}:
        return Channels(head_dim=count, repeats=1)
    heads: Any = scene.module.get_submodule(site.heads or "")
    head_dim = int(heads.head_dim) if site.heads else count
    if site.heads is None or len(widths) > 1 or width % count or count % head_dim:
        raise ValueError(
            f"block {scene.index}: {site.producer} has {count} channels, but"
            f" {', '.join(site.consumers)} read {', '.join(map(str, sorted(widths)))}"
        )
    return Channels(head_dim=head_dim, repeats=width // count)


def _folded(
    problem: SiteProblem, choice: Choice, weights: Weights, changed: dict[str, torch.Tensor]
) -> Choice:
    """Put the folded tensors into `changed`; a scale that overflows what is stored is given up.

    The weight of a norm is rounded to the dtype in which it is stored first, and the scale follows
    it: the consumers then make up for that rounding as well.
    """
    scene, site, scale = problem.scene, problem.site, choice.scale
    assert scale is not None
    offset = scene.family.norm_offset
    producer = weights[f"{site.producer}.weight"]
    if producer.dim() == 1 and f"{site.producer}.bias" not in weights:
        stored = ((producer + offset) / scale - offset).to(scene.float_dtype).float() + offset
        followed = (producer + offset) / stored
        scale = torch.where(followed.isfinite() & (followed > 0), followed, scale)
    folded = fold_scale(site, weights, scale, problem.channels, offset)
    if not all(bool(t.to(scene.float_dtype).isfinite().all()) for t in folded.values()):
        reason = f"scaled weights overflow {str(scene.float_dtype).removeprefix('torch.')}"
        return Choice(loss_before=choice.loss_before, left_alone=reason)
    changed.update(folded)
    return replace(choice, scale=scale)


def _check_block(
    scene: BlockScene,
    weights: Weights,
    changed: Weights,
    scales: Mapping[SmoothingSite, torch.Tensor],
) -> None:
    """Check the whole block once; if it changed, find the first site that is to blame."""
    if not changed:
        return
    before = block_output(scene, weights)
    place = f"block {scene.index}: smoothing"
    try:
        check_unchanged(before, block_output(scene, {**weights, **changed}), place)
    except ValueError:
        for site, scale in scales.items():
            channels = _channels(scene, site, weights)
            alone = fold_scale(site, weights, scale, channels, scene.family.norm_offset)
            after = block_output(scene, {**weights, **alone})
            check_unchanged(before, after, f"{place} at {site.producer}")
        raise


def _report(site: SmoothingSite, choice: Choice) -> SiteReport:
    return SiteReport(
        producer=site.producer,
        chosen=choice.chosen,
        loss_before=_plain(choice.loss_before),
        loss_after=_plain(choice.loss_after),
        left_alone=choice.left_alone,
    )


def _plain(loss: float | None) -> float | None:
    """None for a loss that is not finite: JSON has no word for it."""
    return loss if loss is not None and isfinite(loss) else None


def _input_hook(scheme: ActivationScheme, wide: torch.Tensor, largest: torch.Tensor) -> Any:
    scale = None if scheme.dynamic else static_scale(largest, scheme)

    def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        rounded = fake_quantize(args[0].float() / wide, scheme, scale) * wide
        return (rounded.to(args[0].dtype), *args[1:])

    return hook
