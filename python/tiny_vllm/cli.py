"""The command line: ``tiny-vllm run``, ``tiny-vllm info``."""

from __future__ import annotations

import inspect
import sys
import time
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from tiny_vllm import _core
from tiny_vllm.config import EngineConfig
from tiny_vllm.engine import Engine
from tiny_vllm.errors import Error
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import SamplingParams

app = typer.Typer(
    help="tiny-vllm: an LLM inference engine small enough to read.",
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(stderr=True)  # progress and figures; the answer alone goes to standard output


def _with_engine_options(command: Any) -> Any:
    """Gives a command one flag for each field of EngineConfig, so that no option is written twice."""
    hints = get_type_hints(EngineConfig)
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    flags = []
    for f in fields(EngineConfig):
        if f.name in signature.parameters:
            continue
        kind: Any = Literal[f.metadata["choices"]] if f.metadata["choices"] else hints[f.name]
        kind = Annotated[kind, typer.Option(help=f.metadata["doc"], rich_help_panel="Engine")]
        flags.append(
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=kind)
        )
    command.__signature__ = signature.replace(parameters=[*own, *flags])
    return command


def _load(model: str | None, options: dict[str, Any]) -> Engine:
    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("Loading weights", total=None)
        return Engine(
            model, progress=lambda done, total: bar.update(task, completed=done, total=total), **options
        )


@app.command()
@_with_engine_options
def run(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="One prompt is streamed; several run as one batch.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read more prompts from a file, one a line.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A folder, a .gguf file or a Hub id. Default: the bundled small model.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message: use the chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate for each prompt.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Draw from the likeliest tokens that hold this much probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Draw from this many likeliest tokens; 0 is all.")] = 0,
    sampling_seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    **options: Any,
) -> None:
    """Complete prompts, or answer them with --chat."""
    texts = list(prompts or [])
    if file is not None:
        texts += [line for line in _read(file).splitlines() if line.strip()]
    if not texts:
        raise typer.BadParameter("give a prompt, or --file FILE")
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=sampling_seed
    )
    engine = _load(model, options)
    if len(texts) == 1:
        _run_one(engine, texts[0], chat, params)
    else:
        _run_batch(engine, texts, chat, params)


def _read(file: Path) -> str:
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file} cannot be read: {error}", param_hint="--file") from None


def _run_one(engine: Engine, text: str, chat: bool, params: SamplingParams) -> None:
    outputs = engine.start_stream([{"role": "user", "content": text}] if chat else text, params)
    if not chat:
        print(text, end="", flush=True)
    shown = 0
    output: RequestOutput | None = None
    at_first_token: dict[str, int | float] = {}
    for output in outputs:
        at_first_token = at_first_token or engine.metrics()
        answer = output.outputs[0].text
        print(answer[shown:], end="", flush=True)
        shown = len(answer)
    print()
    assert output is not None
    assert output.metrics is not None
    if output.outputs[0].finish_reason == "error":
        raise Error(str(output.outputs[0].stop_reason))
    times = output.metrics
    assert times.first_token_time is not None
    assert times.finished_time is not None
    generated = len(output.outputs[0].token_ids)
    # Decode speed: the first token belongs to the prefill.
    seconds = times.finished_time - times.first_token_time
    bytes_read = engine.metrics()["bytes_read"] - at_first_token["bytes_read"]
    first = f"first after {times.first_token_time - times.arrival_time:.2f} s"
    if generated == 1:  # there was no decode step to time
        seconds, bytes_read = times.finished_time - times.arrival_time, engine.metrics()["bytes_read"]
    _print_figures(
        engine, len(output.prompt_token_ids), generated, max(generated - 1, 1), seconds, bytes_read, first
    )


def _run_batch(engine: Engine, texts: list[str], chat: bool, params: SamplingParams) -> None:
    start = time.monotonic()
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as bar:
        task = bar.add_task("Requests", total=len(texts))

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        if chat:
            outputs = engine.chat(
                [[{"role": "user", "content": t}] for t in texts], params, progress=progress
            )
        else:
            outputs = engine.generate(texts, params, progress=progress)
    seconds = time.monotonic() - start
    for text, output in zip(texts, outputs, strict=True):
        print(f"--- {text}")
        completion = output.outputs[0]
        print(
            completion.text if completion.finish_reason != "error" else f"(refused: {completion.stop_reason})"
        )
    prompt_tokens = sum(len(o.prompt_token_ids) for o in outputs)
    generated = sum(len(o.outputs[0].token_ids) for o in outputs)
    _print_figures(
        engine,
        prompt_tokens,
        generated,
        generated,
        seconds,
        engine.metrics()["bytes_read"],
        f"{len(texts)} requests",
    )


def _print_figures(
    engine: Engine,
    prompt_tokens: int,
    generated: int,
    timed: int,
    seconds: float,
    bytes_read: float,
    first: str,
) -> None:
    """The last line. GB/s counts weights once a step and keys and values once a request and step."""
    rate = bytes_read / seconds / 1e9
    peak = _core.measure_read_bandwidth(engine.config.num_threads or 0)
    console.print(
        f"{prompt_tokens} prompt + {generated} generated tokens, {first}, {timed / seconds:.1f} tok/s, "
        f"{rate:.1f} GB/s read, {100 * rate / peak:.0f}% of this machine's {peak:.1f} GB/s",
        highlight=False,
        soft_wrap=True,
    )


_SCENARIOS = {  # name: (prompts, tokens of each, tokens to generate)
    "prefill": (1, 512, 1),
    "decode-1": (1, 32, 128),
    "decode-64": (64, 32, 64),
}


@app.command()
@_with_engine_options
def bench(
    scenario: Annotated[str, typer.Argument(help=f"One of {', '.join(_SCENARIOS)}.")] = "decode-1",
    model: Annotated[str | None, typer.Option(help="As for run.")] = None,
    **options: Any,
) -> None:
    """Run a named load once warm, and print its speed. What nsys.sh and ncu.sh profile."""
    if scenario not in _SCENARIOS:
        raise typer.BadParameter(f"{scenario!r} is not one of {', '.join(_SCENARIOS)}")
    requests, prompt_tokens, new_tokens = _SCENARIOS[scenario]
    engine = _load(model, {**options, "enable_prefix_caching": False})
    vocab_size = engine.info()["vocab_size"]
    prompts = [[(7919 * i + 104729 * r) % vocab_size for i in range(prompt_tokens)] for r in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    # Threads, pages.
    engine.generate(prompts[:1], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    before = engine.metrics()
    start = time.monotonic()
    engine.generate(prompts, params)
    seconds = time.monotonic() - start
    after = engine.metrics()
    tokens = requests * (prompt_tokens if new_tokens == 1 else new_tokens)
    print(
        f"{scenario}: {requests} x ({prompt_tokens} prompt + {new_tokens} new) in {seconds:.3f} s, "
        f"{tokens / seconds:.1f} {'prompt' if new_tokens == 1 else 'new'} tok/s, "
        f"{after['num_steps'] - before['num_steps']} steps, "
        f"{(after['bytes_read'] - before['bytes_read']) / seconds / 1e9:.1f} GB/s read"
    )


@app.command()
def info() -> None:
    """How this package was built, and which devices it sees."""
    out = Console()
    for name, value in _core.build_info().items():
        out.print(f"{name}: {value}", highlight=False, soft_wrap=True)


def main() -> None:
    """Entry point. Errors that a person can mend are one sentence, not a traceback."""
    warnings.showwarning = lambda message, *_, **__: console.print(f"note: {message}", highlight=False)
    try:
        app()
    except Error as error:
        console.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
