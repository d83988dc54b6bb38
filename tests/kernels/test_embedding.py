import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.kernels.embedding import embed_tokens_ref, embed_tokens_torch, embed_tokens_triton
from tests.kernels.tolerance import DTYPES, dtype_id

SCALE = 48.0**0.5  # no power of two: both of its roundings show
RUNS = pytest.mark.parametrize("run", [embed_tokens_torch, embed_tokens_triton])


def make(num_tokens, vocabulary, hidden, dtype, device):
    generator = torch.Generator().manual_seed(num_tokens * 1000 + hidden)
    table = torch.randn(vocabulary, hidden, generator=generator).to(device, dtype)
    ids = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    return ids.to(device), table


@RUNS
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32], ids=dtype_id)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("scale", [1.0, SCALE])
@pytest.mark.parametrize(
    "num_tokens, vocabulary, hidden",
    [(1, 5, 1100), (17, 33, 33), (33, 130, 1), (130, 1, 576)],
    ids=str,
)
def test_embedding_equals_reference(
    run, scale, num_tokens, vocabulary, hidden, dtype, ids_dtype, device, poisoned_empty
):
    ids, table = make(num_tokens, vocabulary, hidden, dtype, device)
    ids = ids.to(ids_dtype)
    got = run(ids, table, scale)
    assert got.dtype == dtype and torch.equal(got, embed_tokens_ref(ids, table, scale))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=dtype_id)
def test_scaled_embedding_is_that_of_gemma(dtype):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    ids, table = make(33, 130, 96, dtype, "cpu")
    module = Gemma3TextScaledWordEmbedding(130, 96, padding_idx=0, embed_scale=SCALE)
    module.weight = torch.nn.Parameter(table, requires_grad=False)
    assert torch.equal(embed_tokens_torch(ids, table, SCALE), module(ids))


@RUNS
def test_unscaled_embedding_copies_bfloat16(run, device):
    ids, table = make(17, 33, 130, torch.bfloat16, device)
    assert torch.equal(run(ids, table), table[ids])


def test_triton_gives_nan_for_ids_outside_the_table(device):
    _, table = make(1, 5, 96, torch.float32, device)
    ids = torch.tensor([4, -1, 5, 2**40, -(2**62), 0], device=device)
    got = embed_tokens_triton(ids, table, 2.0)
    assert torch.equal(got[[0, 5]], 2 * table[[4, 0]])
    assert got[1:5].isnan().all()


@pytest.mark.parametrize("bad", [-1, 5])
def test_torch_refuses_ids_outside_the_table(bad):
    _, table = make(1, 5, 96, torch.float32, "cpu")
    with pytest.raises(IndexError):
        embed_tokens_torch(torch.tensor([0, bad]), table)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    num_tokens=st.integers(1, 64),
    vocabulary=st.integers(1, 40),
    hidden=st.integers(1, 1200),
    scale=st.floats(0.01, 100.0),
)
def test_a_token_has_the_same_bits_in_every_batch(num_tokens, vocabulary, hidden, scale):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids, table = make(num_tokens, vocabulary, hidden, torch.float16, device)
    for run in (embed_tokens_torch, embed_tokens_triton):
        got = run(ids, table, scale)
        assert torch.equal(got, embed_tokens_ref(ids, table, scale))
        assert torch.equal(got[-1:], run(ids[-1:].clone(), table, scale))


@RUNS
def test_no_tokens_give_no_rows(run, device):
    ids, table = make(0, 5, 96, torch.float32, device)
    assert run(ids, table).shape == (0, 96)


def test_triton_names_the_bad_argument(device):
    ids, table = make(3, 5, 96, torch.float32, device)
    with pytest.raises(ValueError, match="token_ids must be int64 or int32"):
        embed_tokens_triton(ids.float(), table)
    with pytest.raises(ValueError, match="table must be float16 or bfloat16 or float32"):
        embed_tokens_triton(ids, table.double())
    with pytest.raises(ValueError, match="table must be contiguous"):
        embed_tokens_triton(ids, table.T)
    with pytest.raises(ValueError, match=r"token_ids must be on .*, as table is, got meta"):
        embed_tokens_triton(ids.to("meta"), table)
