"""AsyncEngine: many tasks, several event loops, readers that are slow or go away, and the end."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import fixtures
import pytest
from helpers import (
    check_all_blocks_are_back,
    exact,
    greedy,
    open_engine,
    prompt_of,
    python_process,
    solo,
    tokens_of,
)
from tiny_vllm import (
    AsyncEngine,
    EngineStoppedError,
    Error,
    InvalidRequestError,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from tiny_vllm.engine import Engine

FOREVER = greedy(1000, ignore_eos=True)
Test = Callable[[AsyncEngine], Awaitable[None]]


def serve(engine: Engine, test: Test) -> None:
    """Runs the test with an AsyncEngine. Its end must leave no block, no thread and no callback of ours."""

    async def run() -> None:
        async with AsyncEngine.from_engine(engine) as served:
            await asyncio.wait_for(test(served), timeout=120)
        served._worker.thread.join(timeout=60)
        assert not served._worker.thread.is_alive()

    asyncio.run(run())
    check_all_blocks_are_back(engine)


async def outputs_of(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


async def last_of(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return (await outputs_of(stream))[-1]


async def text_of(stream: AsyncIterator[str]) -> str:
    return "".join([piece async for piece in stream])


async def until(condition: Callable[[], bool]) -> None:
    """Lets the others go on until it is true."""
    while not condition():
        await asyncio.sleep(0.001)


def counted_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Its length is the number of turns that the worker took at the engine."""
    turns: list[int] = []
    step_if = engine._step_if
    monkeypatch.setattr(engine, "_step_if", lambda wanted: (turns.append(1), step_if(wanted)))
    return turns


# ---- answers -----------------------------------------------------------------------------------------------


def test_many_requests_at_once_get_what_generate_gives(rand_folder: Path) -> None:
    """Few blocks, so that some wait and some are preempted. In order, growing, and one end each."""
    prompts: list[Any] = [prompt_of(2 + 3 * i % 40, seed=i) for i in range(24)]
    prompts[5:5] = ["text", {"prompt": "a dict"}]
    params = [SamplingParams(n=1 + i % 2, seed=i, max_tokens=1 + i % 9, logprobs=1) for i in range(26)]
    expected = [exact(o) for o in open_engine(rand_folder).generate(prompts, params)]
    engine = open_engine(rand_folder, num_blocks=20, max_num_batched_tokens=32)

    async def test(served: AsyncEngine) -> None:
        streams = [
            served.generate(p, s, request_id=f"r{i}")
            for i, (p, s) in enumerate(zip(prompts, params, strict=True))
        ]
        for i, outputs in enumerate(await asyncio.gather(*map(outputs_of, streams))):
            assert exact(outputs[-1]) == expected[i]
            assert {output.request_id for output in outputs} == {f"r{i}"}
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            for before, after in itertools.pairwise(outputs):
                sizes = [[len(tokens_of(o, j)) for j in range(params[i].n)] for o in (before, after)]
                assert sum(sizes[0]) < sum(sizes[1])
                assert all(a <= b for a, b in zip(*sizes, strict=True))

    serve(engine, test)


def test_text_in_pieces(rand_folder: Path) -> None:
    prompts = [f"prompt {i}" for i in range(8)]
    engine = open_engine(rand_folder)
    expected = [output.outputs[0].text for output in engine.generate(prompts, greedy(30))]

    async def test(served: AsyncEngine) -> None:
        streams = [served.stream(prompt, greedy(30)) for prompt in prompts]
        assert await asyncio.gather(*map(text_of, streams)) == expected
        pieces = [piece async for piece in served.stream(prompts[0], greedy(30))]
        assert all(pieces)

    serve(engine, test)


def test_without_sampling_params_it_takes_the_models(rand_folder: Path) -> None:
    engine = open_engine(rand_folder)

    async def test(served: AsyncEngine) -> None:
        output = await last_of(served.generate("hi"))
        assert len(tokens_of(output)) == engine.default_sampling_params().max_tokens

    serve(engine, test)


def test_an_engine_of_its_own(rand_folder: Path) -> None:
    """AsyncEngine(model, **options): the options are Engine's, and so are the errors."""
    options: dict[str, Any] = {
        "dtype": "float32",
        "num_threads": 1,
        "device": "cpu",
        "kv_cache_memory_bytes": 2**22,
    }

    async def run() -> None:
        async with AsyncEngine(rand_folder, **options) as served:
            output = await last_of(served.generate([1, 2, 3], greedy(5)))
            assert served.info() == served.engine.info()
            assert (await served.metrics())["num_finished"] == 1
        assert (await served.metrics())["num_finished"] == 1  # after the end too
        assert exact(output) == exact(Engine(rand_folder, **options).generate([1, 2, 3], greedy(5))[0])

    asyncio.run(run())
    with pytest.raises(TypeError, match="'blok_size'"):
        AsyncEngine(rand_folder, blok_size=3)
    with pytest.raises(InvalidRequestError, match=r"must be a tiny_vllm\.Engine, got str"):
        AsyncEngine.from_engine("model")  # type: ignore[arg-type]


def test_others_use_the_engine_meanwhile(rand_folder: Path) -> None:
    """Whoever runs a step, everybody gets the tokens."""
    engine = open_engine(rand_folder)
    expected = [exact(o) for o in solo(rand_folder, [[1, 2, 3], [4, 5, 6]], greedy(40))]

    async def test(served: AsyncEngine) -> None:
        for _ in range(5):
            plain = asyncio.to_thread(engine.generate, [[1, 2, 3]] * 2, greedy(40))
            streams = [last_of(served.generate([4, 5, 6], greedy(40))) for _ in range(3)]
            outputs, *ours = await asyncio.gather(plain, *streams)
            assert [exact(o) for o in outputs] == [expected[0]] * 2
            assert [exact(o) for o in ours] == [expected[1]] * 3

    serve(engine, test)


def test_output_kinds(rand_folder: Path) -> None:
    """What is new, also to a reader that was away for a while; or the end alone. Text is always in pieces."""
    engine = open_engine(rand_folder)
    (expected,) = engine.generate(["hi"], SamplingParams(n=2, seed=1, max_tokens=60))

    async def test(served: AsyncEngine) -> None:
        params = SamplingParams(n=2, seed=1, max_tokens=60, output_kind=RequestOutputKind.DELTA)
        texts, tokens, ends = ["", ""], [[], []], []
        async for output in served.generate("hi", params):
            for completion in output.outputs:
                texts[completion.index] += completion.text
                tokens[completion.index] += completion.token_ids
            ends.append(output.finished)
            await asyncio.sleep(0.002 * (len(ends) % 4))
        assert texts == [completion.text for completion in expected.outputs]
        assert tokens == [completion.token_ids for completion in expected.outputs]
        assert ends == [False] * (len(ends) - 1) + [True]
        params.output_kind = RequestOutputKind.FINAL_ONLY
        (output,) = await outputs_of(served.generate("hi", params))
        assert exact(output) == exact(expected)
        whole = engine.generate("hi", greedy(30))[0].outputs[0].text
        for kind in RequestOutputKind:
            assert await text_of(served.stream("hi", greedy(30, output_kind=kind))) == whole

    serve(engine, test)


def test_stop_strings(rand_folder: Path) -> None:
    """One end each, however the reader and the worker meet; the text is that of generate()."""
    engine = open_engine(rand_folder)
    text = engine.generate("hi", greedy(200))[0].outputs[0].text
    params = [greedy(200, stop=[text[i : i + 2]]) for i in range(5, 60, 5)]
    expected = [exact(output) for output in engine.generate(["hi"] * len(params), params)]
    assert all(completion[3] == "stop" for _, completion in expected)

    async def test(served: AsyncEngine) -> None:
        for _ in range(5):
            answers = await asyncio.gather(*(outputs_of(served.generate("hi", p)) for p in params))
            for outputs, expect in zip(answers, expected, strict=True):
                assert exact(outputs[-1]) == expect
                assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
            texts = await asyncio.gather(*(text_of(served.stream("hi", p)) for p in params))
            assert texts == [completion[2] for _, completion in expected]

    serve(engine, test)


# ---- what is refused ---------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[Callable[[AsyncEngine], AsyncIterator[Any]], str]] = {
    "empty": (lambda a: a.generate([], greedy(2)), "prompt"),
    "token": (lambda a: a.generate([999999], greedy(2)), "prompt token id 999999"),
    "too long": (lambda a: a.generate([1] * 100_000, greedy(2)), "100000"),
    "params": (lambda a: a.generate([1], {"n": 2}), "sampling_params must be SamplingParams, got dict"),  # type: ignore[arg-type]
    "number": (lambda a: a.generate([1], greedy(2, stop_token_ids=[999999])), "stop_token_ids"),
    "id": (lambda a: a.generate([1], greedy(2), request_id=7), "request_id must be a string, got 7"),  # type: ignore[arg-type]
    "in use": (lambda a: a.generate([1], greedy(2), "other"), "'other' is in use"),
    "n": (lambda a: a.stream([1], greedy(2, n=2)), "n must be 1 for stream"),
    "chat": (lambda a: a.generate([{"role": "user"}], greedy(2)), "chat template"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_request_is_refused_at_the_first_iteration(what: str, rand_folder: Path) -> None:
    """The one that runs meanwhile gets all its tokens."""
    engine = open_engine(rand_folder)
    expected = exact(solo(rand_folder, [[1, 2, 3]], greedy(300))[0])
    call, message = REFUSED[what]

    async def test(served: AsyncEngine) -> None:
        other = served.generate([1, 2, 3], greedy(300), "other")
        await other.__anext__()
        bad = call(served)
        with pytest.raises(InvalidRequestError, match=message):
            await bad.__anext__()
        with pytest.raises(StopAsyncIteration):
            await bad.__anext__()
        assert exact(await last_of(other)) == expected

    serve(engine, test)


def test_an_output_without_an_answer(tmp_path: Path) -> None:
    """generate() says so in the output; stream() raises."""
    fixtures.write_fixed(tmp_path, [0.0, float("inf")])
    engine = open_engine(tmp_path)

    async def test(served: AsyncEngine) -> None:
        output = await last_of(served.generate([0], greedy(3)))
        assert output.outputs[0].finish_reason == "error"
        with pytest.raises(Error, match="infinity"):
            await text_of(served.stream([0], greedy(3)))

    serve(engine, test)


# ---- requests that end early -------------------------------------------------------------------------------


async def never_begins(served: AsyncEngine) -> None:
    stream = served.generate([1, 2, 3], FOREVER)
    await stream.aclose()
    assert await outputs_of(stream) == []


async def closes(served: AsyncEngine) -> None:
    stream = served.generate([1, 2, 3], FOREVER)
    await stream.__anext__()
    await stream.aclose()
    metrics = await served.metrics()
    assert metrics["num_requests_running"] == 1  # the other one
    assert await outputs_of(stream) == []
    await stream.aclose()


async def closes_text(served: AsyncEngine) -> None:
    stream = served.stream([1, 2, 3], FOREVER)
    await stream.__anext__()
    await stream.aclose()
    assert (await served.metrics())["num_requests_running"] == 1


async def breaks(served: AsyncEngine) -> None:
    async for _ in served.stream("a", FOREVER):
        break
    async for _ in served.generate("a", SamplingParams(n=2, max_tokens=500)):
        break


async def raises(served: AsyncEngine) -> None:
    async def read() -> None:
        async for _ in served.generate("a", FOREVER):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await read()


async def cancelled_before_it_is_added(served: AsyncEngine) -> None:
    task = asyncio.create_task(outputs_of(served.generate("a", FOREVER)))
    await asyncio.sleep(0)  # it has asked for the request
    await cancelled(task)


async def cancelled_while_it_waits(served: AsyncEngine) -> None:
    seen: list[RequestOutput] = []

    async def read() -> None:
        async for output in served.generate("a", FOREVER):
            seen.append(output)

    task = asyncio.create_task(read())
    await until(lambda: len(seen) > 1)
    await cancelled(task)


async def cancelled_while_it_is_away(served: AsyncEngine) -> None:
    """In the body of its loop."""
    away = asyncio.Event()

    async def read() -> None:
        async for _ in served.generate("a", FOREVER):
            away.set()
            await asyncio.sleep(1000)

    task = asyncio.create_task(read())
    await away.wait()
    await cancelled(task)


async def timed_out(served: AsyncEngine) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(
            outputs_of(served.generate([1] * 200, SamplingParams(n=3, max_tokens=700))), 0.02
        )


async def in_a_circle(served: AsyncEngine) -> None:
    """Only the garbage collector finds it."""
    stream: Any = served.generate("a", FOREVER)
    await stream.__anext__()
    stream.myself = stream
    del stream
    gc.collect()


async def closed_by_another_task(served: AsyncEngine) -> None:
    """The task that waits for the next output gets the end of the iteration."""
    stream = served.generate("a", FOREVER)
    task = asyncio.create_task(outputs_of(stream))
    await until(lambda: stream._seen > 1)
    await stream.aclose()
    assert not (await task)[-1].finished


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    "early",
    [
        never_begins,
        closes,
        closes_text,
        breaks,
        raises,
        cancelled_before_it_is_added,
        cancelled_while_it_waits,
        cancelled_while_it_is_away,
        timed_out,
        in_a_circle,
        closed_by_another_task,
    ],
)
def test_a_reader_that_goes_away_takes_its_request_along(early: Test, rand_folder: Path) -> None:
    """Its blocks come back while the engine goes on; the request that shares the steps does not notice."""
    engine = open_engine(rand_folder)
    expected = exact(solo(rand_folder, [[7, 8, 9]], FOREVER)[0])

    async def test(served: AsyncEngine) -> None:
        other = served.generate([7, 8, 9], FOREVER)
        await other.__anext__()
        await early(served)
        while (await served.metrics())["num_requests_running"] > 1:
            assert not (await other.__anext__()).finished, "it ran as long as the other one"
        assert (await served.metrics())["num_requests_waiting"] == 0
        assert exact(await last_of(other)) == expected
        check_all_blocks_are_back(engine)

    serve(engine, test)


def test_a_reader_of_a_queued_request_goes_away(rand_folder: Path) -> None:
    """One place, and it is taken."""
    engine = open_engine(rand_folder, max_num_seqs=1)

    async def test(served: AsyncEngine) -> None:
        first = served.generate([1, 2, 3], FOREVER)
        await first.__anext__()
        task = asyncio.create_task(outputs_of(served.generate([4, 5, 6], FOREVER)))
        while (await served.metrics())["num_requests_waiting"] == 0:
            await asyncio.sleep(0)
        await cancelled(task)
        assert (await served.metrics())["num_requests_waiting"] == 0
        await first.aclose()

    serve(engine, test)


def test_abort(rand_folder: Path) -> None:
    """The reader gets what there is, and the end. Unknown and finished ids are ignored."""
    engine = open_engine(rand_folder)
    whole = tokens_of(solo(rand_folder, [[1, 2, 3]], FOREVER)[0])

    async def test(served: AsyncEngine) -> None:
        seen: list[RequestOutput] = []

        async def read() -> None:
            async for output in served.generate([1, 2, 3], FOREVER, request_id="x"):
                seen.append(output)

        task = asyncio.create_task(read())
        await until(lambda: len(seen) > 2)
        await served.abort("x")
        await task
        assert [output.finished for output in seen] == [False] * (len(seen) - 1) + [True]
        assert seen[-1].outputs[0].finish_reason == "abort"
        tokens = tokens_of(seen[-1])
        assert 2 < len(tokens) < 1000
        assert tokens == whole[: len(tokens)]
        await served.abort("x")
        await served.abort("nobody")
        with pytest.raises(InvalidRequestError, match="must be a string, got 3"):
            await served.abort(3)  # type: ignore[arg-type]
        assert exact(await last_of(served.generate([1, 2, 3], greedy(5), request_id="x")))[1][1] == whole[:5]

    serve(engine, test)


def test_two_tasks_cannot_wait_for_one_output(rand_folder: Path) -> None:
    engine = open_engine(rand_folder)

    async def test(served: AsyncEngine) -> None:
        stream = served.generate([1, 2, 3], greedy(20))
        task = asyncio.create_task(outputs_of(stream))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task waits"):
            await stream.__anext__()
        assert (await task)[-1].finished

    serve(engine, test)


# ---- readers that are slow ---------------------------------------------------------------------------------


def test_a_slow_reader_gets_fewer_outputs_and_all_tokens(rand_folder: Path) -> None:
    """The engine does not wait for it, nothing piles up for it, and other readers are not slowed down."""
    engine = open_engine(rand_folder)
    expected = exact(solo(rand_folder, [[1, 2, 3]], FOREVER)[0])
    text = engine.generate([1, 2, 3], FOREVER)[0].outputs[0].text

    async def test(served: AsyncEngine) -> None:
        slow, slow_text = served.generate([1, 2, 3], FOREVER), served.stream([1, 2, 3], FOREVER)
        await slow.__anext__()
        begin = await slow_text.__anext__()
        assert exact(await last_of(served.generate([1, 2, 3], FOREVER))) == expected
        while (await served.metrics())["num_requests_running"] > 0:
            await asyncio.sleep(0)
        rest = await outputs_of(slow)
        assert len(rest) == 1
        assert exact(rest[0]) == expected
        pieces = [piece async for piece in slow_text]
        assert len(pieces) == 1
        assert begin + pieces[0] == text

    serve(engine, test)


def test_a_loop_that_is_busy_is_called_once(rand_folder: Path) -> None:
    """While a loop does something else, at most one call for each request waits there."""
    engine = open_engine(rand_folder)

    async def test(served: AsyncEngine) -> None:
        loop = asyncio.get_running_loop()
        calls: list[object] = []
        real = loop.call_soon_threadsafe

        def call(callback: Callable[..., Any], *arguments: Any, **context: Any) -> Any:
            calls.append(callback)
            return real(callback, *arguments, **context)

        stream = served.generate([1, 2, 3], greedy(400, ignore_eos=True))
        await stream.__anext__()
        loop.call_soon_threadsafe = call  # type: ignore[method-assign, assignment]
        while not stream._watch.request.finished:  # type: ignore[union-attr]
            time.sleep(0.001)  # the whole loop stands still
        assert len(calls) <= 1
        del loop.call_soon_threadsafe
        assert (await last_of(stream)).finished

    serve(engine, test)


# ---- several loops -----------------------------------------------------------------------------------------


def test_two_event_loops_in_two_threads(rand_folder: Path) -> None:
    prompts = [prompt_of(5, seed=i) for i in range(8)]
    expected = [exact(o) for o in solo(rand_folder, prompts, greedy(25))]
    engine = open_engine(rand_folder, max_num_seqs=6)
    served = AsyncEngine.from_engine(engine)
    results: list[Any] = [None, None]

    async def work() -> list[Any]:
        rounds = []
        for _ in range(4):
            outputs = await asyncio.gather(*(last_of(served.generate(p, greedy(25))) for p in prompts))
            rounds.append([exact(output) for output in outputs])
        return rounds

    def run(i: int) -> None:
        results[i] = asyncio.run(asyncio.wait_for(work(), 120))

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive(), "a thread hangs"
    assert results == [[expected] * 4] * 2
    asyncio.run(served.shutdown())  # in a third loop
    check_all_blocks_are_back(engine)


def test_a_loop_that_is_closed_with_requests(rand_folder: Path) -> None:
    """Nobody can read them any more: they end, and the other loop's goes on."""
    engine = open_engine(rand_folder)
    served = AsyncEngine.from_engine(engine)
    gone = asyncio.new_event_loop()
    stream = served.generate([1, 2, 3], FOREVER)
    gone.run_until_complete(stream.__anext__())
    gone.close()

    async def test(served: AsyncEngine) -> None:
        other = served.generate([4, 5, 6], greedy(900, ignore_eos=True))
        await other.__anext__()
        while (await served.metrics())["num_requests_running"] > 1:
            assert not (await other.__anext__()).finished, "it ran as long as the other one"
        assert len(tokens_of(await last_of(other))) == 900

    async def run() -> None:
        async with served:
            await asyncio.wait_for(test(served), 120)

    asyncio.run(run())
    assert not stream._watch.request.finished or len(stream._watch.request.received) < 1000  # type: ignore[union-attr]
    check_all_blocks_are_back(engine)


# ---- the thread --------------------------------------------------------------------------------------------


def test_no_step_and_no_cpu_time_while_nothing_runs(
    rand_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sleeps before the first request, between two, and after one that was dropped."""
    engine = open_engine(rand_folder)
    turns = counted_steps(engine, monkeypatch)

    async def stands_still() -> None:
        before = len(turns)
        await asyncio.sleep(0.05)
        assert len(turns) == before

    async def test(served: AsyncEngine) -> None:
        await stands_still()
        assert turns == []
        assert (await last_of(served.generate([1, 2, 3], greedy(4)))).finished
        await until(lambda: not served._worker._watches)
        assert 4 <= len(turns) <= 5  # an answer of four tokens
        await stands_still()
        stream = served.generate([1, 2, 3], FOREVER)
        await stream.__anext__()
        await stream.aclose()
        await until(lambda: not served._worker._watches)
        await stands_still()
        asked = len(turns)
        for _ in range(3):
            await served.abort("nobody")
        assert len(turns) == asked

    serve(engine, test)


def test_it_is_asked_before_each_step(rand_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request joins the running batch: it is done long before a long one."""
    engine = open_engine(rand_folder)

    async def test(served: AsyncEngine) -> None:
        long_one = served.generate([1, 2, 3], FOREVER)
        await long_one.__anext__()
        assert len(tokens_of(await last_of(served.generate([4, 5, 6], greedy(3))))) == 3
        assert not (await long_one.__anext__()).finished
        await long_one.aclose()

    serve(engine, test)


def test_shutdown_with_requests_under_way(rand_folder: Path) -> None:
    """They end as aborted ones, running or queued; later ones are refused, with the reason."""
    engine = open_engine(rand_folder, max_num_seqs=2)

    async def test(served: AsyncEngine) -> None:
        streams = [served.generate([1, 2, i], FOREVER) for i in range(4)]
        tasks = [asyncio.create_task(outputs_of(stream)) for stream in streams]
        away = served.generate([1], FOREVER)
        await until(lambda: streams[1]._seen > 2)
        tasks.append(asyncio.create_task(last_of(away)))
        await asyncio.sleep(0)
        await asyncio.gather(served.shutdown(), served.shutdown())
        for task in tasks[:4]:
            last = (await task)[-1]
            assert last.finished
            assert last.outputs[0].finish_reason == "abort"
        assert (await tasks[4]).outputs[0].finish_reason == "abort"
        for call in (served.generate, served.stream):
            with pytest.raises(EngineStoppedError, match="has been shut down; make a new one"):
                await call([1], greedy(1)).__anext__()
        await served.abort("x")
        await served.shutdown()
        await served.generate([1]).aclose()
        assert (
            len(tokens_of(engine.generate([1], greedy(3))[0])) == 3
        )  # the engine itself is as good as before

    serve(engine, test)


def test_an_engine_that_nobody_holds_lets_its_thread_end(rand_folder: Path) -> None:
    """Without shutdown(). A stream holds it; when that is gone too, so is the thread."""
    engine = open_engine(rand_folder)
    served: AsyncEngine | None = AsyncEngine.from_engine(engine)

    async def begin() -> Any:
        assert served is not None
        stream = served.generate([1, 2, 3], greedy(30))
        await stream.__anext__()
        return stream

    async def run() -> None:
        nonlocal served
        stream = await begin()
        assert served is not None
        worker, served = served._worker, None
        gc.collect()
        assert len(tokens_of(await last_of(stream))) == 30
        assert worker.thread.is_alive()
        del stream
        gc.collect()
        worker.thread.join(timeout=60)
        assert not worker.thread.is_alive()

    asyncio.run(run())
    check_all_blocks_are_back(engine)


def test_the_sleeping_thread_does_not_hold_the_last_stream(rand_folder: Path) -> None:
    """It was refused, so it is the last thing that the thread did. No garbage collector is needed."""
    served: AsyncEngine | None = AsyncEngine.from_engine(open_engine(rand_folder))

    async def refused() -> None:
        assert served is not None
        with pytest.raises(InvalidRequestError):
            await served.generate([999999], greedy(1)).__anext__()

    worker = served._worker
    gc.collect()
    gc.disable()
    try:
        asyncio.run(refused())
        served = None
        worker.thread.join(timeout=60)
        assert not worker.thread.is_alive()
    finally:
        gc.enable()


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clock of another thread here")
def test_the_thread_sleeps_and_does_not_look_again_and_again(rand_folder: Path) -> None:
    """A clock that counts the time that the thread computes stands still."""
    engine = open_engine(rand_folder)

    async def test(served: AsyncEngine) -> None:
        clock = time.pthread_getcpuclockid(served._worker.thread.ident)  # type: ignore[arg-type]
        assert (await last_of(served.generate([1, 2, 3], greedy(4)))).finished
        for _ in range(50):  # at first it may still be on its way to bed
            before = time.clock_gettime_ns(clock)
            await asyncio.sleep(0.02)
            if time.clock_gettime_ns(clock) == before:
                return
        raise AssertionError("the clock goes on")

    serve(engine, test)


class Broken(Exception):
    pass


class BreakingCore:
    """The core of an engine, whose step() raises when `breaks` is set."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.breaks = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    def step(self, *containers: Any) -> None:
        if self.breaks.is_set():
            raise Broken("the device is gone")
        self.core.step(*containers)


def test_a_step_that_fails_reaches_every_reader(rand_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait, those that look later, those that come later. Nothing hangs, the blocks come back."""
    engine = open_engine(rand_folder)
    core = BreakingCore(engine._core)
    monkeypatch.setattr(engine, "_core", core)
    reason = "the engine failed and takes no more requests: Broken: the device is gone"

    async def test(served: AsyncEngine) -> None:
        streams = [served.generate([1, 2, i], FOREVER) for i in range(3)]
        tasks = [asyncio.create_task(outputs_of(stream)) for stream in streams]
        away = served.stream([5], FOREVER)
        await away.__anext__()
        await until(lambda: all(stream._seen > 2 for stream in streams))
        core.breaks.set()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineStoppedError)
            assert str(result) == reason
            assert isinstance(result.__cause__, Broken)
        with pytest.raises(EngineStoppedError, match=reason):
            await text_of(away)
        with pytest.raises(EngineStoppedError, match=reason):
            await last_of(served.generate([1], greedy(1)))
        with pytest.raises(InvalidRequestError):  # this is looked at first
            await last_of(served.generate([], "no"))  # type: ignore[arg-type]
        await served.abort("x")

    serve(engine, test)


def test_a_request_that_cannot_be_added_is_its_own_problem(
    rand_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it raises; the engine goes on."""
    engine = open_engine(rand_folder)
    add = engine._add

    def broken(request_id: str, *rest: Any) -> Any:
        if request_id == "bad":
            raise Broken("no memory")
        return add(request_id, *rest)

    monkeypatch.setattr(engine, "_add", broken)

    async def test(served: AsyncEngine) -> None:
        with pytest.raises(Broken, match="no memory"):
            await last_of(served.generate([1], greedy(1), "bad"))
        assert (await last_of(served.generate([1], greedy(1)))).finished

    serve(engine, test)


# ---- the end of the process, and fork ----------------------------------------------------------------------


EXIT_SCRIPT = """
import asyncio
from pathlib import Path
from helpers import greedy, open_engine
from tiny_vllm import AsyncEngine
served = AsyncEngine.from_engine(open_engine(Path({folder!r}), load_format="dummy", dtype="bfloat16"))

async def work():
    streams = [served.generate([1, 2, 3], greedy(900)) for _ in range(2)]
    for stream in streams:
        await stream.__anext__()
    return streams

{end}
print("end", flush=True)
"""

EXIT_ENDS = {
    "running": "streams = asyncio.run(work())",
    "waiting": "loop = asyncio.new_event_loop(); streams = loop.run_until_complete(work()); "
    "task = loop.create_task(streams[0].__anext__()); loop.run_until_complete(asyncio.sleep(0)); "
    "task.cancel(); loop.run_until_complete(asyncio.wait([task]))",
    "idle": "asyncio.run(asyncio.sleep(0))",
    "dropped": "asyncio.run(work())",
    "shut down": "streams = asyncio.run(work()); asyncio.run(served.shutdown())",
    "fails": "streams = asyncio.run(work()); print('end', flush=True); raise SystemExit(0)",
}


@pytest.mark.parametrize("how", EXIT_ENDS)
def test_the_process_ends_with_requests_under_way(how: str, tmp_path: Path) -> None:
    """As always, and without a word. A model of some size, so that the thread is nearly always in a step."""
    size = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 1000}
    fixtures.write_json(tmp_path / "config.json", fixtures.llama_config(**size))
    script = EXIT_SCRIPT.format(folder=str(tmp_path), end=EXIT_ENDS[how])
    done = subprocess.run(python_process(script), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


FORK_SCRIPT = """
import asyncio, os, sys
from pathlib import Path
from helpers import greedy, open_engine
from tiny_vllm import AsyncEngine, EngineStoppedError
engine = open_engine(Path({folder!r}))
served = AsyncEngine.from_engine(engine)

async def first(served):
    async for output in served.generate([1, 2, 3], greedy(3)):
        pass
    return output.outputs[0].token_ids

tokens = asyncio.run(first(served))
if (child := os.fork()) == 0:
    try:
        asyncio.run(first(served))
    except EngineStoppedError as error:
        assert "was forked" in str(error), error
    asyncio.run(served.abort("x"))
    asyncio.run(served.shutdown())
    assert asyncio.run(first(AsyncEngine.from_engine(engine))) == tokens
    print("child", flush=True)
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert asyncio.run(first(served)) == tokens
"""


@pytest.mark.cpu_only
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_process_needs_an_async_engine_of_its_own(rand_folder: Path) -> None:
    """It says so, instead of waiting for a thread that is not there."""
    script = FORK_SCRIPT.format(folder=str(rand_folder))
    done = subprocess.run(python_process(script), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "child\n", "")


@pytest.fixture(autouse=True)
def _no_error_is_only_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """asyncio and concurrent.futures log what goes wrong in a callback, and go on."""
    yield
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []
