"""The engine for asyncio: one thread runs the steps, and each request is an asynchronous iterator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from tiny_vllm.engine import Engine, _truncates
from tiny_vllm.errors import EngineStoppedError, Error, InvalidRequestError
from tiny_vllm.events import Events
from tiny_vllm.outputs import RequestOutput
from tiny_vllm.prompts import Message, Prompt
from tiny_vllm.requests import Owner, OwnerRef, Request, checked_id
from tiny_vllm.sampling_params import RequestOutputKind, SamplingParams

Result = TypeVar("Result")


class AsyncEngine:
    """Serves one model to the tasks of one or several event loops.

    A thread of its own runs a step for all requests that are there, again and again, and sleeps when there
    are none. The event loops never wait for a step. Use it with ``async with``, or call :meth:`shutdown` at
    the end.

    Args:
        model, **options: as :class:`tiny_vllm.Engine`, with the same errors. Loading takes its time, and the
            event loop waits for it if this is called in one.

    Its methods may be called from any event loop, in any thread. It is of no use in a child process after
    os.fork(), which does not copy threads.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self._begin(Engine(model, **options))

    @classmethod
    def from_engine(cls, engine: Engine) -> AsyncEngine:
        """Serves with an engine that is there already. Others may go on to use it, from their threads."""
        if not isinstance(engine, Engine):
            raise InvalidRequestError(f"engine must be a tiny_vllm.Engine, got {type(engine).__name__}")
        self = cls.__new__(cls)
        self._begin(engine)
        return self

    def _begin(self, engine: Engine) -> None:
        self.engine = engine
        self._worker = _Worker(engine)
        # Nobody may call shutdown(). The thread does not know this object, so it can go away.
        weakref.finalize(self, self._worker.stop).atexit = False

    def generate(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncStream:
        """The growing output of one request, for ``async for``. The last one has ``finished=True``.

        Each output has all that there is so far, or what ``output_kind`` says. A reader that is slower than
        the engine gets fewer and larger ones, and loses nothing. Nothing is queued for it.

        The request begins at the first iteration. It ends, and its memory comes back, when the iterator is
        closed with ``aclose()`` or dropped, or when its task is cancelled.

        Args:
            prompt: text, token ids, a dict with one of these, or a conversation.
            sampling_params: default: ``engine.default_sampling_params()``.
            request_id: for :meth:`abort`; default: one that is free.
            priority: as in :meth:`tiny_vllm.Engine.add_request`.

        Raises, at the first iteration:
            InvalidRequestError: as :meth:`tiny_vllm.Engine.add_request`. Other requests are not disturbed.
            EngineStoppedError: after :meth:`shutdown`, or after a step failed; says why. When a step fails,
                all iterators that are under way raise it.
        """
        return AsyncStream(self, prompt, sampling_params, request_id, priority)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
    ) -> AsyncTextStream:
        """Like :meth:`generate`, but yields the text in pieces, which make the whole text.

        Raises, at the first iteration:
            InvalidRequestError: also if n is not 1.

        Raises, in the middle:
            Error: the output ended with ``finish_reason="error"``.
        """
        return AsyncTextStream(AsyncStream(self, prompt, sampling_params, request_id, priority, is_text=True))

    async def abort(self, request_id: str) -> None:
        """Ends a request, when the running step is over. Unknown and finished ids are ignored.

        Its iterator gets a last output with what there is and ``finish_reason="abort"``.
        """
        request_id = checked_id(request_id)
        with contextlib.suppress(EngineStoppedError):  # then it has ended already
            await self._ask(lambda: self.engine.abort_request(request_id))

    async def shutdown(self) -> None:
        """Ends all requests, as :meth:`abort` does, and the thread. The :attr:`engine` stays as it is.

        Returns when that is done. May be called again.
        """
        self._worker.stop()
        if self._worker.is_here():
            await asyncio.wrap_future(self._worker.ended)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.shutdown()

    async def metrics(self) -> dict[str, int | float]:
        """:meth:`tiny_vllm.Engine.metrics`, when the running step is over."""
        return await self._ask_even_if_stopped(self.engine.metrics)

    async def events(self) -> Events:
        """:meth:`tiny_vllm.Engine.events`, when the running step is over."""
        return await self._ask_even_if_stopped(self.engine.events)

    def info(self) -> dict[str, Any]:
        """:meth:`tiny_vllm.Engine.info`."""
        return self.engine.info()

    async def _ask(self, function: Callable[[], Result]) -> Result:
        """Lets the worker's thread call it. It does so even if the task that asks is cancelled meanwhile."""
        return await asyncio.wrap_future(self._worker.submit(function))

    async def _ask_even_if_stopped(self, function: Callable[[], Result]) -> Result:
        try:
            return await self._ask(function)
        except EngineStoppedError:  # so nobody is in a step
            return function()


class AsyncStream(Owner, AsyncIterator[RequestOutput]):
    """The growing output of one request: :meth:`AsyncEngine.generate`. One task at a time may wait for it."""

    def __init__(
        self,
        async_engine: AsyncEngine,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        is_text: bool = False,
    ) -> None:
        """With `is_text` it is for an AsyncTextStream, which wants one output and finds out what is new."""
        super().__init__(async_engine.engine._dropped)
        self._engine = async_engine  # lives as long as its streams
        self._wanted = (prompt, params, request_id, priority, is_text)
        self._watch: _Watch | None = None
        self._seen = 0  # elements of request.received that the reader has got
        self._closed = False
        self._waiting = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._waiting:
            raise RuntimeError("another task waits for the next output of this request already")
        self._waiting = True
        try:
            if self._watch is None and not self._closed:
                self._watch = await self._start()
            while self._watch is not None and not self._closed:
                if self._watch.error is not None:
                    raise self._watch.error
                request = self._watch.request
                finished = request.finished  # looked at first: what was received before is in the count
                count = len(request.received)
                if count > self._seen and (finished or not self._watch.only_the_end):
                    seen, self._seen = self._seen, count
                    output = request.output(count, seen)
                    if output.finished:  # by a stop string perhaps, and the core will hear of it only now
                        self._close()
                    return output
                if finished:
                    break
                await self._watch.wait()
        except BaseException:
            self._close()
            raise
        finally:
            self._waiting = False
        self._closed = True
        raise StopAsyncIteration

    async def _start(self) -> _Watch:
        prompt, params, request_id, priority, is_text = self._wanted
        engine, worker = self._engine.engine, self._engine._worker
        params = engine._checked_params(params)
        if is_text and params.n != 1:
            raise InvalidRequestError("n must be 1 for stream(); use generate() for more")
        if is_text and params.output_kind is RequestOutputKind.DELTA:
            params.output_kind = RequestOutputKind.CUMULATIVE
        if request_id is not None:
            request_id = checked_id(request_id)
        # The tokenizer works here, and not in the other thread, where it would hold up everybody's step.
        given: Any = prompt
        if isinstance(given, Sequence) and len(given) > 0 and isinstance(given[0], Mapping):
            given = engine._prompts.read_chat(given, True, _truncates(params))
        text, ids = engine._prompts.read(given, params.truncate_prompt_tokens)
        ready = {"prompt": text, "prompt_token_ids": ids}
        loop = asyncio.get_running_loop()
        if params.structured_outputs is not None:  # so that it is there when it is wanted below
            await loop.run_in_executor(None, engine._make_guide, params)
        return await self._engine._ask(lambda: worker.add(self, request_id, ready, params, priority, loop))

    def _close(self) -> Future[None] | None:
        """Has the request ended if it may be running. Returns what is done when that is done."""
        self._closed = True
        if self._watch is not None and self._watch.request.finished:
            return None
        engine, ref = self._engine.engine, self.ref
        with contextlib.suppress(EngineStoppedError):  # then it has ended already
            return self._engine._worker.submit(lambda: engine._call(engine._end, ref))
        return None

    async def aclose(self) -> None:
        """Ends the request if it is still running. Returns when its memory is back."""
        done = self._close()
        if done is not None:
            with contextlib.suppress(EngineStoppedError):
                await asyncio.wrap_future(done)


class AsyncTextStream(AsyncIterator[str]):
    """The text of one request, in pieces: :meth:`AsyncEngine.stream`."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream
        self._sent = 0  # characters that the reader has got
        self._error: str | None = None

    def __aiter__(self) -> AsyncTextStream:
        return self

    async def __anext__(self) -> str:
        while True:
            error, self._error = self._error, None
            if error is not None:
                raise Error(error)
            completion = (await self._stream.__anext__()).outputs[0]
            if completion.finish_reason == "error":
                self._error = str(completion.stop_reason)
            text = completion.text
            if len(text) > self._sent:
                sent, self._sent = self._sent, len(text)
                return text[sent:]

    async def aclose(self) -> None:
        """Ends the request if it is still running. Returns when its memory is back."""
        await self._stream.aclose()


class _Watch:
    """Who waits for a request: what the worker's thread and the event loop share.

    Both write to `called`, each one value: the thread True, before it asks the loop to call wake(); the loop
    False, before it wakes the reader. The reader looks at the request after that. So what the thread does not
    announce, because a call is on its way, the reader finds. One call at most is on its way for each request.
    """

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.loop = loop
        self.only_the_end = request.params.output_kind is RequestOutputKind.FINAL_ONLY
        self.error: EngineStoppedError | None = None
        self.told = 0  # elements of request.received that were announced; the thread's own
        self.called = False
        self._future: asyncio.Future[None] | None = None  # the loop's own

    def has_news(self) -> bool:
        if self.request.finished:
            return True
        return not self.only_the_end and len(self.request.received) > self.told

    async def wait(self) -> None:
        self._future = self.loop.create_future()
        try:
            await self._future
        finally:
            self._future = None

    def wake(self) -> None:
        self.called = False
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


def _wake_all(watches: list[_Watch]) -> None:
    for watch in watches:
        watch.wake()


class _Worker:
    """The thread. It does what it is asked for between two steps.

    It is a daemon thread, so that a process can end with requests under way; tiny_vllm/turns.py says how.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # A SimpleQueue: its put() may be called anywhere, also when an object goes away inside another put().
        self._asked: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._watches: list[_Watch] = []  # of the requests that are under way
        self._stopping = False
        self._failure: BaseException | None = None
        self._has_ended = False
        self._pid = os.getpid()
        self.ended: Future[None] = _future()
        self.thread = threading.Thread(target=self._run, name="tiny-vllm-steps", daemon=True)
        self.thread.start()

    # ---- in any thread -------------------------------------------------------------------------------------

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """Asks for a call of the function. What it returns or raises is in the future."""
        if not self.is_here():
            raise EngineStoppedError(
                "this AsyncEngine cannot be used in this process, which was forked: its thread is not here; "
                "make a new AsyncEngine"
            )
        future: Future[Result] = _future()
        self._asked.put((future, function))
        if self._has_ended:  # the thread may have looked into the queue for the last time
            self._refuse_all()
        return future

    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def stop(self) -> None:
        with contextlib.suppress(EngineStoppedError):
            self.submit(self._stop)

    def _refuse_all(self) -> None:
        while True:
            try:
                future, _ = self._asked.get_nowait()
            except queue.Empty:
                return
            future.set_exception(self._reason())

    def _reason(self) -> EngineStoppedError:
        if self._failure is None:
            return EngineStoppedError("this AsyncEngine has been shut down; make a new one")
        error = EngineStoppedError(
            f"the engine failed and takes no more requests: {type(self._failure).__name__}: {self._failure}"
        )
        error.__cause__ = self._failure
        return error

    # ---- in the worker's thread ----------------------------------------------------------------------------

    def add(
        self,
        stream: AsyncStream,
        request_id: str | None,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        loop: asyncio.AbstractEventLoop,
    ) -> _Watch:
        if request_id is None:
            request_id = self._engine._new_id()
        watch = _Watch(self._engine._add(request_id, prompt, params, stream, priority), loop)
        self._watches.append(watch)
        return watch

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._do_what_is_asked()
                if self._watches and not self._stopping:
                    # Another thread that uses the engine may have run this step already.
                    self._engine._step_if(lambda: not any(watch.has_news() for watch in self._watches))
                    self._tell()
        except BaseException as error:
            self._failure = error
        self._end()

    def _do_what_is_asked(self) -> None:
        """Sleeps until there is something, unless there are requests to go on with."""
        with contextlib.suppress(queue.Empty):
            while not self._stopping:
                future, function = self._asked.get(block=not self._watches)
                _fulfil(future, function)
                del future, function  # while this thread sleeps it must not keep a stream alive

    def _tell(self) -> None:
        """Wakes the readers of the requests that have moved on, with one call for each event loop."""
        under_way: list[_Watch] = []
        to_call: dict[asyncio.AbstractEventLoop, list[_Watch]] = {}
        for watch in self._watches:
            if not watch.request.finished:  # looked at first: if it ends now, the next time will tell
                under_way.append(watch)
            if watch.has_news():
                watch.told = len(watch.request.received)
                if not watch.called:
                    watch.called = True
                    to_call.setdefault(watch.loop, []).append(watch)
        self._watches = under_way
        for loop, watches in to_call.items():
            try:
                loop.call_soon_threadsafe(_wake_all, watches)
            except RuntimeError:  # the loop is closed: nobody will read these any more
                for watch in watches:
                    self._end_request(watch.request.owner)

    def _end_request(self, owner: OwnerRef | None) -> None:
        assert owner is not None
        self._engine._call(self._engine._end, owner)

    def _end(self) -> None:
        self._has_ended = True
        for watch in self._watches:
            if self._failure is not None:
                watch.error = self._reason()
            # An engine that failed may fail again. Its readers get the first reason.
            with contextlib.suppress(Exception):
                self._end_request(watch.request.owner)
        self._tell_the_end()
        self._refuse_all()
        self.ended.set_result(None)

    def _tell_the_end(self) -> None:
        for watch in self._watches:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                watch.loop.call_soon_threadsafe(watch.wake)
        self._watches = []


def _future() -> Future[Any]:
    """One that cannot be cancelled: what was asked for is done."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _fulfil(future: Future[Any] | None, function: Callable[[], Any]) -> None:
    assert future is not None
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)
        future = None  # the error knows this frame: a circle would keep the stream alive
