from pathlib import Path

import pytest
import torch
from torch import nn

from compress.calib.capture import (
    ActivationFile,
    BlockCalls,
    batches,
    create_activations,
    open_activations,
    record_block_calls,
)
from compress.calib.replay import BlockReplay, FloatChain, KVRanges
from compress.models.family import FAMILIES, SharedInput, family_of
from tests.factory import tiny_model

CPU = torch.device("cpu")


def load(architecture: str, folder: Path) -> nn.Module:
    from transformers import AutoModelForCausalLM

    path = tiny_model(architecture, folder, num_layers=3)
    return AutoModelForCausalLM.from_pretrained(path).eval()


def replay_of(block: nn.Module, index: int, calls: BlockCalls, batch_size: int) -> BlockReplay:
    return BlockReplay(block=block, index=index, calls=calls, batch_size=batch_size, device=CPU)


def record(
    model: nn.Module, tokens: torch.Tensor, batch_size: int
) -> tuple[BlockCalls, torch.Tensor]:
    hidden = torch.empty(*tokens.shape, 96)

    def store(samples: slice, first: torch.Tensor) -> None:
        hidden[samples] = first

    blocks = model.model.layers
    return record_block_calls(model.model, blocks, tokens, batch_size, CPU, store), hidden


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_replaying_every_block_gives_the_models_hidden_states(
    architecture: str, tmp_path: Path
) -> None:
    model = load(architecture, tmp_path / "model")
    tokens = torch.randint(0, 331, (5, 17), generator=torch.Generator().manual_seed(0))
    calls, hidden = record(model, tokens, batch_size=2)
    with torch.no_grad():
        expected = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    for index, block in enumerate(model.model.layers):
        outputs = torch.full_like(hidden, torch.nan)
        replay_of(block, index, calls, 2).propagate(hidden, outputs)
        hidden = outputs
    torch.testing.assert_close(model.model.norm(hidden), expected, atol=1e-5, rtol=1e-5)


def test_recording_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = load("LlamaForCausalLM", tmp_path / "model")
    tokens = torch.randint(0, 331, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(input_ids=tokens).logits
        record(model, tokens, batch_size=1)
        assert torch.equal(model(input_ids=tokens).logits, before)


def test_statistics_are_those_of_what_each_linear_reads(tmp_path: Path) -> None:
    model = load("Qwen3ForCausalLM", tmp_path / "model")
    tokens = torch.randint(0, 331, (5, 17), generator=torch.Generator().manual_seed(0))
    calls, hidden = record(model, tokens, batch_size=2)
    shared_inputs = family_of({"architectures": ["Qwen3ForCausalLM"]}).shared_inputs
    block, seen = model.model.layers[0], {}
    for shared in shared_inputs:
        for name in shared.linears:
            block.get_submodule(name).register_forward_pre_hook(
                lambda module, args, name=name: seen.setdefault(name, []).append(args[0])
            )
    replay = replay_of(block, 0, calls, 2)
    statistics = replay.new_statistics(shared_inputs, len(hidden), full=True)
    replay.collect(hidden, statistics)
    for shared, stats in statistics.items():
        for name in shared.linears:
            rows = torch.cat([x.reshape(-1, x.shape[-1]) for x in seen[name]]).double()
            assert stats.num_tokens == len(rows) == 85
            torch.testing.assert_close(
                stats.second_moment.double(), rows.T @ rows, atol=1e-4, rtol=1e-4
            )


def test_an_input_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = load("LlamaForCausalLM", tmp_path / "model")
    tokens = torch.zeros(1, 4, dtype=torch.long)
    calls, hidden = record(model, tokens, batch_size=1)
    model.model.layers[0].mlp.up_proj.weight.data[5] = torch.inf
    shared = SharedInput(linears=("mlp.down_proj",))
    replay = replay_of(model.model.layers[0], 0, calls, 1)
    statistics = replay.new_statistics([shared], 1, full=False)
    with pytest.raises(ValueError, match=r"mlp.down_proj: .* not finite in column 5"):
        replay.collect(hidden, statistics)


def test_the_float_chain_runs_with_its_own_weights_and_inputs(tmp_path: Path) -> None:
    model = load("LlamaForCausalLM", tmp_path / "model")
    tokens = torch.randint(0, 331, (3, 7), generator=torch.Generator().manual_seed(0))
    calls, hidden = record(model, tokens, batch_size=2)
    block, ahead = model.model.layers[0], hidden + 0.1 * torch.randn_like(hidden)
    own = {name: tensor.clone() for name, tensor in block.named_parameters()}
    replay = replay_of(block, 0, calls, 2)
    expected, seen = torch.empty_like(hidden), []
    hook = block.mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    replay.propagate(ahead, expected)
    float_inputs = torch.cat([x.reshape(-1, x.shape[-1]) for x in seen])
    for parameter in block.parameters():
        parameter.data.mul_(1.01)
    seen.clear()
    replay.propagate(hidden, torch.empty_like(hidden))
    inputs = torch.cat([x.reshape(-1, x.shape[-1]) for x in seen])
    hook.remove()
    shared = SharedInput(linears=("mlp.down_proj",))
    statistics = replay.new_statistics([shared], 3, full=True, cross=True)
    chain = FloatChain(inputs=ahead, outputs=torch.empty_like(hidden), weights=own)
    replay.collect(hidden, statistics, chain)
    assert torch.equal(chain.outputs, expected)
    torch.testing.assert_close(
        statistics[shared].cross_moment, (float_inputs - inputs).T @ inputs, atol=1e-4, rtol=1e-4
    )
    assert not torch.equal(block.mlp.down_proj.weight, own["mlp.down_proj.weight"])


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_kv_ranges_are_those_of_the_models_own_cache(architecture: str, tmp_path: Path) -> None:
    model = load(architecture, tmp_path / "model")
    tokens = torch.randint(0, 331, (3, 17), generator=torch.Generator().manual_seed(0))
    calls, hidden = record(model, tokens, batch_size=2)
    ranges = KVRanges()
    replay_of(model.model.layers[0], 0, calls, 2).propagate(hidden, None, ranges)
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
    layer = cache.layers[0]
    torch.testing.assert_close(ranges.keys, layer.keys.abs().amax((0, 2, 3)))
    torch.testing.assert_close(ranges.values, layer.values.abs().amax((0, 2, 3)))


def test_open_activations_maps_the_same_values_again(tmp_path: Path) -> None:
    file, shape = tmp_path / "a.bin", (2, 3, 5)
    create_activations(file, shape, torch.bfloat16)
    first = open_activations(file, shape, torch.bfloat16)
    assert isinstance(first, torch.Tensor)
    first.copy_(torch.randn(shape))
    assert torch.equal(open_activations(file, shape, torch.bfloat16)[:], first)
    with pytest.raises(ValueError, match="60 bytes, expected 120"):
        open_activations(file, shape, torch.float32)


@pytest.mark.parametrize("samples", [slice(None), slice(1, 4)], ids=["all", "share"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_on_disk_read_and_write_what_the_map_shows(
    dtype: torch.dtype, samples: slice, tmp_path: Path
) -> None:
    file, shape = tmp_path / "a.bin", (5, 3, 7)
    create_activations(file, shape, dtype)
    mapped = open_activations(file, shape, dtype, samples=samples)
    on_disk = open_activations(file, shape, dtype, samples=samples, mapped=False)
    assert isinstance(mapped, torch.Tensor)
    assert isinstance(on_disk, ActivationFile)
    assert on_disk.shape == tuple(mapped.shape)
    mapped.copy_(torch.randn(mapped.shape))
    for part in (slice(0, 2), slice(1, 3), slice(2, None), slice(3)):
        assert torch.equal(on_disk[part], mapped[part])
    rows = torch.randn(2, 3, 7)
    before = mapped.clone()
    on_disk[1:3] = rows
    assert torch.equal(mapped[1:3], rows.to(dtype))
    assert torch.equal(mapped[0], before[0])
    assert torch.equal(mapped[3:], before[3:])


def test_activations_that_were_cut_short_are_refused(tmp_path: Path) -> None:
    file, shape = tmp_path / "a.bin", (2, 3, 5)
    create_activations(file, shape, torch.float32)
    on_disk = open_activations(file, shape, torch.float32, mapped=False)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cut short"):
        on_disk[1:2]


def test_batches_cover_every_sample_once() -> None:
    assert [range(7)[part] for part in batches(7, 3)] == [range(3), range(3, 6), range(6, 7)]
