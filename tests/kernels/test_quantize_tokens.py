import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.activations import fake_quantize
from compress.kernels.quantize_tokens import (
    quantize_tokens_ref,
    quantize_tokens_torch,
    quantize_tokens_triton,
)
from compress.kernels.rms_norm import (
    add_rms_norm_torch,
    add_rms_norm_triton,
    rms_norm_torch,
    rms_norm_triton,
)
from compress.scheme import ActivationScheme
from tests.kernels.tolerance import DTYPES, dtype_id

EPS = 1e-5
PER_TOKEN = ActivationScheme(type="int", dynamic=True)


def make(num_tokens, width, dtype, device):
    generator = torch.Generator().manual_seed(num_tokens * 1000 + width)
    x = torch.randn(num_tokens, width, generator=generator) * 3
    weight = torch.rand(width, generator=generator) + 0.5
    return x.to(device, dtype), weight.to(device, dtype)


@pytest.mark.parametrize(
    "num_tokens, width",
    [
        pytest.param(1, 576, id="T1-K576"),
        pytest.param(17, 33, id="T17-K33"),
        pytest.param(33, 1, id="T33-K1"),
        pytest.param(130, 1100, id="T130-K1100"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_codes_and_scales_are_those_of_the_oracle(num_tokens, width, dtype, device, poisoned_empty):
    x, _ = make(num_tokens, width, dtype, device)
    for got, expected in zip(quantize_tokens_triton(x), quantize_tokens_ref(x), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_codes_times_scale_is_what_activations_stand_for(dtype, device):
    x, _ = make(33, 576, dtype, device)
    codes, scale = quantize_tokens_triton(x)
    meant = (codes.float() * scale[:, None]).to(dtype)
    assert torch.equal(meant, fake_quantize(x, PER_TOKEN))


@pytest.mark.parametrize("run", [quantize_tokens_triton, quantize_tokens_torch])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_norm_in_front_moves_few_codes_by_one(run, dtype, device):
    """A sum in another order may round a normed value the other way, and so its code."""
    x, weight = make(33, 576, dtype, device)
    codes, scale = run(x, weight, EPS)
    expected_codes, expected_scale = quantize_tokens_ref(x, weight, EPS)
    last_place = torch.finfo(dtype).eps
    torch.testing.assert_close(scale, expected_scale, rtol=2 * last_place, atol=0)
    difference = (codes.int() - expected_codes.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < 0.02
    assert (codes != quantize_tokens_ref(x)[0]).float().mean() > 0.1  # the norm does something


STEPS = {
    "torch": (quantize_tokens_torch, rms_norm_torch, add_rms_norm_torch),
    "triton": (quantize_tokens_triton, rms_norm_triton, add_rms_norm_triton),
}


def assert_bits_of_steps(backend, x, residual, weight, unit_offset):
    """One call gives what norm and quantization give one after the other."""
    quantize, norm, add_norm = STEPS[backend]
    fused = quantize(x, weight, EPS, unit_offset=unit_offset)
    steps = quantize(norm(x, weight, EPS, unit_offset=unit_offset))
    y, summed = add_norm(x, residual, weight, EPS, unit_offset=unit_offset)
    fused += quantize(x, weight, EPS, residual, unit_offset=unit_offset)
    steps += (*quantize(y), summed)
    assert len(fused) == len(steps) == 5
    for got, expected in zip(fused, steps, strict=True):
        assert got.dtype == expected.dtype and torch.equal(got, expected)


@pytest.mark.parametrize("backend", STEPS)
@pytest.mark.parametrize("unit_offset", [False, True], ids=["w", "1+w"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("num_tokens, width", [(1, 576), (17, 33), (33, 128), (5, 4100)], ids=str)
def test_fused_residual_and_norm_have_the_bits_of_the_steps(
    num_tokens, width, dtype, unit_offset, backend, device, poisoned_empty
):
    x, weight = make(num_tokens, width, dtype, device)
    residual = x.flip(0).roll(1, dims=1) * 1.7
    assert_bits_of_steps(backend, x, residual, weight, unit_offset)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 20),
    width=st.integers(1, 700),
    gap=st.integers(0, 20),
    unit_offset=st.booleans(),
    backend=st.sampled_from(list(STEPS)),
)
def test_any_rows_have_the_bits_of_the_steps(rows, width, gap, unit_offset, backend):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wide, weight = make(rows, width + gap, torch.float16, device)
    assert_bits_of_steps(backend, wide[:, gap:], wide[:, :width], weight[gap:], unit_offset)


# Compiled, the order of a sum is that of the register layout, which the interpreter does not have.
REDUCTION_LAYOUTS = r"""
import dataclasses, json, re
from compress.kernels import quantize_tokens, rms_norm
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def layout(case):
    names = case.kernel.arg_names
    divisible = [*case.divisible, *(name for name in names if case.types.get(name, "")[:1] == "*")]
    kinds = {name: case.types.get(name, "i32") for name in names}
    source = ASTSource(
        fn=case.kernel,
        signature=kinds | dict.fromkeys(case.constexprs, "constexpr"),
        constexprs=dict(case.constexprs),
        attrs={(names.index(x),): [["tt.divisibility", 16]] for x in divisible if x in names},
    )
    options = {"num_warps": case.num_warps}
    text = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"]
    layouts = dict(re.findall(r"(#\w+) = (#ttg\S+<.*>)", text))
    first = text.split("tt.reduce", 1)[1]
    summed = re.search(r"arith.addf.*?: \(tensor<(\S+), (#\w+)>\)", first, re.S)
    return [summed[1], layouts[summed[2]]]

found = {}
for module in (rms_norm, quantize_tokens):
    for case in module.compile_cases():
        if "norm" in case.label and "1+w" not in case.label:
            tile = case.constexprs["ROWS"], case.constexprs["COLUMNS"]
            found.setdefault(str(tile), []).append((case.label, layout(case)))
print(json.dumps(found))
"""


def test_compiled_norms_sum_in_one_order():
    """Every kernel with a norm lays out the rows that it sums as `rms_norm` does."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", REDUCTION_LAYOUTS]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.stdout, run.stderr
    by_tile = json.loads(run.stdout)
    assert sum(map(len, by_tile.values())) > 15
    for tile, found in by_tile.items():
        layouts = [layout for _, layout in found]
        assert layouts.count(layouts[0]) == len(layouts), (tile, found)


def test_ties_go_to_the_even_code(device):
    x = torch.tensor([[127.5, 0.5, 1.5, 2.5, -0.5, -1.5, -127.5]], device=device)
    codes, scale = quantize_tokens_triton(x)
    assert scale.tolist() == [1.0]
    assert codes.tolist() == [[127, 0, 2, 2, 0, -2, -128]]


def test_rows_of_zeros_and_of_what_is_not_finite_harm_no_other(device):
    x, _ = make(5, 96, torch.float32, device)
    alone = quantize_tokens_triton(x[4:])
    x[0], x[1, 3], x[2, 5], x[3, 7] = 0, float("nan"), float("inf"), float("-inf")
    codes, scale = quantize_tokens_triton(x)
    assert scale[0] == torch.finfo(torch.float32).tiny and not codes[0].any()
    assert scale[1].isnan() and scale[2].isinf() and scale[3].isinf()
    assert torch.equal(codes[4:], alone[0]) and torch.equal(scale[4:], alone[1])


@pytest.mark.parametrize("width", [96, 576])
def test_rows_may_lie_apart_and_do_not_depend_on_their_batch(width, device):
    wide, weight = make(64, 700, torch.float16, device)
    x, residual, weight = wide[:, 10 : 10 + width], wide[:, :width], weight[:width]
    for inputs in ((x,), (x, weight, EPS), (x, weight, EPS, residual)):
        whole = quantize_tokens_triton(*inputs)
        for rows in (1, 2, 5, 16):
            some = (t[:rows].contiguous() if t is x or t is residual else t for t in inputs)
            for part, all_rows in zip(quantize_tokens_triton(*some), whole, strict=True):
                assert torch.equal(part, all_rows[:rows])


def test_no_rows_give_no_rows(device):
    x, weight = make(0, 64, torch.float32, device)
    codes, scale = quantize_tokens_triton(x)
    assert codes.shape == (0, 64) and scale.shape == (0,)
    codes, scale, summed = quantize_tokens_triton(x, weight, EPS, x)
    assert codes.shape == summed.shape == (0, 64) and scale.shape == (0,)


def test_the_bad_argument_is_named(device):
    x, weight = make(2, 64, torch.float32, device)
    with pytest.raises(ValueError, match=r"weight must be float32 of shape \(64\)"):
        quantize_tokens_triton(x, weight[:63], EPS)
    with pytest.raises(ValueError, match=r"residual must be float32 of shape \(2, 64\)"):
        quantize_tokens_triton(x, weight, EPS, x[:1])
    for run in (quantize_tokens_triton, quantize_tokens_torch):
        with pytest.raises(ValueError, match="residual needs weight"):
            run(x, residual=x)
    with pytest.raises(ValueError, match=r"residual must be on .*, as x is, got meta"):
        quantize_tokens_triton(x, weight, EPS, x.to("meta"))
    with pytest.raises(ValueError, match="x must have contiguous rows"):
        quantize_tokens_triton(x.T.contiguous().T)
    with pytest.raises(ValueError, match="x must be float16 or bfloat16 or float32"):
        quantize_tokens_triton(x.double())
    with pytest.raises(ValueError, match="x must have 1 to 32768 columns, got 40000"):
        quantize_tokens_triton(torch.zeros(1, 40000, device=device))
