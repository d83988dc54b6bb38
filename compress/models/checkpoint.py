"""Read access to a Hugging Face checkpoint folder, one tensor at a time.

Tensors are read with plain file reads, not through a memory map: the pages of a map count as
resident memory once touched, and the memory of a run must not grow with the depth of the model.
"""

import hashlib
import json
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# Computed from the config when a model is built; old exporters stored them as well.
COMPUTED_SUFFIXES = ("rotary_emb.inv_freq",)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: `nbytes` bytes from `offset` in `file`."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint folder: its config and the place of every tensor."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> torch.Tensor:
        """Tensor `name` on the CPU, in its stored dtype and shape."""
        if name not in self.tensors:
            raise ValueError(f"{self.path}: no tensor named {name!r}")
        info = self.tensors[name]
        raw = torch.empty(info.nbytes, dtype=torch.uint8)
        with info.file.open("rb") as file:
            file.seek(info.offset)
            if file.readinto(raw.numpy().data) != info.nbytes:
                raise ValueError(f"{info.file}: truncated inside tensor {name!r}")
        return raw.view(info.dtype).view(info.shape)

    def read_float(self, name: str) -> torch.Tensor:
        """Floating tensor `name` in fp32, for computing; a view may know it better than stored."""
        return self.read(name).float()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the config and the contents of every weight file."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for file in sorted({info.file for info in self.tensors.values()}):
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder that holds `config.json` and safetensors weights, single or sharded.

    Raises FileNotFoundError for a missing folder or file, ValueError for a damaged one, naming it.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: no such checkpoint folder")
    config = read_json(path / "config.json")
    index = path / "model.safetensors.index.json"
    weight_map = _weight_map(index) if index.is_file() else {}
    tensors: dict[str, TensorInfo] = {}
    for file in _weight_files(path, sorted(set(weight_map.values())) or ["model.safetensors"]):
        tensors.update(read_header(file))
    for name, file_name in weight_map.items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise ValueError(f"{path / file_name}: no tensor {name!r}, which {index.name} lists")
    return Checkpoint(path=path, config=config, tensors=tensors)


def read_json(file: Path) -> dict[str, Any]:
    """Parse a JSON object; errors name the file."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object")
    return value


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, checked against the file's size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _MAX_HEADER_BYTES + 1
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"{file}: not a safetensors file, or truncated in its header")
        try:
            header = json.loads(stream.read(length))
            return {
                name: _tensor_info(file, entry, start=8 + length, size=size)
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{file}: damaged safetensors file ({error})") from None


def _tensor_info(file: Path, entry: dict[str, Any], *, start: int, size: int) -> TensorInfo:
    begin, end = entry["data_offsets"]
    dtype, shape = SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"])
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if not 0 <= begin <= end <= size - start or end - begin != nbytes:
        raise ValueError(f"tensor bytes {begin}..{end} do not fit its shape or the file")
    return TensorInfo(file=file, dtype=dtype, shape=shape, offset=start + begin, nbytes=nbytes)


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index of a sharded checkpoint."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: expected an object named weight_map that lists tensors")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ValueError(f"{index}: {name!r} needs a plain file name, got {file_name!r}")
    return weight_map


def _weight_files(path: Path, names: list[str]) -> list[Path]:
    missing = [name for name in names if not (path / name).is_file()]
    if not missing:
        return [path / name for name in names]
    others = sorted(file.name for file in path.glob("*.bin"))
    hint = f" (found {others[0]}: save the model with safetensors first)" if others else ""
    raise FileNotFoundError(f"{path}: missing {', '.join(missing)}{hint}")
