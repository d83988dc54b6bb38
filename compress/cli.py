"""The command line. Commands import what they need when they run, so that help answers at once."""

import errno
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from compress.errors import CheckFailed, is_out_of_memory, one_line
from compress.options import (
    ActivationBudget,
    Checkpoint,
    Device,
    JsonFile,
    Model,
    Offline,
    Quiet,
    Seed,
    Target,
    Verbose,
    settings,
    to_stdout,
    write_json,
)
from compress.recipes_cli import recipes_app
from compress.serving_cli import generate, serve
from compress.signals import Interrupted, interruptible

EXIT_CHECK_FAILED, EXIT_BAD_USAGE = 1, 2

app = typer.Typer(
    help="Compress large language models: quantize, train drafts, measure what it costs and gains.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(recipes_app, name="recipes")


def _print_version(wanted: bool) -> None:
    if wanted:
        from compress import __version__

        print(f"compress {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    pass


_UsageError: Any = typer.BadParameter.__base__  # of the click that this typer carries


@app.command()
@interruptible
def quantize(
    model: Model,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder to write.")] = None,
    recipe: Annotated[str, typer.Option(help="Name or YAML file.")] = "gptq-w4a16",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change a recipe value: KEY.PATH=VALUE.")
    ] = None,
    calib_data: Annotated[
        str, typer.Option(help="Text or jsonl file, hub:NAME, or `pydoc`.")
    ] = "pydoc",
    calib_samples: Annotated[int, typer.Option(help="Calibration sequences.")] = 128,
    calib_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 512,
    seed: Seed = 0,
    target: Target = None,
    device: Device = "auto",
    activation_budget: ActivationBudget = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a stopped run.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
    offline: Offline = False,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Calibrate MODEL and write a packed checkpoint."""
    if output is None and not dry_run:
        raise typer.BadParameter("missing: where should the checkpoint go?", param_hint="-o")
    from compress import quantize as work
    from compress import render
    from compress.calib.data import CalibrationSpec
    from compress.distributed import launched_rank
    from compress.recipe import load_recipe
    from compress.run import QuantizeJob

    if launched_rank():  # rank 0 speaks for all
        json_file, quiet = None, True
    job = QuantizeJob(
        model=model,
        output=output or Path("unused"),
        recipe=load_recipe(recipe, overrides or ()),
        calibration=CalibrationSpec(
            source=calib_data, num_samples=calib_samples, length=calib_length, seed=seed
        ),
        target=target,
        device=device,
        offline=offline,
        resume=resume,
        force=force,
        quiet=quiet,
        activation_budget=activation_budget,
    )
    if dry_run:
        plan = work.plan_job(job).plan
        write_json(json_file, render.plan_to_dict(plan))
        if not quiet and not to_stdout(json_file):
            render.print_plan(plan)
        return
    report = work.quantize(job)
    write_json(json_file, report)
    if not quiet and not to_stdout(json_file):
        render.print_quantize_report(report, str(output))


@app.command("serve-eval")
@interruptible
def serve_eval(
    model: Model,
    baseline: Annotated[
        str | None, typer.Option(help="Measured in the same run, interleaved.")
    ] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft folder for speculation.")] = None,
    ppl_data: Annotated[str, typer.Option(help="Text file, `pydoc`, or `none`.")] = "pydoc",
    ppl_protocol: Annotated[str, typer.Option(help="`gptq` or `llama.cpp`.")] = "gptq",
    ppl_window: Annotated[int, typer.Option(help="Tokens per window.")] = 2048,
    ppl_limit: Annotated[int | None, typer.Option(help="First windows only.")] = None,
    workload: Annotated[
        str, typer.Option(help="batch:N and rate:R, comma-separated, or `none`.")
    ] = "batch:1,batch:16",
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(help="Tokens generated per prompt.")] = 128,
    repeats: Annotated[int, typer.Option(help="Runs of each workload.")] = 3,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="Cache: auto, model, fp8 or int8.")] = "auto",
    deterministic: Annotated[
        bool | None,
        typer.Option(
            help="Bits that no batch changes; both measurements.",
            show_default="for scores, not for speed",
        ),
    ] = None,
    device: Device = "auto",
    seed: Seed = 0,
    offline: Offline = False,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run MODEL on the engine: perplexity, throughput and latency, with the protocol."""
    from compress.evalsuite import report
    from compress.evalsuite.serve_eval import ServeEvalOptions
    from compress.evalsuite.serve_eval import serve_eval as work

    options = ServeEvalOptions(
        model=model,
        baseline=baseline,
        draft=draft,
        ppl_data=ppl_data,
        ppl_protocol=ppl_protocol,
        ppl_window=ppl_window,
        ppl_limit=ppl_limit,
        workload=workload,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        repeats=repeats,
        dtype=dtype,
        kv_dtype=kv_dtype,
        deterministic=deterministic,
        device=device,
        seed=seed,
        offline=offline,
        quiet=quiet,
        command=_command_line(),
    )
    result = work(options)
    write_json(json_file, result)
    if not quiet and not to_stdout(json_file):
        report.print_report(result)


app.command()(generate)
app.command()(serve)


@app.command("train-draft")
@interruptible
def train_draft(
    target: Annotated[str, typer.Argument(help="Checkpoint that the draft will speed up.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")],
    kind: Annotated[str, typer.Option(help="Kind of draft: medusa.")] = "medusa",
    data: Annotated[str, typer.Option(help="Text or jsonl file, or `pydoc`.")] = "pydoc",
    max_minutes: Annotated[float, typer.Option(help="Wall-clock budget.")] = 10.0,
    seed: Seed = 0,
    device: Device = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
    offline: Offline = False,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train a draft for TARGET, float or packed."""
    from compress import render
    from compress.train_draft import TrainDraftJob
    from compress.train_draft import train_draft as work

    job = TrainDraftJob(
        target=target,
        kind=kind,
        output=output,
        data=data,
        max_minutes=max_minutes,
        seed=seed,
        device=device,
        force=force,
        offline=offline,
        quiet=quiet,
    )
    report = work(job)
    write_json(json_file, report)
    if not quiet and not to_stdout(json_file):
        render.print_draft_report(report, str(output))


@app.command()
def demo(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")] = Path(
        "demo-w4a16"
    ),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
    json_file: JsonFile = None,
    verbose: Verbose = False,
) -> None:
    """Quantize the demo model and measure it beside the original: the tool in one command."""
    report = ["--json", str(json_file)] if json_file else []
    packed = str(output) if output.is_absolute() else f"./{output}"  # a folder, never the model
    for arguments in (
        ["quantize", "demo", "-o", packed, *(["--force"] if force else [])],
        ["serve-eval", packed, "--baseline", "demo", "--ppl-limit", "8", *report],
    ):
        print(f"$ compress {' '.join(arguments)}", flush=True)
        sys.argv[1:] = arguments  # the protocol card shows the command that makes the figures
        app(args=arguments, standalone_mode=False)


@app.command()
@interruptible
def convert(
    checkpoint: Checkpoint,
    to: Annotated[str, typer.Option("--to", help="compressed-tensors, gptq, gptq_v2 or awq.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")],
    target: Target = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output.")] = False,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Rewrite the packed CHECKPOINT in another format, exactly or not at all."""
    from compress import render
    from compress.convert import ConvertJob
    from compress.convert import convert as work

    job = ConvertJob(
        source=checkpoint, output=output, to=to, target=target, force=force, quiet=quiet
    )
    report = work(job)
    write_json(json_file, report)
    if not quiet and not to_stdout(json_file):
        render.print_convert_report(report)


@app.command()
@interruptible
def verify(
    checkpoint: Checkpoint,
    against: Annotated[
        str | None, typer.Option(help="Source to compare with: folder, .gguf file, hub id, `demo`.")
    ] = None,
    offline: Offline = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Re-read every tensor of CHECKPOINT and check it against its config and its source."""
    from compress import render
    from compress.export.verify import verify_checkpoint
    from compress.models.load import resolve_model

    source = resolve_model(against, offline=offline, quiet=quiet) if against else None
    report = verify_checkpoint(checkpoint, source)
    if not quiet:
        render.print_verify_report(report)
    failed = [check.name for check in report.checks if not check.ok]
    if failed:
        raise CheckFailed(f"{checkpoint}: {len(failed)} checks failed ({', '.join(failed)})")


@app.command()
def inspect(
    checkpoint: Checkpoint,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verbose: Verbose = False,
) -> None:
    """Say what CHECKPOINT holds, without loading it."""
    from compress import render
    from compress.export.inspect import inspect_checkpoint

    facts = inspect_checkpoint(checkpoint)
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        render.print_inspection(facts)


def _command_line() -> str:
    import shlex

    return shlex.join(["compress", *sys.argv[1:]])


def main() -> None:
    """Run the command line and exit with the code that its end deserves."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Exit code of one command: 0 done, 1 a check failed, 2 bad usage, 130 or 143 interrupted."""
    settings["verbose"] = False
    try:
        app(args=arguments, standalone_mode=False)
    except _UsageError as error:
        message = error.format_message()  # empty where the help was printed instead
        return _fail(message, EXIT_BAD_USAGE) if message else EXIT_BAD_USAGE
    except Interrupted as error:
        return _fail(str(error), error.code)
    except (KeyboardInterrupt, typer.Abort) as error:
        return _fail(str(error) or "interrupted", Interrupted.code)
    except CheckFailed as error:
        return _fail(one_line(error), EXIT_CHECK_FAILED)
    except (ValueError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        return _fail(one_line(error), EXIT_CHECK_FAILED if full else EXIT_BAD_USAGE)
    except Exception as error:
        if is_out_of_memory(error):
            return _fail(one_line(error, "out of memory"), EXIT_CHECK_FAILED)
        # a bug, or input of a kind that no check has thought of
        reason = f"{type(error).__name__}: {one_line(error)}"
        return _fail(f"unexpected {reason} (-v shows where)", EXIT_CHECK_FAILED)
    return 0


def _fail(message: str, code: int) -> int:
    if settings["verbose"]:
        import traceback

        traceback.print_exc()
    print(f"compress: error: {message}", file=sys.stderr)
    return code
