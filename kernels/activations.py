"""Quantize the inputs of a Linear to 8 bits, as its `ActivationScheme` says.

Shapes (T tokens, K in_features, G groups per token):
  x            (T, K)   fp16 | bf16 | fp32
  scale        (T, G)   fp32; (1,) where it is static
  int codes    (T, K)   q = clamp(round(x / scale), -128, 127), half to even
  float codes  (T, K)   float8_e4m3fn of clamp(x / scale, -448, 448), to nearest even
Mathematics: a dynamic scale is max|x| over the group, divided by 127.5 (int) or 448 (float): half
the length of the code range, as compressed-tensors has it. A positive int maximum is therefore
clipped to 127. All of it is in fp32; what is returned as x again is rounded to x's dtype once.
Contract: a row depends on nothing but itself. A row of zeros has the smallest normal scale. NaN and
infinity in a row make the whole row NaN where its scale is dynamic. Where the largest int value of
a row is negative, x / scale is -127.5, a tie, whose code is -128 or -127 as the last bit of x has
it: two engines whose activations agree to 1e-7 differ by more after it.

Reference: compressed-tensors 0.20.1, `calculate_qparams` and `fake_quantize`.
"""

import torch

from compress.scheme import FLOAT8, FLOAT8_MAX, ActivationScheme

_INT8_MIN, _INT8_MAX = -128, 127
_HALF_RANGE = {"int": (_INT8_MAX - _INT8_MIN) / 2, "float": FLOAT8_MAX}
_LEAST_SCALE = torch.finfo(torch.float32).tiny


def check_activations(
    scheme: ActivationScheme, in_features: int, input_scale: torch.Tensor | None
) -> None:
    """Raise ValueError if a Linear of `in_features` inputs cannot have them quantized so."""
    if scheme.group_size is not None and in_features % scheme.group_size:
        raise ValueError(
            f"activation group_size {scheme.group_size} does not divide in_features {in_features}"
        )
    if scheme.dynamic:
        return
    if input_scale is None:
        raise ValueError("static activations need an input_scale, and there is none")
    if input_scale.numel() != 1 or not 0 < float(input_scale) < float("inf"):
        raise ValueError(f"input_scale must be one positive number, got {input_scale.tolist()}")


def dynamic_scale(x: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    """Scales (T, G) fp32 of `x` (T, K) fp32; G is 1 unless the scheme has groups."""
    groups = x.view(len(x), -1, scheme.group_size or x.shape[1])
    # several times faster than torch's vector_norm and aminmax
    largest = groups.abs().amax(dim=-1)
    return largest.div_(_HALF_RANGE[scheme.type]).clamp_(min=_LEAST_SCALE)


def static_scale(largest: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    """Scale (1,) fp32 with which the `largest` magnitude (one number) fills the codes."""
    scale = largest.float().reshape(1) / _HALF_RANGE[scheme.type]
    return scale.clamp(min=_LEAST_SCALE)


def int8_codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes (T, K) of `x` (T, K) fp32, still as fp32; `scale` (T, 1), or (1,)."""
    return torch.div(x, scale).round_().clamp_(_INT8_MIN, _INT8_MAX)


def float8_codes(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes float8_e4m3fn of `x`, any float dtype; `scale` fp32 of a shape that broadcasts."""
    return torch.div(x, scale).clamp_(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)


def fake_quantize(
    x: torch.Tensor, scheme: ActivationScheme, input_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """`x` (..., K) quantized and dequantized again: codes * scale, in the dtype of x.

    `input_scale` (1,) fp32 is read by a static scheme only, and needed by it.
    """
    values = x.float().reshape(-1, x.shape[-1])
    if scheme.dynamic:
        scale = dynamic_scale(values, scheme)[..., None]  # (T, G, 1)
        values = values.view(len(values), scale.shape[1], -1)
    else:
        assert input_scale is not None, "a static scheme without input_scale"
        scale = input_scale
    codes = int8_codes if scheme.type == "int" else float8_codes
    return (codes(values, scale).float() * scale).view(x.shape).to(x.dtype)
