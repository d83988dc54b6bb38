"""Digests are those of the bytes on disk, however many reads they take."""

import hashlib

import pytest
import torch

from compress.export import digests
from compress.export.digests import tensor_digests
from compress.export.writer import write_safetensors
from compress.models.checkpoint import open_checkpoint


@pytest.mark.parametrize("read_bytes", [1, 7, 16, 1 << 20])
def test_tensor_digests_are_sha256_of_the_stored_bytes(tmp_path, monkeypatch, read_bytes):
    monkeypatch.setattr(digests, "_READ_BYTES", read_bytes)
    tensors = {
        "a": torch.arange(12.0).view(3, 4),
        "b": torch.arange(5).to(torch.bfloat16),
        "c": torch.zeros(0),
        "d": torch.tensor(3, dtype=torch.int64),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text("{}")
    assert tensor_digests(open_checkpoint(tmp_path)) == {
        name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }
