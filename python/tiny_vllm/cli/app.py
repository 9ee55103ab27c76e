"""The program around the commands: its own options, its help, and what becomes of errors."""

from __future__ import annotations

import errno
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer
from typer import completion
from typer.core import TyperCommand

from tiny_vllm import _core
from tiny_vllm.cache import console
from tiny_vllm.cli.output import say
from tiny_vllm.errors import Error

# Plain help instead of panels: those cut long option names short in a terminal of 80 columns.
app = typer.Typer(
    help="tiny-vllm: an LLM inference engine small enough to read.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
_COLUMN = 30  # the widest first column; what is wider gets a line of its own


class Command(TyperCommand):
    """A command whose help has a section for each group of options, and examples as they were written.

    The group is what `typer.Option` calls `rich_help_panel`. Without rich, typer itself shows no groups.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                name, doc = record
                for default in param.secondary_opts:  # --no-this: "[default: no-this]" is hard to read
                    doc = doc.replace(f"[default: {default.lstrip('-')}]", "[default: off]")
                    doc = doc.replace(f"[default: {param.opts[0].lstrip('-')}]", "[default: on]")
                is_argument = param.param_type_name == "argument"
                group = "Arguments" if is_argument else getattr(param, "rich_help_panel", None) or "Options"
                sections.setdefault(group, []).append((name, doc))
        names = [name for rows in sections.values() for name, _ in rows]
        column = min(_COLUMN, max(map(len, names)))  # the same in all sections
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(column), text) for name, text in rows], col_max=_COLUMN)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"  {line}\n")


def command(*, examples: str) -> Callable[[Any], Any]:
    """Makes a function a command, with `examples` at the end of its help, one a line."""
    return app.command(cls=Command, epilog=inspect.cleandoc(examples))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"tiny-vllm {_core.build_info()['version']}")
        raise typer.Exit()


@app.callback(
    epilog="tiny-vllm COMMAND --help says more of each command. The two options of completion also take the "
    f"name of a shell: {', '.join(_SHELLS)}."
)
def _every_command(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


def _give_up_output(error: OSError | UnicodeEncodeError) -> NoReturn:
    """Ends the program, whose standard output takes no more. Quietly when the reader left, as `head` does."""
    # What is still in the buffer would be written at the exit, and fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, UnicodeEncodeError):
        letter = ascii(error.object[error.start])
        say(f"standard output is {error.encoding}, which has no {letter}; set PYTHONIOENCODING=utf-8")
    elif error.errno != errno.EPIPE:
        say(f"standard output cannot be written: {error.strerror}")
    sys.exit(1)


def _complete_named_shell() -> bool:
    """`--show-completion bash` and `--install-completion=bash`. Without the name, typer looks for it."""
    option, equals, shell = (sys.argv[1] if len(sys.argv) > 1 else "").partition("=")
    if option not in ("--show-completion", "--install-completion"):
        return False
    if not equals and len(sys.argv) > 2 and not sys.argv[2].startswith("-"):
        equals, shell = "=", sys.argv[2]
    if not equals:
        return False
    if shell not in _SHELLS:
        say(f"Usage: tiny-vllm {option} [SHELL]\n")
        say(f"Error: Invalid value for {option}: {shell!r} is not one of {', '.join(_SHELLS)}")
        sys.exit(2)
    if option == "--show-completion":
        os.environ["_TINY_VLLM_COMPLETE"] = f"source_{shell}"  # how a shell asks for its script
        return False
    _, path = completion.install(  # type: ignore[attr-defined]
        shell=shell, prog_name="tiny-vllm", complete_var="_TINY_VLLM_COMPLETE"
    )
    print(f"{shell} completion installed in {path}; it works in the next terminal that you open")
    return True


def main() -> None:
    """Entry point. Errors that a person can mend are one sentence, not a traceback."""
    warnings.showwarning = lambda message, *_, **__: say(f"note: {message}")
    try:
        try:
            if not _complete_named_shell():
                app(prog_name="tiny-vllm")  # also when started as python -m tiny_vllm
        finally:
            sys.stdout.flush()
    except (OSError, UnicodeEncodeError) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise  # not about standard output
        _give_up_output(error)
    except Error as error:
        console.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        say(str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
