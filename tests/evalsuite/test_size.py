"""Bytes, parameters and bits per weight of float and packed checkpoints."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compress.artifacts import QuantizedLinear
from compress.evalsuite.size import checkpoint_size, scheme_label
from compress.export.compressed_tensors import pack_linear, quantization_config
from compress.models.checkpoint import Checkpoint, open_checkpoint, read_json
from compress.scheme import QuantScheme, WeightScheme, round_to_codes
from tests.factory import tiny_model


@pytest.fixture(scope="module")
def float_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("float")
    return open_checkpoint(tiny_model("LlamaForCausalLM", folder, dtype=torch.bfloat16))


def _pack(source: Checkpoint, folder: Path, scheme: WeightScheme) -> Checkpoint:
    """Every block Linear of `source` packed with scale 1/16 (the size is what matters here)."""
    tensors: dict[str, torch.Tensor] = {}
    for name in source.tensors:
        tensor = source.read(name)
        if not name.endswith("proj.weight"):
            tensors[name] = tensor
            continue
        scale = torch.full((tensor.shape[0], tensor.shape[1] // scheme.group_size), 1 / 16)
        scale = scale.to(torch.bfloat16)
        zero = None if scheme.symmetric else torch.zeros(scale.shape, dtype=torch.int8)
        codes = round_to_codes(tensor, scale, zero, scheme.bits)
        packed = pack_linear(
            QuantizedLinear(codes=codes, scale=scale, zero_point=zero, bits=scheme.bits)
        )
        stem = name.removesuffix("weight")
        tensors |= {stem + local: value for local, value in packed.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = read_json(source.path / "config.json")
    config["quantization_config"] = quantization_config(QuantScheme(weights=scheme), ["lm_head"])
    (folder / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


def test_checkpoint_size_of_a_float_model(float_checkpoint: Checkpoint) -> None:
    size = checkpoint_size(float_checkpoint)
    # embedding and head, two blocks (q, k, v, o; gate, up, down; two norms), the final norm
    block = 96 * (96 + 32 + 32 + 96) + 3 * 96 * 160 + 2 * 96
    assert size["parameters"] == 2 * 331 * 96 + 2 * block + 96
    assert size["bytes"] == (float_checkpoint.path / "model.safetensors").stat().st_size
    assert 16 < size["bits_per_weight"] < 16.5  # the header is counted
    assert size["quantized_linears"] == 0
    assert size["quantized_bits_per_weight"] is None


@pytest.mark.parametrize(
    ("bits", "symmetric", "expected"),
    [(4, True, 4 + 16 / 32), (8, True, 8 + 16 / 32), (4, False, 4 + 16 / 32 + 4 / 32)],
)
def test_checkpoint_size_counts_codes_scales_and_zero_points(
    float_checkpoint: Checkpoint, tmp_path: Path, bits: int, symmetric: bool, expected: float
) -> None:
    scheme = WeightScheme(bits=bits, group_size=32, symmetric=symmetric)  # type: ignore[arg-type]
    packed = _pack(float_checkpoint, tmp_path, scheme)
    size, source = checkpoint_size(packed), checkpoint_size(float_checkpoint)
    assert size["parameters"] == source["parameters"]
    assert size["quantized_linears"] == 14
    shape_bits = 14 * 2 * 64  # weight_shape: two int64 per Linear
    assert size["quantized_bits_per_weight"] == pytest.approx(
        expected + shape_bits / size["quantized_parameters"]
    )
    assert size["bytes"] == (tmp_path / "model.safetensors").stat().st_size
    assert scheme_label(packed) == scheme.label


def test_scheme_label_of_a_float_model_names_its_dtype(float_checkpoint: Checkpoint) -> None:
    assert scheme_label(float_checkpoint) == "float (bfloat16)"
