"""Several threads on one engine, Ctrl-C at any moment, and objects that go away early."""

from __future__ import annotations

import gc
import inspect
import itertools
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import fixtures
import pytest
from helpers import (
    check_all_blocks_are_back,
    exact,
    finish,
    greedy,
    open_engine,
    prompt_of,
    python_process,
    solo,
    tokens_of,
)
from tiny_vllm import engine as engine_module
from tiny_vllm import output_text, prompts, requests, structured_outputs, turns
from tiny_vllm.engine import Engine
from tiny_vllm.errors import Error
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.sampling_params import RequestOutputKind, SamplingParams


def together(*works: Callable[[], Any]) -> list[Any]:
    """Runs each in a thread of its own; their results in order."""
    results: list[Any] = [None] * len(works)

    def run(i: int) -> None:
        try:
            results[i] = works[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Counter:
    """A thread that counts while `inside` is set: what a server or a window would do during a call."""

    def __init__(self) -> None:
        self.count = 0
        self.inside = False
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._stop:
            if self.inside:
                self.count += 1
            time.sleep(0.0005)

    def during(self, call: Callable[[], Any]) -> int:
        self._thread.start()
        self.inside = True
        call()
        self.inside = False
        self._stop = True
        self._thread.join()
        return self.count


# A call that kept the lock would let the counter run for a moment before it and a moment after it.
BY_CHANCE = 4


def test_other_threads_run_during_a_step(rand_folder: Path) -> None:
    """One call into the core, long enough: 4 x 1,000 tokens in one step."""
    engine = open_engine(rand_folder, max_num_batched_tokens=4096, num_threads=1)
    for i in range(4):
        engine.add_request(str(i), prompt_of(1000, seed=i), greedy(1))
    containers = engine._requests, engine._watched, engine._moved
    assert Counter().during(lambda: engine._core.step(*containers)) > BY_CHANCE
    assert len(engine.step()) == 4


def test_other_threads_run_while_weights_load(tmp_path: Path) -> None:
    """100 million random weights."""
    fixtures.write_json(
        tmp_path / "config.json",
        fixtures.llama_config(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, vocab_size=10_000
        ),
    )
    assert Counter().during(lambda: open_engine(tmp_path, load_format="dummy", dtype="bfloat16")) > BY_CHANCE


def test_two_threads_generate_on_one_engine(rand_folder: Path) -> None:
    """Each gets what it would get alone, again and again, while a third streams and a fourth watches."""
    prompts = [[prompt_of(3 + 7 * i, seed=10 * t + i) for i in range(3)] for t in range(3)]
    params = SamplingParams(seed=1, max_tokens=12, logprobs=1)
    alone = [[exact(o) for o in solo(rand_folder, batch, params)] for batch in prompts]
    engine = open_engine(rand_folder, num_blocks=20, max_num_batched_tokens=32)
    done = threading.Event()

    def generate(t: int) -> None:
        for _ in range(6):
            assert [exact(o) for o in engine.generate(prompts[t], params)] == alone[t]

    def stream() -> None:
        for _ in range(6):
            for prompt, expected in zip(prompts[2], alone[2], strict=True):
                *_, last = engine.start_stream(prompt, params)
                assert exact(last) == expected

    def watch() -> None:
        while not done.is_set():
            metrics = engine.metrics()
            assert 0 <= metrics["num_free_blocks"] <= metrics["num_blocks"]
            engine.has_unfinished_requests()

    def work() -> None:
        together(lambda: generate(0), lambda: generate(1), stream)
        done.set()

    together(work, watch)
    check_all_blocks_are_back(engine)


def test_a_short_request_does_not_wait_for_a_long_one(rand_folder: Path) -> None:
    """It joins the running batch: when it is answered, the other thread's long one is still on its way."""
    engine = open_engine(rand_folder)
    started = threading.Event()
    order: list[str] = []

    def long_one() -> None:
        for _ in engine.start_stream([1, 2, 3], greedy(900)):
            started.set()
        order.append("long")

    def short_one() -> None:
        assert started.wait(60)
        assert len(tokens_of(engine.generate([4, 5, 6], greedy(3))[0])) == 3
        order.append("short")

    together(long_one, short_one)
    assert order == ["short", "long"]


def test_abort_from_another_thread(rand_folder: Path) -> None:
    """The thread that waits for the request returns with what there is."""
    engine = open_engine(rand_folder)
    started = threading.Event()
    seen: list[Any] = []

    def reader() -> None:
        for output in engine.start_stream([1, 2, 3], greedy(900)):
            seen.append(output)
            started.set()

    def aborter() -> None:
        assert started.wait(60)
        engine.abort_request(seen[0].request_id)

    together(reader, aborter)
    assert len(seen) < 900
    check_all_blocks_are_back(engine)


def test_an_engine_outlives_its_last_name(rand_folder: Path) -> None:
    """A stream keeps what it needs alive."""
    expected = open_engine(rand_folder).generate("hi", greedy(20))[0].outputs[0].text
    engine = open_engine(rand_folder)
    stream = engine.stream("hi", greedy(20))
    first = next(stream)
    del engine
    gc.collect()
    assert first + "".join(stream) == expected


def test_an_engine_that_goes_away_with_its_requests(rand_folder: Path) -> None:
    """Nothing crashes when requests are queued and running at the end, and the memory is given back."""
    for _ in range(3):
        engine = open_engine(rand_folder, max_num_seqs=2)
        for i in range(5):
            engine.add_request(str(i), prompt_of(30), SamplingParams(n=2, max_tokens=5))
        engine.step()
        engine.step()
        del engine
        gc.collect()


def test_two_threads_step(rand_folder: Path) -> None:
    """Each end is reported once, to one of them."""
    engine = open_engine(rand_folder)
    names = [str(i) for i in range(12)]
    expected = [exact(o) for o in solo(rand_folder, [prompt_of(3, seed=i) for i in range(12)], greedy(9))]
    for i, name in enumerate(names):
        engine.add_request(name, prompt_of(3, seed=i), greedy(1 + i % 3 * 4))
    ends: list[RequestOutput] = []

    def work() -> None:
        while engine.has_unfinished_requests():
            ends.extend(output for output in engine.step() if output.finished)

    together(work, work, work)
    assert sorted(o.request_id for o in ends) == sorted(names)
    for output in ends:
        assert tokens_of(output) == expected[int(output.request_id)][1][1][: len(tokens_of(output))]
    check_all_blocks_are_back(engine)


def test_threads_share_a_stream(rand_folder: Path) -> None:
    """Each piece goes to one of them, and the end to all."""
    engine = open_engine(rand_folder)
    params = greedy(60)
    expected = engine.generate("Once", params)[0].outputs[0].text
    for _ in range(10):
        stream = engine.stream("Once", params)
        pieces = together(*[lambda stream=stream: "".join(stream)] * 3)
        assert sorted("".join(pieces)) == sorted(expected)
        outputs = engine.start_stream("Once", params)
        lengths = together(*[lambda outputs=outputs: [len(tokens_of(o)) for o in outputs]] * 3)
        assert sorted(itertools.chain(*lengths)) == list(range(1, 61))
    check_all_blocks_are_back(engine)


def test_a_stream_ends_for_all_who_wait_for_its_last_output(rand_folder: Path) -> None:
    """Two threads have seen that nothing is there yet before one of them runs the only step."""
    engine = open_engine(rand_folder)
    stream: Any = engine.start_stream("a", greedy(1))
    step_if = stream._step_if
    both = threading.Barrier(2, timeout=60)
    met = threading.local()

    def wait_for_both(wanted: Callable[[], bool]) -> None:
        if not hasattr(met, "yes"):
            met.yes = True
            both.wait()
        step_if(wanted)

    stream._step_if = wait_for_both
    assert sorted(together(*[lambda: len(list(stream))] * 2)) == [0, 1]


def test_a_failed_stream_raises_in_one_of_its_threads(tmp_path: Path) -> None:
    fixtures.write_fixed(tmp_path, [0.0, float("inf")])
    stream = open_engine(tmp_path).stream([0], greedy(3))
    errors: list[str] = []

    def read() -> None:
        try:
            list(stream)
        except Error as error:
            errors.append(str(error))

    together(read, read, read)
    (message,) = errors
    assert "infinity" in message


# ---- the end of the process --------------------------------------------------------------------------------


EXIT_SCRIPT = """
import threading
from pathlib import Path
from helpers import greedy, open_engine
folder, inside = Path({folder!r}), threading.Event()
engine = open_engine(folder{options})
prompt = [1, 2, 3]

def ready(*_):
    inside.set()

class Late:
    stream = engine.stream(prompt, greedy(100))

    def __del__(self):
        self.stream.close()

late = Late()

def work():
    while True:
        {call}

threading.Thread(target=work, daemon=True).start()
inside.wait()
"""

EXIT_CALLS = {
    "generate": "engine.generate(prompt, greedy(900), progress=ready)",
    "stream": "[ready() for _ in engine.start_stream(prompt, greedy(900))]",
    "step": "ready(engine.add_request('a', prompt, greedy(1)), engine.step(), engine.step())",
    "load": "open_engine(folder, progress=ready, load_format='dummy', dtype='bfloat16')",
}


@pytest.mark.parametrize("what", EXIT_CALLS)
def test_a_daemon_thread_is_inside_when_the_process_ends(what: str, tmp_path: Path) -> None:
    """The process ends as always. A model of some size, so that the thread is nearly always inside."""
    size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 1000}
    fixtures.write_json(tmp_path / "config.json", fixtures.llama_config(**size))
    script = EXIT_SCRIPT.format(
        folder=str(tmp_path), options=", load_format='dummy', dtype='bfloat16'", call=EXIT_CALLS[what]
    )
    done = subprocess.run(python_process(script), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


# ---- fork --------------------------------------------------------------------------------------------------


FORK_SCRIPT = """
import os, signal, threading
from pathlib import Path
from helpers import exact, greedy, open_engine
from tiny_vllm import Error
folder = Path({folder!r})
busy, idle = open_engine(folder), open_engine(folder)
expected = exact(idle.generate("a", greedy(5))[0])
inside, leave = threading.Event(), threading.Event()

def stay():
    inside.set()
    leave.wait()

thread = threading.Thread(target=lambda: busy._turns.call(stay))
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(60)  # its default action ends a child that hangs
    assert exact(idle.generate("a", greedy(5))[0]) == expected
    for call in (busy.metrics, busy.step, lambda: busy.generate("a"), lambda: busy.stream("a"),
                 lambda: busy.add_request("x", "a"), lambda: busy.abort_request("x")):
        try:
            call()
        except Error as error:
            assert "another thread was inside a call of it when the process was forked" in str(error)
        else:
            os._exit(1)
    os._exit(7)
leave.set()
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert exact(busy.generate("a", greedy(5))[0]) == expected
print("fine")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_while_another_thread_is_inside(rand_folder: Path) -> None:
    """The child cannot use that engine, and says why instead of waiting for ever. It can use the others."""
    script = python_process(FORK_SCRIPT.format(folder=str(rand_folder)))
    done = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert done.stdout == "fine\n", done.stderr


# ---- signal handlers that call the engine ------------------------------------------------------------------


def steps_a_stream(engine: Engine) -> None:
    stream = engine.start_stream([9, 9], greedy(5))
    next(stream)
    next(stream)


def adds_again(engine: Engine) -> None:
    engine.abort_request("b")
    engine.add_request("b", [4, 5, 6], greedy(2))


HANDLERS: dict[str, Callable[[Engine], object]] = {
    "stream": steps_a_stream,
    "generate": lambda engine: engine.generate([9, 9], greedy(5)),
    "abort": lambda engine: engine.abort_request("b"),
    "add again": adds_again,
}


@pytest.mark.parametrize("place", [1, 2])
@pytest.mark.parametrize("what", HANDLERS)
def test_a_handler_calls_the_engine_amid_a_report(
    what: str, place: int, rand_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after step() has made the report of the first, or the second request: no end is lost."""
    engine = open_engine(rand_folder)
    make_output = requests.Request.output
    left = place

    def output(self: requests.Request, count: int | None = None, since: int | None = None) -> RequestOutput:
        made = make_output(self, count, since)
        nonlocal left
        left -= 1
        if left == 0:
            HANDLERS[what](engine)
        return made

    for name in ("a", "b"):
        engine.add_request(name, [1, 2, 3], greedy(2))
    monkeypatch.setattr(requests.Request, "output", output)
    reports = Reports(engine)
    reports.collect()
    assert left <= 0
    assert sorted(reports.ends) == (["a"] if what == "abort" else ["a", "b"])
    expected = {"a": [1, 2, 3], "b": [4, 5, 6] if what == "add again" else [1, 2, 3]}
    for name in reports.ends:
        assert exact(reports.last[name]) == exact(solo(rand_folder, [expected[name]], greedy(2))[0])
    check_all_blocks_are_back(engine)


def test_a_handler_steps_amid_a_report(rand_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it got is not reported again."""
    engine = open_engine(rand_folder)
    engine.add_request("a", [1, 2, 3], greedy(2))
    make_output = requests.Request.output
    by_handler: list[RequestOutput] = []

    def output(self: requests.Request, count: int | None = None, since: int | None = None) -> RequestOutput:
        made = make_output(self, count, since)
        monkeypatch.undo()
        by_handler.extend(engine.step())
        return made

    monkeypatch.setattr(requests.Request, "output", output)
    assert engine.step() == []
    (end,) = by_handler
    assert (end.finished, len(tokens_of(end))) == (True, 2)
    assert not engine.has_unfinished_requests()


def test_nothing_of_pythons_runs_between_a_step_and_its_tokens(
    rand_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even its clock, which could raise."""
    engine = open_engine(rand_folder)
    engine.add_request("a", [1, 2, 3], greedy(2))

    def raises() -> float:
        raise OSError

    monkeypatch.setattr(time, "monotonic", raises)
    assert [len(tokens_of(output)) for output in (*engine.step(), *engine.step())] == [1, 2]
    assert not engine.has_unfinished_requests()


# ---- Ctrl-C ------------------------------------------------------------------------------------------------


class InterruptedCore:
    """The core, with Ctrl-C coming right after its n-th step, where Python looks for signals."""

    def __init__(self, core: Any, n: int) -> None:
        self._core = core
        self._left = n

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def step(self, *containers: Any) -> None:
        self._core.step(*containers)
        self._left -= 1
        if self._left == 0:
            raise KeyboardInterrupt


def interrupt(engine: Engine, after_steps: int) -> None:
    engine._core = InterruptedCore(engine._core, after_steps)  # type: ignore[assignment]


@pytest.mark.parametrize("after_steps", [1, 2, 5])
def test_interrupted_generate(after_steps: int, rand_folder: Path) -> None:
    """Its requests end and their blocks come back; another one that shared the step does not lose a token."""
    engine = open_engine(rand_folder)
    engine.add_request("other", [1, 2, 3], greedy(10, logprobs=1))
    interrupt(engine, after_steps)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([prompt_of(20), prompt_of(40)], SamplingParams(n=2, max_tokens=50))
    assert list(engine._requests) == ["other"]
    last = finish(engine)
    assert exact(last["other"]) == exact(solo(rand_folder, [[1, 2, 3]], greedy(10, logprobs=1))[0])
    check_all_blocks_are_back(engine)
    assert len(tokens_of(engine.generate("again", greedy(4))[0])) == 4


def test_interrupted_stream(rand_folder: Path) -> None:
    engine = open_engine(rand_folder)
    interrupt(engine, 4)
    stream = engine.start_stream([1, 2, 3], greedy(50))
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert not engine.has_unfinished_requests()
    check_all_blocks_are_back(engine)


def test_an_interrupted_step_does_not_haunt_its_request_id(rand_folder: Path) -> None:
    """What the step said about "x" does not become part of another "x"."""
    engine = open_engine(rand_folder)
    engine.add_request("x", [1, 2, 3], greedy(10))
    interrupt(engine, 2)
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.abort_request("x")
    engine.add_request("x", [4, 5, 6], greedy(10))
    assert exact(finish(engine)["x"]) == exact(solo(rand_folder, [[4, 5, 6]], greedy(10))[0])


def test_a_step_that_was_interrupted_can_go_on(rand_folder: Path) -> None:
    engine = open_engine(rand_folder)
    engine.add_request("x", [1, 2, 3], greedy(5))
    interrupt(engine, 5)
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    assert engine.has_unfinished_requests()  # the core is done with it, but nobody has been told yet
    assert exact(finish(engine)["x"]) == exact(solo(rand_folder, [[1, 2, 3]], greedy(5))[0])


def test_a_second_ctrl_c_amid_the_clean_up(rand_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """generate() cannot end its requests; the engine does it as soon as nobody holds the call any more."""
    engine = open_engine(rand_folder)
    interrupt(engine, 2)

    def end(owner: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_end", end)
    try:
        engine.generate(["a", "b"], greedy(50))
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError("no KeyboardInterrupt")
    assert not engine.has_unfinished_requests()
    check_all_blocks_are_back(engine)


PACKAGE_FILES = {
    inspect.getsourcefile(module)
    for module in (engine_module, output_text, prompts, requests, structured_outputs, turns)
}


def ctrl_c_at_line(n: int, call: Callable[[], object]) -> bool:
    """Runs the call, with Ctrl-C at the n-th line that it runs of the engine's Python. Whether it came.

    Python looks for signals after calls and at the ends of loops. So there are two places where a debugger
    can stop but Ctrl-C cannot: between the last two lines of step(), and where the block of a lock ends.
    """
    left = n
    locking: set[int] = set()  # ids: to keep a frame would keep what is in it

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in PACKAGE_FILES:
            return None
        if event == "return":
            locking.discard(id(frame))
        if event == "line":
            left -= 1
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            leaves_lock = line == "with self._lock:" and id(frame) in locking
            if line == "with self._lock:":
                locking.add(id(frame))
            possible = line != "return ready" and not leaves_lock
            if left == 0 and possible:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left <= 0


class Reports:
    """What step() reports, until there is no more."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.last: dict[str, RequestOutput] = {}
        self.ends: list[str] = []

    def collect(self) -> None:
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                assert len(output.outputs[0].token_ids) >= len(self.tokens(output.request_id))
                self.last[output.request_id] = output
                if output.finished:
                    self.ends.append(output.request_id)

    def tokens(self, request_id: str) -> list[int]:
        return tokens_of(self.last[request_id]) if request_id in self.last else []


def test_ctrl_c_at_any_line_of_step(rand_folder: Path) -> None:
    """Each request gets all its tokens, and its end is reported once."""
    params = {
        "a": SamplingParams(n=2, seed=1, max_tokens=2, logprobs=1),
        "b": greedy(3),
        "c": greedy(structured_outputs={"choice": ["ab", "x"]}),
    }
    expected = {name: exact(solo(rand_folder, ["hi"], p)[0]) for name, p in params.items()}
    engine = open_engine(rand_folder)
    for n in itertools.count(1):
        for name, p in params.items():
            engine.add_request(name, "hi", p)
        reports = Reports(engine)
        came = ctrl_c_at_line(n, reports.collect)
        reports.collect()
        assert sorted(reports.ends) == ["a", "b", "c"], n
        assert {name: exact(output) for name, output in reports.last.items()} == expected, n
        check_all_blocks_are_back(engine)
        if not came:
            break
    assert n > 50


STOPPING: dict[str, SamplingParams] = {
    "a": greedy(stop="a bet", logprobs=1),
    "b": SamplingParams(temperature=0, n=2, stop=["ga", "x"]),
    "delta": greedy(stop="gam", output_kind=RequestOutputKind.DELTA),
    "end": greedy(stop="pha b", output_kind=RequestOutputKind.FINAL_ONLY),
}


def collect_texts(engine: Engine, texts: dict[str, str], ends: list[str]) -> None:
    while engine.has_unfinished_requests():
        for output in engine.step():
            text = output.outputs[0].text
            before = texts.get(output.request_id, "")
            if output.request_id == "delta":
                text = before + text
            assert text.startswith(before)
            texts[output.request_id] = text
            if output.finished:
                assert all(c.finish_reason == "stop" for c in output.outputs)
                ends.append(output.request_id)


@pytest.fixture
def stopping(tmp_path: Path) -> Engine:
    return open_engine(fixtures.write_text_chain(tmp_path, [b"al", b"pha be", b"ta ga", b"mma"]))


def test_ctrl_c_at_any_line_of_step_with_stop_strings(stopping: Engine) -> None:
    """Each end is reported once, deltas join up, and the core computes no token more."""
    computed = set()
    for n in itertools.count(1):
        before = stopping.metrics()["num_generated_tokens"]
        for name, p in STOPPING.items():
            stopping.add_request(name, [fixtures.CHAIN_START], p)
        texts: dict[str, str] = {}
        ends: list[str] = []
        came = ctrl_c_at_line(n, lambda: collect_texts(stopping, texts, ends))  # noqa: B023
        collect_texts(stopping, texts, ends)
        assert sorted(ends) == ["a", "b", "delta", "end"], n
        assert texts == {"a": "alph", "b": "alpha beta ", "delta": "alpha beta ", "end": "al"}, n
        assert not stopping._watched, n
        check_all_blocks_are_back(stopping)
        computed.add(stopping.metrics()["num_generated_tokens"] - before)
        if not came:
            break
    assert n > 100
    assert len(computed) == 1


@pytest.mark.parametrize("after_steps", [1, 2, 3])
def test_ctrl_c_right_before_the_core_hears_of_a_stop_string(after_steps: int, stopping: Engine) -> None:
    interrupt(stopping, after_steps)
    stopping.add_request("a", [fixtures.CHAIN_START], STOPPING["a"])
    texts: dict[str, str] = {}
    ends: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        collect_texts(stopping, texts, ends)
    assert stopping.has_unfinished_requests()
    collect_texts(stopping, texts, ends)
    assert (texts, ends) == ({"a": "alph"}, ["a"])
    assert stopping.metrics()["num_generated_tokens"] == 3
    check_all_blocks_are_back(stopping)


def test_a_handler_gives_the_id_away_before_the_core_hears_of_a_stop_string(
    stopping: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new request of that name is not the one that is stopped."""
    stopping.add_request("a", [fixtures.CHAIN_START], STOPPING["a"])
    find = requests.Request.stopped

    def stopped(self: requests.Request) -> list[tuple[int, bool]]:
        found = find(self)
        if found:
            monkeypatch.undo()
            stopping.abort_request("a")
            stopping.add_request("a", [fixtures.CHAIN_START], greedy(stop="gam"))
        return found

    monkeypatch.setattr(requests.Request, "stopped", stopped)
    assert finish(stopping)["a"].outputs[0].text == "alpha beta "
    check_all_blocks_are_back(stopping)


def test_threads_share_a_stream_of_deltas(stopping: Engine) -> None:
    """Each delta goes to one of them, and together they are the whole."""
    params = SamplingParams(
        temperature=0, max_tokens=200, ignore_eos=True, stop="gamX", output_kind=RequestOutputKind.DELTA
    )
    whole = stopping.generate([fixtures.CHAIN_START], params)[0].outputs[0]
    stream = stopping.start_stream([fixtures.CHAIN_START], params)
    parts = together(*[lambda: list(stream)] * 3)
    deltas = [output.outputs[0] for part in parts for output in part]
    assert sum(len(delta.token_ids) for delta in deltas) == len(whole.token_ids) == 200
    assert sorted("".join(delta.text for delta in deltas)) == sorted(whole.text)
    assert [delta.finish_reason for delta in deltas].count("length") == 1


def adds_and_aborts(engine: Engine) -> None:
    engine.add_request("x", [1, 2], greedy(5))
    engine.step()
    engine.abort_request("x")


def drops_a_stream(engine: Engine) -> None:
    for _ in engine.stream("a", greedy(9)):
        break


CTRL_C_CALLS: dict[str, Callable[[Engine], object]] = {
    "generate": lambda engine: engine.generate(["a", [1, 2]], greedy(2, logprobs=1)),
    "stream": lambda engine: list(engine.stream("a", greedy(2))),
    "start_stream": lambda engine: list(engine.start_stream("a", greedy(2))),
    "drop": drops_a_stream,
    "abort": adds_and_aborts,
}


@pytest.mark.parametrize("what", CTRL_C_CALLS)
def test_ctrl_c_at_any_line(what: str, rand_folder: Path) -> None:
    """The call's own requests are gone with it, and another one that shares the steps loses nothing."""
    params = greedy(8, logprobs=1)
    expected = exact(solo(rand_folder, ["hi"], params)[0])
    engine = open_engine(rand_folder)
    for n in itertools.count(1):
        engine.add_request("other", "hi", params)
        came = ctrl_c_at_line(n, lambda: CTRL_C_CALLS[what](engine))
        engine.abort_request("x")
        assert engine.metrics()["num_requests_running"] + engine.metrics()["num_requests_waiting"] <= 1, n
        assert not engine._turns._threads, n
        assert not engine._turns._lock._is_owned(), n  # type: ignore[attr-defined]
        reports = Reports(engine)
        reports.collect()
        if reports.last:  # adds_and_aborts() may have taken the last report itself
            assert reports.ends == ["other"], n
            assert exact(reports.last["other"]) == expected, n
        check_all_blocks_are_back(engine)
        if not came:
            break
    assert n > 50


def test_ctrl_c_at_any_line_of_add_request(rand_folder: Path) -> None:
    """A call that raises leaves no request. Another thread waits, so that the call pauses at its end."""
    engine = open_engine(rand_folder)
    ids: list[str] = []

    def add() -> None:
        engine.add_request("x", "a", greedy(2))
        ids[-1] = "x"

    for n in itertools.count(1):
        ids.append("interrupted")
        engine._turns._threads.add(-1)
        came = ctrl_c_at_line(n, add)
        engine._turns._threads.clear()
        assert list(engine._requests) == (["x"] if ids.pop() == "x" else []), n
        engine.abort_request("x")
        check_all_blocks_are_back(engine)
        if not came:
            break
    assert n > 15


SIGINT_SCRIPT = """
import sys, threading
from pathlib import Path
from helpers import check_all_blocks_are_back, exact, greedy, open_engine, prompt_of, solo, tokens_of
folder = Path({folder!r})
prompts = [prompt_of(10, seed=i) for i in range(4)]
long_prompts = [prompt_of(1000, seed=i) for i in range(9)]
forever = greedy(1000, ignore_eos=True)
engine = open_engine(folder)

def ready(*_):
    print("ready", flush=True)

def wait_for_it():
    {call}

try:
    wait_for_it()
except KeyboardInterrupt:
    pass
else:
    sys.exit("no KeyboardInterrupt")
assert not engine.has_unfinished_requests()
check_all_blocks_are_back(engine)
outputs = engine.generate(prompts, greedy(5))
assert [exact(o) for o in outputs] == [exact(o) for o in solo(folder, prompts, greedy(5))]
print("fine")
"""

SIGINT_CALLS = {
    "generate": "while True: engine.generate(prompts, forever, progress=ready)",
    "stream": "[ready() for _ in range(1000) for _ in engine.stream(prompts[0], forever)]",
    "long prompts": "while True: engine.generate(long_prompts, greedy(1), progress=ready)",
    "load": "while True: open_engine(folder, progress=ready)",
}


@pytest.mark.parametrize("what", SIGINT_CALLS)
def test_sigint(what: str, rand_folder: Path) -> None:
    """A real Ctrl-C, in a process of its own: KeyboardInterrupt, and the engine is as good as before."""
    script = SIGINT_SCRIPT.format(folder=str(rand_folder), call=SIGINT_CALLS[what])
    process = subprocess.Popen(
        python_process(script),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert out.splitlines()[-1:] == ["fine"], err
    assert process.returncode == 0


def test_loading_sees_signals_without_a_progress_callback(tmp_path: Path) -> None:
    """A timer goes off during a load of 400 million random weights; its handler ends the load."""
    fixtures.write_json(
        tmp_path / "config.json",
        fixtures.llama_config(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=6, vocab_size=10_000
        ),
    )

    def handler(*_: object) -> None:
        raise InterruptedError

    old = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptedError):
            open_engine(tmp_path, load_format="dummy", dtype="bfloat16")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
