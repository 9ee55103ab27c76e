"""Several threads on one engine, Ctrl-C at any moment, and objects that go away early."""

from __future__ import annotations

import gc
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
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
from tiny_vllm.engine import Engine
from tiny_vllm.sampling_params import SamplingParams


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
    outputs: list[Any] = []
    assert Counter().during(lambda: engine._core.step(outputs)) > BY_CHANCE
    assert len(outputs) == 4


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


# ---- Ctrl-C ------------------------------------------------------------------------------------------------


class InterruptedCore:
    """The core, with Ctrl-C coming right after its n-th step, where Python looks for signals."""

    def __init__(self, core: Any, n: int) -> None:
        self._core = core
        self._left = n

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def step(self, outputs: list[Any]) -> None:
        self._core.step(outputs)
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
