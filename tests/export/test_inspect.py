"""What `inspect_checkpoint` says about float and packed checkpoints, and the provenance file."""

import hashlib
import json

import pytest
import torch

from compress.export.inspect import (
    inspect_checkpoint,
    read_provenance,
    stored_bits,
    write_provenance,
)
from compress.models.checkpoint import open_checkpoint
from tests.export.samples import edit_config, edit_tensors

PROVENANCE = {
    "version": "0.1.0",
    "recipe": {"method": {"kind": "rtn"}},
    "calibration": None,
    "source_fingerprint": "abc",
    "report": {"seconds": 1.5},
}
NUM_PACKED = 2 * (96 * 96 * 2 + 2 * 32 * 96 + 3 * 160 * 96)
NUM_FLOAT = 2 * 331 * 96 + 5 * 96


def test_inspect_checkpoint_describes_a_packed_model(pristine):
    facts = inspect_checkpoint(pristine)
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["sizes"]["hidden_size"] == 96
    assert facts["sizes"]["tie_word_embeddings"] is False
    assert facts["num_weights"] == NUM_PACKED + NUM_FLOAT
    assert facts["dtypes"] == ["float32", "int32", "int64"]
    assert facts["bytes"]["by_kind"] == {
        "codes": NUM_PACKED // 2,
        "scales": NUM_PACKED // 32 * 4,
        "shapes": 14 * 16,
        "embedding": 331 * 96 * 4,
        "head": 331 * 96 * 4,
        "norms and biases": 5 * 96 * 4,
    }
    assert facts["bytes"]["total"] == sum(facts["bytes"]["by_kind"].values())
    assert facts["bits_per_weight"]["quantized"] == pytest.approx(5 + 14 * 128 / NUM_PACKED)
    [row] = facts["schemes"]
    assert (row["scheme"], row["num_linears"]) == ("W4A16 g32 sym", 14)
    assert len(row["linears"]) == 7
    assert "model.layers.*.self_attn.q_proj" in row["linears"]
    assert facts["provenance"] is None
    json.dumps(facts)


def test_inspect_checkpoint_describes_a_float_model(source):
    facts = inspect_checkpoint(source)
    assert facts["bits_per_weight"] == {"overall": 32, "quantized": None}
    assert facts["num_weights"] == NUM_PACKED + NUM_FLOAT
    assert facts["bytes"]["by_kind"]["float matrices"] == 4 * NUM_PACKED
    assert facts["schemes"] == []


def test_inspect_checkpoint_shows_a_packed_linear_that_the_config_ignores(packed):
    quantization = json.loads((packed / "config.json").read_text())["quantization_config"]
    ignore = ["lm_head", "model.layers.1.mlp.up_proj"]
    edit_config(packed, quantization_config=quantization | {"ignore": ignore})
    rows = {row["scheme"]: row["linears"] for row in inspect_checkpoint(packed)["schemes"]}
    assert rows["packed, but ignored by config.json"] == ["model.layers.*.mlp.up_proj"]


def test_stored_bits_counts_padding_and_biases(packed):
    before = stored_bits(open_checkpoint(packed))
    edit_tensors(packed, **{"model.layers.0.self_attn.q_proj.bias": torch.ones(96)})
    after = stored_bits(open_checkpoint(packed))
    assert after.num_weights == before.num_weights + 96
    assert after.quantized == before.quantized


def test_read_provenance_returns_what_write_provenance_wrote(packed):
    write_provenance(packed, PROVENANCE | {"source": "demo"})
    record = read_provenance(packed)
    digests = record.pop("tensor_sha256")
    assert record == PROVENANCE | {"source": "demo"}
    assert digests.keys() == open_checkpoint(packed).tensors.keys()
    norm = open_checkpoint(packed).read("model.norm.weight")
    expected = hashlib.sha256(norm.numpy().tobytes()).hexdigest()
    assert digests["model.norm.weight"] == expected
    assert "tensor_sha256" not in inspect_checkpoint(packed)["provenance"]
    assert inspect_checkpoint(packed)["provenance"]["recipe"]["method"]["kind"] == "rtn"


def test_write_provenance_rejects_an_incomplete_record(tmp_path):
    with pytest.raises(ValueError, match="lacks recipe, report"):
        record = {k: v for k, v in PROVENANCE.items() if k not in ("recipe", "report")}
        write_provenance(tmp_path, record)
    assert read_provenance(tmp_path) is None


def test_read_provenance_names_a_damaged_file(tmp_path):
    (tmp_path / "compress.json").write_text("{")
    with pytest.raises(ValueError, match=r"compress\.json: not valid JSON"):
        read_provenance(tmp_path)
