"""Files and folders that appear whole or not at all, and shards that any reader takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from compress.export import writer
from compress.export.writer import (
    check_free,
    copy_side_files,
    merge_shards,
    open_atomic,
    publish,
    side_files,
    staging_dir,
    write_json,
    write_safetensors,
)
from compress.models.checkpoint import SAFETENSORS_DTYPES, open_checkpoint


def _tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Every dtype of the format with odd sizes, an empty tensor, a scalar and a strided view."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2, (3, 17), generator=generator)
    tensors = {f"{seed}.{name}": values.to(dtype) for name, dtype in SAFETENSORS_DTYPES.items()}
    tensors[f"{seed}.empty"] = torch.empty(0, 5)
    tensors[f"{seed}.scalar"] = torch.tensor(1.5)
    tensors[f"{seed}.view"] = torch.randn(33, 4, generator=generator).T[1:]
    return tensors


def _assert_equal(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert loaded[name].shape == tensor.shape, name
        assert torch.equal(loaded[name].float(), tensor.float()), name


def _parts(folder: Path, count: int = 3) -> tuple[list[Path], dict[str, torch.Tensor]]:
    folder.mkdir(exist_ok=True)
    expected: dict[str, torch.Tensor] = {}
    files = []
    for i in range(count):
        tensors = _tensors(seed=i)
        files.append(folder / f"part-{i}.safetensors")
        write_safetensors(files[-1], tensors)
        expected |= tensors
    return files, expected


def _names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_write_safetensors_is_read_by_the_safetensors_package(tmp_path):
    file = tmp_path / "model.safetensors"
    write_safetensors(file, _tensors())
    _assert_equal(load_file(file), _tensors())
    with safe_open(file, framework="pt") as reader:
        assert reader.metadata() == {"format": "pt"}


def test_write_safetensors_is_a_function_of_the_tensors(tmp_path):
    write_safetensors(tmp_path / "a", _tensors())
    write_safetensors(tmp_path / "b", _tensors())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_write_safetensors_aligns_every_tensor_to_its_item_size(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write_safetensors(tmp_path / "model.safetensors", _tensors())
    for name, info in open_checkpoint(tmp_path).tensors.items():
        assert info.offset % info.dtype.itemsize == 0, name


def test_write_safetensors_rejects_a_dtype_that_the_format_lacks(tmp_path):
    with pytest.raises(ValueError, match=r"odd: safetensors has no dtype for torch\.complex64"):
        write_safetensors(tmp_path / "x", {"odd": torch.zeros(1, dtype=torch.complex64)})
    assert _names(tmp_path) == []


def test_merge_shards_writes_one_file_when_it_fits(tmp_path):
    parts, expected = _parts(tmp_path / "parts")
    out = tmp_path / "out"
    out.mkdir()
    merge_shards(parts, out)
    assert _names(out) == ["model.safetensors"]
    _assert_equal(load_file(out / "model.safetensors"), expected)


@pytest.mark.parametrize("max_shard_bytes", [1, 150, 1000])
def test_merge_shards_splits_and_indexes(tmp_path, max_shard_bytes):
    parts, expected = _parts(tmp_path / "parts")
    out = tmp_path / "out"
    out.mkdir()
    merge_shards(parts, out, max_shard_bytes)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert _names(out) == [*files, "model.safetensors.index.json"]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    loaded = {}
    for file in files:
        shard = load_file(out / file)
        assert all(index["weight_map"][name] == file for name in shard)
        size = sum(tensor.nbytes for tensor in shard.values())
        assert size <= max_shard_bytes or sum(t.nbytes > 0 for t in shard.values()) == 1
        loaded |= shard
    _assert_equal(loaded, expected)


def test_merge_shards_keeps_the_parts_and_replaces_stale_weight_files(tmp_path):
    parts, _ = _parts(tmp_path / "parts")
    out = tmp_path / "out"
    out.mkdir()
    merge_shards(parts, out, 500)
    merge_shards(parts, out)
    assert _names(out) == ["model.safetensors"]
    merge_shards(parts, out, 500)
    assert "model.safetensors" not in _names(out)
    assert all(part.is_file() for part in parts)


def test_merge_shards_rejects_a_tensor_in_two_parts(tmp_path):
    parts, _ = _parts(tmp_path / "parts", count=1)
    with pytest.raises(ValueError, match=r"part-0.*0\.F64.*earlier part"):
        merge_shards([*parts, *parts], tmp_path)


@pytest.mark.parametrize(
    "size", [0, 5, 100, -1], ids=["empty", "no-header", "in-header", "in-data"]
)
def test_merge_shards_rejects_a_truncated_part_and_writes_nothing(tmp_path, size):
    parts, _ = _parts(tmp_path / "parts", count=2)
    parts[1].write_bytes(parts[1].read_bytes()[:size])
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(ValueError, match="part-1"):
        merge_shards(parts, out)
    assert _names(out) == []


def test_merge_shards_rejects_a_shard_size_that_is_not_positive(tmp_path):
    with pytest.raises(ValueError, match="got 0"):
        merge_shards([], tmp_path, 0)


def test_merge_shards_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """Peak memory of a process that merges 300 MB, above that of one that merges 1 MB."""
    script = (
        "import resource, sys; from pathlib import Path; import torch;"
        "from compress.export.writer import merge_shards, write_safetensors;"
        "parts = [Path(sys.argv[1]) / f'{i}.safetensors' for i in range(10)];"
        "one = torch.ones(int(sys.argv[2]), 25_000, dtype=torch.int32);"
        "[write_safetensors(part, {part.name: one}) for part in parts];"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; del one;"
        "merge_shards(parts, Path(sys.argv[1]), 150_000_000);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    command = [sys.executable, "-c", script, str(tmp_path), "300"]
    grown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path.cwd())
    assert int(grown.stdout) < 20_000  # KiB, of 300,000 merged


class _FullDisk:
    """A stream that takes `room` bytes and then behaves like a full disk."""

    def __init__(self, stream, room: int):
        self._stream, self._room = stream, room

    def write(self, data) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(28, "No space left on device")
        return self._stream.write(data)

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._stream.close()


@pytest.fixture
def full_disk(monkeypatch):
    """After a call with a number of bytes, every file written takes that many and no more."""

    def fill(room: int) -> None:
        original = Path.open

        def open_with_limit(self, mode="r", *args, **kwargs):
            stream = original(self, mode, *args, **kwargs)
            return _FullDisk(stream, room) if "w" in mode else stream

        monkeypatch.setattr(Path, "open", open_with_limit)

    return fill


@pytest.mark.parametrize("room", [0, 8, 300, 2000])
def test_write_safetensors_leaves_the_old_file_on_a_full_disk(tmp_path, full_disk, room):
    file = tmp_path / "model.safetensors"
    write_safetensors(file, {"old": torch.ones(3)})
    full_disk(room)
    with pytest.raises(OSError, match="No space left"):
        write_safetensors(file, _tensors())
    assert _names(tmp_path) == ["model.safetensors"]
    assert load_file(file).keys() == {"old"}


def test_merge_shards_leaves_no_truncated_file_on_a_full_disk(tmp_path, full_disk):
    parts, _ = _parts(tmp_path / "parts")
    out = tmp_path / "out"
    out.mkdir()
    full_disk(1500)  # enough for a shard of 500 bytes and its header, not for all of it
    with pytest.raises(OSError, match="No space left"):
        merge_shards(parts, out)
    assert _names(out) == []


def test_copy_side_files_leaves_no_truncated_file_on_a_full_disk(tmp_path, full_disk):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir(), out.mkdir()
    (source / "tokenizer.json").write_text("x" * 100)
    full_disk(99)
    with pytest.raises(OSError, match="No space left"):
        copy_side_files(source, out)
    assert _names(out) == []


def test_open_atomic_keeps_the_old_file_when_interrupted(tmp_path):
    file = tmp_path / "report.json"
    write_json(file, {"version": 1})
    with pytest.raises(KeyboardInterrupt), open_atomic(file) as stream:
        stream.write(b"half")
        raise KeyboardInterrupt
    assert json.loads(file.read_text()) == {"version": 1}
    assert _names(tmp_path) == ["report.json"]


def test_staging_dir_is_a_hidden_sibling():
    out = Path("some/where/out").resolve()
    assert staging_dir(Path("some/where/out/")) == out.parent / ".out.partial"
    assert staging_dir(Path()).name == f".{Path.cwd().name}.partial"


def _checkpoint(folder: Path, text: str) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text(text)
    return folder


def test_publish_renames_the_staging_folder(tmp_path):
    staging = _checkpoint(staging_dir(tmp_path / "out"), "new")
    publish(staging, tmp_path / "out", force=False)
    assert _names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == "new"


def test_publish_replaces_a_checkpoint_only_with_force(tmp_path):
    out = _checkpoint(tmp_path / "out", "old")
    staging = _checkpoint(staging_dir(out), "new")
    with pytest.raises(FileExistsError, match="--force"):
        publish(staging, out, force=False)
    assert (out / "config.json").read_text() == "old"
    publish(staging, out, force=True)
    assert _names(tmp_path) == ["out"]
    assert (out / "config.json").read_text() == "new"


def test_publish_puts_the_old_folder_back_when_the_new_one_cannot_take_its_place(tmp_path):
    out = _checkpoint(tmp_path / "out", "old")
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "missing", out, force=True)
    assert _names(tmp_path) == ["out"]
    assert (out / "config.json").read_text() == "old"


@pytest.mark.parametrize("out_exists", [True, False], ids=["killed-late", "killed-between-renames"])
def test_publish_clears_what_a_killed_run_set_aside(tmp_path, out_exists):
    _checkpoint(tmp_path / ".out.replaced", "oldest")
    if out_exists:
        _checkpoint(tmp_path / "out", "old")
    staging = _checkpoint(staging_dir(tmp_path / "out"), "new")
    publish(staging, tmp_path / "out", force=True)
    assert _names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "config.json").read_text() == "new"


def test_publish_follows_a_link_at_the_destination(tmp_path):
    real = _checkpoint(tmp_path / "real", "old")
    (tmp_path / "link").symlink_to(real)
    staging = _checkpoint(staging_dir(tmp_path / "link"), "new")
    publish(staging, tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink()
    assert (real / "config.json").read_text() == "new"


def test_check_free_never_lets_force_replace_what_is_no_checkpoint(tmp_path):
    check_free(tmp_path / "absent", force=False)
    (tmp_path / "empty").mkdir()
    check_free(tmp_path / "empty", force=True)
    with pytest.raises(FileExistsError, match="empty"):
        check_free(tmp_path / "empty", force=False)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(FileExistsError, match="not a checkpoint folder"):
        check_free(tmp_path / "photos", force=True)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="not a folder"):
        check_free(tmp_path / "file", force=True)


def test_copy_side_files_takes_everything_but_weights_and_caches(tmp_path):
    source = tmp_path / "source"
    kept = ["tokenizer.json", "chat_template.jinja", "generation_config.json", "modeling_x.py",
            "LICENSE", "templates/tool.jinja", "nested/config.json"]  # fmt: skip
    dropped = ["config.json", "compress.json", "model.safetensors", "pytorch_model.bin", "x.gguf",
               "model.safetensors.index.json", "pytorch_model.bin.index.json", "old.pt",
               ".git/HEAD", ".cache/huggingface/x", "__pycache__/x.pyc"]  # fmt: skip
    for name in [*kept, *dropped]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    assert sorted(map(str, side_files(source))) == sorted(kept)
    out = source / "packed" / ".w4.partial"  # inside the source: must not copy itself
    out.mkdir(parents=True)
    (out / "state.json").touch()
    copy_side_files(source, out)
    copied = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert copied == {*kept, "state.json"}
    assert all((out / name).read_text() == name for name in kept)


def test_copy_side_files_copies_what_links_point_to(tmp_path):
    """A hub cache keeps snapshots as links into a folder of blobs."""
    (tmp_path / "blob").write_text("vocabulary")
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir(), out.mkdir()
    (source / "tokenizer.json").symlink_to(tmp_path / "blob")
    copy_side_files(source, out)
    assert not (out / "tokenizer.json").is_symlink()
    assert (out / "tokenizer.json").read_text() == "vocabulary"


def test_copy_side_files_copies_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_COPY_BYTES", 7)
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir(), out.mkdir()
    (source / "merges.txt").write_bytes(bytes(range(256)))
    copy_side_files(source, out)
    assert (out / "merges.txt").read_bytes() == bytes(range(256))
