"""A request on its way through a batch, in the hands of whoever asked."""

from collections.abc import Callable, Iterator
from queue import SimpleQueue

from cutaway.generate.edited import EditedSequence
from cutaway.generate.response import Finish, Request, Step

Event = Step | BaseException | None  # a step; what went wrong; None where it was cancelled


class Ticket:
    """A request on its way. Iterating gives its steps as they come, from any thread but the batch's own.

    It ends with the step that has a `finish`, without one where it was cancelled, or raises what went wrong.
    """

    def __init__(self, request: Request, deliver: Callable[[Event], None] | None, left: Callable[["Ticket"], None]):
        self.request = request
        self.finish: Finish | None = None
        self.reused = 0
        self.edited: EditedSequence | None = None  # what its edits do, where it has any
        self._left = left
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._deliver = deliver or self._events.put

    def __iter__(self) -> Iterator[Step]:
        while True:
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                return
            yield event
            if event.finish is not None:
                return

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

    def ready(self) -> Iterator[Step]:
        """The steps that are there already, without waiting; raises what went wrong."""
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            if event is not None:
                yield event
