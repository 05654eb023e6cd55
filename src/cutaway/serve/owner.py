"""The one thread that runs passes: requests queue to it, and past a number of them they are refused."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from cutaway.errors import CutawayError

T = TypeVar("T")


class Busy(CutawayError):
    """More is asked for at once than is worked on."""


class Owner:
    """Runs functions one after another in a thread of its own; at most `waiting` may wait."""

    def __init__(self, waiting: int = 8) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cutaway-owner")
        self._most = waiting
        self._held = 0
        self._closed = False
        self._lock = threading.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`. Raises Busy where too many wait already, CutawayError where the owner is closed."""
        with self._lock:
            if self._held > self._most:
                raise Busy(f"{self._held} passes are waiting already; try again when they are done.")
            self._held += 1
        try:
            return await asyncio.wrap_future(self._submitted(work))
        except asyncio.CancelledError:
            if self._closed:  # it waited, and was dropped
                raise _closing() from None
            raise
        finally:
            with self._lock:
                self._held -= 1

    def soon(self, work: Callable[[], None], dropped: Callable[[], None]) -> None:
        """Run `work`, which tells of its errors itself, behind what waits already; it counts as no pass.

        `dropped` is called in its place where the owner is closed before its turn. Raises CutawayError where it is
        closed already.
        """
        self._submitted(work).add_done_callback(lambda ended: dropped() if ended.cancelled() else None)

    def close(self) -> None:
        """Let go of the thread; what waits is dropped, and told so."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submitted(self, work: Callable[[], T]) -> "Future[T]":
        try:
            return self._pool.submit(work)
        except RuntimeError:  # as the pool says where it is closed, or can have no thread
            raise _closing() from None


def _closing() -> CutawayError:
    return CutawayError("The server is closing; it takes nothing more.")
