"""From measurements to the report: which figure of which model goes where (see report.py)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from compress.evalsuite.fidelity import Fidelity
from compress.evalsuite.perplexity import Perplexity
from compress.evalsuite.report import rate_ratios, ratio
from compress.evalsuite.throughput import (
    Run,
    acceptance_length,
    identical_outputs,
    workload_report,
)
from compress.evalsuite.workload import Workload
from compress.models.checkpoint import Checkpoint

MODEL, BASELINE, DRAFT = "model", "baseline", "model with draft"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A checkpoint under evaluation; `name` is what the user called it.

    `facts` is what `inspect_checkpoint` says of it.
    """

    name: str
    checkpoint: Checkpoint
    facts: dict[str, Any]

    @property
    def scheme(self) -> str:
        """The schemes of its Linears, or the dtypes of a float checkpoint."""
        schemes = [entry["scheme"] for entry in self.facts["schemes"]]
        return ", ".join(schemes) or f"float ({', '.join(self.facts['dtypes'])})"


def assemble(
    subjects: Mapping[str, Subject],
    scores: Mapping[str, Perplexity | None],
    fidelity: Fidelity | None,
    runs: Mapping[Workload, Mapping[str, list[Run]]],
) -> dict[str, Any]:
    """The report without its card, from scores by role and runs by workload and role."""
    parts = {role: _part(role, subject, scores[role], runs) for role, subject in subjects.items()}
    report = parts[MODEL]
    if BASELINE in parts:
        report["baseline"] = parts[BASELINE]
        report["ratio"] = ratio(parts[MODEL], parts[BASELINE])
        report["fidelity"] = None if fidelity is None else asdict(fidelity)
    if any(DRAFT in by_role for by_role in runs.values()):
        report["speculation"] = _speculation(report, runs)
    return report


def _part(
    role: str,
    subject: Subject,
    score: Perplexity | None,
    runs: Mapping[Workload, Mapping[str, list[Run]]],
) -> dict[str, Any]:
    return {
        "model": subject.name,
        "quantized": bool(subject.facts["schemes"]),
        "size": {
            "bytes": subject.facts["bytes"]["total"],
            "parameters": subject.facts["num_weights"],
            "bits_per_weight": subject.facts["bits_per_weight"]["overall"],
            "quantized_bits_per_weight": subject.facts["bits_per_weight"]["quantized"],
        },
        "perplexity": None if score is None else asdict(score),
        "throughput": [
            workload_report(workload, by_role[role]) for workload, by_role in runs.items()
        ],
    }


def _speculation(
    model: Mapping[str, Any], runs: Mapping[Workload, Mapping[str, list[Run]]]
) -> dict[str, Any]:
    """What the draft changes: tokens per iteration, speed with / without, and the text itself."""
    with_draft = [run for by_role in runs.values() for run in by_role[DRAFT]]
    without = [run for by_role in runs.values() for run in by_role[MODEL]]
    throughput = [
        {
            **workload_report(workload, by_role[DRAFT]),
            "acceptance_length": acceptance_length(by_role[DRAFT]),
        }
        for workload, by_role in runs.items()
    ]
    return {
        "acceptance_length": acceptance_length(with_draft),
        "identical_outputs": identical_outputs(with_draft, without),
        "throughput": throughput,
        "speedup": rate_ratios(throughput, model["throughput"]),
    }
