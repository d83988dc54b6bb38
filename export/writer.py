"""Write checkpoint folders so that nothing half-written ever has a final name.

A file is written under a temporary name, flushed to disk and renamed; a folder is built beside its
destination and renamed when it is complete. A full disk, a kill or Ctrl-C therefore leaves the old
state or the new one. Memory does not grow with the checkpoint: tensors that are on disk already
are copied as bytes, a few MiB at a time.

safetensors: 8 bytes header length (little endian), a JSON header {name: {dtype, shape,
data_offsets}}, then the tensors back to back. They are ordered by decreasing item size, so that
each is aligned to its own dtype for readers that map the file.
https://github.com/huggingface/safetensors
"""

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from compress.models.checkpoint import SAFETENSORS_DTYPES, TensorInfo, read_header

PROVENANCE_FILE = "compress.json"  # how the checkpoint was made, see inspect.py
DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
INDEX_FILE = "model.safetensors.index.json"
_COPY_BYTES = 4 << 20
_DTYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
# The last two repeat the quantization of config.json for tools that read them first.
_OWN_FILES = ("config.json", PROVENANCE_FILE, "quantize_config.json", "quant_config.json")
_SKIPPED_FOLDERS = (".git", ".cache", "__pycache__")


class _Entry(NamedTuple):
    """One tensor to be written: what the header says, and how to write its bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    write: Callable[[BinaryIO], None]


@contextmanager
def open_atomic(file: Path) -> Iterator[BinaryIO]:
    """Open `file` for writing; it appears or is replaced only when the block ends without error."""
    temporary = file.with_name(f".{file.name}.partial")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as indented JSON, atomically."""
    with open_atomic(file) as stream:
        stream.write((json.dumps(value, indent=2) + "\n").encode())


def write_safetensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `tensors` (any device, any strides) to one safetensors file, atomically."""
    _write_file(file, [_entry_of_tensor(name, tensor) for name, tensor in tensors.items()])


def merge_shards(
    parts: Sequence[Path], folder: Path, max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES
) -> None:
    """Merge safetensors files into the weight files of a checkpoint `folder`.

    Writes `model.safetensors`, or `model-00001-of-0000N.safetensors` and the index when the tensors
    take more than `max_shard_bytes`; a single tensor beyond that gets a shard of its own. Tensors
    keep the order of `parts`. Weight files that were in `folder` are replaced; `parts` stay.
    Raises ValueError for a tensor that is in two parts, or a damaged part.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    shards = _split(_collect(parts), max_shard_bytes)
    for stale in [*folder.glob("model.safetensors*"), *folder.glob("model-*-of-*.safetensors")]:
        stale.unlink()
    if len(shards) == 1:
        _write_file(folder / "model.safetensors", shards[0])
        return
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file = folder / f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_file(file, shard)
        weight_map.update((entry.name, file.name) for entry in shard)
    total_size = sum(entry.nbytes for shard in shards for entry in shard)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    write_json(folder / INDEX_FILE, index)


def staging_dir(out: Path) -> Path:
    """The hidden folder beside `out` in which its contents are prepared. Does not create it."""
    out = out.resolve()
    return out.with_name(f".{out.name}.partial")


def replaced_dir(out: Path) -> Path:
    """The hidden folder beside `out` where `publish` puts what it replaces, to delete it last."""
    out = out.resolve()
    return out.with_name(f".{out.name}.replaced")


def check_free(out: Path, *, force: bool) -> None:
    """Raise unless `publish` may put a folder at `out`; call it before long work.

    FileExistsError when `out` exists without `force`, or holds something that is no checkpoint:
    `force` replaces a checkpoint, it does not delete other people's folders.
    """
    if not out.exists():
        parent = next(parent for parent in out.resolve().parents if parent.exists())
        if not parent.is_dir():
            raise NotADirectoryError(f"{out}: {parent} is not a folder")
        return
    if not out.is_dir():
        raise NotADirectoryError(f"{out}: exists and is not a folder")
    if not force:
        raise FileExistsError(f"{out}: exists already (--force replaces it)")
    if out.is_mount():
        raise FileExistsError(f"{out}: is a mount point; name a folder inside it")
    if any(out.iterdir()) and not (out / "config.json").is_file():
        raise FileExistsError(f"{out}: not a checkpoint folder, so --force does not replace it")


def check_keeps(source: Path, out: Path) -> None:
    """Raise ValueError if replacing `out` would delete the checkpoint folder `source`."""
    if source.resolve().is_relative_to(out.resolve()):
        raise ValueError(f"{out}: holds the source, which would be deleted with it")


def publish(staging: Path, out: Path, *, force: bool) -> None:
    """Give the finished folder `staging` its final name `out`; see `check_free` for the errors.

    An old `out` is renamed aside first and deleted last, and put back if the new one cannot take
    its place: at no time is `out` a mixture or partly deleted.
    """
    check_free(out, force=force)
    out = out.resolve()
    aside = replaced_dir(out)
    if out.exists():
        if aside.exists():  # left by a run that was killed while deleting it
            shutil.rmtree(aside)
        out.rename(aside)
    try:
        staging.rename(out)
    except BaseException:
        if aside.exists() and not out.exists():
            aside.rename(out)
        raise
    if aside.exists():
        shutil.rmtree(aside)


def side_files(folder: Path, *, skip: Path | None = None) -> list[Path]:
    """Every file of a checkpoint, relative to `folder`, that goes along with other weights.

    That is all but weights and their indices, configs, the provenance file, and version
    control and cache folders: tokenizer, chat template, generation config, Python files, licence.
    A folder that is or contains `skip` is left out.
    """
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if name not in _SKIPPED_FOLDERS and not _contains(Path(parent) / name, skip)
        ]
        for name in files:
            relative = (Path(parent) / name).relative_to(folder)
            if str(relative) not in _OWN_FILES and not name.endswith(_WEIGHT_SUFFIXES):
                found.append(relative)
    return sorted(found)


def copy_side_files(source: Path, destination: Path) -> None:
    """Copy the `side_files` of checkpoint `source` into the folder `destination`."""
    for relative in side_files(source, skip=destination):
        target = destination / relative
        target.parent.mkdir(parents=True, exist_ok=True)
        with (source / relative).open("rb") as original, open_atomic(target) as copy:
            shutil.copyfileobj(original, copy, _COPY_BYTES)


def _contains(folder: Path, inner: Path | None) -> bool:
    return inner is not None and inner.resolve().is_relative_to(folder.resolve())


def _entry_of_tensor(name: str, tensor: torch.Tensor) -> _Entry:
    if tensor.dtype not in _DTYPE_NAMES:
        raise ValueError(f"{name}: safetensors has no dtype for {tensor.dtype}")

    def write(stream: BinaryIO) -> None:
        flat = tensor.detach().cpu().contiguous().view(-1)
        stream.write(flat.view(torch.uint8).numpy().data)

    return _Entry(name, tensor.dtype, tuple(tensor.shape), tensor.nbytes, write)


def _entry_of_bytes(name: str, info: TensorInfo) -> _Entry:
    def write(stream: BinaryIO) -> None:
        with info.file.open("rb") as part:
            part.seek(info.offset)
            left = info.nbytes
            while left:
                chunk = part.read(min(left, _COPY_BYTES))
                if not chunk:
                    raise ValueError(f"{info.file}: truncated inside tensor {name!r}")
                stream.write(chunk)
                left -= len(chunk)

    return _Entry(name, info.dtype, info.shape, info.nbytes, write)


def _collect(parts: Sequence[Path]) -> list[_Entry]:
    entries: dict[str, _Entry] = {}
    for part in parts:
        for name, info in read_header(part).items():
            if name in entries:
                raise ValueError(f"{part}: tensor {name!r} is in an earlier part too")
            entries[name] = _entry_of_bytes(name, info)
    return list(entries.values())


def _split(entries: Sequence[_Entry], max_shard_bytes: int) -> list[list[_Entry]]:
    shards: list[list[_Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _write_file(file: Path, entries: Sequence[_Entry]) -> None:
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in ordered:
        header[entry.name] = {
            "dtype": _DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.nbytes],
        }
        offset += entry.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # keeps the data aligned to 8 bytes
    with open_atomic(file) as stream:
        stream.write(struct.pack("<Q", len(encoded)))
        stream.write(encoded)
        for entry in ordered:
            entry.write(stream)
