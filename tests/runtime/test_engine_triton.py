"""The engine on the Triton kernels, end to end, in Triton's interpreter where there is no GPU.

In a process of its own: the interpreter has to be chosen before Triton is imported.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.request import SamplingParams
from compress.scheme import KVCacheScheme, LinearScheme
from tests.export.samples import FP8, packed_model
from tests.runtime.test_loader import W4, W8A8_STATIC

PROMPTS = [[5], [7, 11, 13, 200, 3], list(range(20, 43))]
_SCRIPT = """
import json, sys
from pathlib import Path
from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.request import SamplingParams

path, prompts = Path(sys.argv[1]), json.loads(sys.argv[2])
limits = {"num_blocks": 16, "block_size": 16, "token_budget": 20, "max_num_seqs": 4}
config = EngineConfig(kernels="triton", **limits)
engine = Engine.load(path, dtype="float32", config=config)
completions = engine.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True))
scores = engine.score(prompts[1:])
print(json.dumps([[c.token_ids for c in completions], [s.tolist() for s in scores]]))
"""


@pytest.mark.parametrize(
    ("name", "scheme", "kv_cache", "largest"),
    [
        ("llama", W4, None, 1e-4),
        ("llama", W4, KVCacheScheme(strategy="head"), 1e-4),
        ("llama", W8A8_STATIC, None, 1e-4),
        # An activation near a tie takes one float8 code or the next, as the last bit of the sums
        # before it has it; torch's own product in another order differs by as much.
        ("llama", FP8, KVCacheScheme(), 0.05),
        ("phi3-longrope", W4, None, 1e-4),
        ("gemma3", W4, None, 1e-4),
    ],
    ids=["w4", "w4-kv8-head", "w8a8", "fp8-kv8", "fused-partial-rotary", "norms-around-zero"],
)
def test_triton_kernels_give_what_torch_gives(
    name: str,
    scheme: LinearScheme,
    kv_cache: KVCacheScheme | None,
    largest: float,
    model_path: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    packed = tmp_path / "packed"
    packed_model(model_path(name), packed, scheme, kv_cache=kv_cache)
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(packed), json.dumps(PROMPTS)],
        env=os.environ | interpreted,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    tokens, scores = json.loads(result.stdout.splitlines()[-1])
    engine = Engine.load(packed, config=EngineConfig(num_blocks=32, block_size=16))
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    assert tokens == [c.token_ids for c in engine.generate(PROMPTS, params)]
    got = torch.cat([torch.tensor(values) for values in scores])
    difference = (got - torch.cat(engine.score(PROMPTS[1:]))).abs()
    assert difference.max() < largest
    assert difference.median() < 1e-4
