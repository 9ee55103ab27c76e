"""``tiny-vllm trace view``."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from tiny_vllm.cli.app import Command, app
from tiny_vllm.trace.format import TraceError, read_trace
from tiny_vllm.trace.view import make_page

trace_app = typer.Typer(
    help="Look at what the scheduler did.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(trace_app, name="trace")


@trace_app.callback()
def _every_command() -> None:
    """Keeps `view` a command of its own while it is the only one."""


@trace_app.command(
    cls=Command,
    epilog="tiny-vllm trace view run.json\n"
    "tiny-vllm trace view static.json continuous.json --output both.html --open",
)
def view(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A trace, as tiny-vllm run --trace FILE writes it.")
    ],
    file2: Annotated[
        Path | None,
        typer.Argument(metavar="FILE2", help="A second run of the same requests, to be shown beside it."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page to write. Default: FILE with .html.")
    ] = None,
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Show the page in the browser.")
    ] = False,
) -> None:
    """Make one HTML page of a trace: who sat where, which blocks were whose, and why."""
    inputs = [file] if file2 is None else [file, file2]
    if not file.name:
        raise typer.BadParameter(f"{file} is a folder", param_hint="FILE")
    page_file = output if output is not None else file.with_suffix(".html")
    if any(
        os.path.exists(page_file) and os.path.exists(path) and page_file.samefile(path) for path in inputs
    ):
        raise typer.BadParameter(
            f"{page_file} is the trace; name another file for the page", param_hint="--output"
        )
    page = make_page([read_trace(path) for path in inputs], [path.name for path in inputs])
    try:
        page_file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"{page_file} cannot be written: {error.strerror}") from None
    print(f"wrote {page_file}")
    if open_page and not webbrowser.open(page_file.resolve().as_uri()):
        print(f"no browser could be opened; open {page_file} yourself")
