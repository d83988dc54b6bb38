"""Quantized activations against compressed-tensors, and against the rules that they follow."""

import pytest
import torch

from compress.kernels.activations import check_activations, fake_quantize, int8_codes
from compress.scheme import ActivationScheme

SCHEMES = {
    "int8-token": ActivationScheme(type="int"),
    "int8-static": ActivationScheme(type="int", dynamic=False),
    "fp8-token": ActivationScheme(type="float"),
    "fp8-g32": ActivationScheme(type="float", group_size=32),
    "fp8-static": ActivationScheme(type="float", dynamic=False),
}
STATIC_SCALE = torch.tensor([0.0173])


def inputs(rows: int, seed: int = 0) -> torch.Tensor:
    """Rows of very different size, with an outlier channel."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 96, generator=generator) * torch.logspace(-2, 1, rows)[:, None]
    x[:, 7] *= 20
    return x


def oracle(x: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    """What the compressed-tensors package makes of `x`."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    strategy = "tensor" if not scheme.dynamic else "group" if scheme.group_size else "token"
    args = QuantizationArgs(
        num_bits=8,
        type=scheme.type,
        strategy=strategy,
        dynamic=scheme.dynamic,
        group_size=scheme.group_size,
    )
    batched = x[None]  # the package takes dimensions 0 and 1 for sequences and tokens
    if scheme.dynamic:
        scale, zero = compute_dynamic_scales_and_zp(batched, args, torch.nn.Module())
    else:
        scale, zero = STATIC_SCALE, torch.zeros(1)
    return fake_quantize(batched, scale, zero, args)[0]


@pytest.mark.parametrize("rows", [1, 17], ids=lambda n: f"T{n}")
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_fake_quantize_is_that_of_compressed_tensors(scheme: ActivationScheme, rows: int) -> None:
    x = inputs(rows)
    got = fake_quantize(x, scheme, STATIC_SCALE)
    torch.testing.assert_close(got, oracle(x, scheme), rtol=0, atol=0)
    assert not torch.equal(got, x)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_fake_quantize_of_a_row_ignores_the_others(scheme: ActivationScheme) -> None:
    x = inputs(9)
    whole = fake_quantize(x, scheme, STATIC_SCALE)
    for row in range(9):
        alone = fake_quantize(x[row : row + 1], scheme, STATIC_SCALE)
        assert torch.equal(alone, whole[row : row + 1])


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_fake_quantize_keeps_the_dtype_and_rounds_once(
    dtype: torch.dtype, scheme: ActivationScheme
) -> None:
    x = inputs(5).to(dtype)
    got = fake_quantize(x, scheme, STATIC_SCALE)
    assert torch.equal(got, fake_quantize(x.float(), scheme, STATIC_SCALE).to(dtype))


def test_fake_quantize_of_zeros_is_zeros() -> None:
    for scheme in SCHEMES.values():
        assert torch.equal(
            fake_quantize(torch.zeros(2, 96), scheme, STATIC_SCALE), torch.zeros(2, 96)
        )


@pytest.mark.parametrize("name", ["int8-token", "fp8-token"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_fake_quantize_does_not_hide_what_is_not_finite(name: str, bad: float) -> None:
    x = inputs(3)
    x[1, 4] = bad
    got = fake_quantize(x, SCHEMES[name])
    assert got[1].isnan().any()
    assert got[[0, 2]].isfinite().all()


def test_int8_codes_clamp_both_ends_and_round_half_to_even() -> None:
    x = torch.tensor([[0.5, 1.5, -2.5, 127.5, 200.0, -129.0]])
    assert int8_codes(x, torch.ones(1)).tolist() == [[0, 2, -2, 127, 127, -128]]


@pytest.mark.parametrize(
    ("scheme", "scale", "message"),
    [
        (SCHEMES["fp8-g32"], None, "group_size 32 does not divide in_features 48"),
        (SCHEMES["fp8-static"], None, "need an input_scale"),
        (SCHEMES["int8-static"], torch.tensor([0.0]), "one positive number, got"),
        (SCHEMES["int8-static"], torch.tensor([float("nan")]), "one positive number"),
        (SCHEMES["int8-static"], torch.tensor([1.0, 2.0]), "one positive number"),
    ],
    ids=["group", "no-scale", "zero", "nan", "two"],
)
def test_check_activations_says_what_cannot_be(
    scheme: ActivationScheme, scale: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_activations(scheme, 48, scale)
