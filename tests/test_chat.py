"""`tiny-vllm chat`: a conversation in a real terminal, and over standard input."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import fixtures
import pytest
from helpers import MODEL_OPTIONS, Run, open_engine, python_process
from tiny_vllm import SamplingParams
from tiny_vllm.cli import chat
from tiny_vllm.cli.conversation import Conversation, Unanswered

# The letters of an answer each come once: the model knows only the last token.
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<go>{% endif %}"
)
ANSWER = "Truly so."


def write_answering(folder: Path, answer: str = ANSWER, **config: object) -> Path:
    """A model that says `answer` to everything, and a chat template."""
    fixtures.write_chain(folder, answer.encode(), **config)
    pieces = [bytes([1, i]) for i in range(255)]
    fixtures.write_byte_tokenizer(folder, pieces, ["<go>"], chat_template=TEMPLATE)
    return folder


def write_endless(folder: Path, letter: str = "A") -> Path:
    """A model that says the letter again and again."""
    logits = [0.0] * 266
    logits[ord(letter)] = 1.0
    fixtures.write_fixed(folder, logits, max_position_embeddings=10**6)
    fixtures.write_byte_tokenizer(folder, chat_template=TEMPLATE.replace("<go>", "assistant:"))
    return folder


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answering(tmp_path_factory.mktemp("answering"))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_endless(tmp_path_factory.mktemp("endless"))


# ---- over standard input -----------------------------------------------------------------------------------


def test_each_line_is_a_message(run: Run, answering: Path) -> None:
    code, out, err = run("chat", "--model", str(answering), *MODEL_OPTIONS, stdin="one\n\n//two\r\nthree")
    assert (code, out, err) == (0, "\n".join([f"{ANSWER}\n"] * 3), "")


def test_a_line_may_be_a_command(run: Run, answering: Path, tmp_path: Path) -> None:
    """What it says is not among the answers."""
    file = tmp_path / "it.json"
    lines = [
        "/system Be kind.",
        "//etc/motd",
        "/two",
        "/set top_p 2",
        f"/save {file}",
        "/clear",
        "hi",
        "/exit",
        "x",
    ]
    code, out, err = run("chat", "--model", str(answering), *MODEL_OPTIONS, stdin="\n".join(lines))
    assert (code, out) == (1, f"{ANSWER}\n\n{ANSWER}\n")
    said = err.splitlines()
    assert said[0] == "The system message is changed, from the next answer on."
    assert said[1].startswith("line 3: there is no command /two")
    assert said[2].startswith("line 4: top_p must be in")
    assert said[3:] == [
        "2 messages, and the system message, saved.",
        "The conversation is forgotten; the system message stays.",
    ]
    messages = json.loads(file.read_text())
    assert [m["content"] for m in messages] == ["Be kind.", "/etc/motd", ANSWER]


@pytest.mark.parametrize("name", ["~nosuchuser/x", "a" * 300, "/nowhere/x"])
def test_files_that_cannot_be(run: Run, answering: Path, name: str) -> None:
    """A sentence each, and the conversation goes on."""
    lines = f"/save {name}\n/load {name}\nhi\n"
    code, out, err = run("chat", "--model", str(answering), *MODEL_OPTIONS, stdin=lines)
    assert (code, out) == (1, f"{ANSWER}\n")
    assert [line.partition(":")[0] for line in err.splitlines()] == ["line 1", "line 2"]
    assert err.count("cannot be ") == 2


def test_a_line_whose_answer_is_cut(run: Run, endless: Path) -> None:
    options = ["--max-tokens", "2", "--temperature", "0", *MODEL_OPTIONS]
    code, out, err = run("chat", "--model", str(endless), *options, stdin="\nhi\n")
    assert (code, out) == (0, "AA\n")
    assert err == "line 2: (cut at max_tokens, 2; /set max_tokens NUMBER allows more)\n"


def test_a_line_that_fails_does_not_stop_the_others(run: Run, answering: Path) -> None:
    code, out, err = run(
        "chat",
        "--model",
        str(answering),
        "--max-model-len",
        "90",
        *MODEL_OPTIONS,
        stdin=f"a\n{'b' * 65}\n{'b' * 90}\nc\n",
    )
    assert (code, out) == (1, f"{ANSWER}\n\n{ANSWER}\n")
    assert re.fullmatch(
        r"line 2: no answer: the conversation has \d+ tokens with this message, and there is room for 90 "
        r"with the answer \(max_model_len\); /clear begins anew, or raise --max-model-len\n"
        r"line 3: no answer: this message alone has \d+ tokens, and there is room for 90 with the answer "
        r"\(max_model_len\): it can never be sent; shorten it\n",
        err,
    )


def test_a_line_that_is_no_text(answering: Path) -> None:
    done = subprocess.run(
        command("chat", "--model", str(answering), *MODEL_OPTIONS), input=b"\xff\nhi\n", capture_output=True
    )
    assert (done.returncode, done.stdout.decode()) == (1, f"{ANSWER}\n")
    assert done.stderr == b"line 1: no answer, because it is not UTF-8 text\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "InvalidRequestError: temperature must be"),
        (["--max-tokens", "0"], "InvalidRequestError: max_tokens must be"),
    ],
)
def test_wrong_parameters_are_said_before_the_model_is_loaded(
    run: Run, arguments: list[str], message: str
) -> None:
    code, out, err = run("chat", "--model", "./not/there", *arguments)
    assert (code, out) == (1, "")
    assert message in err


def test_a_model_without_a_chat_template(run: Run, rand_folder: Path) -> None:
    code, out, err = run("chat", "--model", str(rand_folder), *MODEL_OPTIONS, stdin="hi\n")
    assert (code, out) == (1, "")
    assert err == (
        f"InvalidRequestError: {rand_folder} has no chat template, so it cannot chat; `tiny-vllm run` goes "
        "on with a text\n"
    )


# ---- without a terminal: what a conversation remembers ---------------------------------------------------


def no_show(_: str) -> None:
    pass


def test_the_model_names_the_defaults(tmp_path: Path) -> None:
    """And flags come before it."""
    write_answering(tmp_path)
    fixtures.write_json(
        tmp_path / "generation_config.json", {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.25}
    )
    params = Conversation(open_engine(tmp_path), {"top_k": 3})._params()
    wanted = {"temperature": 0.5, "top_k": 3, "repetition_penalty": 1.25, "max_tokens": 512}
    assert params == SamplingParams(**wanted, seed=params.seed)  # type: ignore[arg-type]
    assert params.seed is not None


@pytest.mark.parametrize(
    ("config", "given", "temperature", "source"),
    [
        ({}, {}, 0.7, "default"),
        ({"top_k": 5}, {}, 0.7, "default"),
        ({"temperature": 1.0}, {}, 1.0, "the model's"),
        ({"temperature": 0.6}, {"temperature": 0.2}, 0.2, "flag"),
    ],
)
def test_where_the_model_names_no_temperature(
    tmp_path: Path, config: dict[str, object], given: dict[str, float], temperature: float, source: str
) -> None:
    write_answering(tmp_path)
    fixtures.write_json(tmp_path / "generation_config.json", config)
    conversation = Conversation(open_engine(tmp_path), given)
    assert conversation.sampling["temperature"] == temperature
    assert conversation.sources["temperature"] == source
    assert conversation.sources["max_tokens"] == "default"


def test_later_turns_find_the_earlier_ones_in_the_prefix_cache(answering: Path) -> None:
    engine = open_engine(answering)
    conversation = Conversation(engine, {"temperature": 0.0}, system="Be brief, be kind, and be right.")
    known = 0
    for _ in range(4):
        before = engine.metrics()["prefix_cache_hit_tokens"]
        conversation.ask("a question of some length " * 2, no_show)
        last = conversation.last
        assert last is not None
        assert last.cached_tokens == engine.metrics()["prefix_cache_hit_tokens"] - before
        # All blocks of 16 that were full when the last turn ended, but for what the template ends with.
        assert last.cached_tokens >= known - 2 * 16
        known = last.prompt_tokens + last.new_tokens


def test_what_fails_changes_nothing(answering: Path) -> None:
    conversation = Conversation(open_engine(answering, max_model_len=100), {})
    conversation.ask("hi", no_show)
    before = conversation.messages
    with pytest.raises(Unanswered, match=r"has \d+ tokens with this message, and there is room for 100"):
        conversation.ask("x" * 70, no_show)
    assert (conversation.messages, conversation.unsent) == (before, "x" * 70)
    conversation.system = "Be kind."
    with pytest.raises(Unanswered, match=r"this message alone has 1\d\d tokens with the system message, and"):
        conversation.ask("x" * 90, no_show)
    assert (conversation.messages, conversation.unsent) == (before, None)  # to send it again is no use
    conversation.system = None
    conversation.clear()
    conversation.unsent = "short"
    conversation.retry(no_show)
    assert [m["content"] for m in conversation.messages] == ["short", ANSWER]
    assert conversation.unsent is None


def test_a_stop_before_the_first_token_leaves_nothing(endless: Path) -> None:
    conversation = Conversation(open_engine(endless), {"max_tokens": 5, "temperature": 0.0})
    params = conversation._params

    def stopped() -> SamplingParams:
        conversation.stop()
        return params()

    conversation._params = stopped  # type: ignore[method-assign]
    with pytest.raises(Unanswered, match="stopped before the answer began"):
        conversation.ask("hi", no_show)
    assert conversation.messages == []
    conversation._params = params  # type: ignore[method-assign]
    conversation.retry(no_show)
    assert [m["content"] for m in conversation.messages] == ["hi", "AAAAA"]
    assert not conversation.engine.has_unfinished_requests()


# ---- in a terminal -----------------------------------------------------------------------------------------


def command(*arguments: str) -> list[str]:
    return python_process(f"sys.argv = {['tiny-vllm', *arguments]!r}\nfrom tiny_vllm.cli import main\nmain()")


class Terminal:
    """A program in a terminal of its own, and what it wrote there."""

    def __init__(self, *arguments: str) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "INPUTRC": os.devnull}
        self.process = subprocess.Popen(
            command(*arguments),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that \x03 is Ctrl-C
        )
        os.close(slave)
        self.unread = ""

    def expect(self, pattern: str, seconds: float = 20) -> str:
        """Reads on until the pattern comes; returns what came before and with it."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.unread)) is None:
            left = end - time.monotonic()
            assert left > 0, f"{pattern!r} did not come: {self.unread!r}"
            assert select.select([self.master], [], [], left)[0], f"{pattern!r} did not come: {self.unread!r}"
            try:
                self.unread += os.read(self.master, 65536).decode("utf-8", "replace")
            except OSError:  # how Linux says that the program is gone
                raise AssertionError(f"the program ended without {pattern!r}: {self.unread!r}") from None
            # Without what readline says to the terminal alone.
            self.unread = re.sub(r"\x1b\[\?2004[hl]\r?", "", self.unread).replace("\r\n", "\n")
        read, self.unread = self.unread[: found.end()], self.unread[found.end() :]
        return read

    def send(self, text: str) -> None:
        os.write(self.master, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C, once the program waits for a key: readline sees an earlier one with the next key only."""
        calm = 0
        while calm < 5:
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(") ", 1)[1][0]
            calm = calm + 1 if state == "S" else 0
            time.sleep(0.02)
        self.send("\x03")

    def say(self, text: str, pattern: str) -> str:
        """A line, and what comes after its echo up to the next prompt, which has the pattern in it."""
        self.send(text + "\n")
        self.expect(re.escape(text.splitlines()[-1]) + "\n")
        answer = self.expect(r"(?:^|\n)> $")
        assert re.search(pattern, answer), answer
        return answer

    def end(self, seconds: float = 20) -> int:
        """Its exit status. Fails if it does not end by itself."""
        end = time.monotonic() + seconds
        with contextlib.suppress(OSError):  # until the program closes its side
            while select.select([self.master], [], [], max(0.0, end - time.monotonic()))[0]:
                assert time.monotonic() < end, "the program goes on writing"
                if not os.read(self.master, 65536):
                    break
        return self.process.wait(20)


@contextlib.contextmanager
def talk(folder: Path, *arguments: str) -> Iterator[Terminal]:
    terminal = Terminal("chat", "--model", str(folder), *MODEL_OPTIONS[:-1], str(2**26), *arguments)
    try:
        terminal.expect("/help lists the commands.*\n> ")
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


def test_commands(answering: Path, tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    with talk(answering, "--system", "Be kind.") as terminal:
        say = terminal.say
        say("/stats", "There is no answer yet")
        say("/undo", "There is nothing to forget")
        say("/retry", "there is no message yet that could be answered again")
        say("hello", re.escape(ANSWER))
        say(
            "/stats",
            rf"Last turn: \d+ prompt tokens, 0 of them \(0%\).*; {len(ANSWER) + 1} new tokens, first",
        )
        # A retry begins with the same prompt.
        say("/retry", re.escape(ANSWER))
        say("/stats", r"prompt tokens, (16|32) of them")
        say("//etc/motd", re.escape(ANSWER))
        say("/system", "Be kind")
        say("/system Be brief.", "The system message is changed")
        say(f"/save {file}", "4 messages, and the system message, saved")
        say(f"/save {file}", "message, saved; the conversation that was there is replaced")
        say("/undo", "Forgotten: '/etc/motd' and the answer to it; 2 messages left")
        say("/cler", r"there is no command /cler \(did you mean /clear\?\); /help lists")
        say("/reset", "The conversation is forgotten; the system message stays")
        say(f"/load {file}", "4 messages, and the system message, loaded")
        say("/retry", re.escape(ANSWER))
        say("/load /not/there", "/not/there cannot be read: No such file")
        say("/save", "/save FILE needs the name of a file")
        say('/system ""', "There is no system message now")
        say(f"/save {file}", "4 messages saved")
        say(f"/save {answering / 'config.json'}", "exists and is not a saved conversation")
        assert all(f"/{name}" in say("/help", "this list") for c in chat._COMMANDS for name in c.names)
        terminal.send("/quit\n")
        assert terminal.end() == 0
    said = [("user", "hello"), ("assistant", ANSWER), ("user", "/etc/motd"), ("assistant", ANSWER)]
    assert [(m["role"], m["content"]) for m in json.loads(file.read_text())] == said


def test_parameters(endless: Path) -> None:
    with talk(endless, "--temperature", "0", "--max-tokens", "3") as terminal:
        say = terminal.say
        say("hi", r"^AAA\n\(cut at max_tokens, 3; /set max_tokens NUMBER allows more\)")
        say("/set max_tokens 5", "max_tokens = 5")
        say("hi", r"^AAAAA\n")
        say("/set top-p 0.5", r"top_p = 0.5 \(has no effect at temperature 0\)")
        say("/set temperature 0.25", "temperature = 0.25")
        say("/set top_p 7", "top_p must be in")
        say("/set seed many", "seed must be a whole number, or default, got 'many'")
        say("/set seed 5", "seed = 5")
        say("/set seed default", "seed = other numbers each time")
        say(
            "/set temprature 1",
            r"^'temprature' cannot be set \(did you mean temperature\?\); it is /set NAME",
        )
        say(
            "/set stop foo",
            "'stop' cannot be set.*; it is /set NAME VALUE, where NAME is one of max_tokens, ",
        )
        shown = say("/show", r"temperature = 0.25 \(/set\)")
        assert "max_tokens = 5 (/set)" in shown
        assert "top_p = 0.5 (/set)" in shown
        assert "top_k = 0 (default)" in shown
        say("/set max_tokens default", "max_tokens = 3")
        say("/show", r"max_tokens = 3 \(flag\)")


def test_a_message_of_several_lines(endless: Path, tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    with talk(endless, "--temperature", "0", "--max-tokens", "1") as terminal:
        terminal.send("one\\\n")
        terminal.expect(r"\.\.\. ")
        terminal.say("two", "^A\n")
        terminal.send('"""\n')
        terminal.expect(r"\.\.\. ")
        for line in ("three\\", "", "/four"):
            terminal.send(f"{line}\n")
            terminal.expect(r"\.\.\. ")
        terminal.say('"""', "^A\n")
        terminal.say(f"/save {file}", "4 messages saved")
        terminal.send("\x04")
        assert terminal.end() == 0
    assert [m["content"] for m in json.loads(file.read_text())[::2]] == ["one\ntwo", "three\\\n\n/four"]


def test_what_no_longer_fits(answering: Path) -> None:
    with talk(answering, "--max-model-len", "100") as terminal:
        terminal.say("hello", re.escape(ANSWER))
        terminal.say(
            "x" * 70,
            r"the conversation has 1\d\d tokens with this message, and there is room for 100 with the answer "
            r"\(max_model_len\). /undo forgets the last exchange, /clear all; then /retry sends it again",
        )
        terminal.say("/undo", "Forgotten: 'hello' and the answer to it; 0 messages left")
        terminal.say("/retry", f"^{ANSWER}")


def test_a_message_that_is_too_long_by_itself(answering: Path) -> None:
    """No advice that would cost the conversation."""
    with talk(answering, "--max-model-len", "100") as terminal:
        terminal.say("hello", re.escape(ANSWER))
        terminal.say(
            "x" * 100,
            r"^this message alone has 1\d\d tokens, and there is room for 100 with the answer "
            r"\(max_model_len\): it can never be sent; shorten it\n> $",
        )
        terminal.say("/undo", "Forgotten: 'hello' and the answer to it; 0 messages left")


def has_echo(terminal: Terminal) -> bool:
    return bool(termios.tcgetattr(terminal.master)[3] & termios.ECHO)


def test_what_is_typed_meanwhile_is_for_the_next_prompt(endless: Path) -> None:
    with talk(endless, "--temperature", "0", "--max-tokens", "200000") as terminal:
        terminal.send("go on\n")
        terminal.expect("go on\n")
        terminal.expect("A{20}")
        assert not has_echo(terminal)
        terminal.send("/stats\n/exi")
        terminal.expect("^A{200}")
        terminal.send("\x03")
        assert "/" not in terminal.expect(r"A*\n\(stopped;").replace("/retry", "")
        terminal.expect(r"\n> /stats\nLast turn: .*\n(.*\n)*> /exi")
        terminal.send("t\n")
        assert terminal.end() == 0
        assert has_echo(terminal)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_the_echo_comes_back_when_the_program_is_ended(endless: Path, number: signal.Signals) -> None:
    with talk(endless, "--temperature", "0", "--max-tokens", "200000") as terminal:
        terminal.send("go on\n")
        terminal.expect("A{20}")
        assert not has_echo(terminal)
        terminal.process.send_signal(number)
        assert terminal.end() == -number
        assert has_echo(terminal)


def test_ctrl_c_stops_an_answer(endless: Path, tmp_path: Path) -> None:
    """What came of it stays in the conversation, to the letter."""
    file = tmp_path / "it.json"
    with talk(endless, "--temperature", "0", "--max-tokens", "200000") as terminal:
        terminal.send("go on\n")
        terminal.expect("go on\n")
        shown = terminal.expect("A{20}")
        terminal.send("\x03")
        shown += terminal.expect(
            r"\(stopped; what came of the answer is remembered, and /retry asks again\)\n> "
        )
        terminal.say("/set max_tokens 4", "max_tokens = 4")
        terminal.say(f"/save {file}", "2 messages saved")
        messages = json.loads(file.read_text())
        letters = re.sub(r"\^C|\(stopped.*|\s", "", shown, flags=re.DOTALL)
        assert messages == [{"role": "user", "content": "go on"}, {"role": "assistant", "content": letters}]
        # The next turn has it in its prompt, and in the prefix cache.
        terminal.say("more", r"^AAAA\n")
        found = re.search(r"turn: (\d+) prompt tokens, (\d+) of them", terminal.say("/stats", "Last turn"))
        assert found is not None
        assert int(found[1]) > len(letters)
        assert int(found[2]) > len(letters) - 32
        terminal.say("/undo", "Forgotten: 'more' and the answer to it; 2 messages left")
        terminal.say("/retry", r"^AAAA\n")
        terminal.say(f"/save {file}", "2 messages saved")
        assert json.loads(file.read_text())[1]["content"] == "AAAA"
        terminal.send("\x04")
        assert terminal.end() == 0


def test_ctrl_c_at_the_prompt(answering: Path) -> None:
    with talk(answering) as terminal:
        terminal.interrupt()
        terminal.expect("Ctrl-C once more, Ctrl-D or /exit leaves.\n> ")
        terminal.say("hello", re.escape(ANSWER))  # and the count begins anew
        terminal.send("half a line")
        terminal.expect("half a line")
        terminal.interrupt()  # drops the line
        assert "leaves" not in terminal.expect("> ")
        terminal.interrupt()
        terminal.expect("Ctrl-C once more, Ctrl-D or /exit leaves.\n> ")
        terminal.interrupt()
        assert terminal.end() == 0


def test_the_arrow_key_brings_a_message_back(answering: Path, tmp_path: Path) -> None:
    file = tmp_path / "it.json"
    with talk(answering) as terminal:
        terminal.say("hello", re.escape(ANSWER))
        terminal.send("\x1b[A there\n")
        terminal.expect(re.escape(ANSWER) + r"\n> ")
        terminal.send("/sa\t")  # the tab key completes
        terminal.expect("/save ")
        terminal.send(f"{file}\n")
        terminal.expect("4 messages saved.\n> ")
    assert json.loads(file.read_text())[2]["content"] == "hello there"


def test_standard_output_has_the_answers_alone(answering: Path) -> None:
    """Also when a person types: what is asked and said beside it goes to standard error."""
    master, slave = pty.openpty()
    os.write(master, b"hello\n/stats\n\x04")
    try:
        done = subprocess.run(
            command("chat", "--model", str(answering), *MODEL_OPTIONS),
            stdin=slave,
            capture_output=True,
            text=True,
            timeout=20,
        )
    finally:
        os.close(master)
        os.close(slave)
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n")
    assert "Last turn: " in done.stderr
    assert done.stderr.endswith("> \n")


def test_ctrl_c_ends_what_reads_lines(endless: Path) -> None:
    process = subprocess.Popen(
        command(
            "chat", "--model", str(endless), "--max-tokens", "200000", "--temperature", "0", *MODEL_OPTIONS
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"go on\n")
    process.stdin.flush()
    assert process.stdout.read(1) == b"A"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, b"")
