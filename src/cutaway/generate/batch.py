"""A running batch: sequences join it and leave it between passes, and each gets what it would get alone.

One thread owns a batch and calls `step` (or `run`, which does so until the batch is closed); any thread may
submit and cancel. Sequences are packed, so a step runs one more token of those that are under way together with
a chunk of the prompts that are still being read.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from queue import SimpleQueue

import numpy as np

from cutaway.errors import CutawayError
from cutaway.forward.cache import KVCache
from cutaway.forward.context import warn_beyond_context
from cutaway.generate.cache_use import CacheStep
from cutaway.generate.passes import Passes, Work, reuse, shared_prefix
from cutaway.generate.response import Finish, Request, Response, Step
from cutaway.generate.speculation import Lookup, Payoff
from cutaway.progress import progress
from cutaway.spec import ModelSpec
from cutaway.text.tokenizer import Tokenizer

PROMPT_ROWS = 512  # of the prompts that are being read, so many tokens a pass
WORTH_REUSING = 16  # tokens that a prompt shares with an earlier sequence

Event = Step | BaseException | None  # a step; what went wrong; None where it was cancelled


class QueueFull(CutawayError):
    """As many requests wait as may."""


class Ticket:
    """A request on its way. Iterating gives its steps as they come, from any thread but the batch's own.

    It ends with the step that has a `finish`, without one where it was cancelled, or raises what went wrong.
    """

    def __init__(self, request: Request, deliver: Callable[[Event], None] | None, left: Callable[["Ticket"], None]):
        self.request = request
        self.finish: Finish | None = None
        self.reused = 0
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


class _Lane:
    """A sequence under way: what has still to run, and what was guessed to follow it."""

    def __init__(self, ticket: Ticket, response: Response, cache: KVCache, guessing: bool) -> None:
        self.ticket, self.response, self.cache = ticket, response, cache
        self.pending = list(ticket.request.ids[cache.length :])
        self._held = cache.length  # rows that were there when the passes for the next token began
        self.guessed: list[int] = []
        self.running: list[int] = []  # what the present pass runs
        self._lookup = Lookup(ticket.request.ids) if guessing else None
        self.payoff = Payoff()

    @property
    def reading(self) -> bool:
        """Whether it runs a text up to its last token: the prompt or, where nothing is kept, all that there is."""
        return not self.response.tokens or not self.ticket.request.cached

    @property
    def growth(self) -> tuple[int, int]:
        """How long the text was before this pass and will be after it."""
        before = self.response.length - 1 if self.response.tokens else self.cache.length
        return before, self.cache.length + len(self.running)

    def unsettle(self) -> None:
        """Where no row that is held holds in the longer text to come, the pass runs all of it anew."""
        if not self.cache.settled(self.cache.length + len(self.running)):
            self._held = 0

    def guess(self) -> None:
        """Look for what may follow the next token, where guessing pays; never past the end of the response."""
        self.guessed = []
        limits, response = self.response.request.limits, self.response
        if self._lookup is None or self.reading or not self.payoff.wanted():
            return
        most = min(response.request.guess, limits.max_tokens - len(response.tokens) - 1)
        if limits.context is not None:
            most = min(most, limits.context - response.length)
        self.guessed = self._lookup.guess(most) if most > 0 else []

    def accept(self, logits: np.ndarray, seconds: float) -> Iterator[Step]:
        """The steps that the rows `[1 + guessed, V]` of the pass give: more than one where a guess came true."""
        taken: list[int] = []
        room, appended = self.cache.room, self.cache.length - self._held
        for place, row in enumerate(logits):
            found = CacheStep(0, 0, 0, room) if place else CacheStep(self._held, appended, len(logits), room)
            step = self.response.take(row, guessed=place > 0, cache=found)
            taken.append(step.token)
            yield step
            if step.finish is not None or place == len(self.guessed) or step.token != self.guessed[place]:
                break
        self.payoff.note(seconds, len(self.guessed), len(taken))
        if self._lookup is not None:
            self._lookup.extend(taken)
        if self.cache.length >= self.response.length:  # keys of guesses that did not come true
            self.cache.truncate(self.response.length - 1)
        self.pending = taken[-1:]
        if not self.ticket.request.cached:
            self.cache.truncate(0)
            self.pending = [*self.response.request.ids, *self.response.tokens]
        self._held = self.cache.length


class Batch:
    """Sequences that share passes. `at_once` run together, `waiting` more may queue (None: any number).

    `retained` caches of sequences that ended are kept, so that a prompt that begins as one of them did (the next
    turn of a chat) need not be read again. `shown` draws a bar while a prompt is read; for one sequence only.
    """

    def __init__(
        self,
        passes: Passes,
        tokenizer: Tokenizer | None,
        *,
        at_once: int = 8,
        waiting: int | None = None,
        prompt_rows: int = PROMPT_ROWS,
        retained: int = 0,
        shown: bool = False,
    ) -> None:
        if isinstance(at_once, bool) or not isinstance(at_once, int | np.integer) or at_once < 1:
            raise CutawayError(f"at_once is {at_once!r}; it must be a whole number, at least 1.")
        self._passes, self._tokenizer = passes, tokenizer
        self._at_once, self._limit, self._prompt_rows, self._retained = int(at_once), waiting, prompt_rows, retained
        self._shown = shown
        self._queue: deque[tuple[Ticket, KVCache | None]] = deque()
        self._lanes: list[_Lane] = []
        self._kept: deque[KVCache] = deque(maxlen=retained)
        self._changed = threading.Condition()
        self._closed = False
        self._left_rows = prompt_rows
        self._read: Callable[[int], None] | None = None  # told how many tokens of a prompt were read
        self.passes = 0

    def submit(
        self, request: Request, deliver: Callable[[Event], None] | None = None, cache: KVCache | None = None
    ) -> Ticket:
        """Queue a request. Its steps go to `deliver` (called in the batch's thread), or wait in the ticket.

        `cache` is one that an earlier call left: what it shares with the prompt is not run again, and it is the
        caller's to use again afterwards. Raises QueueFull where too many wait, CutawayError where it is closed.
        """
        ticket = Ticket(request, deliver, self._leave)
        with self._changed:
            if self._closed:
                raise CutawayError("This batch is closed; it takes no more requests.")
            if self._limit is not None and len(self._queue) >= self._limit:
                raise QueueFull(f"{len(self._queue)} requests are waiting, as many as may; try again later.")
            self._queue.append((ticket, cache))
            self._changed.notify_all()
        return ticket

    @property
    def kind(self) -> tuple[ModelSpec, str]:
        """The model that it runs, and the type of the numbers that its caches hold."""
        return self._passes.spec, self._passes.dtype

    @property
    def waiting(self) -> int:
        """Requests that no pass has begun for."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Sequences under way."""
        return len(self._lanes)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values that are held, of sequences that ended too."""
        with self._changed:
            return sum(cache.nbytes for cache in (*(lane.cache for lane in self._lanes), *self._kept))

    def step(self) -> bool:
        """One pass for everything that is under way. False where there was nothing to do."""
        with self._changed:
            self._admit()
            self._left_rows = self._prompt_rows
            lanes = [lane for lane in self._lanes if self._give_out(lane)]
        if not lanes:
            return False
        begun = time.perf_counter()
        try:
            for lane in lanes:
                warn_beyond_context(self._passes.spec, *lane.growth, 2)
                lane.unsettle()
            work = [Work(lane.cache, lane.running, self._rows(lane)) for lane in lanes]
            logits = self._passes.run(work, shown=self._shown and self.passes == 0 and self._read is None)
        except BaseException as error:
            for lane in lanes:
                self._fail(lane, error)
            if not isinstance(error, Exception):
                raise
            return True
        self.passes += 1
        seconds = time.perf_counter() - begun
        for lane, rows in zip(lanes, logits, strict=True):
            self._advance(lane, rows, seconds)
        return True

    def steps(self, ticket: Ticket) -> Iterator[Step]:
        """The steps of a ticket, the batch being driven by whoever takes them; leaving off cancels it."""
        try:
            first = self._first_steps(ticket)
            yield from first
            while not ticket.done:
                self.step()
                yield from ticket.ready()
        finally:
            ticket.cancel()

    def _first_steps(self, ticket: Ticket) -> list[Step]:
        """Read the prompt; where that takes several passes, a bar over its tokens is shown if asked for."""
        if self._shown and len(ticket.request.ids) > self._prompt_rows:
            watching: AbstractContextManager[Callable[[int], None] | None] = progress(
                "Reading the prompt", len(ticket.request.ids), "tokens", after=1.0
            )
        else:
            watching = nullcontext()
        with watching as self._read:
            while not (first := list(ticket.ready())) and not ticket.done:
                self.step()
        self._read = None
        return first

    def run(self) -> None:
        """Step until the batch is closed and empty, waiting where there is nothing to do: the owner thread's work."""
        while True:
            if self.step():
                continue
            with self._changed:
                if self._closed and not self._queue and not self._lanes:
                    return
                self._changed.wait_for(lambda: self._queue or self._lanes or self._closed)

    def close(self, *, drain: bool = True) -> None:
        """Take no more requests. With `drain` those that are there are finished, else all are cancelled."""
        with self._changed:
            self._closed = True
            tickets = [] if drain else [ticket for ticket, _ in self._queue] + [lane.ticket for lane in self._lanes]
            self._changed.notify_all()
        for ticket in tickets:
            ticket.cancel()

    # In the owner's thread

    def _admit(self) -> None:
        while self._queue and len(self._lanes) < self._at_once:
            ticket, cache = self._queue.popleft()
            if cache is None:
                cache = self._kept_for(ticket.request)
            ticket.reused = reuse(cache, ticket.request.ids) if cache.length else 0
            guessing = ticket.request.guess > 0 and self._passes.may_shorten
            self._lanes.append(_Lane(ticket, Response(ticket.request, self._tokenizer), cache, guessing))

    def _kept_for(self, request: Request) -> KVCache:
        """The kept cache that shares most with a prompt, or a new one."""
        shared = [shared_prefix(cache.ids, request.ids) for cache in self._kept]
        if not shared or max(shared) < WORTH_REUSING:
            return self._passes.cache()
        best = self._kept[int(np.argmax(shared))]
        self._kept.remove(best)
        return best

    def _give_out(self, lane: _Lane) -> bool:
        """Say what the lane runs in this pass; False where its prompt has to wait for room."""
        if not lane.reading:
            lane.guess()
            lane.running = [*lane.pending, *lane.guessed]
            return True
        count = self._passes.chunk(lane.cache.length, len(lane.pending), self._left_rows)
        if count == 0:
            return False
        self._left_rows = max(0, self._left_rows - count)
        lane.running = lane.pending[:count]
        return True

    def _rows(self, lane: _Lane) -> int:
        """How many rows of logits are of use: none before the prompt's last token."""
        if lane.reading:
            return int(len(lane.running) == len(lane.pending))
        return 1 + len(lane.guessed)

    def _advance(self, lane: _Lane, logits: np.ndarray, seconds: float) -> None:
        if lane.ticket.done:
            return  # cancelled meanwhile
        if not len(logits):
            lane.pending = lane.pending[len(lane.running) :]
            if self._read is not None:
                self._read(len(lane.running))
            return
        try:
            for step in lane.accept(logits, seconds):
                if not lane.ticket.done:
                    lane.ticket.send(step)
        except Exception as error:
            self._fail(lane, error)
        if lane.ticket.done:
            self._drop(lane)

    def _fail(self, lane: _Lane, error: BaseException) -> None:
        if not lane.ticket.done:
            lane.ticket.send(error)
        self._drop(lane, keep=False)

    def _drop(self, lane: _Lane, *, keep: bool = True) -> None:
        with self._changed:
            if lane in self._lanes:
                self._lanes.remove(lane)
                if keep and self._retained:
                    self._kept.append(lane.cache)

    # In any thread

    def _leave(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket.done:
                return
            self._queue = deque(entry for entry in self._queue if entry[0] is not ticket)
            self._lanes = [lane for lane in self._lanes if lane.ticket is not ticket]
            ticket.send(None)
            self._changed.notify_all()
