"""The transforms of float weights that run on a block before it is rounded. One table.

Each is a function of the block's weights (local tensor name -> fp32), the statistics of what its
Linears read, the block on its calibration inputs, and its own settings. It returns the tensors that
it changed and a report per place, and makes the statistics those of the new inputs, in place.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from compress.calib.collectors import InputStatistics
from compress.calib.methods.awq import AWQ, apply_awq
from compress.calib.methods.smoothquant import SmoothQuant, apply_smoothquant
from compress.calib.scene import BlockScene, SiteReport
from compress.lookup import lookup
from compress.models.family import SharedInput

TRANSFORMS: dict[str, Callable[..., tuple[dict[str, torch.Tensor], list[SiteReport]]]] = {
    "awq": apply_awq,
    "smoothquant": apply_smoothquant,
}


def apply_transform(
    transform: AWQ | SmoothQuant,
    weights: Mapping[str, torch.Tensor],
    statistics: Mapping[SharedInput, InputStatistics],
    scene: BlockScene,
) -> tuple[dict[str, torch.Tensor], list[SiteReport]]:
    """Changed tensors of the block, and what was done at each place.

    `weights` are all tensors of the block. Raises ValueError if the block's float output would
    change, or an output that is scaled has a reader that is not on record.
    """
    fn: Any = lookup(TRANSFORMS, transform.kind, "transform")
    changed, reports = fn(weights, statistics, scene, transform)
    return changed, reports
