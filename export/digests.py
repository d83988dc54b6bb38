"""SHA-256 of every tensor of a checkpoint: finds one flipped bit that still decodes to a weight."""

import hashlib

from compress.models.checkpoint import Checkpoint, TensorInfo

DIGESTS_KEY = "tensor_sha256"  # of the provenance, see inspect.py
_READ_BYTES = 4 << 20


def tensor_digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Tensor name -> hex SHA-256 of its bytes on disk, read a few MiB at a time."""
    return {name: _digest(info) for name, info in checkpoint.tensors.items()}


def _digest(info: TensorInfo) -> str:
    digest = hashlib.sha256()
    with info.file.open("rb") as file:
        file.seek(info.offset)
        left = info.nbytes
        while left and (chunk := file.read(min(left, _READ_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()
