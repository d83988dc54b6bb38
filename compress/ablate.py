"""What each mechanism of quantization contributes, on the user's own model and data.

    python -m compress.ablate MODEL -o FOLDER
    python -m compress.ablate MODEL -o FOLDER --variant weighted --variant "g32=gptq-w4a16,set
        scheme.weights.group_size=32" --ppl-data test.txt --calib-data valid.txt

A variant is a recipe with overrides, those of `compress quantize`. The model is quantized once per
variant, with the same calibration data, each time in a process of its own: so the peak memory is
that variant's alone. Each result is then measured against the float model on the same windows, in
fp32: perplexity, KL divergence and top-1 agreement (see evalsuite/fidelity.py). One table shows the
variants in the given order, each with its difference to the row before it. The default is a ladder
in which each variant changes one thing in the one before.

What is finished lies in FOLDER/NAME/ and is not done again unless its settings change:

    checkpoint/    the quantized model
    settings.json  all that it depends on       quantize.json  the report of `compress quantize`
    evaluate.json  the report of `compress serve-eval` against the float model, with its settings
"""

import hashlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from compress import __version__
from compress.calib.data import CalibrationSpec
from compress.errors import CheckFailed
from compress.evalsuite.ablation import results_table, with_changes
from compress.evalsuite.card import environment
from compress.evalsuite.serve_eval import ServeEvalOptions, check_options, serve_eval
from compress.export.writer import write_json
from compress.lookup import lookup
from compress.models.checkpoint import open_checkpoint, read_json
from compress.models.family import family_of
from compress.models.load import resolve_model
from compress.plan import make_plan
from compress.recipe import load_recipe

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_PIPE_WIDTH = 160  # rich takes 80 when it cannot know, which folds rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A way to quantize: `recipe` is a name or file, `overrides` are KEY.PATH=VALUE."""

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()


_VARIANTS = (
    Variant(
        name="minmax",
        recipe="rtn-w4a16",
        overrides=(
            "method.scale.steps=1",
            "method.scale.weighted=false",
            "method.scale.signed=false",
        ),
    ),
    Variant(
        name="signed",
        recipe="rtn-w4a16",
        overrides=("method.scale.steps=1", "method.scale.weighted=false"),
    ),
    Variant(name="weighted", recipe="rtn-w4a16", overrides=("method.scale.steps=16",)),
    Variant(name="gptq", recipe="gptq-w4a16", overrides=("method.order=none",)),
    Variant(name="act-order", recipe="gptq-w4a16"),
    Variant(name="awq", recipe="gptq-w4a16", overrides=("transforms=[{kind: awq}]",)),
    Variant(name="rotation", recipe="gptq-w4a16", overrides=("transforms=[{kind: rotation}]",)),
    # not in the ladder: a search that weighs all columns alike; act-order and one thing more
    Variant(name="unweighted", recipe="rtn-w4a16", overrides=("method.scale.weighted=false",)),
    Variant(
        name="smoothquant", recipe="gptq-w4a16", overrides=("transforms=[{kind: smoothquant}]",)
    ),
    Variant(name="refined", recipe="gptq-w4a16", overrides=("method.refinement.rounds=2",)),
    Variant(name="gptaq", recipe="gptq-w4a16", overrides=("method.asymmetry=0.5",)),
    Variant(name="true-sequential", recipe="gptq-w4a16", overrides=("true_sequential=true",)),
)
VARIANTS: dict[str, Variant] = {variant.name: variant for variant in _VARIANTS}
LADDER = ("minmax", "signed", "weighted", "gptq", "act-order", "awq", "rotation")


@dataclass(frozen=True, kw_only=True, slots=True)
class AblationJob:
    """One run of the ablation.

    `overrides` go to every variant, before its own. `ppl_data`, `ppl_window` and `ppl_limit` as in
    `ServeEvalOptions`.
    """

    model: str
    output: Path
    variants: tuple[Variant, ...]
    overrides: tuple[str, ...] = ()
    calibration: CalibrationSpec
    ppl_data: str = "pydoc"
    ppl_window: int = 2048
    ppl_limit: int | None = 10
    device: str = "auto"
    offline: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"variant {name!r} is given twice")
        if self.ppl_data == "none":
            raise ValueError("an ablation compares perplexities: ppl_data must not be 'none'")
        if not names:
            raise ValueError("no variant to quantize")


def parse_variant(text: str) -> Variant:
    """`NAME` in VARIANTS, or `NAME=RECIPE[,set KEY.PATH=VALUE]...`; ValueError quotes `text`."""
    name, separator, rest = text.partition("=")
    if not separator:
        return lookup(VARIANTS, name, "variant")
    if not _NAME.fullmatch(name):
        raise ValueError(f"variant {text!r}: the name may hold letters, digits and _ . + -")
    recipe, *overrides = re.split(r",\s*set\s+", rest)
    if not recipe.strip() or any("=" not in override for override in overrides):
        raise ValueError(f"variant {text!r}: expected NAME=RECIPE[,set KEY.PATH=VALUE]...")
    return Variant(
        name=name, recipe=recipe.strip(), overrides=tuple(part.strip() for part in overrides)
    )


def ablate(job: AblationJob, command: str = "") -> dict[str, Any]:
    """Quantize and measure every variant that is not finished; the report, plain JSON values.

    Raises ValueError and OSError for bad input before any work, CheckFailed when a quantization
    fails (it has said why) or a model is not finite. Finished variants stay finished.
    """
    card = environment(command)  # before any work: the load is the others'
    settings = _settings(job)
    rows: list[dict[str, Any]] = []
    baseline: dict[str, Any] = {}
    for number, variant in enumerate(job.variants, start=1):
        _say(job, f"variant {number} of {len(job.variants)}: {variant.name}")
        folder = job.output / variant.name
        quantized = _quantize(job, variant, folder, settings[variant.name])
        evaluated = _evaluate(job, folder, settings[variant.name])
        baseline = evaluated["baseline"]
        rows.append(_row(job, variant, quantized, evaluated))
    return {
        "model": job.model,
        "baseline": {key: baseline[key] for key in ("perplexity", "size")},
        "calibration": asdict(job.calibration),
        "variants": with_changes(baseline, rows),
        "protocol": card,
    }


def _settings(job: AblationJob) -> dict[str, dict[str, Any]]:
    """By variant all that its checkpoint depends on. Whatever can be found wrong now is raised."""
    checkpoint = open_checkpoint(resolve_model(job.model, offline=job.offline, quiet=job.quiet))
    check_options(_evaluation(job, job.model, baseline=None))
    family = family_of(checkpoint.config)
    tokens = job.calibration.num_samples * job.calibration.length
    common = {
        "version": __version__,
        "model": checkpoint.fingerprint,
        "calibration": asdict(job.calibration) | {"content": _content(job.calibration.source)},
        "device": job.device,
    }
    settings = {}
    for variant in job.variants:
        recipe = load_recipe(variant.recipe, _overrides(job, variant))
        make_plan(checkpoint, family, recipe, calibration_tokens=tokens)
        settings[variant.name] = common | {"recipe": recipe.to_dict()}
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps(settings))  # as it will be read back
    return plain


def _overrides(job: AblationJob, variant: Variant) -> tuple[str, ...]:
    return (*job.overrides, *variant.overrides)


def _content(source: str) -> str:
    """SHA-256 of a file that may be edited under the same name; the name of any other source."""
    file = Path(source)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else source


def _quantize(
    job: AblationJob, variant: Variant, folder: Path, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The report of `compress quantize`, from disk if the same was done before."""
    report, noted = folder / "quantize.json", folder / "settings.json"
    same = noted.is_file() and read_json(noted) == settings
    if same and report.is_file():
        _say(job, "  quantized before")
        return read_json(report)
    folder.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    write_json(noted, settings)
    command = _quantize_command(job, variant, folder, report, resume=same)
    if code := _run_compress(command):
        raise CheckFailed(
            f"variant {variant.name!r}: 'compress {shlex.join(command)}' ended with exit code"
            f" {code}; finished variants are kept (remove {folder} to start this one afresh)"
        )
    return read_json(report)


def _run_compress(arguments: list[str]) -> int:
    """Exit code of one command in a process of its own; its summary is in the table here."""
    command = [sys.executable, "-m", "compress", *arguments]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode


def _quantize_command(
    job: AblationJob, variant: Variant, folder: Path, report: Path, *, resume: bool
) -> list[str]:
    """Arguments of `compress`; what a stopped run of the same settings left is used."""
    arguments = ["quantize", job.model, "-o", str(folder / "checkpoint"), "--force"]
    arguments += ["--recipe", variant.recipe]
    for override in _overrides(job, variant):
        arguments += ["--set", override]
    calibration = job.calibration
    arguments += ["--calib-data", calibration.source, "--seed", str(calibration.seed)]
    arguments += ["--calib-samples", str(calibration.num_samples)]
    arguments += ["--calib-length", str(calibration.length)]
    arguments += ["--device", job.device, "--json", str(report)]
    flags = {"--resume": resume, "--offline": job.offline, "--quiet": job.quiet}
    return arguments + [flag for flag, is_set in flags.items() if is_set]


def _evaluate(job: AblationJob, folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The report of `compress serve-eval`, from disk if the same was measured before."""
    file = folder / "evaluate.json"
    options = _evaluation(job, str(folder / "checkpoint"), baseline=job.model)
    measured = {
        name: getattr(options, name)
        for name in ("ppl_data", "ppl_protocol", "ppl_window", "ppl_limit", "dtype", "device")
    }
    wanted = dict(settings) | {"evaluation": measured | {"content": _content(options.ppl_data)}}
    if file.is_file() and read_json(file)["settings"] == wanted:
        _say(job, "  measured before")
    else:
        report = serve_eval(replace(options, command=_evaluate_command(options)))
        if report["fidelity"] is None:
            raise CheckFailed(f"{options.model}: its vocabulary is not that of {job.model}")
        write_json(file, {"settings": wanted, "report": report})
    found: dict[str, Any] = read_json(file)["report"]
    return found


def _evaluation(job: AblationJob, model: str, *, baseline: str | None) -> ServeEvalOptions:
    return ServeEvalOptions(
        model=model,
        baseline=baseline,
        ppl_data=job.ppl_data,
        ppl_window=job.ppl_window,
        ppl_limit=job.ppl_limit,
        workload="none",
        dtype="float32",
        device=job.device,
        offline=job.offline,
        quiet=job.quiet,
    )


def _evaluate_command(options: ServeEvalOptions) -> str:
    """The line that repeats one measurement."""
    arguments = ["compress", "serve-eval", options.model, "--baseline", str(options.baseline)]
    arguments += ["--workload", "none", "--dtype", options.dtype, "--device", options.device]
    arguments += ["--ppl-data", options.ppl_data, "--ppl-protocol", options.ppl_protocol]
    arguments += ["--ppl-window", str(options.ppl_window)]
    if options.ppl_limit is not None:
        arguments += ["--ppl-limit", str(options.ppl_limit)]
    return shlex.join(arguments)


def _row(
    job: AblationJob, variant: Variant, quantized: Mapping[str, Any], evaluated: Mapping[str, Any]
) -> dict[str, Any]:
    """What the report says of one variant, but its change."""
    return {
        "name": variant.name,
        "recipe": variant.recipe,
        "overrides": list(_overrides(job, variant)),
        "perplexity": evaluated["perplexity"],
        "fidelity": evaluated["fidelity"],
        "size": evaluated["size"],
        "seconds": quantized["seconds"],
        "peak_rss_bytes": quantized["peak_rss_bytes"],
    }


def _say(job: AblationJob, line: str) -> None:
    if not job.quiet:
        print(line, file=sys.stderr, flush=True)


def main(
    model: Annotated[str, typer.Argument(help="Folder, .gguf file, hub id, or `demo`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the variants.")],
    variant: Annotated[
        list[str] | None,
        typer.Option(help="NAME=RECIPE[,set KEY.PATH=VALUE]..., or a NAME of the ladder."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="KEY.PATH=VALUE for every variant.")
    ] = None,
    ppl_data: Annotated[str, typer.Option(help="Text file, or `pydoc`.")] = "pydoc",
    ppl_window: Annotated[int, typer.Option(help="Tokens per window.")] = 2048,
    ppl_limit: Annotated[int, typer.Option(help="First windows only.")] = 10,
    calib_data: Annotated[
        str, typer.Option(help="Text or jsonl file, hub:NAME, or `pydoc`.")
    ] = "pydoc",
    calib_samples: Annotated[int, typer.Option(help="Calibration sequences.")] = 128,
    calib_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 512,
    seed: Annotated[int, typer.Option(help="Seed of the calibration set.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    offline: Annotated[bool, typer.Option("--offline", help="Never use the network.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report.")] = None,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress, no table.")] = False,
) -> None:
    """Quantize MODEL in several ways and show what each step of the way contributes."""
    if json_file is not None and not json_file.resolve().parent.is_dir():
        raise ValueError(f"--json: no folder {json_file.resolve().parent}")
    job = AblationJob(
        model=model,
        output=output,
        variants=tuple(map(parse_variant, variant or LADDER)),
        overrides=tuple(overrides or ()),
        calibration=CalibrationSpec(
            source=calib_data, num_samples=calib_samples, length=calib_length, seed=seed
        ),
        ppl_data=ppl_data,
        ppl_window=ppl_window,
        ppl_limit=ppl_limit,
        device=device,
        offline=offline,
        quiet=quiet,
    )
    report = ablate(job, shlex.join(["python", "-m", "compress.ablate", *sys.argv[1:]]))
    if json_file is not None:
        write_json(json_file, report)
    if not quiet:
        console = Console()
        if not console.is_terminal:
            console.width = _PIPE_WIDTH
        console.print(results_table(report))


def run(arguments: list[str]) -> int:
    """Exit code of one command: 0 done, 1 a step failed, 2 bad usage or input."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    try:
        app(args=arguments)
    except SystemExit as end:  # of typer, which has printed what was wrong
        return int(end.code or 0)
    except (ValueError, OSError, CheckFailed) as error:
        print(f"compress.ablate: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, CheckFailed) else 2
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
