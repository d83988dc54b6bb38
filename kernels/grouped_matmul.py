"""Product of each row with the weight of its expert: y[s] = x[row of s] @ w[expert of s].T

Shapes (T tokens, TOPK experts per token, S = T * TOPK slots as in moe_routing.py, E experts, N
out_features, K in_features, R rows per token):
  x        (T * R, K)  fp16 | bf16 | fp32   contiguous. R = 1: a row per token, which all its slots
                                            read (the first product); R = TOPK: a row per slot
  weight   (E, N, K)   dtype of x, contiguous; or packed, a `PackedWeight` whose tensors have one
                       more leading dimension E than in wna16.py: words (E, N, K / C), high the
                       same, scale (E, N, G), zero_point (E, N, G)
  routing  `Routing` of the same T, TOPK, E
  factor   (S,)        fp32, contiguous, or None: what y[s] is multiplied by (a router's weight)
  y        (S, N)      dtype of x, contiguous, in the order of the slots
Mathematics: products summed in fp32, multiplied by the factor, rounded once; a packed weight is
rounded to the dtype of x first, as in wna16.py.
Contract: a row of y has the same bits alone and in every batch. A packed row has the bits that
`wna16` gives with the weight of its expert.

How Triton does it: the slots sorted by expert are cut into tiles of one expert each, and a tile
gathers its rows of x and scatters its rows of y, so no copy in sorted order is made. The grid has
as many tiles as there can be at most; those without a row return. Each tile computes y.T = w x.T
and cuts the columns into splits as wna16.py does: how many depends on N and K alone.

Gale et al., MegaBlocks, arXiv:2211.15841; Kim et al., Who Says Elephants Can't Run,
arXiv:2211.10017 (experts with packed weights).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from compress.kernels.grouped_matmul_kernels import dense_kernel, packed_kernel, sum_parts_kernel
from compress.kernels.grouped_matmul_plan import (
    APART,
    TILES,
    dense_variant,
    packed_variant,
    plan_dense,
    plan_packed,
)
from compress.kernels.jit import (
    FLOAT_DTYPES,
    BenchCase,
    CompileCase,
    check_one_device,
    check_tensor,
    triton,
)
from compress.kernels.moe_routing import Routing, route
from compress.kernels.wna16 import (
    PackedWeight,
    check_weight,
    expert_weight,
    wna16_ref,
    wna16_torch,
)

_SUM_BLOCK = 1024


def grouped_matmul_ref(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    routing: Routing,
    *,
    rows_per_token: int,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Oracle: `grouped_matmul` in float64, slot by slot of each expert, rounded once."""
    slots_per_row = routing.top_k // rows_per_token
    starts = routing.expert_starts.tolist()
    out = []
    for expert, (first, last) in enumerate(pairwise(starts)):
        rows = x.double()[routing.sorted_rows[first:last].long() // slots_per_row]
        if isinstance(weight, torch.Tensor):
            out.append(rows @ weight[expert].double().T)
        else:
            exact = expert_weight(weight, expert)
            out.append(wna16_ref(rows, replace(exact, scale=exact.scale.double())))
    y = torch.cat(out)[routing.sorted_rows.argsort()]
    return (y if factor is None else y * factor.double()[:, None]).to(x.dtype)


def grouped_matmul_triton(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    routing: Routing,
    *,
    rows_per_token: int,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Triton `grouped_matmul`; shapes and contract above, ValueError if broken."""
    _check(x, weight, routing, rows_per_token, factor)
    num_slots, out_features = len(routing.sorted_rows), _out_features(weight)
    y = torch.empty((num_slots, out_features), dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    if isinstance(weight, torch.Tensor):
        plan = plan_dense(x, weight, routing)
    else:
        plan = plan_packed(x, weight, routing)
    apart = plan.num_splits > 1 and routing.block_m == APART
    shape = (plan.num_splits, num_slots, out_features)
    target = torch.empty(shape, dtype=torch.float32, device=x.device) if apart else y
    sub_tiles = routing.block_m // plan.constexprs["BLOCK_M"]
    grid = (
        len(routing.tile_first) * sub_tiles,
        triton.cdiv(out_features, plan.constexprs["BLOCK_N"]),
        plan.num_splits if apart else 1,
    )
    read_factor = x if factor is None else factor  # not read without its constant
    plan.kernel[grid](
        *plan.tensors, read_factor, target, routing.sorted_rows, routing.expert_starts,
        routing.tile_expert, routing.tile_first, *plan.sizes,
        SLOTS_PER_ROW=routing.top_k // rows_per_token, SUB_TILES=sub_tiles,
        HAS_FACTOR=factor is not None and not apart, ONE_SPLIT=plan.num_splits == 1, APART=apart,
        **plan.constexprs, **plan.options,
    )  # fmt: skip
    if apart:
        sum_parts_kernel[(triton.cdiv(y.numel(), _SUM_BLOCK),)](
            target, read_factor, y, y.numel(), out_features, plan.num_splits,
            HAS_FACTOR=factor is not None, BLOCK=_SUM_BLOCK,
        )  # fmt: skip
    return y


def _out_features(weight: torch.Tensor | PackedWeight) -> int:
    return (weight if isinstance(weight, torch.Tensor) else weight.words).shape[1]


def _check(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    routing: Routing,
    rows_per_token: int,
    factor: torch.Tensor | None,
) -> None:
    num_slots, top_k = len(routing.sorted_rows), routing.top_k
    if rows_per_token not in (1, top_k):
        raise ValueError(f"rows_per_token must be 1 or {top_k}, got {rows_per_token}")
    num_rows = num_slots // top_k * rows_per_token
    check_tensor("x", x, shape=(num_rows, None), dtypes=FLOAT_DTYPES)
    if not x.shape[1]:
        raise ValueError("x must have at least one column")
    if isinstance(weight, torch.Tensor):
        tensors: dict[str, torch.Tensor | None] = {"weight": weight}
        shape = (routing.num_experts, None, x.shape[1])
        check_tensor("weight", weight, shape=shape, dtypes=(x.dtype,))
    else:
        tensors = _check_packed(x, weight, routing.num_experts)
    if factor is not None:
        check_tensor("factor", factor, shape=(num_slots,), dtypes=(torch.float32,))
    check_one_device(x=x, routing=routing.sorted_rows, factor=factor, **tensors)
    for name, tensor in ({"x": x, "factor": factor} | tensors).items():
        if tensor is not None and name != "weight.scale" and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def _check_packed(
    x: torch.Tensor, weight: PackedWeight, num_experts: int
) -> dict[str, torch.Tensor | None]:
    """The tensors of `weight` by name, after a check of their shapes and dtypes."""
    names = ("words", "high", "scale", "zero_point")
    tensors = {f"weight.{name}": getattr(weight, name) for name in names}
    for name, tensor in tensors.items():
        if tensor is not None and (tensor.dim() != 3 or len(tensor) != num_experts):
            raise ValueError(
                f"{name} must have 3 dimensions, the first of {num_experts} experts,"
                f" got {tuple(tensor.shape)}"
            )
    check_weight(x, expert_weight(weight, 0))
    return tensors


def grouped_matmul_torch(
    x: torch.Tensor,
    weight: torch.Tensor | PackedWeight,
    routing: Routing,
    *,
    rows_per_token: int,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Torch `grouped_matmul`: one product per expert that has rows; reads `routing` on the host and
    unpacks the packed weight of such an expert on every call."""
    _check(x, weight, routing, rows_per_token, factor)
    shape = (len(routing.sorted_rows), _out_features(weight))
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    slots_per_row = routing.top_k // rows_per_token
    slots = routing.sorted_rows.long()
    starts = routing.expert_starts.tolist()
    for expert, (first, last) in enumerate(pairwise(starts)):
        if first == last:
            continue
        rows = x[slots[first:last] // slots_per_row]
        if isinstance(weight, torch.Tensor):
            y[slots[first:last]] = F.linear(rows, weight[expert])
        else:
            y[slots[first:last]] = wna16_torch(rows, expert_weight(weight, expert))
    return y if factor is None else (y * factor.unsqueeze(1)).to(x.dtype)


def compile_cases() -> list[CompileCase]:
    """Every tile, dense and packed, with the splits one, in turn and apart; fp32 dense as well."""
    pointers = ("sorted_rows", "expert_starts", "tile_expert", "tile_first")
    types = {f"{name}_ptr": "*i32" for name in pointers} | {"factor_ptr": "*fp32"}
    types |= {"part_ptr": "*fp32", "w_ptr": "*i32", "high_ptr": "*i16", "zero_ptr": "*i8"}
    types |= dict.fromkeys(("x_ptr", "y_ptr", "scale_ptr"), "*bf16")
    cases = [
        CompileCase(
            kernel=sum_parts_kernel,
            label=f"sum,{'factor' if factor else 'plain'}",
            types=types,
            constexprs={"BLOCK": _SUM_BLOCK, "HAS_FACTOR": factor},
            divisible=("size", "N"),
            meant=("load16",),
        )
        for factor in (False, True)
    ]
    for dtype, block_m, in_features in (
        *((torch.bfloat16, block_m, 4096) for block_m in TILES),
        *((torch.bfloat16, block_m, 1000) for block_m in (16, 128)),
        *((torch.float32, block_m, 4096) for block_m in (16, 32)),
    ):
        name = "bf16" if dtype == torch.bfloat16 else "fp32"
        floats = dict.fromkeys(("x_ptr", "w_ptr", "y_ptr"), f"*{name}")
        for splits in _splits_of_tile(block_m):
            num_splits = 1 if splits == "one" else 4
            constexprs, options = dense_variant(dtype, block_m, in_features, num_splits)
            label = f"{name},K={in_features}"
            cases.append(
                _compile_case(dense_kernel, label, splits, types | floats, constexprs, options)
            )
    for bits, block_m, asymmetric in (
        *((4, block_m, True) for block_m in (16, 32, 64)),
        (4, 16, False),
        *((bits, block_m, True) for bits in (2, 3) for block_m in (16, 32)),
        *((8, block_m, True) for block_m in (16, 64)),
    ):
        label = f"{bits}b,{'asym' if asymmetric else 'sym'}"
        for splits in _splits_of_tile(block_m):
            num_splits = 1 if splits == "one" else 4
            constexprs, options = packed_variant(
                block_m, bits, 128, 32, num_splits, asymmetric=asymmetric
            )
            cases.append(_compile_case(packed_kernel, label, splits, types, constexprs, options))
    return list({case.label: case for case in cases}.values())  # some tiles coincide


def _splits_of_tile(block_m: int) -> tuple[str, str]:
    return ("one", "apart" if block_m == APART else "in turn")


def _compile_case(
    kernel: Any,
    label: str,
    splits: str,
    types: dict[str, str],
    constexprs: dict[str, Any],
    options: dict[str, int],
) -> CompileCase:
    fp32 = types["x_ptr"] == "*fp32"
    launched = {
        "SLOTS_PER_ROW": 2,
        "SUB_TILES": 2 if splits == "in turn" else 1,
        "HAS_FACTOR": splits == "in turn",
        "ONE_SPLIT": splits == "one",
        "APART": splits == "apart",
    }
    return CompileCase(
        kernel=kernel,
        label=f"{label},tile={constexprs['BLOCK_M']}x{constexprs['BLOCK_N']},{splits}",
        types=types | ({"y_ptr": "*fp32"} if splits == "apart" else {}),
        constexprs=constexprs | launched,
        divisible=("N", "K", "stride_se", "stride_sn", "split_words", "split_columns"),
        meant=("load16",) if fp32 else ("mma", "wgmma", "load16"),
        **options,
    )


def bench_cases() -> list[BenchCase]:
    """Both products of Mixtral 8x7B, dense and 4-bit; slots are dealt to the experts in turn."""
    experts, top_k, hidden, intermediate = 8, 2, 4096, 14336
    cases = []
    for packed in (False, True):
        for num_tokens in (1, 16, 256, 4096):
            slots = num_tokens * top_k
            for name, rows_per_token, (N, K) in (
                ("gate_up", 1, (2 * intermediate, hidden)),
                ("down", top_k, (hidden, intermediate)),
            ):
                call: dict[str, Any] = {"rows_per_token": rows_per_token}
                read = min(experts, slots) * N * K
                stored = read // 2 + read // 128 * 2 if packed else 2 * read
                num_bytes = stored + 2 * num_tokens * rows_per_token * K + 2 * slots * N
                num_flops = 2 * slots * N * K
                cases.append(
                    BenchCase(
                        label=f"T={num_tokens},{'w4a16' if packed else 'dense'},{name}",
                        make=partial(
                            _bench_inputs, num_tokens, rows_per_token, N, K, packed=packed
                        ),
                        triton=partial(grouped_matmul_triton, **call),
                        plain=partial(grouped_matmul_torch, **call),
                        exact=partial(grouped_matmul_ref, **call),
                        num_bytes=num_bytes,
                        num_flops=num_flops,
                        # about 200 operations per byte are where a card turns from one to the other
                        ceiling="memory" if num_flops < 200 * num_bytes else "matrix",
                        goal={1: 0.6, 16: 0.7, 4096: 0.5}.get(num_tokens),
                    )
                )
    return cases


def _bench_inputs(
    num_tokens: int,
    rows_per_token: int,
    N: int,
    K: int,
    device: torch.device,
    dtype: torch.dtype,
    *,
    packed: bool,
) -> tuple[torch.Tensor, torch.Tensor | PackedWeight, Routing]:
    ids = torch.arange(num_tokens * 2, device=device).view(num_tokens, 2) % 8
    x = torch.randn(num_tokens * rows_per_token, K, device=device, dtype=dtype)
    if not packed:
        return x, torch.randn(8, N, K, device=device, dtype=dtype) * 0.02, route(ids, 8)
    words = torch.randint(-(2**31), 2**31, (8, N, K // 8), device=device, dtype=torch.int32)
    scale = torch.rand(8, K // 128, N, device=device, dtype=dtype).transpose(1, 2) * 0.01
    weight = PackedWeight(words=words, high=None, scale=scale, zero_point=None, bits=4)
    return x, weight, route(ids, 8)
