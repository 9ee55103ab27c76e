"""``tiny-vllm bench``: named loads, and how fast they are."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tiny_vllm.cli.app import command
from tiny_vllm.cli.options import (
    Model,
    Trace,
    check_trace_file,
    load,
    traced,
    why_not_writable,
    with_engine_options,
)
from tiny_vllm.cli.output import counted
from tiny_vllm.engine import Engine
from tiny_vllm.errors import Error
from tiny_vllm.kernel_profile import chrome_trace, summary, table
from tiny_vllm.sampling_params import SamplingParams

_SCENARIOS = {  # name: (prompts, tokens of each, tokens to generate)
    "prefill": (1, 512, 1),
    "decode-1": (1, 32, 128),
    "decode-64": (64, 32, 64),
}


def _begin_with(incomplete: str) -> list[str]:
    return [name for name in _SCENARIOS if name.startswith(incomplete)]


@command(
    examples="""
    tiny-vllm bench
    tiny-vllm bench decode-64 --model ~/models/Qwen3-0.6B
    tiny-vllm bench prefill --profile profile.json    # on a GPU
    """
)
# The prompts would all be found in the prefix cache after the warm-up; and a seed would draw nothing here.
@with_engine_options("enable_prefix_caching", "seed", "profile")
def bench(
    scenario: Annotated[
        str,
        typer.Argument(
            metavar="SCENARIO", help=f"One of {', '.join(_SCENARIOS)}.", autocompletion=_begin_with
        ),
    ] = "decode-1",
    model: Model = None,
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
    trace: Trace = None,
    **options: Any,
) -> None:
    """Run a named load once warm, and print its speed. What nsys.sh and ncu.sh profile."""
    if scenario not in _SCENARIOS:
        raise typer.BadParameter(f"{scenario!r} is not one of {', '.join(_SCENARIOS)}")
    if profile is not None and (reason := why_not_writable(profile)):
        raise typer.BadParameter(f"{profile} cannot be written: {reason}", param_hint="--profile")
    check_trace_file(trace)
    options |= {"enable_prefix_caching": False, "profile": profile is not None}
    engine = load(model, {**options, "record_events": trace is not None})
    with traced(engine, trace):  # the warm-up too
        _run(engine, scenario, profile)


def _run(engine: Engine, scenario: str, profile: Path | None) -> None:
    requests, prompt_tokens, new_tokens = _SCENARIOS[scenario]
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
        f"{tokens / seconds:.1f} {kind} tok/s, {counted(after['num_steps'] - before['num_steps'], 'step')}, "
        f"{(after['bytes_read'] - before['bytes_read']) / seconds / 1e9:.1f} GB/s read"
    )


def _write_profile(engine: Engine, file: Path) -> None:
    records = engine.take_profile()
    try:
        file.write_text(json.dumps(chrome_trace(records, engine.info()["device"])) + "\n", encoding="utf-8")
    except OSError as error:
        raise Error(f"{file} cannot be written: {error.strerror}") from None
    print(table(records))
    print(summary(records))
    print(f"open {file} at https://ui.perfetto.dev")
