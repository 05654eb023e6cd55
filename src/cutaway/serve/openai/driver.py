"""A running batch that is driven by the server's one owner thread, and what comes out of it in the event loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from cutaway.errors import CutawayError
from cutaway.generate import Batch, Request, Step, Ticket
from cutaway.generate.ticket import Event
from cutaway.serve.owner import Owner

if TYPE_CHECKING:
    from cutaway.model import Model


class Driver:
    """One model's batch. Its steps are single pieces of work for the owner, so that pages have their turn between."""

    def __init__(self, model: "Model", owner: Owner, at_once: int, waiting: int) -> None:
        self.model = model
        # A prompt that goes on from a kept cache has the bits of the whole on this engine only.
        retained = at_once // 2 if model.engine.name == "cpu" else 0
        self._batch = model.batch(at_once, waiting, retained)
        self._owner = owner
        self._lock = threading.Lock()
        self._under_way = False
        self._flows: set[Flow] = set()

    @property
    def batch(self) -> Batch:
        """The sequences under way, and those that wait."""
        return self._batch

    @property
    def idle(self) -> bool:
        """Whether nobody waits for anything."""
        return not self._flows

    def submit(self, requests: Sequence[Request], *, whole: bool) -> "Flow":
        """Queue the choices of one request, all or none of them. Raises QueueFull where too many wait, CutawayError
        where the server is closing.

        To be called in the event loop, which takes the steps: each as it comes, or, if they are wanted `whole`, all
        of a choice at its end.
        """
        flow = Flow(whole, self._flows.discard)
        self._flows.add(flow)
        try:
            takers = [(request, flow.taker(index)) for index, request in enumerate(requests)]
            flow.tickets += self._batch.submit_all(takers)
            self._wake()
        except BaseException:
            flow.close()
            raise
        return flow

    def close(self) -> None:
        """Cancel everything; nothing more is taken."""
        self._batch.close(drain=False)

    def retire(self) -> None:
        """Finish what is there; nothing more is taken."""
        self._batch.close(drain=True)

    def _wake(self) -> None:
        with self._lock:
            if not self._under_way:
                self._owner.soon(self._turn, self.close)
                self._under_way = True

    def _turn(self) -> None:
        """One step, in the owner's thread; and the next one is asked for, behind whatever waits there."""
        with suppress(BaseException):  # a step that fails has told all who wait for it
            self._batch.step()
        with self._lock:
            self._under_way = bool(self._batch.running or self._batch.waiting)
            if self._under_way:
                try:
                    self._owner.soon(self._turn, self.close)
                except CutawayError:  # the owner was closed meanwhile: nobody will take another step
                    self._under_way = False
                    self.close()
                except BaseException as error:  # no room to ask for it: who waits now is told, later ones are served
                    self._under_way = False
                    self._batch.give_up(error)


class Flow:
    """The steps of one request's choices, as they come. Iterating ends when all have ended, or raises what failed."""

    def __init__(self, whole: bool, left: Callable[["Flow"], None]) -> None:
        self.tickets: list[Ticket] = []
        self._whole, self._left = whole, left
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, list[Step], BaseException | None]] = asyncio.Queue()

    def reused(self, n: int) -> int:
        """Tokens of the prompts that stood in a kept cache when the first of the `n` responses to each began."""
        return sum(ticket.reused for ticket in self.tickets[::n])

    def taker(self, index: int) -> Callable[[Event], None]:
        """What the batch calls with the events of choice `index`, in its own thread."""
        held: list[Step] = []

        def take(event: Event) -> None:
            if not isinstance(event, Step):
                error = event or CutawayError("The server is closing; this response was cancelled.")
                self._hand_on(index, [], error)
                return
            held.append(event)
            if event.finish is not None or not self._whole:
                self._hand_on(index, held[:], None)
                held.clear()

        return take

    def close(self) -> None:
        """Stop what is still under way and give up its caches."""
        self._left(self)
        for ticket in self.tickets:
            ticket.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Step]]:
        under_way = len(self.tickets)
        while under_way:
            index, steps, error = await self._events.get()
            if error is not None:
                raise error
            for step in steps:
                yield index, step
                under_way -= step.finish is not None

    def _hand_on(self, index: int, steps: list[Step], error: BaseException | None) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it everybody who waited
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, steps, error))
