"""The command line: ``tiny-vllm run``, ``tiny-vllm bench``, ``tiny-vllm info``."""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import secrets
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_type_hints

import typer

from tiny_vllm import _core
from tiny_vllm.cache import byte_progress, console, count_progress
from tiny_vllm.config import EngineConfig
from tiny_vllm.engine import Engine
from tiny_vllm.errors import Error
from tiny_vllm.kernel_profile import chrome_trace, summary, table
from tiny_vllm.model_files import resolve_model
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import SamplingParams

# Plain help instead of panels: those cut long option names short in a terminal of 80 columns.
app = typer.Typer(
    help="tiny-vllm: an LLM inference engine small enough to read.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"tiny-vllm {_core.build_info()['version']}")
        raise typer.Exit()


@app.callback()
def _every_command(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def _with_engine_options(*left_out: str) -> Callable[[Any], Any]:
    """Gives a command one flag for each field of EngineConfig, so that no option is written twice."""

    def add_flags(command: Any) -> Any:
        hints = get_type_hints(EngineConfig)
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        flags = []
        for f in fields(EngineConfig):
            if f.name in left_out:
                continue
            kind: Any = Literal[f.metadata["choices"]] if f.metadata["choices"] else hints[f.name]
            doc = f.metadata["doc"]
            kind = Annotated[kind, typer.Option(help=f"{doc[0].upper()}{doc[1:]}.")]
            flags.append(
                inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=kind)
            )
        command.__signature__ = signature.replace(parameters=[*own, *flags])
        return command

    return add_flags


def _load(model: str | None, options: dict[str, Any]) -> Engine:
    folder = resolve_model(model)  # may fetch and convert, with bars of its own
    with byte_progress("Loading weights") as progress:
        return Engine(folder, progress=progress, **options)


@app.command()
@_with_engine_options(
    "seed", "profile"
)  # this --seed is the requests' own; and bench shows what profile finds
def run(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="One prompt is streamed; several run as one batch.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Read more prompts from a file, one a line; - is standard input."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A folder, a .gguf file or a Hub id. Default: the bundled small model.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message: use the chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate for each prompt.")] = 128,
    temperature: Annotated[
        float, typer.Option(help="0 always takes the likeliest token; above 0 tokens are drawn.")
    ] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Draw from the likeliest tokens that hold this much probability. Default: from all."
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from this many likeliest tokens. Default: from all.")
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Drop tokens less likely than this times the likeliest; 0 to 1. Default: drop none."
        ),
    ] = None,
    repetition_penalty: Annotated[
        float,
        typer.Option(
            help="Above 1: tokens of the prompt or the answer become less likely; 1 changes nothing."
        ),
    ] = 1.0,
    presence_penalty: Annotated[
        float, typer.Option(help="Taken from the logit of each token that the answer has; -2 to 2.")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Taken from a token's logit for each time the answer has it; -2 to 2.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Draw the same tokens each time. Default: others each time.")
    ] = None,
    **options: Any,
) -> None:
    """Complete prompts, or answer them with --chat."""
    texts = list(prompts or [])
    if file is not None:
        texts += _read_prompts(file)
    if not texts:
        raise typer.BadParameter("give a prompt, or --file FILE")
    if temperature == 0:
        for name, value in (("--top-p", top_p), ("--top-k", top_k), ("--min-p", min_p)):
            if value is not None:
                raise typer.BadParameter(
                    "has no effect at temperature 0; give --temperature too", param_hint=name
                )
    params = [
        SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=0 if top_k is None else top_k,
            min_p=0.0 if min_p is None else min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            seed=secrets.randbits(63) if seed is None else seed,
        )
        for _ in texts
    ]
    engine = _load(model, options)
    if len(texts) == 1:
        _run_one(engine, texts[0], chat, params[0])
    else:
        _run_batch(engine, texts, chat, params)


def _read_prompts(file: Path) -> list[str]:
    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        text = data.decode("utf-8-sig")  # some editors begin a file with U+FEFF
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise typer.BadParameter(f"{file} cannot be read: {reason}", param_hint="--file") from None
    # Not splitlines(): a prompt may hold U+2028 and other characters that it cuts at.
    lines = [line for line in re.split("\r\n|\n|\r", text) if line.strip()]
    if not lines:
        where = "standard input" if str(file) == "-" else str(file)
        raise typer.BadParameter(f"{where} holds no prompt; write one a line", param_hint="--file")
    return lines


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
    _suggest_chat(engine, [output], chat)
    _print_figures(engine, [output], params, first, max(generated - 1, 1), seconds, bytes_read)


def _run_batch(engine: Engine, texts: list[str], chat: bool, params: list[SamplingParams]) -> None:
    """Answers on standard output. Prompts without an answer on standard error, and in the exit code."""
    start = time.monotonic()
    with count_progress("Requests") as progress:
        if chat:
            conversations = [[{"role": "user", "content": t}] for t in texts]
            outputs = engine.chat(conversations, params, progress=progress)
        else:
            outputs = engine.generate(texts, params, progress=progress)
    seconds = time.monotonic() - start
    answered = [(t, o) for t, o in zip(texts, outputs, strict=True) if o.outputs[0].finish_reason != "error"]
    print(
        "\n".join(f"--- {text}\n{output.outputs[0].text}\n" for text, output in answered), end="", flush=True
    )
    for text, output in zip(texts, outputs, strict=True):
        if output.outputs[0].finish_reason == "error":
            prompt = text if len(text) <= 60 else f"{text[:57]}..."
            _say(f"no answer to {prompt!r}: {output.outputs[0].stop_reason}")
    generated = sum(len(o.outputs[0].token_ids) for o in outputs)
    bytes_read = engine.metrics()["bytes_read"]
    _suggest_chat(engine, outputs, chat)
    _print_figures(engine, outputs, params[0], f"{len(texts)} requests", generated, seconds, bytes_read)
    if len(answered) < len(texts):
        raise typer.Exit(1)


def _suggest_chat(engine: Engine, outputs: list[RequestOutput], chat: bool) -> None:
    """A model that was taught to answer often ends at once when a question is to be completed."""
    if chat or engine.tokenizer is None or not engine.tokenizer.chat_templates:
        return
    completions = [o.outputs[0] for o in outputs]
    empty = sum(c.finish_reason == "stop" and not c.text.strip() for c in completions)
    if empty:
        which = f"{empty} of {len(outputs)} prompts: " if len(outputs) > 1 else ""
        _say(f"{which}the model ended at once; for a question try --chat")


def _print_figures(
    engine: Engine,
    outputs: list[RequestOutput],
    params: SamplingParams,
    first: str,
    timed: int,
    seconds: float,
    bytes_read: float,
) -> None:
    """The last line. GB/s counts weights once a step and keys and values once a request and step."""
    prompt_tokens = sum(len(o.prompt_token_ids) for o in outputs)
    generated = sum(len(o.outputs[0].token_ids) for o in outputs)
    rate = bytes_read / seconds / 1e9
    peak = _core.measure_read_bandwidth(engine.config.num_threads or 0)
    _say(
        f"{prompt_tokens} prompt + {generated} generated tokens{_cut(outputs, params)}, {first}, "
        f"{timed / seconds:.1f} tok/s, {rate:.1f} GB/s read, "
        f"{100 * rate / peak:.0f}% of this machine's {peak:.1f} GB/s"
    )


def _cut(outputs: list[RequestOutput], params: SamplingParams) -> str:
    """Says how many answers did not come to their own end, and why. "" when all did."""
    cut = [o.outputs[0] for o in outputs if o.outputs[0].finish_reason == "length"]
    if not cut:
        return ""
    own = all(len(c.token_ids) == params.max_tokens for c in cut)
    who = f"{_count(len(cut), 'answer')} " if len(outputs) > 1 else ""
    return f" ({who}cut at {'--max-tokens' if own else '--max-model-len, --max-tokens or the KV cache'})"


def _count(number: float, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _say(text: str) -> None:
    """A line on standard error: the answer alone goes to standard output."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


_SCENARIOS = {  # name: (prompts, tokens of each, tokens to generate)
    "prefill": (1, 512, 1),
    "decode-1": (1, 32, 128),
    "decode-64": (64, 32, 64),
}


@app.command()
# The prompts would all be found in the prefix cache after the warm-up; and a seed would draw nothing here.
@_with_engine_options("enable_prefix_caching", "seed", "profile")
def bench(
    scenario: Annotated[str, typer.Argument(help=f"One of {', '.join(_SCENARIOS)}.")] = "decode-1",
    model: Annotated[str | None, typer.Option(help="As for run.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            dir_okay=False,
            readable=False,
            help="On a GPU: time every kernel instead, print a table, and write a timeline for "
            "ui.perfetto.dev to FILE.",
        ),
    ] = None,
    **options: Any,
) -> None:
    """Run a named load once warm, and print its speed. What nsys.sh and ncu.sh profile."""
    if scenario not in _SCENARIOS:
        raise typer.BadParameter(f"{scenario!r} is not one of {', '.join(_SCENARIOS)}")
    if profile is not None and (reason := _why_not_writable(profile)):
        raise typer.BadParameter(f"{profile} cannot be written: {reason}", param_hint="--profile")
    requests, prompt_tokens, new_tokens = _SCENARIOS[scenario]
    engine = _load(model, {**options, "enable_prefix_caching": False, "profile": profile is not None})
    vocab_size = engine.info()["vocab_size"]
    prompts = [[(7919 * i + 104729 * r) % vocab_size for i in range(prompt_tokens)] for r in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    # Threads, pages, and on a GPU a CUDA graph for every size that a step of the load has. Contexts grow, so
    # only the whole load meets them all. Where nothing is recorded, three tokens warm as well.
    eager = profile is not None or engine.config.enforce_eager or engine.info()["device"].startswith("cpu")
    warm = SamplingParams(
        temperature=0, max_tokens=min(new_tokens, 3) if eager else new_tokens, ignore_eos=True
    )
    engine.generate(prompts, warm)
    engine.take_profile()  # the warm-up's
    before = engine.metrics()
    start = time.monotonic()
    outputs = engine.generate(prompts, params)
    seconds = time.monotonic() - start
    after = engine.metrics()
    for output in outputs:
        completion = output.outputs[0]
        if completion.finish_reason == "error":
            raise Error(f"{scenario}: a request failed: {completion.stop_reason}")
        if len(completion.token_ids) < new_tokens:  # another load than its name says
            raise Error(
                f"{scenario}: a request stopped after {len(completion.token_ids)} of its {new_tokens} "
                f"tokens; it needs room for {prompt_tokens + new_tokens} (--max-model-len, and the KV cache)"
            )
    if profile is not None:
        _write_profile(engine, profile)
        return
    generated = sum(len(o.outputs[0].token_ids) for o in outputs)
    tokens, kind = (requests * prompt_tokens, "prompt") if new_tokens == 1 else (generated, "new")
    print(
        f"{scenario}: {requests} x ({prompt_tokens} prompt + {new_tokens} new) in {seconds:.3f} s, "
        f"{tokens / seconds:.1f} {kind} tok/s, {_count(after['num_steps'] - before['num_steps'], 'step')}, "
        f"{(after['bytes_read'] - before['bytes_read']) / seconds / 1e9:.1f} GB/s read"
    )


def _why_not_writable(file: Path) -> str:
    """Said before the work and not after it. "" when the file can be written."""
    if not file.parent.is_dir():
        return "no such folder"
    if file.exists():
        return "" if os.access(file, os.W_OK) else "no permission to change this file"
    return "" if os.access(file.parent, os.W_OK) else "no permission to write in this folder"


def _write_profile(engine: Engine, file: Path) -> None:
    records = engine.take_profile()
    try:
        file.write_text(json.dumps(chrome_trace(records, engine.info()["device"])) + "\n", encoding="utf-8")
    except OSError as error:
        raise Error(f"{file} cannot be written: {error.strerror}") from None
    print(table(records))
    print(summary(records))
    print(f"open {file} at https://ui.perfetto.dev")


@app.command()
def info() -> None:
    """How this package was built, and which devices it sees."""
    print("Build")
    for name, value in _core.build_info().items():
        if isinstance(value, bool):
            value = "yes" if value else "no"
        print(f"  {name}: {' '.join(value) if isinstance(value, list) else value}")
    best, *others = _core.available_isas()
    print("Devices")
    print(f"  cpu: instruction sets {', '.join([f'{best} (default)', *others])}")
    gpus, why_none = _core.cuda_devices()
    if not gpus:
        print(f"  cuda: none ({why_none})")
    for gpu in gpus:
        capability = f"{gpu.compute_capability // 10}.{gpu.compute_capability % 10}"
        memory = f"{gpu.memory_bytes / 1e9:.1f} GB"
        print(f"  cuda:{gpu.index}: {gpu.name}, compute capability {capability}, {memory}")


def _give_up_output(error: OSError | UnicodeEncodeError) -> NoReturn:
    """Ends the program, whose standard output takes no more. Quietly when the reader left, as `head` does."""
    # What is still in the buffer would be written at the exit, and fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, UnicodeEncodeError):
        letter = ascii(error.object[error.start])
        _say(f"standard output is {error.encoding}, which has no {letter}; set PYTHONIOENCODING=utf-8")
    elif error.errno != errno.EPIPE:
        _say(f"standard output cannot be written: {error.strerror}")
    sys.exit(1)


def main() -> None:
    """Entry point. Errors that a person can mend are one sentence, not a traceback."""
    warnings.showwarning = lambda message, *_, **__: _say(f"note: {message}")
    try:
        try:
            app(prog_name="tiny-vllm")  # also when started as python -m tiny_vllm
        finally:
            sys.stdout.flush()
    except (OSError, UnicodeEncodeError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # not about standard output
        _give_up_output(error)
    except Error as error:
        console.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        _say(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
