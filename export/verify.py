"""Check a finished checkpoint: is it whole, consistent, and what it was made from?

`verify_checkpoint` reads every tensor, one at a time, and returns a report of named checks; with a
source checkpoint it also does the comparisons of compare.py. `check_part` is the check of the
writing loop: what is on disk is what was meant, bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.artifacts import QuantizedLinear
from compress.errors import CheckFailed
from compress.export.checks import Check, Subject, differing_part, result, subject_of
from compress.export.compare import (
    compare_config,
    compare_packed,
    compare_side_files,
    compare_untouched,
    transformed_tensors,
)
from compress.export.digests import DIGESTS_KEY, tensor_digests
from compress.export.formats import Format, read_linear
from compress.export.inspect import packed_names, read_provenance, stored_bits
from compress.export.packed_checks import check_packed
from compress.export.patterns import is_embedding, matches
from compress.export.writer import INDEX_FILE
from compress.models.checkpoint import (
    TOKENIZER_FILES,
    Checkpoint,
    open_checkpoint,
    read_header,
    read_json,
)
from compress.models.family import family_of
from compress.scheme import LinearScheme


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """Result of `verify_checkpoint`.

    `relative_errors` is ||W - W_hat|| / ||W|| per packed Linear, empty without a source.
    `bits_per_weight` counts the quantized Linears with all their tensors, None if there are none;
    `bits_per_weight_overall` counts the whole checkpoint.
    """

    checks: tuple[Check, ...]
    relative_errors: Mapping[str, float]
    num_bytes: int
    bits_per_weight: float | None
    bits_per_weight_overall: float

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(check.ok for check in self.checks)

    @property
    def failures(self) -> list[str]:
        """`name: detail` of each check that failed."""
        return [f"{check.name}: {check.detail}" for check in self.checks if not check.ok]


def verify_checkpoint(path: Path, against: Path | None = None) -> VerifyReport:
    """Check the float or packed checkpoint folder `path`, alone or `against` its float source.

    A checkpoint that can be read but is wrong gives a report with failed checks. Raises
    FileNotFoundError for missing files and ValueError for damaged files, unknown architectures
    and quantizations that this project does not read.
    """
    subject = subject_of(open_checkpoint(path))
    source = open_checkpoint(against) if against is not None else None
    checks = [_check_tensors(subject, source), _check_finite(subject)]
    if (path / INDEX_FILE).is_file():
        checks.append(_check_index(subject.checkpoint))
    if digests := _provenance(subject).get(DIGESTS_KEY):
        checks.append(_check_digests(subject.checkpoint, digests))
    if subject.packed or packed_names(subject.checkpoint):
        checks += [_check_ignore(subject), _check_fused(subject), *check_packed(subject)]
    if subject.kv_scales:
        checks.append(_check_kv_scales(subject))
    relative_errors: dict[str, float] = {}
    if source is None:
        checks.append(_check_tokenizer(path))
    else:
        transformed = transformed_tensors(subject)
        weights, relative_errors = compare_packed(subject, source, transformed)
        checks += [
            compare_config(subject, source, transformed),
            compare_untouched(subject, source, transformed),
            *([weights] if subject.packed else []),
            compare_side_files(subject, source),
        ]
    bits = stored_bits(subject.checkpoint)
    return VerifyReport(
        checks=tuple(checks),
        relative_errors=relative_errors,
        num_bytes=subject.checkpoint.num_bytes,
        bits_per_weight=bits.quantized,
        bits_per_weight_overall=bits.overall,
    )


def check_part(
    file: Path,
    linears: Mapping[str, QuantizedLinear],
    schemes: Mapping[str, LinearScheme],
    format: Format,
) -> None:
    """Re-read the packed `linears` from `file`; CheckFailed unless each is what was meant.

    Both mappings are by full name. Codes and zero points are compared bit for bit, scales by value:
    a format that stores them in float16 may have been given them in another dtype.
    """
    part = Checkpoint(path=file, config={}, tensors=read_header(file))
    for name, meant in linears.items():
        try:
            stored = read_linear(part, name, schemes[name], format)
        except ValueError as error:
            raise CheckFailed(str(error)) from None
        if different := differing_part(stored, meant):
            raise CheckFailed(f"{file}: {name}: the {different} on disk are not what was written")


def _check_tensors(subject: Subject, source: Checkpoint | None) -> Check:
    tensors = subject.checkpoint.tensors
    found = (subject.tensor_problem(name) for name in subject.expected)
    problems = [problem for problem in found if problem is not None]
    known = {*subject.expected, *subject.optional}
    kept = _kept_tensors(subject, source) - known
    others = [name for name in tensors if name not in known]
    problems += [f"unexpected {name}" for name in others if name not in kept]
    passed = f"{len(tensors)} tensors, all as the config says"
    beside = f" or kept from the source ({', '.join(others)})" if others else ""
    return result("tensors", problems, passed + beside)


def _kept_tensors(subject: Subject, source: Checkpoint | None) -> set[str]:
    """Tensors that may be there though the architecture does not name them, as those of a module
    for multi-token prediction: the source has them, or the provenance says so.
    """
    if source is not None:
        names = set(source.tensors)
    else:
        names = set(_provenance(subject).get("kept_tensors", ()))
    return names - {f"{name}.weight" for name in subject.packed}


def _provenance(subject: Subject) -> dict[str, Any]:
    return read_provenance(subject.checkpoint.path) or {}


def _check_digests(checkpoint: Checkpoint, digests: Mapping[str, str]) -> Check:
    """The bytes of every tensor are those that were written with the provenance."""
    found = tensor_digests(checkpoint)
    problems = [f"{name} was written and is missing" for name in digests if name not in found]
    problems += [
        f"{name} was not written with the others"
        if name not in digests
        else f"{name} differs from what was written"
        for name in found
        if digests.get(name) != found[name]
    ]
    return result("digests", problems, f"SHA-256 of {len(found)} tensors as written")


def _check_kv_scales(subject: Subject) -> Check:
    problems = []
    for name in sorted(subject.kv_scales):
        if subject.tensor_problem(name) is None:
            scale = subject.checkpoint.read(name).float()
            if not bool((scale > 0).all() and scale.isfinite().all()):
                problems.append(f"{name} is not positive and finite")
    return result("KV scales", problems, f"{len(subject.kv_scales)} scales, positive and finite")


def _check_index(checkpoint: Checkpoint) -> Check:
    """Readers that trust the index never see a tensor that it does not list."""
    index = read_json(checkpoint.path / INDEX_FILE)
    unlisted = sorted(checkpoint.tensors.keys() - index["weight_map"].keys())
    problems = [f"{name} is not listed" for name in unlisted]
    total_size = index.get("metadata", {}).get("total_size", checkpoint.num_bytes)
    if total_size != checkpoint.num_bytes:
        problems.append(f"total_size is {total_size}, the tensors take {checkpoint.num_bytes}")
    return result("index", problems, f"lists all {len(checkpoint.tensors)} tensors")


def _check_finite(subject: Subject) -> Check:
    checkpoint = subject.checkpoint
    problems = [
        f"{name} holds NaN or infinity"
        for name, info in checkpoint.tensors.items()
        if info.dtype.is_floating_point and not checkpoint.read(name).float().isfinite().all()
    ]
    return result("finite", problems, "no NaN or infinity")


def _check_ignore(subject: Subject) -> Check:
    config = subject.checkpoint.config.get("quantization_config") or {}
    modules = {*subject.linears, *(n.removesuffix(".weight") for n in subject.checkpoint.tensors)}
    problems = [
        f"entry {entry!r} names no Linear"
        for key, means in (("ignore", matches), ("modules_to_not_convert", _is_part))
        for entry in config.get(key) or []
        if not any(means(name, entry) for name in modules)
    ]
    stored_packed = set(packed_names(subject.checkpoint))
    for name in subject.linears:
        if name in subject.packed and name not in stored_packed:
            problems.append(f"{name} is stored in float but not listed")
        if name not in subject.packed and name in stored_packed:
            problems.append(f"{name} is stored packed but listed, or not a target")
    num_float = sum(not is_embedding(name) for name in subject.linears.keys() - subject.packed)
    passed = f"{len(subject.packed)} modules packed, {num_float} Linears float, all as stored"
    return result("ignore list", problems, passed)


def _is_part(name: str, entry: str) -> bool:
    return entry in name


def _check_fused(subject: Subject) -> Check:
    """Loaders stack the Linears that read one input and need one scheme for the stack."""
    family = family_of(subject.checkpoint.config)
    problems = []
    for block in range(int(subject.checkpoint.config["num_hidden_layers"])):
        for shared in family.shared_inputs:
            names = [f"{family.blocks}.{block}.{name}" for name in shared.linears]
            if len({subject.packed.get(name) for name in names}) > 1:
                problems.append(f"{', '.join(names)} differ in scheme")
    return result("fused", problems, "Linears that loaders stack share one scheme")


def _check_tokenizer(path: Path) -> Check:
    found = [name for name in TOKENIZER_FILES if (path / name).is_file()]
    problems = [] if found else [f"none of {', '.join(TOKENIZER_FILES)}"]
    return result("tokenizer", problems, ", ".join(found))
