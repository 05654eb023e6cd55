"""A running batch: sequences join it and leave it between passes, and each gets what it would get alone.

One thread owns a batch and calls `step` (or `run`, which does so until the batch is closed); any thread may
submit and cancel. Sequences are packed, so a step runs one more token of those that are under way together with
a chunk of the prompts that are still being read.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial

import numpy as np

from cutaway.engines.layout import CHUNK
from cutaway.errors import CutawayError
from cutaway.forward.cache import KVCache
from cutaway.forward.context import warn_beyond_context
from cutaway.generate.held import Held, ReadPrompt
from cutaway.generate.lane import Lane
from cutaway.generate.passes import Passes, Work, reuse
from cutaway.generate.response import Request, Response, ScoredToken, Step
from cutaway.generate.ticket import Event, Ticket
from cutaway.progress import progress
from cutaway.spec import ModelSpec
from cutaway.text.tokenizer import Tokenizer

PROMPT_ROWS = 512  # of the prompts that are being read, so many tokens a pass


class QueueFull(CutawayError):
    """As many requests wait as may."""


def _too_many(waiting: int, more: int, limit: int) -> str:
    told = f"{waiting} request{'s are' if waiting != 1 else ' is'} waiting"
    if waiting >= limit:
        return f"{told}, as many as may; try again later."
    return f"{told} and {limit} may: {more} more are too many now; try again later."


class Batch:
    """Sequences that share passes. `at_once` run together, `waiting` more may queue (None: any number).

    Requests with the same prompt that wait at once read it once: it is the same rows that each goes on from.
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
        self._at_once, self._limit, self._prompt_rows = int(at_once), waiting, prompt_rows
        self._shown = shown
        self._queue: deque[tuple[Ticket, KVCache | None]] = deque()
        self._lanes: list[Lane] = []
        self._held = Held(retained)
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
        caller's to use again afterwards. Raises QueueFull where too many wait, CutawayError where it is closed, and for
        edits that can never act; with edits there can be no `cache`, whose rows are others.
        """
        if cache is not None and request.edits:
            raise CutawayError("A response with edits begins with a cache of its own; leave this one out.")
        if cache is not None:
            self._passes.refuse_foreign(cache)
        return self._submitted([(Ticket(request, deliver, self._leave), cache)])[0]

    def submit_all(self, requests: Sequence[tuple[Request, Callable[[Event], None] | None]]) -> list[Ticket]:
        """Queue several requests, each with its `deliver`, at one moment: all, or none where too many wait.

        What has the same prompt is sure to read it once. Raises as `submit` does.
        """
        return self._submitted([(Ticket(request, deliver, self._leave), None) for request, deliver in requests])

    def _submitted(self, entries: Sequence[tuple[Ticket, KVCache | None]]) -> list[Ticket]:
        for ticket, _ in entries:
            ticket.edited = self._passes.edited(ticket.request)
        with self._changed:
            if self._closed:
                raise CutawayError("This batch is closed; it takes no more requests.")
            if self._limit is not None and len(self._queue) + len(entries) > self._limit:
                raise QueueFull(_too_many(len(self._queue), len(entries), self._limit))
            self._queue.extend(entries)
            self._changed.notify_all()
        return [ticket for ticket, _ in entries]

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
        return sum(1 + len(lane.followers) for lane in self._lanes)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values that are held, of sequences that ended too."""
        with self._changed:
            return self._held.nbytes + sum(lane.cache.nbytes for lane in self._lanes)

    def step(self) -> bool:
        """One pass for everything that is under way. False where there was nothing to do.

        What goes wrong with one sequence its own ticket is told. Whatever this raises, an interrupt for one, all have
        been told, also those who wait.
        """
        try:
            return self._step()
        except BaseException as error:
            self.give_up(error)
            raise

    def _step(self) -> bool:
        with self._changed:
            begun = self._admit()
        for lane, rows in begun:
            self._advance(lane, rows, None)
        with self._changed:
            self._left_rows, there = self._prompt_rows, self._lanes[:]
            given = [lane for lane in there if self._alone(lane, self._give_out)]
        lanes = [lane for lane in given if self._alone(lane, self._prepared)]
        if not lanes:
            return bool(begun or given) or len(self._lanes) < len(there)
        started = time.perf_counter()
        try:
            work = [Work(lane.cache, lane.running, self._rows(lane), lane.ticket.edited) for lane in lanes]
            found = self._passes.run(work, shown=self._shown and self.passes == 0 and self._read is None)
        except Exception as error:
            for lane in lanes:
                self._fail(lane, error)
            return True
        self.passes += 1
        seconds = time.perf_counter() - started
        for lane, result in zip(lanes, found, strict=True):
            if isinstance(result, Exception):
                self._fail(lane, result)
            else:
                self._advance(lane, result, seconds)
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
        try:
            with watching as self._read:
                while not (first := list(ticket.ready())) and not ticket.done:
                    self.step()
        finally:
            self._read = None
        return first

    def run(self) -> None:
        """Step until the batch is closed and empty, waiting where there is nothing to do: the owner thread's work.

        Where it ends otherwise it closes the batch, and all who wait are told.
        """
        try:
            while True:
                if self.step():
                    continue
                with self._changed:
                    if self._closed and not self._queue and not self._lanes:
                        return
                    self._changed.wait_for(lambda: self._queue or self._lanes or self._closed)
        except BaseException as error:
            with self._changed:
                self._closed = True
            self.give_up(error)
            raise

    def close(self, *, drain: bool = True) -> None:
        """Take no more requests. With `drain` those that are there are finished, else all are cancelled."""
        with self._changed:
            self._closed = True
            waiting = [ticket for ticket, _ in self._queue] + [one for lane in self._lanes for one in lane.followers]
            tickets = [] if drain else waiting + [lane.ticket for lane in self._lanes]
            self._changed.notify_all()
        for ticket in tickets:
            ticket.cancel()

    # In the owner's thread

    def _admit(self) -> list[tuple[Lane, np.ndarray]]:
        """Begin with what waits, as far as there is room; those whose prompt was read before, with the row after it."""
        begun = []
        while self._queue and self.running < self._at_once:
            ticket, lent = self._queue[0]  # it stays there until it is in a lane, so that it is never nowhere
            reading = next((lane for lane in self._lanes if lane.reads_for(ticket.request)), None)
            read = self._held.prompt(ticket.request)
            if lent is None and reading is not None:
                reading.followers.append(ticket)
            elif lent is None and read is not None:
                if lane := self._begin(ticket, read.cache.fork, read.scored):
                    begun.append((lane, read.logits))
            elif lane := self._begin(ticket, partial(self._cache_for, ticket.request, lent)):
                lane.lent, lane.shares = lent is not None, lent is None
            self._queue.popleft()
        self._forget()
        return begun

    def _begin(
        self, ticket: Ticket, made: Callable[[], KVCache], scored: list[ScoredToken] | None = None
    ) -> Lane | None:
        """A lane for a ticket, on the cache that `made` gives; with `scored` it holds all of its prompt, the last
        token's row too. None where it could not begin, for want of memory say, which the ticket is told.
        """
        try:
            cache, whole = made(), scored is not None
            ticket.reused = cache.length if whole else reuse(cache, ticket.request.ids) if cache.length else 0
            lane = Lane(ticket, Response(ticket.request, self._tokenizer), cache, self._guesses(ticket))
            lane.scored += scored or ()
            self._passes.claim(cache, lane)
        except Exception as error:
            ticket.end(error)
            return None
        self._lanes.append(lane)
        return lane

    def _guesses(self, ticket: Ticket) -> bool:
        return ticket.request.guess > 0 and self._passes.may_shorten

    def _cache_for(self, request: Request, lent: KVCache | None) -> KVCache:
        """The cache that was lent, else the kept one that shares most with a prompt, or a new one."""
        return lent or self._held.take(request) or self._passes.cache()

    def _forget(self) -> None:
        self._held.forget([ticket.request for ticket, _ in self._queue])

    def _share(self, lane: Lane, logits: np.ndarray) -> list[Lane]:
        """The prompt was read: its followers go on from the same rows, and those who wait will."""
        with self._changed:
            begun = []
            while lane.followers:
                begun.append(self._begin(lane.followers[0], lane.cache.fork, lane.scored))
                del lane.followers[0]
            if lane.shares and any(lane.ticket.request.reads_like(ticket.request) for ticket, _ in self._queue):
                with suppress(MemoryError):  # then they read it themselves
                    read = ReadPrompt(lane.ticket.request, lane.cache.fork(), np.array(logits), lane.scored)
                    self._held.prompts.append(read)
            return [one for one in begun if one is not None]

    def _give_out(self, lane: Lane) -> bool:
        """Say what the lane runs in this pass; False where its prompt has to wait for room."""
        if not lane.reading:
            lane.guess()
            lane.running = [*lane.pending, *lane.guessed]
            return True
        most = min(self._left_rows, CHUNK) if lane.scoring else self._left_rows  # so many logits stand in memory
        count = self._passes.chunk(lane.cache.length, len(lane.pending), most)
        if count == 0:
            return False
        self._left_rows = max(0, self._left_rows - count)
        lane.running = lane.pending[:count]
        return True

    def _prepared(self, lane: Lane) -> bool:
        """True; raises where the lane cannot go on, as with a cache that is no longer its own."""
        lane.cache.refuse_others(lane)
        warn_beyond_context(self._passes.spec, *lane.growth, 2)
        lane.unsettle()
        return True

    def _alone(self, lane: Lane, told: Callable[[Lane], bool]) -> bool:
        """What is told of a lane; False where that goes wrong, and then it fails alone."""
        try:
            return told(lane)
        except Exception as error:
            self._fail(lane, error)
            return False

    def _rows(self, lane: Lane) -> int:
        """How many rows of logits are of use: none before the prompt's last token."""
        if lane.scoring:
            return len(lane.running)
        if lane.reading:
            return int(len(lane.running) == len(lane.pending))
        return 1 + len(lane.guessed)

    def _advance(self, lane: Lane, logits: np.ndarray, seconds: float | None) -> None:
        if lane.ticket.done:
            return  # cancelled meanwhile
        try:
            if lane.scoring and seconds is not None:
                logits = lane.score(logits)
            if not len(logits):
                lane.pending = lane.pending[len(lane.running) :]
                if self._read is not None:
                    self._read(len(lane.running))
                return
            followers = [] if lane.response.tokens else self._share(lane, logits)
            for follower in followers:
                self._advance(follower, logits, None)
            for step in lane.accept(logits, seconds):
                if not lane.ticket.done:
                    edited = lane.ticket.edited
                    lane.ticket.send(step if edited is None else edited.told(step, logits[-1], lane.cache.ids))
        except Exception as error:
            self._fail(lane, error)
        if lane.ticket.done:
            self._drop(lane)

    def _fail(self, lane: Lane, error: Exception) -> None:
        self._drop(lane, keep=False)
        for ticket in (lane.ticket, *lane.followers):
            ticket.end(error)

    def give_up(self, error: BaseException) -> None:
        """Tell everybody, under way or waiting, so that nobody waits for what never comes."""
        if not isinstance(error, Exception):  # it stops whoever runs the batch, not those who wait in other threads
            error = CutawayError(f"The batch was stopped ({type(error).__name__}) before this response had ended.")
        with self._changed:
            tickets = [ticket for lane in self._lanes for ticket in (lane.ticket, *lane.followers)]
            tickets += [ticket for ticket, _ in self._queue]
            self._lanes, self._held.prompts = [], []
            self._queue.clear()
            self._changed.notify_all()
        for ticket in tickets:
            ticket.end(error)

    def _drop(self, lane: Lane, *, keep: bool = True) -> None:
        with self._changed:
            if lane in self._lanes:
                self._lanes.remove(lane)
                if keep and not lane.lent and lane.ticket.edited is None:
                    self._held.keep(lane.cache)

    # In any thread

    def _leave(self, ticket: Ticket) -> None:
        with self._changed:
            if ticket.done:
                return
            self._queue = deque(entry for entry in self._queue if entry[0] is not ticket)
            for lane in self._lanes:
                lane.followers = [one for one in lane.followers if one is not ticket]
                while lane.ticket is ticket and lane.followers:
                    self._hand_over(lane)
            self._lanes = [lane for lane in self._lanes if lane.ticket is not ticket]
            self._forget()
            ticket.end(None)
            self._changed.notify_all()

    def _hand_over(self, lane: Lane) -> None:
        """What a lane has read goes to the first of its followers, or that is told why it cannot."""
        first = lane.followers[0]
        try:
            lane.hand_over(Response(first.request, self._tokenizer), self._guesses(first))
        except Exception as error:
            lane.followers.remove(first)
            first.end(error)
