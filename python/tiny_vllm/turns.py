"""One call at a time, from many threads, across Ctrl-C, fork and the end of the process."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from tiny_vllm.errors import Error

Result = TypeVar("Result")


class Turns:
    """Lets one thread in at a time, and the others in between its calls."""

    def __init__(self) -> None:
        # The standard library's lock: Ctrl-C cannot come between its `__enter__` and the block it guards. A
        # signal handler may call again from inside.
        self._lock = threading.RLock()
        self._threads: set[int] = set()  # that hold the lock or wait for it
        self._lost = False
        _all.append(weakref.ref(self, _all.remove))

    def call(self, function: Callable[[], Result]) -> Result:
        """Calls the function while no other thread is in such a call.

        A loop of calls would take the lock back before anybody else wakes up; so it pauses for a moment when
        others wait.

        Raises:
            Error: this process was forked while another thread was inside.
        """
        if self._lost:
            raise Error(
                "this engine cannot be used in this process: another thread was inside a call of it when the "
                "process was forked, and nobody will end that call here; make a new Engine"
            )
        me = threading.get_ident()
        if _exiting(me):
            threading.Event().wait()  # for ever: the process ends without this thread
        try:
            self._threads.add(me)
            with self._lock:
                return function()
        finally:
            self._threads.discard(me)
            if self._threads:
                time.sleep(0.0002)

    def stop_if_exiting(self) -> None:
        """To be called now and then in a long call: ends it, and its thread, when the process ends."""
        if _exiting(threading.get_ident()):
            raise SystemExit

    def at_exit(self) -> None:
        """Waits for the call that is inside; no other thread comes in any more."""
        if not self._lost:
            self._lock.acquire()

    def after_fork_in_child(self) -> None:
        """Only the thread that forked is left. A lock that another one held will never be free again."""
        self._threads = set()
        self._lost = self._lost or not self._lock.acquire(blocking=False)
        if not self._lost:
            self._lock.release()


# Not a WeakSet, which forgets its dead in a Python function: a Ctrl-C that comes while it runs is swallowed.
_all: list[weakref.ref[Turns]] = []
_last_thread: int | None = None  # the one that ends the process


def _all_turns() -> list[Turns]:
    return [turns for ref in tuple(_all) if (turns := ref()) is not None]


def _after_fork_in_child() -> None:
    for turns in _all_turns():
        turns.after_fork_in_child()


def _exiting(thread: int) -> bool:
    return _last_thread is not None and _last_thread != thread


def _at_exit() -> None:
    """A daemon thread that comes back from C++ while the interpreter goes away would abort the process.

    So it finishes its call before, and its next one never begins. The thread that ends the process may still
    call, from a `__del__` for example.
    """
    global _last_thread
    _last_thread = threading.get_ident()
    for turns in _all_turns():
        turns.at_exit()


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork_in_child)
