"""Exercise 22.1: a door for an AsyncEngine, so that nobody waits in vain.

    door = Door(inside=8, waiting=4)
    async with door:      # waits for a place; raises Busy at once if there is none to wait in
        async for output in engine.generate(...):
            ...

At most `inside` tasks are inside at a time, and at most `waiting` wait for a place. Who waits gets in by
order of arrival. A place comes back however the block is left: at its end, by an exception, by a cancelled
task. A task that is cancelled while it waits leaves the queue, and nobody loses a place by it.

All of this happens in one event loop, so no locks are needed. A list of asyncio.Future is enough. (An
asyncio.Semaphore would do a part of it.)
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType


class Busy(Exception):
    """Come back later. A server answers HTTP 429 or 503."""


class Door:
    def __init__(self, inside: int, waiting: int) -> None:
        self._free = inside
        self._most_waiting = waiting
        self._queue: deque[asyncio.Future[None]] = deque()

    async def __aenter__(self) -> None:
        if self._free > 0 and not self._queue:
            self._free -= 1
            return
        if len(self._queue) >= self._most_waiting:
            raise Busy
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # the place was ours already when we were cancelled
            else:
                self._queue.remove(turn)
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        """Gives a place to the first who waits, without letting anybody in between."""
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
