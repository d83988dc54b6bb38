"""The commands that run a model for its text: `generate` and `serve`."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compress.options import (
    Device,
    JsonFile,
    Model,
    Offline,
    Quiet,
    Verbose,
    parse_bytes,
    to_stdout,
    write_json,
)
from compress.signals import interruptible

if TYPE_CHECKING:
    from compress.runtime.llm import LLM
    from compress.runtime.request import Completion

Draft = Annotated[Path | None, typer.Option(help="Draft folder for speculation.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
KVDtype = Annotated[str, typer.Option(help="Of keys and values: auto, model or fp8.")]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Longest sequence.", show_default="what the model was made for", min=1),
]


@interruptible
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Text to continue or answer; - reads stdin.")],
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Put the prompt through the chat template, or continue it as it is.",
            show_default="chat, if the model has a template",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Most likely tokens to keep; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Probability to keep.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this string; may be repeated.")
    ] = None,
    draft: Draft = None,
    dtype: Dtype = "auto",
    kv_dtype: KVDtype = "auto",
    max_model_len: MaxModelLen = None,
    device: Device = "auto",
    offline: Offline = False,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Generate from PROMPT to the terminal, as MODEL's checkpoint prefers unless options say."""
    from compress.runtime.engine_config import EngineConfig
    from compress.runtime.generation_config import describe_params
    from compress.runtime.llm import LLM

    llm = LLM(
        model,
        dtype=dtype,
        device=device,
        draft=draft,
        kv_dtype=kv_dtype,
        config=EngineConfig(max_num_seqs=1, max_model_len=max_model_len),
        offline=offline,
        quiet=quiet,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    is_chat = llm.has_chat_template if chat is None else chat
    if system is not None and not is_chat:
        raise typer.BadParameter("needs a chat (--chat)", param_hint="--system")
    messages = [{"role": "system", "content": system}] if system is not None else []
    whole = [*messages, {"role": "user", "content": text}] if is_chat else text
    given = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }
    params = llm.params(**{name: value for name, value in given.items() if value is not None})
    if not quiet:
        kind = "chat" if is_chat else "raw prompt"
        _note(f"{kind}, {describe_params(params, {'stop': stop})}", llm)
    printed = not to_stdout(json_file)
    parts: list[str] = []
    completion = None
    try:
        for chunk in llm.stream(whole, params, stop=stop or ()):
            parts.append(chunk.text)
            if printed:
                print(chunk.text, end="", flush=True)
            completion = chunk.completion
    finally:
        if printed:
            print(flush=True)
    assert completion is not None, "the last piece has a completion"
    write_json(json_file, _report("".join(parts), completion, params))
    if not quiet:
        print(_speed(completion), file=sys.stderr)


@interruptible
def serve(
    model: Model,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="COMPRESS_API_KEY",
            help="Key that clients must send. The environment does not show it to other users.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What clients call the model.", show_default="MODEL")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests that run at once.")] = 64,
    max_queue: Annotated[int, typer.Option(help="Most requests that wait.", min=0)] = 256,
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of one answer.", show_default="no limit", min=1)
    ] = None,
    max_body: Annotated[
        int, typer.Option(parser=parse_bytes, metavar="SIZE", help="Largest request.")
    ] = "8MiB",  # type: ignore[assignment]  # parsed by the option
    max_model_len: MaxModelLen = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(help="Cache blocks of 64 tokens.", show_default="what memory affords", min=1),
    ] = None,
    stall_seconds: Annotated[
        float, typer.Option(help="Fail all requests if no step ends for so long.")
    ] = 300.0,
    draft: Draft = None,
    dtype: Dtype = "auto",
    kv_dtype: KVDtype = "auto",
    device: Device = "auto",
    offline: Offline = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Serve MODEL over HTTP with the OpenAI API, until Ctrl-C."""
    for package in ("fastapi", "uvicorn"):
        if find_spec(package) is None:
            raise ValueError(f"serving needs {package}: pip install compress-llm[serve]")
    from compress.runtime.engine_config import EngineConfig
    from compress.runtime.generation_config import describe_params
    from compress.runtime.llm import LLM
    from compress.runtime.server.app import make_app
    from compress.runtime.server.guard import LOOPBACK, ServerLimits
    from compress.runtime.server.run import bind, run_server

    is_local = host in ("127.0.0.1", "localhost", "::1")
    limits = ServerLimits(
        max_body_bytes=max_body,
        max_tokens=max_tokens,
        api_key=api_key,
        allowed_hosts=LOOPBACK if is_local else None,
    )
    listener = bind(host, port)
    llm = LLM(
        model,
        dtype=dtype,
        device=device,
        draft=draft,
        kv_dtype=kv_dtype,
        config=EngineConfig(
            max_num_seqs=max_num_seqs, max_model_len=max_model_len, num_blocks=num_blocks
        ),
        offline=offline,
        quiet=quiet,
    )
    app = make_app(llm, name=name, limits=limits, max_queue=max_queue, stall_seconds=stall_seconds)
    if not quiet:
        _note(f"defaults: {describe_params(llm.default_params)}", llm)
        address = f"[{host}]" if ":" in host else host
        url = f"http://{address}:{listener.getsockname()[1]}/v1"
        print(f"serving {name or model} at {url}; Ctrl-C ends", file=sys.stderr, flush=True)
    if not is_local and api_key is None:
        print("warning: everyone who reaches this port may use it: no API key", file=sys.stderr)
    run_server(app, listener, quiet=quiet)


def _note(text: str, llm: "LLM") -> None:
    """Say on stderr what is in effect, and what the checkpoint wants and does not get."""
    print(text, file=sys.stderr, flush=True)
    if llm.ignored_defaults:
        ignored = ", ".join(llm.ignored_defaults)
        print(f"warning: generation_config.json also asks for {ignored}", file=sys.stderr)


def _report(text: str, completion: "Completion", params: Any) -> dict[str, Any]:
    from dataclasses import asdict

    times = completion.token_times
    return {
        "text": text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "sampling_params": asdict(params),
        "seconds_to_first_token": times[0] - completion.arrival_time,
        "seconds": times[-1] - completion.arrival_time,
        "decode_tokens_per_second": _decode_rate(completion),
    }


def _decode_rate(completion: "Completion") -> float | None:
    """Tokens per second after the first; None where that is no rate: they came all at once."""
    times = completion.token_times
    return (len(times) - 1) / (times[-1] - times[0]) if times[-1] > times[0] else None


def _speed(completion: "Completion") -> str:
    first = completion.token_times[0] - completion.arrival_time
    rate = _decode_rate(completion)
    speed = "" if rate is None else f", then {rate:.1f} tokens/s"
    return (
        f"{completion.prompt_tokens} prompt tokens, {len(completion.token_ids)} generated"
        f" ({completion.finish_reason}): the first after {first:.2f} s{speed}"
    )
