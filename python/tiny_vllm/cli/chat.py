"""``tiny-vllm chat``: a conversation in the terminal, or over standard input."""

from __future__ import annotations

import contextlib
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NamedTuple

import typer

from tiny_vllm.bundled import BUNDLED, NAME
from tiny_vllm.cli.app import command
from tiny_vllm.cli.conversation import MAX_TOKENS, TEMPERATURE, Conversation, DoesNotFit
from tiny_vllm.cli.options import (
    SAMPLING,
    Model,
    Trace,
    check_trace_file,
    load,
    take_sampling,
    traced,
    with_engine_options,
    with_sampling_options,
)
from tiny_vllm.cli.output import counted, did_you_mean, say
from tiny_vllm.errors import Error, InvalidRequestError
from tiny_vllm.plain_files import expanded
from tiny_vllm.sampling_params import SamplingParams

_OF_THE_MODEL = dict.fromkeys(
    ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"), "what the model asks for"
) | {"temperature": f"what the model asks for, or {TEMPERATURE}"}


@command(
    examples="""
    tiny-vllm chat
    tiny-vllm chat --system "You are a pirate." --temperature 0.7
    tiny-vllm chat --model ~/models/Qwen3-0.6B < questions.txt > answers.txt
    """
)
@with_engine_options("seed", "profile")
@with_sampling_options(
    {"max_tokens": MAX_TOKENS, "presence_penalty": 0.0, "frequency_penalty": 0.0}, _OF_THE_MODEL
)
def chat(
    model: Model = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="What the model is told before the conversation.")
    ] = None,
    trace: Trace = None,
    **options: Any,
) -> None:
    """Talk with a model; /help there lists what else you can do. Ctrl-C stops an answer, Ctrl-D leaves.

    What the model asks for stands in its generation_config.json; where it
    says nothing, vLLM's defaults hold, but for the temperature.

    Without a terminal, each line of standard input is a message of one
    conversation, and an empty line stands between its answers. A line that
    begins with / is a command there too; what it says goes to standard error.
    A message that begins with / is written with //. After a line that failed,
    the exit code is 1.
    """
    given = {name: value for name, value in take_sampling(options).items() if value is not None}
    SamplingParams(**given)  # what is out of range is said before the model is loaded
    check_trace_file(trace)
    engine = load(model, {**options, "record_events": trace is not None})
    conversation = Conversation(engine, given, system)
    with traced(engine, trace):
        if sys.stdin.isatty():
            _Terminal(conversation).talk(NAME if model in (None, BUNDLED) else model)
        elif not _Lines(conversation).answer_all():
            raise typer.Exit(1)


class _Command(NamedTuple):
    names: tuple[str, ...]
    argument: str
    doc: str
    run: Callable[[_Commands, str], None]


class _Leave(Exception):
    """Ends the loop."""


@contextlib.contextmanager
def _terminal_modes(on: int = 0, off: int = 0) -> Iterator[None]:
    """With these local modes of the terminal, and without those; afterwards as before.

    A shell would not mend a terminal without an echo: what is off comes back also when a signal ends or stops
    the program.
    """
    try:
        before = termios.tcgetattr(sys.stdin)
    except termios.error:  # the terminal is gone
        yield
        return
    within = [*before[:3], before[3] & ~off | on, *before[4:]]

    def set_modes(modes: list[Any]) -> None:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(sys.stdin, termios.TCSANOW, modes)

    def leave(number: int, _frame: FrameType | None) -> None:
        set_modes(before)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
        signal.signal(number, leave)  # Ctrl-Z, and then fg
        set_modes(within)

    ways_out = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
    watched = [number for number in ways_out if off and signal.getsignal(number) is signal.SIG_DFL]
    try:
        for number in watched:
            signal.signal(number, leave)
        set_modes(within)
        yield
    finally:
        set_modes(before)
        for number in watched:
            signal.signal(number, signal.SIG_DFL)


class _Commands:
    """What a line is taken for: a message or a command. Answers go to standard output, all else is said."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._begun = False  # something of the answer stands in the line

    def _obey(self, text: str) -> None:
        if _is_command(text):
            name, _, argument = text[1:].partition(" ")
            known = {name: c for c in _COMMANDS for name in c.names}
            if name not in known:
                hint = did_you_mean(f"/{name}", [f"/{other}" for other in known])
                raise InvalidRequestError(
                    f"there is no command /{name}{hint}; /help lists them, and a message that begins with "
                    "/ is written with //"
                )
            known[name].run(self, argument.strip())
        else:
            message = text.removeprefix("/")
            self._answer(lambda: self._conversation.ask(message, self._show))

    def _show(self, piece: str) -> None:
        print(piece, end="", flush=True)
        self._begun = self._begun or bool(piece)

    def _end_answer(self) -> None:
        self._show("\n")
        self._begun = False

    def _note(self, text: str) -> None:
        say(text)

    def _answer(self, ask: Callable[[], None]) -> None:
        try:
            ask()
        except Error:
            if self._begun:
                self._end_answer()
            raise
        self._end_answer()
        turn = self._conversation.last
        assert turn is not None
        if turn.finish_reason is None:
            self._note("(stopped; what came of the answer is remembered, and /retry asks again)")
        elif turn.finish_reason == "length" and turn.new_tokens == self._conversation.sampling["max_tokens"]:
            self._note(f"(cut at max_tokens, {turn.new_tokens}; /set max_tokens NUMBER allows more)")
        elif turn.finish_reason == "length":
            self._note(
                f"(cut: the conversation has come to its limit of {self._conversation.room} tokens; "
                "/undo or /clear makes room)"
            )
        elif not self._conversation.messages[-1]["content"]:
            self._note("(the model ended at once; /retry asks again)")

    def help(self, _: str) -> None:
        rows = [(", ".join(f"/{name}" for name in c.names) + f" {c.argument}", c.doc) for c in _COMMANDS]
        for name, doc in rows:
            say(f"  {name:<20} {doc}")
        say('A line that ends in \\ goes on in the next one; so does all between two lines of """.')
        say("Ctrl-C stops an answer; Ctrl-D leaves. //text is a message that begins with /.")

    def exit(self, _: str) -> None:
        raise _Leave

    def clear(self, _: str) -> None:
        self._conversation.clear()
        kept = "; the system message stays" if self._conversation.system is not None else ""
        say(f"The conversation is forgotten{kept}.")

    def undo(self, _: str) -> None:
        text = self._conversation.undo()
        if text is None:
            say("There is nothing to forget.")
        else:
            left = counted(len(self._conversation.messages), "message")
            say(f"Forgotten: {_brief(text)} and the answer to it; {left} left.")

    def retry(self, _: str) -> None:
        self._answer(lambda: self._conversation.retry(self._show))

    def system(self, text: str) -> None:
        if text in ('""', "''"):
            self._conversation.system = None
            say("There is no system message now.")
        elif text:
            self._conversation.system = text
            say("The system message is changed, from the next answer on.")
        elif self._conversation.system is None:
            say("There is no system message; /system TEXT gives one.")
        else:
            say(f'{self._conversation.system}\n(/system TEXT changes it, /system "" removes it)')

    def set(self, argument: str) -> None:
        name, _, word = argument.replace("=", " ").partition(" ")
        name, word = name.lstrip("-").replace("-", "_"), word.strip()
        if name not in SAMPLING or not word:
            unknown = (
                f"{name!r} cannot be set{did_you_mean(name, SAMPLING)}; "
                if name and name not in SAMPLING
                else ""
            )
            raise InvalidRequestError(
                f"{unknown}it is /set NAME VALUE, where NAME is one of {', '.join(SAMPLING)}, and VALUE a "
                "number, or default"
            )
        if word == "default":
            value = self._conversation.defaults[name]
        else:
            try:
                value = SAMPLING[name].kind(word)
            except ValueError:
                wanted = "a whole number" if SAMPLING[name].kind is int else "a number"
                raise InvalidRequestError(f"{name} must be {wanted}, or default, got {word!r}") from None
        self._conversation.set(name, value)
        greedy = (
            name in ("top_p", "top_k", "min_p", "seed") and self._conversation.sampling["temperature"] == 0
        )
        say(f"{name} = {_shown(value)}{' (has no effect at temperature 0)' if greedy else ''}")

    def params(self, _: str) -> None:
        for name, value in self._conversation.sampling.items():
            default = value == self._conversation.defaults[name]
            say(f"{name} = {_shown(value)} ({self._conversation.sources[name] if default else '/set'})")
        if self._conversation.system is not None:
            say(f"system = {self._conversation.system!r}")

    def stats(self, _: str) -> None:
        turn = self._conversation.last
        if turn is None:
            say("There is no answer yet.")
        else:
            used = turn.prompt_tokens + turn.new_tokens
            say(f"Last turn: {turn}.")
            say(f"The conversation had {used} of {self._conversation.room} tokens after it.")

    def save(self, argument: str) -> None:
        replaced = self._conversation.save(_file("save", argument))
        say(f"{self._all()} saved{'; the conversation that was there is replaced' if replaced else ''}.")

    def load(self, argument: str) -> None:
        self._conversation.load(_file("load", argument))
        say(f"{self._all()} loaded.")

    def _all(self) -> str:
        system = ", and the system message," if self._conversation.system is not None else ""
        return f"{counted(len(self._conversation.messages), 'message')}{system}"


class _Terminal(_Commands):
    """Reads messages and commands from a terminal."""

    def __init__(self, conversation: Conversation) -> None:
        super().__init__(conversation)
        self._at_prompt = False
        self._readline = _line_editor()
        # Prompts are kept off a standard output that goes elsewhere. A line can be edited only in a terminal.
        self._can_edit = self._readline is not None and sys.stdout.isatty()

    def talk(self, name: str) -> None:
        """Until the person leaves."""
        say(f"{name}. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")
        with self._own_ctrl_c(), contextlib.suppress(_Leave):
            while True:
                text = self._read()
                try:
                    self._obey(text)
                except DoesNotFit as error:
                    say(f"{error}. /undo forgets the last exchange, /clear all; then /retry sends it again.")
                except InvalidRequestError as error:
                    say(str(error))
                except Error as error:
                    unsent = "; /retry asks again" if self._conversation.unsent is not None else ""
                    say(f"{error}{unsent}")

    @contextlib.contextmanager
    def _own_ctrl_c(self) -> Iterator[None]:
        """Ctrl-C raises KeyboardInterrupt at the prompt only.

        An answer is stopped between two of its pieces, so that what the screen shows and what the
        conversation remembers are the same.
        """

        def interrupt(_signal: int, _frame: FrameType | None) -> None:
            if self._at_prompt:
                raise KeyboardInterrupt
            self._conversation.stop()

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            with _terminal_modes(on=termios.NOFLSH):  # Ctrl-C drops nothing that is not on the screen yet
                yield
        finally:
            signal.signal(signal.SIGINT, before)

    # ---- reading -------------------------------------------------------------------------------------------

    def _read(self) -> str:
        """A message, of several lines perhaps. Raises _Leave."""
        lines: list[str] = []
        in_block = warned = False
        while True:
            try:
                self._at_prompt = True
                line = self._read_line("... " if lines or in_block else "> ")
                self._at_prompt = False
            except KeyboardInterrupt:
                self._at_prompt = False
                # What was typed is dropped, as in a shell; only where nothing was, leaving is meant.
                dropped = lines or in_block or self._typed()
                print(file=sys.stderr)
                if warned and not dropped:
                    raise _Leave from None
                if not dropped:
                    say("Ctrl-C once more, Ctrl-D or /exit leaves.")
                warned = not dropped
                lines, in_block = [], False
                continue
            except EOFError:
                self._at_prompt = False
                print(file=sys.stderr)
                if not lines:
                    raise _Leave from None
                return "\n".join(lines)
            except UnicodeDecodeError:
                self._at_prompt = False
                say("that line is not UTF-8 text")
                continue
            warned = False
            if line.strip() == '"""' and (in_block or not lines):
                if in_block and any(part.strip() for part in lines):
                    return "\n".join(lines)
                in_block, lines = not in_block, []
            elif in_block:
                lines.append(line)
            elif line.endswith("\\"):
                lines.append(line[:-1])
            else:
                lines.append(line)
                text = "\n".join(lines)
                if text.strip():
                    return text
                lines = []

    def _read_line(self, prompt: str) -> str:
        if self._can_edit:
            return input(prompt)
        print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _typed(self) -> str:
        """What stood in the line when Ctrl-C came."""
        return self._readline.get_line_buffer() if self._can_edit else ""

    def _answer(self, ask: Callable[[], None]) -> None:
        # What is typed meanwhile is for the next prompt, which shows it.
        with _terminal_modes(off=termios.ECHO):
            super()._answer(ask)


class _Lines(_Commands):
    """Reads standard input, a message or a command a line."""

    def __init__(self, conversation: Conversation) -> None:
        super().__init__(conversation)
        self._number = 0
        self._between = ""  # what stands between an answer and the one before

    def answer_all(self) -> bool:
        """Whether nothing went wrong; what did is said, and the other lines are done all the same."""
        ok = True
        with contextlib.suppress(_Leave):
            for self._number, line in enumerate(sys.stdin.buffer, 1):
                try:
                    text = line.rstrip(b"\r\n").decode("utf-8-sig" if self._number == 1 else "utf-8")
                    if text.strip():
                        self._obey(text)
                except UnicodeDecodeError:
                    self._note("no answer, because it is not UTF-8 text")
                    ok = False
                except Error as error:
                    advice = (
                        "; /clear begins anew, or raise --max-model-len"
                        if isinstance(error, DoesNotFit)
                        else ""
                    )
                    failed = "" if _is_command(text) else "no answer: "
                    self._note(f"{failed}{error}{advice}")
                    ok = False
        return ok

    def _show(self, piece: str) -> None:
        if piece:
            super()._show(self._between + piece)
            self._between = ""

    def _end_answer(self) -> None:
        super()._end_answer()
        self._between = "\n"

    def _note(self, text: str) -> None:
        say(f"line {self._number}: {text}")


_COMMANDS = (
    _Command(("help",), "", "this list", _Commands.help),
    _Command(("exit", "quit"), "", "leave", _Commands.exit),
    _Command(("clear", "reset"), "", "forget the conversation", _Commands.clear),
    _Command(("undo",), "", "forget the last message and its answer", _Commands.undo),
    _Command(("retry",), "", "answer the last message again", _Commands.retry),
    _Command(("system",), "TEXT", "what the model is told before the conversation", _Commands.system),
    _Command(("set",), "NAME VALUE", "change a parameter; /params lists them", _Commands.set),
    _Command(("params", "show"), "", "the parameters of sampling", _Commands.params),
    _Command(("stats",), "", "tokens and speed of the last answer, and the prefix cache", _Commands.stats),
    _Command(("save",), "FILE", "write the messages as JSON", _Commands.save),
    _Command(("load",), "FILE", "go on with the messages of a file", _Commands.load),
)


def _is_command(text: str) -> bool:
    return text.startswith("/") and not text.startswith("//")


def _file(name: str, argument: str) -> Path:
    if not argument:
        raise InvalidRequestError(f"/{name} FILE needs the name of a file")
    return expanded(argument)


def _shown(value: Any) -> str:
    return "other numbers each time" if value is None else str(value)  # seed


def _brief(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _line_editor() -> Any:
    """The module readline, set up, or None: Python may have been built without it.

    What was typed can be fetched back with the arrow keys; it is in no file.
    """
    try:
        import readline
    except ImportError:
        return None
    found: list[str] = []

    def complete(text: str, state: int) -> str | None:
        if state == 0:
            found[:] = _completions(readline.get_line_buffer(), text)
        return found[state] if state < len(found) else None

    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
    readline.set_completer_delims(" ")
    readline.set_completer(complete)
    return readline


def _completions(line: str, word: str) -> list[str]:
    """What the tab key offers: commands, parameters and files."""
    name, space, _ = line.partition(" ")
    if not space:
        known = [f"/{name}{' ' if c.argument else ''}" for c in _COMMANDS for name in c.names]
    elif name == "/set" and line.count(" ") == 1:
        known = [f"{name} " for name in SAMPLING]
    elif name in ("/save", "/load"):
        folder = expanded(word) if word.endswith("/") else expanded(word).parent
        prefix = word[: word.rfind("/") + 1]
        try:
            known = [f"{prefix}{p.name}{'/' if p.is_dir() else ''}" for p in sorted(folder.iterdir())]
        except OSError:
            known = []
    else:
        known = []
    return [name for name in known if word and name.startswith(word)]
