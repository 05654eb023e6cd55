"""A request on its way through a batch, in the hands of whoever asked."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue

from cutaway.errors import CutawayError
from cutaway.generate.edited import EditedSequence
from cutaway.generate.response import Finish, Request, Step

Event = Step | BaseException | None  # a step; what went wrong; None where it was cancelled


class Ticket:
    """A request on its way. Iterating gives its steps as they come, from any thread but the batch's own.

    It ends with the step that has a `finish`, without one where it was cancelled, or raises what went wrong. Steps that
    are delivered elsewhere cannot be iterated: CutawayError.
    """

    def __init__(self, request: Request, deliver: Callable[[Event], None] | None, left: Callable[["Ticket"], None]):
        self.request = request
        self.finish: Finish | None = None
        self.reused = 0
        self.edited: EditedSequence | None = None  # what its edits do, where it has any
        self._left = left
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._elsewhere = deliver is not None
        self._deliver = deliver or self._events.put
        self._over = False  # whether the last event was taken out

    def __iter__(self) -> Iterator[Step]:
        if self._elsewhere:
            raise CutawayError("The steps of this ticket go to the function that it was submitted with, not here.")
        while not self._over:  # else whoever asks once more would wait for ever
            yield from self._taken(self._events.get())

    @property
    def done(self) -> bool:
        """Whether nothing more comes."""
        return self.finish is not None

    def cancel(self) -> None:
        """Stop: the cache is given up, no further step comes. Harmless where it has ended already."""
        self._left(self)

    def send(self, event: Event) -> None:
        """Hand on what the batch has to say; called by the batch."""
        if self.done:
            return
        if not isinstance(event, Step):
            self.finish = "cancelled"
        elif event.finish is not None:
            self.finish = event.finish
        self._deliver(event)

    def end(self, event: BaseException | None) -> None:
        """Hand on that nothing more comes, and why. A taker that goes wrong at this is no matter of anybody else."""
        with suppress(Exception):
            self.send(event)

    def ready(self) -> Iterator[Step]:
        """The steps that are there already, without waiting; raises what went wrong."""
        while not self._over and not self._events.empty():
            yield from self._taken(self._events.get())

    def _taken(self, event: Event) -> Iterator[Step]:
        if not isinstance(event, Step) or event.finish is not None:
            self._over = True
            self._events.put(event if isinstance(event, BaseException) else None)  # others may wait for it as well
        if isinstance(event, BaseException):
            raise event
        if event is not None:
            yield event
