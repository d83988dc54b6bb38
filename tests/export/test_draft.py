"""Draft checkpoints: what is written is read back, and nothing else is accepted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.export.draft import MedusaDraft, read_medusa, write_medusa

HIDDEN, VOCAB = 17, 33


def sample(token_map: torch.Tensor | None = None) -> MedusaDraft:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"blocks.{head}.layers.{layer}.{kind}": torch.randn(shape, generator=generator)
        for head in range(3)
        for layer in range(2)
        for kind, shape in (("weight", (HIDDEN, HIDDEN)), ("bias", (HIDDEN,)))
    }
    return MedusaDraft(
        num_heads=3,
        num_layers=2,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        target_fingerprint="abc",
        tensors=tensors,
        token_map=token_map,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_medusa(tmp_path, sample(torch.tensor([0, 4, 32])), {"seconds": 1})
    return tmp_path


@pytest.mark.parametrize("token_map", [None, torch.tensor([3, 5, 32])], ids=["full", "reduced"])
def test_read_gives_back_what_was_written(token_map: torch.Tensor | None, tmp_path: Path) -> None:
    written = sample(token_map)
    write_medusa(tmp_path, written, {"seconds": 1})
    read = read_medusa(tmp_path)
    for name in ("num_heads", "num_layers", "hidden_size", "vocab_size", "target_fingerprint"):
        assert getattr(read, name) == getattr(written, name)
    assert read.tensors.keys() == written.tensors.keys()
    assert all(torch.equal(read.tensors[name], written.tensors[name]) for name in read.tensors)
    assert (read.token_map is None) == (token_map is None)
    if token_map is not None:
        assert torch.equal(read.token_map, token_map)


def test_config_has_the_names_that_vllm_reads(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["MedusaModel"]
    assert {key: config[key] for key in ("num_heads", "num_hidden_layers", "hidden_size")} == {
        "num_heads": 3,
        "num_hidden_layers": 2,
        "hidden_size": HIDDEN,
    }
    assert (config["vocab_size"], config["truncated_vocab_size"]) == (VOCAB, 3)
    assert config["medusa_fc_bias"] is config["original_lm_head"] is True
    assert json.loads((folder / "draft.json").read_text()) == {"seconds": 1}


Tensors = dict[str, torch.Tensor]


def drop(tensors: Tensors) -> None:
    del tensors["blocks.1.layers.0.bias"]


def add(tensors: Tensors) -> None:
    tensors["lm_heads.0.weight"] = torch.zeros(2)


def reshape(tensors: Tensors) -> None:
    tensors["blocks.2.layers.1.weight"] = torch.zeros(HIDDEN, HIDDEN - 1)


def spoil(tensors: Tensors) -> None:
    tensors["blocks.0.layers.1.bias"][3] = torch.nan


def repeat_token(tensors: Tensors) -> None:
    tensors["token_map"] = torch.tensor([0, 4, 4])


def token_too_large(tensors: Tensors) -> None:
    tensors["token_map"] = torch.tensor([0, 4, VOCAB])


def no_token_map(tensors: Tensors) -> None:
    del tensors["token_map"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (drop, r"missing tensors: blocks\.1\.layers\.0\.bias"),
        (add, r"unexpected tensors: lm_heads\.0\.weight"),
        (reshape, r"blocks\.2\.layers\.1\.weight has shape \(17, 16\), expected \(17, 17\)"),
        (spoil, r"blocks\.0\.layers\.1\.bias holds values that are not finite"),
        (repeat_token, "token_map must hold ascending int64 token ids below 33"),
        (token_too_large, "token_map must hold ascending"),
        (no_token_map, "missing tensors: token_map"),
    ],
)
def test_wrong_tensors_are_named(
    edit: Callable[[Tensors], None], message: str, folder: Path
) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        read_medusa(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_heads", None, "num_heads must be a positive integer, got None"),
        ("hidden_size", "17", "hidden_size must be a positive integer, got '17'"),
        ("num_hidden_layers", 0, "num_hidden_layers must be a positive integer, got 0"),
        ("num_heads", 4, r"missing tensors: blocks\.3\."),
        ("medusa_fc_bias", False, r"medusa_fc_bias is False \(supported: true\)"),
        ("original_lm_head", None, "original_lm_head is None"),
        ("target_fingerprint", None, "lacks 'target_fingerprint'"),
    ],
)
def test_wrong_config_is_named(key: str, value: Any, message: str, folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=message):
        read_medusa(folder)


def test_truncated_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged safetensors file"):
        read_medusa(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_file_is_named(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        read_medusa(folder)
