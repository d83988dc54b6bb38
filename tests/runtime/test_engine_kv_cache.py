"""The engine over a float8 cache, against transformers with keys and values rounded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from compress.export.kv_scales import read_kv_scales
from compress.models.checkpoint import open_checkpoint
from compress.runtime.engine import Engine, EngineConfig
from compress.runtime.request import SamplingParams
from compress.scheme import KVCacheScheme
from tests.export.samples import packed_model
from tests.runtime.test_loader import SEQUENCE, W4

PROMPTS = [SEQUENCE[:1], SEQUENCE[:17], SEQUENCE[:33]]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
STRATEGIES = {"per-tensor": KVCacheScheme(), "per-head": KVCacheScheme(strategy="head")}
FLOAT8 = torch.float8_e4m3fn


def load(path: Path, kv_dtype: str = "auto", dtype: str = "auto", **config: Any) -> Engine:
    fields: dict[str, Any] = {"num_blocks": 64, "block_size": 16, "max_num_seqs": 8}
    limits = EngineConfig(**(fields | config))
    return Engine.load(path, kv_dtype=kv_dtype, dtype=dtype, config=limits)


class RoundingCache(DynamicCache):
    """Keys and values are rounded to float8 codes of their scales on the way into the cache."""

    def __init__(self, scales: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.scales = scales

    def update(self, k: Any, v: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        rounded = [
            (x / scale.view(1, -1, 1, 1)).clamp(-448, 448).to(FLOAT8).float()
            * scale.view(1, -1, 1, 1)
            for x, scale in zip((k, v), self.scales[layer_idx], strict=True)
        ]
        return super().update(*rounded, layer_idx, *args, **kwargs)


def with_kv_scales(source: Path, folder: Path, scheme: KVCacheScheme) -> Path:
    """The float model with scales of the cache beside it, and nothing else quantized."""
    packed_model(source, folder, lambda name: None, kv_cache=scheme)
    return folder


def rounded_scores(path: Path, scales: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    cache = RoundingCache(scales)
    with torch.no_grad():
        logits = model(torch.tensor([SEQUENCE]), past_key_values=cache, use_cache=True).logits[0]
    picked = logits.double().log_softmax(-1)[:-1]
    return picked.gather(1, torch.tensor(SEQUENCE[1:])[:, None])[:, 0]


@pytest.mark.parametrize(
    "architecture", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3"]
)
@pytest.mark.parametrize("scheme", STRATEGIES.values(), ids=STRATEGIES)
def test_score_is_that_of_a_model_whose_keys_and_values_are_rounded(
    scheme: KVCacheScheme,
    architecture: str,
    model_path: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    source = model_path(architecture)
    path = with_kv_scales(source, tmp_path / "packed", scheme)
    checkpoint = open_checkpoint(path)
    scales = [
        read_kv_scales(checkpoint, f"model.layers.{i}.self_attn", scheme, 2) for i in range(2)
    ]
    expected = rounded_scores(source, scales)
    engine = load(path)
    assert engine.kv_dtype == FLOAT8
    # a last bit may move a key or value to the next code, which is rare and small
    difference = (engine.score([SEQUENCE])[0].double() - expected).abs()
    assert float(difference.median()) < 1e-5
    assert float(difference.max()) < 0.02
    plain = load(path, "model").score([SEQUENCE])[0]
    assert float((plain.double() - expected).abs().max()) > 0.02


def test_kv_dtype_says_how_the_cache_is_stored(llama: Path, tmp_path: Path) -> None:
    path = with_kv_scales(llama, tmp_path / "packed", KVCacheScheme())
    assert load(path).kv_dtype == load(path, "fp8").kv_dtype == load(llama, "fp8").kv_dtype
    assert load(path).kv_dtype == FLOAT8
    assert load(path, "model").kv_dtype == load(llama).kv_dtype == torch.float32
    torch.testing.assert_close(
        load(path, "model").score([SEQUENCE])[0], load(llama).score([SEQUENCE])[0], rtol=0, atol=0
    )
    with pytest.raises(ValueError, match="unknown kv_dtype 'fp16'"):
        load(llama, "fp16")


@pytest.mark.parametrize("kv_dtype, largest", [("int8", 0.03), ("fp8", 0.15)])
@pytest.mark.parametrize("attention", ["blockwise", "paged"])
def test_scales_of_tokens_need_no_calibration(
    kv_dtype: str, largest: float, attention: str, llama: Path
) -> None:
    """8 bits change every score a little, and those of int8 the least."""
    scores = load(llama, kv_dtype, attention=attention).score([SEQUENCE])[0]
    difference = (scores - load(llama).score([SEQUENCE])[0]).abs()
    assert 0 < float(difference.median()) < largest / 3
    assert float(difference.max()) < largest


@pytest.mark.parametrize(
    "config",
    [{}, {"token_budget": 16}, {"num_blocks": 8}, {"attention": "paged", "token_budget": 16}],
    ids=["batched", "chunked", "tight-pool", "paged"],
)
def test_generation_over_float8_does_not_depend_on_batching_or_chunks(
    config: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    packed_model(llama, tmp_path / "packed", W4, kv_cache=KVCacheScheme(strategy="head"))
    alone = load(tmp_path / "packed")
    expected = [alone.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]
    together = load(tmp_path / "packed", **config)
    assert [c.token_ids for c in together.generate(PROMPTS, GREEDY)] == expected


def test_generation_over_float8_is_greedy_by_its_own_scores(llama: Path, tmp_path: Path) -> None:
    """What was decoded token by token is what the same cache predicts in one pass."""
    path = with_kv_scales(llama, tmp_path / "packed", KVCacheScheme())
    engine = load(path)
    tokens = SEQUENCE[:17] + engine.generate([SEQUENCE[:17]], GREEDY)[0].token_ids
    log_probs = torch.cat(list(engine.log_probs(tokens, 100)))
    assert log_probs[16:].argmax(-1).tolist() == tokens[17:]


def test_an_automatic_cache_holds_twice_the_blocks_in_float8_as_in_float16(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = 2 * 2 * 2 * 16 * 16 * 2  # K and V, layers, heads, block, head_dim, float16

    class Memory:
        available = 4 * 10 * block_bytes

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    options = {"num_blocks": None, "max_num_seqs": 64}
    assert load(llama, "model", "float16", **options).blocks.num_blocks == 10
    with_scales = with_kv_scales(llama, tmp_path / "packed", KVCacheScheme())
    assert load(with_scales, "fp8", "float16", **options).blocks.num_blocks == 20
    assert load(llama, "int8", "float16", **options).blocks.num_blocks == 16  # 20 bytes, not 32
