"""Rotation of a checkpoint: outliers are spread over all channels before anything is rounded.

Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", arXiv 2404.00456, section
4, stage 1; R1 and R2 are the names that SpinQuant (arXiv 2405.16406) gave the two rotations that
cost nothing at run time, as they are folded into the weights:

  R1   of the residual stream, Q (hidden, hidden): every hidden state x becomes x Q. Norms only
       scale then: their weights move into the Linears behind them, which reads
           embedding  E Q        Linears behind a norm g      W diag(g) Q
           head       W diag(g) Q     residual writers        Q^T W, bias Q^T b
       An RMS norm with unit weight commutes with Q, as |x Q| = |x|. The head is no longer the
       embedding: tied ones are untied.
  R2   of the values within each head, (head_dim, head_dim), one matrix for all heads of a block:
       value projection rows R2^T W (and bias), output projection columns W R2, head by head.

The function of the model is unchanged. Tensors are rotated as they are read, so that a checkpoint
larger than memory needs no second copy: products are made in fp64, kept in fp32 between two steps,
and rounded once, to the dtype of the source. For bf16 sources that rounding adds a relative error
of 0.17 % to weights, 35 dB below that of 4-bit codes; an fp32 copy would double what stays in
float (the embedding and the head).
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from pydantic import ConfigDict

from compress.calib.methods.hadamard import OrthogonalMatrix, random_orthogonal
from compress.models.checkpoint import COMPUTED_SUFFIXES, Checkpoint
from compress.models.family import ModelFamily, is_tied


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """`r1` rotates the residual stream, `r2` the values of each head; `seed` draws the signs."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    kind: Literal["rotation"] = "rotation"
    seed: int = 0
    r1: bool = True
    r2: bool = True

    def __post_init__(self) -> None:
        if not (self.r1 or self.r2):
            raise ValueError("rotation: r1 and r2 are both false, nothing is left to rotate")
        if self.seed < 0:
            raise ValueError(f"rotation: seed must not be negative, got {self.seed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """How one tensor (O, I) is made: read `source`, then do what is set, in the order given here.

    norm     multiply columns by the weight (plus offset) of this norm
    heads    "out": rotate rows within heads, from `first_row` on, "in": columns
    columns  W Q
    rows     Q^T W, or Q^T b for a bias (O,)
    unit     the weight of a norm that was moved: all ones (less the offset)
    """

    source: str
    norm: str | None = None
    heads: Literal["in", "out"] | None = None
    columns: bool = False
    rows: bool = False
    unit: bool = False
    first_row: int = 0


@dataclass(frozen=True)
class RotatedCheckpoint(Checkpoint):
    """`source` seen through a rotation: a checkpoint like any other, whose reads are rotated."""

    source: Checkpoint
    rotation: Rotation
    folds: dict[str, Fold]
    norm_offset: float
    stream: OrthogonalMatrix
    head: OrthogonalMatrix

    def read(self, name: str) -> torch.Tensor:
        """Tensor `name` on the CPU, rotated, in the dtype and shape of its source."""
        if name not in self.folds:
            return self.source.read(name)
        return self.read_float(name).to(self.tensors[name].dtype)

    def read_float(self, name: str) -> torch.Tensor:
        """Tensor `name` rotated, in fp32: not yet rounded to the dtype of its source."""
        fold = self.folds.get(name)
        if fold is None:
            return self.source.read_float(name)
        rotated = self.source.read_float(fold.source)
        if fold.unit:
            return torch.full_like(rotated, 1 - self.norm_offset)
        if fold.norm is not None:
            norm = self.source.read(fold.norm).double() + self.norm_offset
            rotated = rotated * norm.float()
        if fold.heads is not None:
            rest, turned = rotated[: fold.first_row], rotated[fold.first_row :]
            rotated = torch.cat((rest, _within_heads(turned, self.head, fold.heads)))
        if fold.columns:
            rotated = self.stream.of_rows(rotated)
        if fold.rows:
            rotated = _of_columns(self.stream, rotated)
        return rotated.contiguous()

    @property
    def num_bytes(self) -> int:
        """Bytes of the source: a head that the rotation unties is not stored there."""
        return self.source.num_bytes

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the source's fingerprint and the rotation."""
        text = json.dumps([self.source.fingerprint, asdict(self.rotation)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def rotate_checkpoint(
    checkpoint: Checkpoint, family: ModelFamily, rotation: Rotation
) -> RotatedCheckpoint:
    """`checkpoint` of `family` seen through `rotation`; nothing is read but names and shapes.

    Raises ValueError if it holds a tensor of which it is not known how the rotation acts on it, or
    norms that no rotation can pass.
    """
    tensors, config = dict(checkpoint.tensors), dict(checkpoint.config)
    folds: dict[str, Fold] = {}
    embedding, head = f"{family.embedding}.weight", f"{family.head}.weight"
    if rotation.r1:
        _refuse_output_norms(family)
        _refuse_unknown(checkpoint, family)
        if head not in tensors and is_tied(config):
            tensors[head] = tensors[embedding]
        folds |= _stream_folds(checkpoint, family)
        config["tie_word_embeddings"] = False
    if rotation.r2:
        for name, fold in _head_folds(checkpoint, family).items():
            known = folds.get(name, fold)
            folds[name] = replace(known, heads=fold.heads, first_row=fold.first_row)
    generator = torch.Generator().manual_seed(rotation.seed)
    return RotatedCheckpoint(
        path=checkpoint.path,
        config=config,
        tensors=tensors,
        source=checkpoint,
        rotation=rotation,
        folds=folds,
        norm_offset=family.norm_offset,
        stream=random_orthogonal(tensors[embedding].shape[1], generator),
        head=random_orthogonal(_head_dim(config), generator),
    )


def _stream_folds(checkpoint: Checkpoint, family: ModelFamily) -> dict[str, Fold]:
    """R1: what becomes of every tensor that meets the residual stream."""
    embedding, head = f"{family.embedding}.weight", f"{family.head}.weight"
    final_norm = f"{family.final_norm}.weight"
    head_source = head if head in checkpoint.tensors else embedding
    folds = {
        embedding: Fold(source=embedding, columns=True),
        head: Fold(source=head_source, norm=final_norm, columns=True),
        final_norm: Fold(source=final_norm, unit=True),
    }
    for prefix in _block_prefixes(checkpoint, family):
        for shared in family.shared_inputs:
            if shared.norm is None:
                continue
            norm = f"{prefix}{shared.norm}.weight"
            folds[norm] = Fold(source=norm, unit=True)
            for linear in shared.linears:
                weight = f"{prefix}{linear}.weight"
                folds[weight] = Fold(source=weight, norm=norm, columns=True)
        for linear in family.residual_writers:
            for name in (f"{prefix}{linear}.weight", f"{prefix}{linear}.bias"):
                if name in checkpoint.tensors:
                    folds[name] = Fold(source=name, rows=True)
    return folds


def _head_folds(checkpoint: Checkpoint, family: ModelFamily) -> dict[str, Fold]:
    """R2: rows of what produces values, columns of what reads them."""
    folds = {}
    for prefix in _block_prefixes(checkpoint, family):
        for site in family.smoothing_sites:
            if site.heads is None:
                continue
            num_rows = checkpoint.tensors[f"{prefix}{site.producer}.weight"].shape[0]
            in_features = checkpoint.tensors[f"{prefix}{site.consumers[0]}.weight"].shape[1]
            first_row = site.first_row(num_rows, in_features)
            for name in (f"{prefix}{site.producer}.weight", f"{prefix}{site.producer}.bias"):
                if name in checkpoint.tensors:
                    folds[name] = Fold(source=name, heads="out", first_row=first_row)
            for consumer in site.consumers:
                name = f"{prefix}{consumer}.weight"
                folds[name] = Fold(source=name, heads="in")
    return folds


def _refuse_output_norms(family: ModelFamily) -> None:
    """A norm between a residual writer and the stream weighs channels before they can be mixed."""
    if family.output_norms:
        raise ValueError(
            f"{family.architecture}: rotation r1 cannot pass {' and '.join(family.output_norms)},"
            " which norm what attention and the MLP add to the residual stream; use r1: false"
        )


def _refuse_unknown(checkpoint: Checkpoint, family: ModelFamily) -> None:
    """Raise ValueError for tensors that may meet the residual stream in a way not on record."""
    modules = {*family.block_linears, *(shared.norm for shared in family.shared_inputs)}
    known = {f"{name}.weight" for name in modules if name}
    known |= {f"{name}.bias" for name in family.block_linears}
    if family.qk_norm:
        known |= {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    outside = {f"{family.embedding}.weight", f"{family.final_norm}.weight"}
    outside |= {f"{family.head}.weight", f"{family.head}.bias"}
    unknown = []
    for name in checkpoint.tensors:
        index, _, local = name.removeprefix(f"{family.blocks}.").partition(".")
        inside = name.startswith(f"{family.blocks}.") and index.isdecimal()
        if not (name in outside or (inside and local in known) or name.endswith(COMPUTED_SUFFIXES)):
            unknown.append(name)
    if unknown:
        raise ValueError(
            f"{checkpoint.path}: rotation r1 does not know what to do with {unknown[0]}"
            f" ({len(unknown)} such tensors); use r1: false"
        )


def _block_prefixes(checkpoint: Checkpoint, family: ModelFamily) -> list[str]:
    count = int(checkpoint.config["num_hidden_layers"])
    return [f"{family.blocks}.{index}." for index in range(count)]


def _head_dim(config: dict[str, Any]) -> int:
    given = config.get("head_dim")
    return int(given or config["hidden_size"] // config["num_attention_heads"])


def _within_heads(
    tensor: torch.Tensor, matrix: OrthogonalMatrix, side: Literal["in", "out"]
) -> torch.Tensor:
    """Rotate each head's columns ("in") or rows ("out") of a weight (O, I), or of a bias (O,)."""
    rows = tensor.T if side == "out" and tensor.dim() == 2 else tensor
    heads = rows.reshape(-1, matrix.size)
    rotated = matrix.of_rows(heads).view(rows.shape)
    return rotated.T if side == "out" and tensor.dim() == 2 else rotated


def _of_columns(matrix: OrthogonalMatrix, tensor: torch.Tensor) -> torch.Tensor:
    """Q^T W for a weight (O, I), Q^T b for a bias (O,)."""
    if tensor.dim() == 1:
        return matrix.of_rows(tensor[None])[0]
    return matrix.of_rows(tensor.T).T
