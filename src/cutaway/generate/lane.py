"""One sequence in a running batch: what it runs in the next pass, and what becomes of the logits."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cutaway.forward.cache import KVCache
from cutaway.generate.cache_use import CacheStep
from cutaway.generate.candidates import Candidates
from cutaway.generate.record import alternatives
from cutaway.generate.response import Request, Response, ScoredToken, Step
from cutaway.generate.scratch import Scratch
from cutaway.generate.speculation import Lookup, Payoff
from cutaway.generate.ticket import Ticket


class Lane:
    """A sequence under way: what has still to run, and what was guessed to follow it.

    `followers` wait for the same prompt to be read, to go on from its rows each in its own way.
    """

    def __init__(self, ticket: Ticket, response: Response, cache: KVCache, guessing: bool) -> None:
        self.ticket, self.response, self.cache = ticket, response, cache
        self.followers: list[Ticket] = []
        self.shares = False  # whether its rows may be given to others
        self.lent = False  # whether its cache belongs to whoever asked, who will use it again
        self.pending = list(ticket.request.ids[cache.length :])
        self._held = cache.length  # rows that were there when the passes for the next token began
        self.guessed: list[int] = []
        self.running: list[int] = []  # what the present pass runs
        self._lookup = Lookup(ticket.request.ids) if guessing else None
        self.payoff = Payoff()
        self.scored: list[ScoredToken] = []
        self._scratch = Scratch()

    @property
    def reading(self) -> bool:
        """Whether it runs a text up to its last token: the prompt or, where nothing is kept, all that there is."""
        return not self.response.tokens or not self.ticket.request.cached

    def reads_for(self, request: Request) -> bool:
        """Whether the prompt that it is reading is that of `request` too."""
        return self.shares and not self.response.tokens and self.ticket.request.reads_like(request)

    def hand_over(self, response: Response, guessing: bool) -> None:
        """Its ticket leaves: what was read goes to the first of its followers, whose response this is."""
        lookup = Lookup(response.request.ids) if guessing else None
        self.ticket, self.response, self._lookup = self.followers.pop(0), response, lookup

    @property
    def scoring(self) -> bool:
        """Whether it reads a prompt that is to be scored: then every row goes through the head."""
        return self.ticket.request.score_prompt and not self.response.tokens

    def score(self, logits: np.ndarray) -> np.ndarray:
        """Note what the rows of the pass say of the prompt; the row after its last token, `[1, V]`, if that was run."""
        request, end = self.ticket.request, self.cache.length
        if not self.scored:
            self.scored.append(ScoredToken(request.ids[0], None))
        for place, row in enumerate(logits, start=end - len(logits) + 1):
            if place == len(request.ids):
                return logits[-1:]
            self._scratch.begin()
            own, token = Candidates.of(row, self._scratch), request.ids[place]
            told = alternatives(own, request.alternatives) if request.alternatives else ()
            self.scored.append(ScoredToken(token, own.log_probability(token), told))
        return logits[:0]

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

    def accept(self, logits: np.ndarray, seconds: float | None) -> Iterator[Step]:
        """The steps that the rows `[1 + guessed, V]` of the pass give: more than one where a guess came true.

        `seconds` is what the pass took; None where it was another's.
        """
        taken: list[int] = []
        room, appended = self.cache.room, self.cache.length - self._held
        for place, row in enumerate(logits):
            found = CacheStep(0, 0, 0, room) if place else CacheStep(self._held, appended, len(logits), room)
            step = self.response.take(row, guessed=place > 0, cache=found)
            taken.append(step.token)
            yield replace(step, prompt=tuple(self.scored)) if self.scored and step.index == 0 else step
            if step.finish is not None or place == len(self.guessed) or step.token != self.guessed[place]:
                break
        if seconds is not None:
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
