import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from compress.artifacts import QuantizedLinear
from compress.kernels.moe_mlp import moe_mlp
from compress.kernels.ops import select
from compress.kernels.wna16 import pack_weight, stack_packed, unpack_codes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TORCH, TRITON = select("torch", DEVICE), select("triton", DEVICE)
BOTH = pytest.mark.parametrize("ops", [TORCH, TRITON], ids=["torch", "triton"])


def mlp_ref(x, logits, gate_up, down, top_k, renormalize):
    """Every token through every expert in float64, weighted with 0 where it was not chosen."""
    x, weights = x.double(), torch.softmax(logits.double(), 1)
    kept, ids = weights.topk(top_k, 1)
    if renormalize:
        kept = kept / kept.sum(1, keepdim=True)
    weights = torch.zeros_like(weights).scatter(1, ids, kept)
    y = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        gate, up = (x @ gate_up[expert].double().T).chunk(2, 1)
        hidden = torch.nn.functional.silu(gate) * up
        y += weights[:, expert, None] * (hidden @ down[expert].double().T)
    return y


def floats(*shape, scale=1.0):
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE)


def pack(experts, rows, columns):
    """A 4-bit asymmetric weight of random codes, and what it stands for."""
    generator = torch.Generator().manual_seed(rows)

    def integers(*shape):
        return torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)

    packed, dense = [], []
    for _ in range(experts):
        codes, zero_point = integers(rows, columns), integers(rows, columns // 16)
        scale = torch.rand(zero_point.shape, generator=generator) * 0.05
        linear = QuantizedLinear(codes=codes, scale=scale, zero_point=zero_point, bits=4)
        packed.append(pack_weight(linear, torch.float32, DEVICE))
        steps = unpack_codes(packed[-1]).cpu().view(*scale.shape, -1) - zero_point.unsqueeze(-1)
        dense.append((steps * scale.unsqueeze(-1)).flatten(1).to(DEVICE))
    return stack_packed(packed), torch.stack(dense)


@pytest.mark.parametrize("T, E, top_k", [(1, 4, 2), (17, 8, 3), (33, 4, 1)])
@pytest.mark.parametrize("renormalize", [True, False], ids=["sum1", "softmax"])
@pytest.mark.parametrize("kind", ["dense", "4b"])
@BOTH
def test_moe_mlp_is_the_sum_over_experts(ops, T, E, top_k, renormalize, kind, poisoned_empty):
    H, intermediate = 48, 80
    x, logits = floats(T, H), floats(T, E, scale=2.0)
    if kind == "dense":
        gate_up, down = floats(E, 2 * intermediate, H), floats(E, H, intermediate)
        read = gate_up, down
    else:
        gate_up, read_up = pack(E, 2 * intermediate, H)
        down, read_down = pack(E, H, intermediate)
        read = read_up, read_down
    y = moe_mlp(x, logits, gate_up, down, top_k=top_k, renormalize=renormalize, ops=ops)
    exact = mlp_ref(x, logits, *read, top_k, renormalize)
    scale = exact.abs().max().item()
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=2e-6 * scale)


@BOTH
def test_moe_mlp_is_the_block_of_transformers(ops):
    config = MixtralConfig(
        hidden_size=48, intermediate_size=80, num_local_experts=8, num_experts_per_tok=2
    )
    block = MixtralSparseMoeBlock(config).to(DEVICE).eval().requires_grad_(False)
    for i, parameter in enumerate(block.parameters()):
        parameter.copy_(floats(*parameter.shape, i + 1)[..., 0] * 0.2)
    x = floats(3, 11, 48)
    logits = torch.nn.functional.linear(x.view(33, 48), block.gate.weight)
    experts = block.experts
    y = moe_mlp(
        x.view(33, 48), logits, experts.gate_up_proj, experts.down_proj,
        top_k=2, renormalize=True, ops=ops,
    )  # fmt: skip
    want = block(x).view(33, 48)
    assert want.abs().max() > 0.1
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


@BOTH
def test_moe_mlp_of_no_tokens_is_empty(ops):
    y = moe_mlp(
        floats(0, 48), floats(0, 4), floats(4, 160, 48), floats(4, 48, 80),
        top_k=2, renormalize=True, ops=ops,
    )  # fmt: skip
    assert y.shape == (0, 48)


def test_moe_mlp_triton_row_has_the_same_bits_in_every_batch():
    x, logits = floats(64, 48).half(), floats(64, 4).half()
    gate_up, down = floats(4, 160, 48).half(), floats(4, 48, 80).half()

    def mlp(T):
        return moe_mlp(x[:T], logits[:T], gate_up, down, top_k=2, renormalize=True, ops=TRITON)

    whole = mlp(64)
    for T in (1, 2, 5, 16):
        assert torch.equal(mlp(T), whole[:T])
