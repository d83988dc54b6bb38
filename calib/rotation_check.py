"""Does a rotated checkpoint still compute the float model? Checked before anything is rounded.

Every block, given the same hidden states in either basis, must put out the same in either basis:

    block_rotated(x Q) = block(x) Q        and      head_rotated(norm_rotated(x Q)) = head(norm(x))

in fp32, to 1e-4. A record of the architecture that does not fit (a Linear that writes the residual
stream and is not listed, another kind of norm) would otherwise give a plausible worse model. One
block is in memory at a time.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.func import functional_call

from compress.calib.capture import BlockCalls, record_block_calls
from compress.calib.methods.rotation import RotatedCheckpoint
from compress.calib.scene import check_unchanged, first_output, widened
from compress.models.checkpoint import COMPUTED_SUFFIXES, Checkpoint
from compress.models.family import ModelFamily
from compress.models.load import dematerialize, materialize

_PROBE_TOKENS = 16


@torch.no_grad()
def check_rotation(
    rotated: RotatedCheckpoint,
    family: ModelFamily,
    model: nn.Module,
    tokens: torch.Tensor,
    device: torch.device,
) -> None:
    """Raise ValueError naming the first place whose float output the rotation changes.

    `model` is the skeleton of the checkpoint; `tokens` (num_samples, length) only tell the blocks
    how they are called.
    """
    tokens = tokens[:1, :_PROBE_TOKENS]
    calls = _probe_calls(rotated, family, model, tokens, device)
    shape, generator = (*tokens.shape, rotated.stream.size), torch.Generator().manual_seed(0)
    blocks = model.get_submodule(family.blocks)
    assert isinstance(blocks, nn.ModuleList), f"{family.blocks} is not a list of blocks"
    for index, block in enumerate(blocks):
        prefix = f"{family.blocks}.{index}."
        x = torch.randn(*shape, generator=generator).to(device)
        before = _run_block(block, index, calls, _read(rotated.source, prefix, device), x)
        turned = _run_block(block, index, calls, _read(rotated, prefix, device), _turn(rotated, x))
        check_unchanged(_turn(rotated, before), turned, f"block {index}: the rotation")
    _check_head(rotated, family, model, torch.randn(*shape, generator=generator).to(device), device)


def _probe_calls(
    rotated: RotatedCheckpoint,
    family: ModelFamily,
    model: nn.Module,
    tokens: torch.Tensor,
    device: torch.device,
) -> BlockCalls:
    embedding = model.get_submodule(family.embedding)
    prefix = f"{family.embedding}."
    materialize(embedding, rotated, prefix, device=device, dtype=torch.float32)
    decoder = model.get_submodule(family.blocks.rpartition(".")[0])
    blocks = model.get_submodule(family.blocks)
    assert isinstance(blocks, nn.ModuleList), f"{family.blocks} is not a list of blocks"
    calls = record_block_calls(decoder, blocks, tokens, 1, device, None)
    dematerialize(embedding)
    return calls


def _turn(rotated: RotatedCheckpoint, x: torch.Tensor) -> torch.Tensor:
    """`x` Q, or `x` where the residual stream is not rotated."""
    if not rotated.rotation.r1:
        return x
    rows = rotated.stream.of_rows(x.cpu().reshape(-1, x.shape[-1]))
    return rows.view(x.shape).to(x.device)


def _read(checkpoint: Checkpoint, prefix: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Every float tensor under `prefix` in fp32, by local name."""
    return {
        name.removeprefix(prefix): checkpoint.read_float(name).to(device)
        for name, info in checkpoint.tensors.items()
        if name.startswith(prefix)
        and info.dtype.is_floating_point
        and not name.endswith(COMPUTED_SUFFIXES)
    }


def _run_block(
    block: nn.Module,
    index: int,
    calls: BlockCalls,
    weights: Mapping[str, torch.Tensor],
    x: torch.Tensor,
) -> torch.Tensor:
    args, kwargs = widened(calls.by_batch_size[1][index])
    return first_output(functional_call(block, dict(weights), (x, *args), kwargs))


def _check_head(
    rotated: RotatedCheckpoint,
    family: ModelFamily,
    model: nn.Module,
    x: torch.Tensor,
    device: torch.device,
) -> None:
    norm, outputs = model.get_submodule(family.final_norm), []
    for checkpoint, hidden in ((rotated.source, x), (rotated, _turn(rotated, x))):
        weights = _read(checkpoint, f"{family.final_norm}.", device)
        name = f"{family.head}.weight"
        if name not in checkpoint.tensors:
            name = f"{family.embedding}.weight"
        head = checkpoint.read_float(name).to(device)
        outputs.append(functional_call(norm, weights, (hidden,)) @ head.T)
    before, after = outputs
    check_unchanged(before, after, "the head: the rotation")
