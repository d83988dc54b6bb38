"""Rewrite a packed checkpoint in another format, exactly or not at all.

Codes, zero points and scales are unpacked, packed again and read back from disk; what the other
format cannot hold bit for bit is an error that names the module, before anything is written where
that can be known. Everything else goes along as it is: float tensors, among them those that the
architecture does not name, tokenizer, chat template, generation config, provenance.

A few hundred MB of weights are in memory at a time. The output folder appears when it is complete.
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from compress import __version__
from compress.artifacts import QuantizedLinear
from compress.errors import CheckFailed
from compress.export.awq import is_symmetric
from compress.export.checks import Subject, subject_of
from compress.export.formats import (
    FORMATS,
    Format,
    pack_linear,
    read_kv_cache,
    read_linear,
    write_config,
)
from compress.export.inspect import packed_names, read_provenance, write_provenance
from compress.export.patterns import is_embedding
from compress.export.targets import TARGETS, lint_target
from compress.export.verify import check_part, verify_checkpoint
from compress.export.writer import (
    check_free,
    check_keeps,
    copy_side_files,
    merge_shards,
    publish,
    write_safetensors,
)
from compress.lookup import lookup
from compress.models.checkpoint import Checkpoint, open_checkpoint
from compress.progress import progress
from compress.scheme import LinearScheme

_PART_BYTES = 256_000_000
_MAX_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertJob:
    """Write the packed checkpoint `source` to `output` in the format called `to`.

    `target` names a program (see `TARGETS`) that must be able to load the result.
    """

    source: Path
    output: Path
    to: str
    target: str | None = None
    force: bool = False
    quiet: bool = False


def convert(job: ConvertJob) -> dict[str, Any]:
    """Run `job`; returns `source, output, from, to, num_linears, bytes`.

    Raises ValueError for what cannot be converted exactly and for what `job.target` would refuse or
    misread, CheckFailed if the written folder does not pass `verify`.
    """
    format = lookup(FORMATS, job.to, "format")
    if job.target is not None:
        lookup(TARGETS, job.target, "target")
    check_free(job.output, force=job.force)
    checkpoint = open_checkpoint(job.source)
    check_keeps(job.source, job.output)
    subject = subject_of(checkpoint)
    schemes = _schemes(subject, format)
    config = _config(subject, schemes, format)
    _check_target(job, config, subject, schemes, format)
    # not the staging folder of `quantize`, which may hold a run to be resumed
    staging = job.output.resolve().with_name(f".{job.output.resolve().name}.converting")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        folder = staging / "checkpoint"
        folder.mkdir(parents=True)
        merge_shards(_write_parts(subject, schemes, format, staging, quiet=job.quiet), folder)
        copy_side_files(job.source, folder)
        write_config(folder, config)
        write_provenance(folder, _provenance(subject))
        _check(folder)
        after = open_checkpoint(folder)
        publish(folder, job.output, force=job.force)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return {
        "source": str(job.source),
        "output": str(job.output),
        "from": _format(subject).name,
        "to": format.name,
        "num_linears": len(schemes),
        "bytes": {"before": checkpoint.num_bytes, "after": after.num_bytes},
    }


def _check(folder: Path) -> None:
    """Raise CheckFailed unless `folder` passes `verify`; whether it has a tokenizer is up to the
    source.
    """
    checks = verify_checkpoint(folder).checks
    failures = [f"{c.name}: {c.detail}" for c in checks if not c.ok and c.name != "tokenizer"]
    if failures:
        raise CheckFailed("; ".join(failures))


def _format(subject: Subject) -> Format:
    if subject.format is None or not subject.packed:
        raise ValueError(
            f"{subject.checkpoint.path}: nothing is packed; `compress quantize` packs a float model"
        )
    return subject.format


def _schemes(subject: Subject, format: Format) -> dict[str, LinearScheme]:
    """The scheme of every packed module in the new format; ValueError names what it cannot hold."""
    path, old = subject.checkpoint.path, _format(subject)
    if old.name == format.name:
        raise ValueError(f"{path}: is in the format {format.name} already")
    if strange := [n for n in packed_names(subject.checkpoint) if n not in subject.packed]:
        raise ValueError(f"{path}: {strange[0]} is packed, but not in a way that config.json says")
    missing = (subject.tensor_problem(name) for name in subject.expected)
    if problem := next(filter(None, missing), None):
        raise ValueError(f"{path}: {problem}")
    schemes = dict(subject.packed)
    if old.name == "awq" and all(_is_symmetric(subject.checkpoint, name) for name in schemes):
        schemes = {name: _symmetric(scheme) for name, scheme in schemes.items()}
    refused = [
        f"{name}: {reason}"
        for name, scheme in schemes.items()
        if (reason := format.refusal(scheme, subject.linears[name]))
    ]
    if refused:
        more = f" and {len(refused) - _MAX_SHOWN} more" if len(refused) > _MAX_SHOWN else ""
        raise ValueError(f"{path}: not exact in {format.name}: {'; '.join(refused[:3])}{more}")
    return schemes


def _is_symmetric(checkpoint: Checkpoint, name: str) -> bool:
    return is_symmetric(checkpoint.read(f"{name}.qzeros"))


def _symmetric(scheme: LinearScheme) -> LinearScheme:
    return replace(scheme, weights=replace(scheme.weights, symmetric=True))


def _config(
    subject: Subject, schemes: Mapping[str, LinearScheme], format: Format
) -> dict[str, Any]:
    """The whole new `config.json`."""
    # beside the Linears of the architecture, matrices of modules that it does not name
    matrices = [
        name.removesuffix(".weight")
        for name, info in subject.checkpoint.tensors.items()
        if name.endswith(".weight") and len(info.shape) == 2
    ]
    floats = dict.fromkeys([*subject.linears, *matrices])
    ignore = [name for name in floats if name not in schemes and not is_embedding(name)]
    config = subject.checkpoint.config
    quantization = format.config(schemes, ignore, read_kv_cache(config))
    return config | {"quantization_config": quantization}


def _write_parts(
    subject: Subject,
    schemes: Mapping[str, LinearScheme],
    format: Format,
    folder: Path,
    *,
    quiet: bool,
) -> list[Path]:
    """Every tensor in the new format, in files of `folder`, each read back and compared."""
    parts: list[Path] = []
    tensors: dict[str, torch.Tensor] = {}
    linears: dict[str, QuantizedLinear] = {}

    def flush() -> None:
        file = folder / f"part-{len(parts):05d}.safetensors"
        write_safetensors(file, tensors)
        check_part(file, linears, schemes, format)
        parts.append(file)
        tensors.clear()
        linears.clear()

    steps = list(_steps(subject))
    with progress("converting", len(steps), quiet=quiet) as tick:
        for name in steps:
            if name in schemes:
                linear = read_linear(subject.checkpoint, name, subject.packed[name], subject.format)
                linears[name] = _as_scheme(linear, schemes[name])
                tensors |= pack_linear(name, linears[name], schemes[name], format)
            else:
                tensors[name] = subject.checkpoint.read(name)
            if sum(tensor.nbytes for tensor in tensors.values()) > _PART_BYTES:
                flush()
            tick()
    if tensors:
        flush()
    return parts


def _steps(subject: Subject) -> Iterator[str]:
    """Names of packed modules and of float tensors, in file order, each once."""
    seen = set()
    for name in subject.checkpoint.tensors:
        module, _, local = name.rpartition(".")
        step = module if module in subject.packed and local in subject.layout(module) else name
        if step not in seen:
            seen.add(step)
            yield step


def _as_scheme(linear: QuantizedLinear, scheme: LinearScheme) -> QuantizedLinear:
    """`linear` without its zero points if they are all 0 and `scheme` is symmetric."""
    if scheme.weights.symmetric and linear.zero_point is not None:
        assert not linear.zero_point.any(), "zero points of a Linear that was found symmetric"
        return replace(linear, zero_point=None)
    return linear


def _provenance(subject: Subject) -> dict[str, Any]:
    """That of the source, with where it was converted from."""
    checkpoint = subject.checkpoint
    known = {*subject.expected, *subject.optional}
    unknown_origin = {
        "version": __version__,
        "recipe": None,
        "calibration": None,
        "source_fingerprint": None,
        "kept_tensors": sorted(checkpoint.tensors.keys() - known),
        "report": None,
    }
    converted = {
        "path": str(checkpoint.path),
        "format": _format(subject).name,
        "fingerprint": checkpoint.fingerprint,
        "version": __version__,
    }
    origin = read_provenance(checkpoint.path) or unknown_origin
    earlier = list(origin.get("converted_from") or ())
    return {**origin, "converted_from": [*earlier, converted]}


def _check_target(
    job: ConvertJob,
    config: Mapping[str, Any],
    subject: Subject,
    schemes: Mapping[str, LinearScheme],
    format: Format,
) -> None:
    if job.target is None:
        return
    names = (f"{name}.weight_scale" for name in schemes)
    stored = (subject.checkpoint.tensors.get(name) for name in names)
    found = next((info.dtype for info in stored if info is not None), torch.float16)
    scale_dtype = format.scale_dtype or found
    problems = lint_target(config, schemes, subject.linears, scale_dtype, job.target)
    if problems:
        raise ValueError(f"--target {job.target}: {'; '.join(problems)}")
