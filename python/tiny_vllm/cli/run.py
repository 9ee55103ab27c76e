"""``tiny-vllm run``: prompts in, answers out."""

from __future__ import annotations

import re
import secrets
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tiny_vllm import _core
from tiny_vllm.cache import count_progress
from tiny_vllm.cli.app import command
from tiny_vllm.cli.options import (
    Model,
    Trace,
    check_trace_file,
    load,
    take_sampling,
    traced,
    with_engine_options,
    with_sampling_options,
)
from tiny_vllm.cli.output import counted, say
from tiny_vllm.engine import Engine
from tiny_vllm.errors import Error
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import SamplingParams

_DEFAULTS = {
    "max_tokens": 128,
    "temperature": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


@command(
    examples="""
    tiny-vllm run "The capital of France is"
    tiny-vllm run --chat --temperature 0.7 --top-p 0.9 "What is gravity?"
    tiny-vllm run --model ~/models/Qwen3-0.6B --file prompts.txt
    tiny-vllm run --trace run.json "One," "Two," && tiny-vllm trace view run.json
    """
)
# This --seed is the requests' own; and bench shows what profile finds.
@with_engine_options("seed", "profile")
@with_sampling_options(_DEFAULTS)
def run(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="One prompt is streamed; several run as one batch.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Read more prompts from a file, one a line; - is standard input."),
    ] = None,
    model: Model = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Each prompt is a user's message: use the chat template.")
    ] = False,
    trace: Trace = None,
    **options: Any,
) -> None:
    """Complete prompts, or answer them with --chat."""
    texts = list(prompts or [])
    if file is not None:
        texts += _read_prompts(file)
    if not texts:
        raise typer.BadParameter("give a prompt, or --file FILE")
    sampling = take_sampling(options)
    if sampling["temperature"] == 0:
        for name in ("top_p", "top_k", "min_p"):
            if sampling[name] is not None:
                raise typer.BadParameter(
                    "has no effect at temperature 0; give --temperature too",
                    param_hint=f"--{name.replace('_', '-')}",
                )
    given = {name: value for name, value in sampling.items() if value is not None}
    params = [SamplingParams(**{"seed": secrets.randbits(63), **given}) for _ in texts]
    check_trace_file(trace)
    engine = load(model, {**options, "record_events": trace is not None})
    with traced(engine, trace):
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
    try:
        for output in outputs:
            at_first_token = at_first_token or engine.metrics()
            answer = output.outputs[0].text
            print(answer[shown:], end="", flush=True)
            shown = len(answer)
    finally:  # also after Ctrl-C: the shell's prompt gets a line of its own
        print(flush=True)
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
            say(f"no answer to {prompt!r}: {output.outputs[0].stop_reason}")
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
        say(f"{which}the model ended at once; for a question try --chat")


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
    say(
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
    who = f"{counted(len(cut), 'answer')} " if len(outputs) > 1 else ""
    return f" ({who}cut at {'--max-tokens' if own else '--max-model-len, --max-tokens or the KV cache'})"
