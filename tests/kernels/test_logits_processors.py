import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.logits_processors import (
    Bans,
    Bias,
    Penalties,
    process_logits_ref,
    process_logits_torch,
    process_logits_triton,
)

BOTH = pytest.mark.parametrize(
    "process", [process_logits_torch, process_logits_triton], ids=["torch", "triton"]
)
INF = float("inf")


def ragged(counts, vocab, generator, device):
    """Distinct ids per row, and where each row starts."""
    ids = [torch.randperm(vocab, generator=generator)[:n] for n in counts]
    starts = torch.tensor([0, *counts]).cumsum(0)
    return torch.cat(ids).to(device), starts.to(device, torch.int32)


def make(counts, vocab, device, seed=0):
    """Logits, and every part for rows with `counts` listed tokens."""
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(counts)
    logits = torch.randn(num_rows, vocab, generator=generator) * 4
    ids, starts = ragged(counts, vocab, generator, device)
    n = len(ids)
    output_counts = torch.randint(0, 4, (n,), generator=generator)
    in_prompt = torch.rand(n, generator=generator) < 0.5
    repetition, presence, frequency = torch.rand(3, num_rows, generator=generator).to(device)
    penalties = Penalties(
        token_ids=ids,
        output_counts=output_counts.to(device, torch.int32),
        in_prompt=in_prompt.to(device),
        row_starts=starts,
        repetition=1 + repetition,
        presence=presence,
        frequency=frequency,
    )
    bias_ids, bias_starts = ragged([n // 2 for n in counts], vocab, generator, device)
    values = torch.randn(len(bias_ids), generator=generator).to(device)
    bias = Bias(ids=bias_ids, values=values, starts=bias_starts)
    banned_ids, banned_starts = ragged([min(n, 2) for n in counts], vocab, generator, device)
    bans = Bans(ids=banned_ids, starts=banned_starts)
    return logits.to(device), {"penalties": penalties, "bias": bias, "bans": bans}


def assert_close(got, want):
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


@BOTH
@pytest.mark.parametrize("parts", [("penalties",), ("bias",), ("bans",), None], ids=str)
@pytest.mark.parametrize("counts", [[2], [0, 17, 5], [33, 0, 1, 130]], ids=str)
def test_process_logits_matches_reference(process, counts, parts, device):
    logits, given_parts = make(counts, 1031, device)
    chosen = {name: given_parts[name] for name in parts or given_parts}
    want = process_logits_ref(logits, **chosen)
    assert not torch.equal(want, logits.double())
    got = process(logits, **chosen)
    assert got is logits
    assert_close(got, want)


@BOTH
def test_process_logits_of_more_tokens_than_a_block(process, device):
    logits, parts = make([2500, 3], 3001, device)
    want = process_logits_ref(logits, **parts)
    assert_close(process(logits, **parts), want)


@BOTH
def test_process_logits_worked_example(process, device):
    """One row: token 0 in the prompt, 1 once in the output, 2 twice and in both, 3 in neither."""
    logits = torch.tensor([[2.0, -2.0, 4.0, 8.0, 1.0]], device=device)
    penalties = Penalties(
        token_ids=torch.tensor([0, 1, 2, 3], device=device),
        output_counts=torch.tensor([0, 1, 2, 0], dtype=torch.int32, device=device),
        in_prompt=torch.tensor([True, False, True, False], device=device),
        row_starts=torch.tensor([0, 4], dtype=torch.int32, device=device),
        repetition=torch.tensor([2.0], device=device),
        presence=torch.tensor([0.5], device=device),
        frequency=torch.tensor([0.25], device=device),
    )
    one = torch.tensor([0, 1], dtype=torch.int32, device=device)
    ids = torch.tensor([0], device=device)
    bias = Bias(ids=ids, values=torch.tensor([10.0], device=device), starts=one)
    bans = Bans(ids=ids + 4, starts=one)
    got = process(logits, penalties=penalties, bias=bias, bans=bans)
    assert got.tolist() == [[11.0, -4.75, 1.0, 8.0, -INF]]


@BOTH
def test_process_logits_ban_wins_over_bias(process, device):
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    ids = torch.tensor([2], device=device)
    bias = Bias(ids=ids, values=torch.tensor([100.0], device=device), starts=starts)
    logits = process(torch.zeros(1, 5, device=device), bias=bias, bans=Bans(ids=ids, starts=starts))
    assert logits[0].tolist() == [0, 0, -INF, 0, 0]


@BOTH
@pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
def test_process_logits_of_one_penalty(process, name, device):
    logits, parts = make([17, 5], 130, device)
    whole = parts["penalties"]
    lists = ("token_ids", "output_counts", "in_prompt", "row_starts", name)
    single = Penalties(**{key: getattr(whole, key) for key in lists})
    want = process_logits_ref(logits, penalties=single)
    assert_close(process(logits, penalties=single), want)


@BOTH
def test_process_logits_of_nothing_is_the_same_bits(process, device):
    logits, parts = make([0, 0], 33, device)
    before = logits.clone()
    assert torch.equal(process(logits, **parts), before)
    assert torch.equal(process(logits), before)
    assert process(logits[:0]).shape == (0, 33)


@BOTH
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    vocab=st.integers(41, 300),
    seed=st.integers(0, 9),
)
def test_process_logits_row_does_not_depend_on_the_others(process, counts, vocab, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits, parts = make(counts, vocab, device, seed)
    alone = []
    for r in range(len(counts)):
        penalties, bias, bans = (parts[name] for name in ("penalties", "bias", "bans"))
        own = {}
        i, j = penalties.row_starts[r : r + 2].tolist()
        bounds = torch.tensor([0, j - i], dtype=torch.int32, device=device)
        own["penalties"] = Penalties(
            token_ids=penalties.token_ids[i:j].clone(),
            output_counts=penalties.output_counts[i:j].clone(),
            in_prompt=penalties.in_prompt[i:j].clone(),
            row_starts=bounds,
            repetition=penalties.repetition[r : r + 1].clone(),
            presence=penalties.presence[r : r + 1].clone(),
            frequency=penalties.frequency[r : r + 1].clone(),
        )
        i, j = bias.starts[r : r + 2].tolist()
        bounds = torch.tensor([0, j - i], dtype=torch.int32, device=device)
        own["bias"] = Bias(
            ids=bias.ids[i:j].clone(), values=bias.values[i:j].clone(), starts=bounds
        )
        i, j = bans.starts[r : r + 2].tolist()
        bounds = torch.tensor([0, j - i], dtype=torch.int32, device=device)
        own["bans"] = Bans(ids=bans.ids[i:j].clone(), starts=bounds)
        alone.append(process(logits[r : r + 1].clone(), **own))
    want = process_logits_ref(logits, **parts)
    together = process(logits, **parts)
    assert torch.equal(together, torch.cat(alone))
    assert_close(together, want)


@BOTH
def test_process_logits_names_the_bad_argument(process, device):
    logits, parts = make([17, 5], 130, device)
    bias = parts["bias"]
    with pytest.raises(ValueError, match="logits must be float32"):
        process(logits.half())
    with pytest.raises(ValueError, match=r"banned_starts must be int32 of shape \(3\)"):
        process(logits, bans=Bans(ids=bias.ids, starts=bias.starts[:2]))
    with pytest.raises(ValueError, match="bias_ids must be int64"):
        process(logits, bias=Bias(ids=bias.ids.int(), values=bias.values, starts=bias.starts))
    with pytest.raises(ValueError, match="bias_values must be float32"):
        process(logits, bias=Bias(ids=bias.ids, values=bias.values[1:], starts=bias.starts))
    with pytest.raises(ValueError, match="logits must have contiguous rows"):
        process(logits.t().contiguous().t(), **parts)
    with pytest.raises(ValueError, match="bias_ids must be on"):
        process(logits, bias=Bias(ids=bias.ids.to("meta"), values=bias.values, starts=bias.starts))
