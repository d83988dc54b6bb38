"""The Medusa proposer: the guesses of the heads, batched, for the right target only."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compress.calib.drafts.medusa import MedusaHeads
from compress.export.draft import MedusaDraft, write_medusa
from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.loader import head_rows
from compress.runtime.model import Decoder
from compress.runtime.request import SamplingParams
from compress.runtime.speculative.base import DraftContext, load_proposer
from compress.runtime.speculative.medusa import MedusaProposer, load_medusa
from compress.scheme import dequantize
from tests.export.samples import W8A8, packed_model
from tests.runtime.test_loader import W8

VOCAB, HIDDEN, HEADS = 331, 96, 3
TOKEN_MAP = torch.arange(5, VOCAB, 7)


def random_heads(num_layers: int = 1) -> MedusaHeads:
    heads = MedusaHeads(HIDDEN, HEADS, num_layers)
    generator = torch.Generator().manual_seed(1)
    for parameter in heads.parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return heads


def draft_for(target: Decoder, heads: MedusaHeads, **fields: Any) -> MedusaDraft:
    values: dict[str, Any] = {
        "num_heads": HEADS,
        "num_layers": len(heads.blocks[0].layers),
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "target_fingerprint": target.source.fingerprint,
        "tensors": heads.state_dict(),
        "token_map": TOKEN_MAP,
    }
    return MedusaDraft(**values | fields)


@pytest.fixture(scope="module")
def target(llama: Path) -> Decoder:
    return Engine.load(llama, config=EngineConfig(num_blocks=1)).decoder


def contexts(*limits: int) -> list[DraftContext]:
    return [
        DraftContext(request_id=f"r{i}", token_ids=[1], max_draft_tokens=limit)
        for i, limit in enumerate(limits)
    ]


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("token_map", [None, TOKEN_MAP], ids=["full", "reduced"])
@pytest.mark.parametrize("limits", [(9,), (3, 1, 2), (1, 1)], ids=["one", "mixed", "short"])
@torch.inference_mode()
def test_propose_is_the_argmax_of_each_head(
    limits: tuple[int, ...], token_map: torch.Tensor | None, num_layers: int, target: Decoder
) -> None:
    heads = random_heads(num_layers)
    proposer = MedusaProposer(draft_for(target, heads, token_map=token_map), target)
    hidden = torch.randn(len(limits), HIDDEN, generator=torch.Generator().manual_seed(2))
    for i, state in enumerate(hidden):
        proposer.observe(f"r{i}", 0, torch.stack([-state, state]))
    logits = target.logits(heads(hidden).flatten(0, 1)).view(len(limits), HEADS, VOCAB)
    kept = torch.arange(VOCAB) if token_map is None else token_map
    expected = kept[logits[:, :, kept].argmax(dim=-1)].tolist()
    assert proposer.propose(contexts(*limits)) == [
        chain[:limit] for chain, limit in zip(expected, limits, strict=True)
    ]


def test_only_the_last_state_of_live_requests_is_kept(target: Decoder) -> None:
    proposer = MedusaProposer(draft_for(target, random_heads()), target)
    step = torch.randn(40, HIDDEN)
    for i in range(3):
        proposer.observe("r0", 40 * i, step)
    proposer.observe("r0", 120, step[:0])
    state = proposer._last_hidden["r0"]
    assert torch.equal(state, step[-1])
    assert state.untyped_storage().nbytes() == HIDDEN * 4, "the state keeps the whole step alive"
    proposer.reset("r0")
    proposer.reset("never seen")
    assert not proposer._last_hidden


@pytest.mark.parametrize("token_budget", [512, 10], ids=["whole", "chunked"])
def test_generation_is_unchanged_by_a_bad_draft(
    token_budget: int, llama: Path, tmp_path: Path
) -> None:
    config = EngineConfig(num_blocks=64, max_num_seqs=4, token_budget=token_budget)
    plain = Engine.load(llama, config=config)
    write_medusa(tmp_path, draft_for(plain.decoder, random_heads()), {})
    engine = Engine.load(llama, config=config, draft=tmp_path)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (3, 17, 40)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = [completion.token_ids for completion in plain.generate(prompts, params)]
    assert [c.token_ids for c in engine.generate(prompts, params)] == expected
    assert engine.stats.drafted_tokens > 50
    assert isinstance(engine._proposer, MedusaProposer)
    assert not engine._proposer._last_hidden


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_head_rows_are_the_stored_ones(name: str, model_path: Any) -> None:
    decoder = Engine.load(model_path(name), config=EngineConfig(num_blocks=1)).decoder
    stored = "model.embed_tokens.weight" if name == "llama-tied" else "lm_head.weight"
    expected = decoder.source.read(stored)[TOKEN_MAP]
    assert torch.equal(head_rows(decoder, TOKEN_MAP), expected)


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_head_rows_are_the_dequantized_ones_of_a_packed_head(
    name: str, model_path: Any, tmp_path: Path
) -> None:
    packed = "model.embed_tokens" if name == "llama-tied" else "lm_head"
    scheme = W8 if name == "llama-tied" else W8A8
    linears = packed_model(
        model_path(name), tmp_path / "packed", lambda module: scheme if module == packed else None
    )
    decoder = Engine.load(tmp_path / "packed", config=EngineConfig(num_blocks=1)).decoder
    assert torch.equal(head_rows(decoder, TOKEN_MAP), dequantize(linears[packed])[TOKEN_MAP])


def test_load_refuses_the_draft_of_another_target(target: Decoder, tmp_path: Path) -> None:
    draft = draft_for(target, random_heads())
    write_medusa(tmp_path, replace(draft, target_fingerprint="0123456789abcdef0"), {})
    with pytest.raises(
        ValueError, match=r"another target, with fingerprint 0123456789abcdef\.\.\."
    ):
        load_medusa(tmp_path, target)
    write_medusa(tmp_path, replace(draft, vocab_size=400), {})
    with pytest.raises(ValueError, match="a draft for vocab_size 400, but the target has 331"):
        load_medusa(tmp_path, target)
    narrow = MedusaHeads(95, HEADS, 1)
    write_medusa(tmp_path, replace(draft, hidden_size=95, tensors=narrow.state_dict()), {})
    with pytest.raises(ValueError, match="a draft for hidden_size 95, but the target has 96"):
        load_medusa(tmp_path, target)


def test_load_proposer_finds_medusa_by_its_architecture(target: Decoder, tmp_path: Path) -> None:
    write_medusa(tmp_path, draft_for(target, random_heads()), {})
    assert isinstance(load_proposer(tmp_path, target), MedusaProposer)
