"""The one thread that runs passes: requests queue to it, and past a number of them they are refused."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
        self._lock = threading.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`. Raises Busy where too many wait already."""
        with self._lock:
            if self._held > self._most:
                raise Busy(f"{self._held} passes are waiting already; try again when they are done.")
            self._held += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            with self._lock:
                self._held -= 1

    def soon(self, work: Callable[[], None]) -> None:
        """Run `work`, which tells of its errors itself, behind what waits already; it counts as no pass.

        Raises RuntimeError where the owner is closed.
        """
        self._pool.submit(work)

    def close(self) -> None:
        """Let go of the thread; what waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
