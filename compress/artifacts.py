"""The nouns that the parts hand to each other. Data only: the work on them lives elsewhere."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedLinear:
    """One quantized weight matrix, independent of any file format.

    codes        (out, in)          int8, signed, in [-2^(bits-1), 2^(bits-1)-1]; or float8_e4m3fn
    scale        (out, num_groups)  float, in the dtype that is written to disk; with `block_size` B
                                    (ceil(out / B), ceil(in / B)), one for each B x B block
    zero_point   (out, num_groups)  int8 in the range of the codes, None for a symmetric scheme
    input_scale  (1,)               fp32, the static scale of the Linear's inputs, None if they stay
                                    in float or are scaled per token
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    bits: int
    block_size: int | None = None
    input_scale: torch.Tensor | None = None

    @property
    def group_size(self) -> int:
        """Consecutive input columns that share a scale."""
        return self.block_size or self.codes.shape[1] // self.scale.shape[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """What happened to one Linear.

    `relative_error` is ||X (W - W_hat)^T|| / ||X W^T|| in the Frobenius norm on a sample of the
    calibration inputs X; `fallback` is None, or says which simpler method was used and why.
    """

    name: str
    scheme: str
    relative_error: float
    seconds: float
    fallback: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftInFloat:
    """A Linear that keeps its float weight, and why."""

    name: str
    reason: str
