"""Every family, and what is special in each, against transformers and in every cut of the work."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.factory import tiny_model
from tests.runtime.test_engine import PARAMS, load, outputs, prompts


def test_score_and_generate_match_transformers(
    model_name: str, model_path: Callable[[str], Path]
) -> None:
    from transformers import AutoModelForCausalLM

    path = model_path(model_name)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    engine = load(path)
    completions = engine.generate(prompts(), PARAMS)
    full = [p + c.token_ids for p, c in zip(prompts(), completions, strict=True)]
    for prompt, tokens, scores in zip(prompts(), full, engine.score(full), strict=True):
        with torch.no_grad():
            log_probs = theirs(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        picked = log_probs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        torch.testing.assert_close(scores.double(), picked, rtol=0, atol=1e-4)
        greedy = log_probs.argmax(-1).tolist()
        assert tokens[len(prompt) :] == greedy[len(prompt) - 1 : -1]


# Ways of cutting up the work; every family goes through each.
CUTS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"token_budget": 8, "block_size": 4, "num_blocks": 200},
    "preempted": {"num_blocks": 12, "token_budget": 40},
}


def test_every_family_gives_the_same_in_every_cut(
    model_name: str, model_path: Callable[[str], Path]
) -> None:
    """Tokens and scores of each prompt alone, in one piece, are those of any batch."""
    path = model_path(model_name)
    alone = load(path, token_budget=512)
    tokens = [outputs(alone.generate([prompt], PARAMS))[0] for prompt in prompts()]
    scores = [alone.score([prompt])[0] for prompt in prompts()[1:]]
    for config in CUTS.values():
        engine = load(path, **config)
        assert outputs(engine.generate(prompts(), PARAMS)) == tokens
        for got, expected in zip(engine.score(prompts()[1:]), scores, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        engine.blocks.check()


def test_every_family_gives_the_same_from_the_prefix_cache(
    model_name: str, model_path: Callable[[str], Path]
) -> None:
    engine = load(model_path(model_name), block_size=16, num_blocks=64)
    first = engine.generate(prompts(), PARAMS)
    again = engine.generate(prompts(), PARAMS)
    assert outputs(again) == outputs(first)
    assert sum(completion.cached_tokens for completion in first) == 0
    assert sum(completion.cached_tokens for completion in again) > 0


def test_longrope_takes_its_long_factors_when_long_sequences_are_asked_for(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.5 + i for i in range(8)],
    }
    path = tiny_model(
        "Phi3ForCausalLM", tmp_path, rope_parameters=rope, original_max_position_embeddings=64
    )
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for sequence, limit in ((prompts()[2], None), (prompts()[3], 256)):
        with torch.no_grad():
            log_probs = theirs(torch.tensor([sequence])).logits[0].double().log_softmax(-1)
        picked = log_probs[:-1].gather(1, torch.tensor(sequence[1:])[:, None])[:, 0]
        scores = load(path, max_model_len=limit).score([sequence])[0]
        torch.testing.assert_close(scores.double(), picked, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match=r"130 prompt tokens .* exceed max_model_len 64"):
        load(path).score([prompts()[3]])
