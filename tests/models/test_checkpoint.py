"""Reading checkpoint folders: what is stored is what is read, and damage is named."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.models.checkpoint import open_checkpoint, read_header
from tests.factory import tiny_model

_DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("LlamaForCausalLM", tmp_path_factory.mktemp("models") / "single")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny_model("LlamaForCausalLM", tmp_path / "sharded", max_shard_size="100KB")


def _weights(tmp_path: Path, content: bytes) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    return tmp_path


def _file_bytes(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_open_checkpoint_reads_what_safetensors_reads(single: Path) -> None:
    checkpoint, expected = open_checkpoint(single), load_file(single / "model.safetensors")
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor)
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in expected.values())


def test_open_checkpoint_reads_shards_like_a_single_file(single: Path, sharded: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 1
    one, many = open_checkpoint(single), open_checkpoint(sharded)
    assert one.tensors.keys() == many.tensors.keys()
    assert all(torch.equal(one.read(name), many.read(name)) for name in one.tensors)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (17, 3)], ids=str)
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_read_keeps_dtype_and_shape(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    save_file({"t": tensor, "pad": torch.zeros(3, dtype=torch.uint8)}, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(_weights(tmp_path, (tmp_path / "x.safetensors").read_bytes()))
    stored = checkpoint.read("t")
    assert stored.dtype == dtype and stored.shape == shape
    assert torch.equal(stored.double(), tensor.double())


def test_read_of_an_unknown_name_is_named(single: Path) -> None:
    with pytest.raises(ValueError, match=r"no tensor named 'model\.nothing'"):
        open_checkpoint(single).read("model.nothing")


def test_read_of_a_file_that_shrank_is_named(tmp_path: Path) -> None:
    save_file({"t": torch.ones(130)}, tmp_path / "x.safetensors")
    content = (tmp_path / "x.safetensors").read_bytes()
    checkpoint = open_checkpoint(_weights(tmp_path, content))
    (tmp_path / "model.safetensors").write_bytes(content[:-4])
    with pytest.raises(ValueError, match="truncated inside tensor 't'"):
        checkpoint.read("t")


def test_fingerprint_changes_with_one_weight_and_with_the_config(tmp_path: Path) -> None:
    prints = []
    for value, config in ((1.0, "{}"), (2.0, "{}"), (1.0, '{"a": 1}'), (1.0, "{}")):
        save_file({"t": torch.full((33,), value)}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(config)
        prints.append(open_checkpoint(tmp_path).fingerprint)
    assert len(set(prints)) == 3 and prints[0] == prints[3]


def test_open_checkpoint_names_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent: no such checkpoint folder"):
        open_checkpoint(tmp_path / "absent")


@pytest.mark.parametrize(
    ("config", "message"),
    [(b"{not json", "not valid JSON"), (b"[1]", "JSON object"), (b"\xff\xfe", "not valid JSON")],
    ids=["syntax", "list", "not-utf8"],
)
def test_open_checkpoint_names_a_bad_config(tmp_path: Path, config: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(config)
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        open_checkpoint(tmp_path)


def test_open_checkpoint_names_a_missing_config(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        open_checkpoint(tmp_path)


def test_open_checkpoint_says_what_to_do_with_pickled_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"found pytorch_model\.bin.*safetensors first"):
        open_checkpoint(tmp_path)


def test_open_checkpoint_names_a_missing_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"missing {shard.name}"):
        open_checkpoint(sharded)


def test_open_checkpoint_names_a_tensor_that_only_the_index_lists(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["ghost"] = sorted(sharded.glob("*.safetensors"))[0].name
    index.write_text(json.dumps(value))
    with pytest.raises(ValueError, match="no tensor 'ghost'"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "weight_map",
    [None, {}, ["a"], {"a": 3}, {"a": "../elsewhere.safetensors"}],
    ids=["absent", "empty", "list", "number", "other-folder"],
)
def test_open_checkpoint_names_a_bad_index(tmp_path: Path, weight_map: object) -> None:
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"index\.json: "):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 8, 60], ids=lambda keep: f"{keep}-bytes")
def test_open_checkpoint_names_a_file_cut_in_its_header(
    single: Path, tmp_path: Path, keep: int
) -> None:
    content = (single / "model.safetensors").read_bytes()[:keep]
    with pytest.raises(ValueError, match=r"model\.safetensors: .*truncated in its header"):
        open_checkpoint(_weights(tmp_path, content))


@pytest.mark.parametrize("cut", [1, 33], ids=lambda cut: f"cut-{cut}")
def test_open_checkpoint_names_a_file_cut_in_its_data(
    single: Path, tmp_path: Path, cut: int
) -> None:
    content = (single / "model.safetensors").read_bytes()[:-cut]
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged .*do not fit"):
        open_checkpoint(_weights(tmp_path, content))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        7,
    ],
    ids=["size", "order", "before", "dtype", "text-shape", "negative", "no-offsets", "number"],
)
def test_read_header_names_a_file_with_a_wrong_entry(tmp_path: Path, entry: object) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(_file_bytes({"t": entry}, b"\0" * 8))
    with pytest.raises(ValueError, match=r"w\.safetensors: damaged safetensors file"):
        read_header(file)


@pytest.mark.parametrize("header", [[], 3, "x"], ids=str)
def test_read_header_names_a_header_that_is_no_object(tmp_path: Path, header: object) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(_file_bytes(header))
    with pytest.raises(ValueError, match=r"w\.safetensors: damaged safetensors file"):
        read_header(file)
