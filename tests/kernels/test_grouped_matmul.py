from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.artifacts import QuantizedLinear
from compress.kernels.grouped_matmul import (
    grouped_matmul_ref,
    grouped_matmul_torch,
    grouped_matmul_triton,
)
from compress.kernels.moe_routing import BLOCKS_M, route
from compress.kernels.wna16 import expert_weight, pack_weight, stack_packed, wna16_triton
from tests.kernels.tolerance import DTYPES, assert_as_exact_as, dtype_id

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def choose(num_tokens, top_k, num_experts, load="random"):
    """Ids (T, TOPK) int64: distinct per token where they can be; `one`: all of the last expert;
    `gaps`: of every other expert only."""
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k]
    ids = ids.repeat(1, top_k)[:, :top_k]
    if load == "one":
        ids = torch.full_like(ids, num_experts - 1)
    elif load == "gaps":
        ids = ids // 2 * 2
    return ids.to(DEVICE)


def floats(*shape, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)


def packed(E, N, K, group, dtype, *, bits=4, asymmetric=True):
    generator = torch.Generator().manual_seed(E + N + K)
    half, shape = 1 << (bits - 1), (N, K // group)

    def integers(*shape):
        return torch.randint(-half, half, shape, generator=generator, dtype=torch.int8)

    experts = []
    for _ in range(E):
        linear = QuantizedLinear(
            codes=integers(N, K),
            scale=(torch.rand(shape, generator=generator) + 0.05) * 0.02,
            zero_point=integers(*shape) if asymmetric else None,
            bits=bits,
        )
        experts.append(pack_weight(linear, dtype, DEVICE))
    return stack_packed(experts)


def exactly(x, weight, routing, **options):
    """The oracle in float64."""
    wide = weight.double() if isinstance(weight, torch.Tensor) else weight
    return grouped_matmul_ref(x.double(), wide, routing, **options)


# E experts, T tokens, TOPK, load, N, K
CASES = [
    pytest.param(1, 17, 1, "random", 80, 96, id="E1-T17-top1"),
    pytest.param(4, 1, 3, "random", 80, 96, id="E4-T1-top3"),
    pytest.param(8, 17, 2, "gaps", 33, 144, id="E8-T17-top2-gaps"),
    pytest.param(8, 33, 3, "random", 80, 96, id="E8-T33-top3"),
    pytest.param(4, 130, 2, "random", 130, 96, id="E4-T130-top2"),
    pytest.param(8, 33, 2, "one", 80, 96, id="E8-T33-top2-one"),
    pytest.param(4, 1, 2, "random", 17, 2304, id="E4-T1-top2-splits"),
    pytest.param(2, 20, 2, "random", 17, 2304, id="E2-T20-top2-splits"),
]


@pytest.mark.parametrize("E, T, top_k, load, N, K", CASES)
@pytest.mark.parametrize("kind", ["dense", "4b"])
@pytest.mark.parametrize("per_slot", [False, True], ids=["by-token", "by-slot"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_triton_matches_reference(E, T, top_k, load, N, K, kind, per_slot, dtype, poisoned_empty):
    """By token without a factor, by slot with one."""
    routing = route(choose(T, top_k, E, load), E)
    rows_per_token = top_k if per_slot else 1
    x = floats(T * rows_per_token, K, dtype=dtype)
    weight = floats(E, N, K, dtype=dtype) if kind == "dense" else packed(E, N, K, 16, dtype)
    factor = floats(T * top_k).abs() if per_slot else None
    options = {"rows_per_token": rows_per_token, "factor": factor}
    plain = grouped_matmul_torch(x, weight, routing, **options)
    got = grouped_matmul_triton(x, weight, routing, **options)
    assert_as_exact_as(got, plain, exactly(x, weight, routing, **options))


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("asymmetric", [False, True], ids=["sym", "asym"])
@pytest.mark.parametrize("block_m", [16, 64])
def test_other_widths_match_reference(bits, asymmetric, block_m, poisoned_empty):
    weight = packed(4, 33, 96, 32, torch.float32, bits=bits, asymmetric=asymmetric)
    routing, x = route(choose(17, 2, 4), 4, block_m), floats(17, 96)
    got, plain, exact = (
        product(x, weight, routing, rows_per_token=1)
        for product in (grouped_matmul_triton, grouped_matmul_torch, exactly)
    )
    assert_as_exact_as(got, plain, exact)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data(), E=st.integers(1, 9), top_k=st.integers(1, 3), per_slot=st.booleans())
def test_products_of_integers_are_exact_for_every_routing(data, E, top_k, per_slot):
    """Sums of small integers do not round, so a row that went to a wrong expert or slot shows."""
    T = data.draw(st.integers(0, 25))
    expert = st.integers(0, E - 1)
    ids = data.draw(st.lists(expert, min_size=T * top_k, max_size=T * top_k))
    ids = torch.tensor(ids, dtype=torch.int64, device=DEVICE).view(T, top_k)
    routing = route(ids, E, data.draw(st.sampled_from(BLOCKS_M)))
    rows_per_token = top_k if per_slot else 1
    x, weight = floats(T * rows_per_token, 40, scale=9).round(), floats(E, 21, 40, scale=9).round()
    by_slot = x.repeat_interleave(top_k // rows_per_token, 0)
    want = torch.einsum("snk,sk->sn", weight[ids.flatten()].double(), by_slot.double()).float()
    for product in (grouped_matmul_triton, grouped_matmul_torch, grouped_matmul_ref):
        assert torch.equal(product(x, weight, routing, rows_per_token=rows_per_token), want)


SPLITS = pytest.mark.parametrize("N, K", [(80, 96), (33, 2304)], ids=["one-split", "splits"])


@SPLITS
@pytest.mark.parametrize("kind", ["dense", "4b"])
def test_row_has_the_same_bits_in_every_batch(N, K, kind):
    """16 rows of a tile add the splits in a second kernel, more in the first; the factor is applied
    after that."""
    if kind == "dense":
        weight = floats(2, N, K, dtype=torch.float16)
    else:
        weight = packed(2, N, K, 32, torch.float16)
    x, ids, factor = floats(40, K, dtype=torch.float16), choose(40, 2, 2), floats(80)

    def product(T, block_m=None):
        options = {"rows_per_token": 1, "factor": factor[: 2 * T]}
        return grouped_matmul_triton(x[:T], weight, route(ids[:T], 2, block_m), **options)

    whole = product(40)
    for T, block_m in ((1, None), (5, None), (16, None), (20, 32), (20, 128)):
        assert torch.equal(product(T, block_m), whole[: 2 * T])


@SPLITS
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packed_row_is_that_of_wna16(N, K, bits):
    weight, x = packed(4, N, K, 32, torch.float16, bits=bits), floats(2, K, dtype=torch.float16)
    ids = choose(2, 2, 4)
    y = grouped_matmul_triton(x, weight, route(ids, 4), rows_per_token=1)
    for slot, expert in enumerate(ids.flatten().tolist()):
        alone = wna16_triton(x[slot // 2 : slot // 2 + 1], expert_weight(weight, expert))
        assert torch.equal(y[slot], alone[0])


def test_stack_packed_keeps_experts_and_the_order_of_scales():
    experts = [expert_weight(packed(3, 16, 64, 32, torch.float16, bits=3), e) for e in range(3)]
    weight = stack_packed(experts)
    assert weight.scale.stride() == (32, 1, 16) and weight.in_features == 64
    for e, expert in enumerate(experts):
        for name in ("words", "high", "scale", "zero_point"):
            assert torch.equal(getattr(expert_weight(weight, e), name), getattr(expert, name))
    with pytest.raises(ValueError, match="weights must agree in bits, shapes and symmetry"):
        stack_packed([experts[0], replace(experts[1], zero_point=None)])
    with pytest.raises(ValueError, match="weights must be of at least one expert"):
        stack_packed([])


def test_scales_may_be_stored_either_way():
    weight = packed(4, 48, 128, 32, torch.float32)
    routing, x = route(choose(5, 2, 4), 4), floats(5, 128)
    by_row = replace(weight, scale=weight.scale.contiguous())
    y, again = (grouped_matmul_triton(x, w, routing, rows_per_token=1) for w in (weight, by_row))
    assert torch.equal(y, again)


@pytest.mark.parametrize("product", [grouped_matmul_torch, grouped_matmul_triton])
@pytest.mark.parametrize("T, N", [(0, 5), (5, 0)], ids=["no-tokens", "no-columns"])
def test_nothing_gives_nothing(product, T, N):
    routing, x = route(choose(T, 2, 4), 4), floats(T, 64)
    for weight in (floats(4, N, 64), packed(4, N, 64, 32, torch.float32)):
        assert product(x, weight, routing, rows_per_token=1).shape == (2 * T, N)


@pytest.mark.parametrize("product", [grouped_matmul_torch, grouped_matmul_triton])
def test_the_bad_argument_is_named(product):
    routing, x, weight = route(choose(5, 2, 4), 4), floats(5, 64), floats(4, 6, 64)
    four_bits = packed(4, 6, 64, 32, torch.float32)
    for bad, message in [
        ({"x": x[:4]}, r"x must be .* of shape \(5, any\), got float32 \(4, 64\)"),
        ({"rows_per_token": 2}, r"x must be .* of shape \(10, any\)"),
        ({"rows_per_token": 3}, "rows_per_token must be 1 or 2, got 3"),
        ({"x": x[:, :0]}, "x must have at least one column"),
        ({"x": floats(5, 128)[:, ::2]}, "x must be contiguous"),
        ({"x": x.half()}, r"weight must be float16 of shape \(4, any, 64\)"),
        ({"weight": weight[:3]}, r"weight must be float32 of shape \(4, any, 64\)"),
        ({"weight": weight.transpose(1, 2).contiguous().transpose(1, 2)}, "weight must be contig"),
        ({"weight": weight.to("meta")}, "weight must be on .*, got meta"),
        ({"factor": floats(5)}, r"factor must be float32 of shape \(10\)"),
        ({"weight": expert_weight(four_bits, 0)}, "weight.words must have 3 dimensions"),
        ({"weight": replace(four_bits, zero_point=four_bits.zero_point[:3])}, "weight.zero_point"),
        ({"weight": replace(four_bits, bits=5)}, "weight.bits must be 2, 3, 4 or 8, got 5"),
        ({"weight": replace(four_bits, scale=four_bits.scale.half())}, "weight.scale must be flo"),
        ({"weight": four_bits, "x": floats(5, 72)}, r"x must be .* of shape \(any, 64\)"),
    ]:
        arguments = {"x": x, "weight": weight, "routing": routing, "rows_per_token": 1} | bad
        with pytest.raises(ValueError, match=message):
            product(**arguments)
