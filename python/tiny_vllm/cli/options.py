"""Options that several commands have: those of the engine, those of sampling, and the model."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import typer

from tiny_vllm.bundled import BUNDLED
from tiny_vllm.cache import byte_progress
from tiny_vllm.cli.output import say
from tiny_vllm.config import EngineConfig
from tiny_vllm.engine import Engine
from tiny_vllm.errors import Error
from tiny_vllm.events import perfetto_file
from tiny_vllm.model_files import resolve_model


def begin_with_bundled(incomplete: str) -> list[str]:
    """For completion. Where nothing is offered, a shell offers its files, as it does for no letter at all."""
    if not incomplete or not BUNDLED.startswith(incomplete):
        return []
    return sorted({BUNDLED, *(path.name for path in Path().glob(f"{incomplete}*"))})


Model = Annotated[
    str | None,
    typer.Option(
        help="A folder, a .gguf file (converted once, and kept in the cache), a Hub id, or bundled: the "
        "small model. A folder of that name is ./bundled. Default: bundled.",
        autocompletion=begin_with_bundled,
    ),
]

Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        dir_okay=False,
        readable=False,
        help="Write what the scheduler did to FILE, for tiny-vllm trace view, and a timeline for "
        "ui.perfetto.dev beside it.",
    ),
]

# --trace sets the first, and a policy that goes by priorities needs requests that have some.
_NO_FLAGS = ("record_events", "scheduling_policy")


class _Sampling(NamedTuple):
    kind: Any
    doc: str
    none: str  # what it means to leave it out, where the model has no say


SAMPLING = {
    "max_tokens": _Sampling(int, "Most tokens to generate for each answer.", ""),
    "temperature": _Sampling(float, "0 always takes the likeliest token; above 0 tokens are drawn.", ""),
    "top_p": _Sampling(float, "Draw from the likeliest tokens that hold this much probability.", "from all"),
    "top_k": _Sampling(int, "Draw from this many likeliest tokens.", "from all"),
    "min_p": _Sampling(float, "Drop tokens less likely than this times the likeliest; 0 to 1.", "drop none"),
    "repetition_penalty": _Sampling(
        float, "Above 1: tokens of the prompt or the answer become less likely; 1 changes nothing.", ""
    ),
    "presence_penalty": _Sampling(
        float, "Taken from the logit of each token that the answer has; -2 to 2.", ""
    ),
    "frequency_penalty": _Sampling(
        float, "Taken from a token's logit for each time the answer has it; -2 to 2.", ""
    ),
    "seed": _Sampling(int, "Draw the same tokens each time.", "others each time"),
}


def _with_flags(command: Any, flags: list[inspect.Parameter], rest: bool) -> Any:
    """The command with these flags after its own. With `rest` its `**options` may take still more."""
    signature = inspect.signature(command, eval_str=True)
    parameters = list(signature.parameters.values())
    options = [p for p in parameters if p.kind is p.VAR_KEYWORD]
    own = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    command.__signature__ = signature.replace(parameters=[*own, *flags, *(options if rest else [])])
    return command


def _flag(name: str, default: Any, kind: Any, doc: str, group: str) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(help=doc, rich_help_panel=group)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def with_sampling_options(
    defaults: dict[str, Any], models: dict[str, str] | None = None
) -> Callable[[Any], Any]:
    """Gives a command the flags of sampling. `models` has words for the defaults that the model may name."""

    def add_flags(command: Any) -> Any:
        flags = []
        for name, option in SAMPLING.items():
            default = defaults.get(name)
            none = (models or {}).get(name, option.none)
            doc = f"{option.doc} Default: {none}." if default is None else option.doc
            kind = option.kind | None if default is None else option.kind
            flags.append(_flag(name, default, kind, doc, "Sampling options"))
        return _with_flags(command, flags, rest=True)

    return add_flags


def with_engine_options(*left_out: str) -> Callable[[Any], Any]:
    """Gives a command one flag for each field of EngineConfig, so that no option is written twice.

    It is the outermost of the decorators: its flags stand last in the help.
    """

    def add_flags(command: Any) -> Any:
        hints = get_type_hints(EngineConfig)
        flags = []
        for f in fields(EngineConfig):
            if f.name in left_out or f.name in _NO_FLAGS:
                continue
            kind: Any = Literal[f.metadata["choices"]] if f.metadata["choices"] else hints[f.name]
            doc = f.metadata["doc"]
            flags.append(_flag(f.name, f.default, kind, f"{doc[0].upper()}{doc[1:]}.", "Engine options"))
        return _with_flags(command, flags, rest=False)

    return add_flags


def take_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Takes what `with_sampling_options` added out of the options; the rest is the engine's."""
    return {name: options.pop(name) for name in SAMPLING}


def load(model: str | None, options: dict[str, Any]) -> Engine:
    folder = resolve_model(model)  # may fetch and convert, with bars of its own
    with byte_progress("Loading weights") as progress:
        return Engine(folder, progress=progress, **options)


def check_trace_file(file: Path | None) -> None:
    for each in [] if file is None else [file, perfetto_file(file)]:
        if reason := why_not_writable(each):
            raise typer.BadParameter(f"{each} cannot be written: {reason}", param_hint="--trace")
        if not _is_ours(each):
            raise typer.BadParameter(
                f"{each} is there already and no trace; give another name", param_hint="--trace"
            )


def _is_ours(file: Path) -> bool:
    """Nothing is lost when it is written: it is not there, is empty, is a trace already, or a device."""
    if not file.is_file():
        return True
    with open(file, "rb") as opened:
        begin = opened.read(64)
    return not begin or begin.startswith((b'{"format":"tiny-vllm-trace"', b'{"traceEvents":'))


@contextmanager
def traced(engine: Engine, file: Path | None) -> Iterator[None]:
    """Afterwards the trace is written, also of what came to a bad end. The engine has record_events then."""
    try:
        yield
    finally:
        if file is not None:
            try:
                files = engine.events().write(file)
            except OSError as error:
                raise Error(f"{error.filename} cannot be written: {error.strerror}") from None
            say(f"wrote {files[0]} (look at it: tiny-vllm trace view {files[0]}) and {files[1]}")


def why_not_writable(file: Path) -> str:
    """Said before the work and not after it. "" when the file can be written."""
    if not file.parent.is_dir():
        return "no such folder"
    if file.exists():
        return "" if os.access(file, os.W_OK) else "no permission to change this file"
    return "" if os.access(file.parent, os.W_OK) else "no permission to write in this folder"
