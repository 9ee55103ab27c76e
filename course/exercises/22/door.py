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

from types import TracebackType


class Busy(Exception):
    """Come back later. A server answers HTTP 429 or 503."""


class Door:
    def __init__(self, inside: int, waiting: int) -> None:
        raise NotImplementedError("Your turn")

    async def __aenter__(self) -> None:
        raise NotImplementedError("Your turn")

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        raise NotImplementedError("Your turn")
