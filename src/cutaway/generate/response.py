"""One response while it grows: from each pass's logits a token, its text, and whether that was the end."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from cutaway.errors import CutawayError
from cutaway.generate.cache_use import CacheStep
from cutaway.generate.candidates import Candidates
from cutaway.generate.record import Recording, StepRecord, alternatives, taken
from cutaway.generate.sampling import Sampling, run_stages
from cutaway.generate.scratch import Scratch
from cutaway.generate.stages import History
from cutaway.generate.stopping import StopStrings
from cutaway.points import Point
from cutaway.text.tokenizer import Tokenizer
from cutaway.trace import Trace
from cutaway.trace.edits.edit import Edit
from cutaway.trace.edits.edited import EditReport

Finish = Literal["length", "stop token", "stop string", "context", "callback", "cancelled"]


@dataclass(frozen=True)
class ScoredToken:
    """A token of the prompt: its natural-log probability after those before it, and the likeliest ids there.

    The first follows nothing: its `logprob` is None.
    """

    token: int
    logprob: float | None
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Step:
    """One turn of the loop.

    `text` is what may be shown now: whole characters only, and nothing that could belong to a stop string, so
    it may be empty, and later hold more than one token's text. `logprob` is the token's natural-log probability
    in the model's own distribution, `alternatives` the likeliest ids there with theirs, where some were asked
    for. `finish` says why the loop ended, in its last step. A `forced` token was given, not drawn; a `guessed`
    one cost no pass of its own: its logits came with an earlier pass that a guess was added to. `cache` tells
    which rows of keys and values its pass found, and which it added. `edits` stand in the last step: what each did in
    all of the response. `prompt` stands in the first step, where the
    prompt was to be scored.
    """

    index: int
    token: int
    text: str
    logprob: float
    finish: Finish | None = None
    trace: Trace | None = None
    alternatives: tuple[tuple[int, float], ...] = ()
    record: StepRecord | None = None
    forced: bool = False
    guessed: bool = False
    cache: CacheStep | None = None
    edits: tuple[EditReport, ...] = ()
    prompt: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True)
class Limits:
    """When to end: after `max_tokens`, at `stop_ids` or `stops`, where a pass would need more than `context` positions.

    Raises CutawayError for a stop string that is none.
    """

    max_tokens: int
    context: int | None
    stop_ids: frozenset[int]
    stops: tuple[str, ...]

    def __post_init__(self) -> None:
        StopStrings(self.stops)


@dataclass(frozen=True, eq=False)
class Request:
    """What is asked for: `ids` to continue, when to end, how to pick.

    `alternatives`: so many of the likeliest are told with each token. `recording`: what to keep of every
    stage. `force` puts tokens at steps (counted from 0) in place of what is drawn there. `until` is called with
    the text so far after every step, and ends the response when it returns something true. `guess`: so many
    tokens are guessed at a time from what stands in the text already (see `speculation`); 0 guesses none. Without
    `cached` no keys and values are kept from one pass to the next: each runs the whole text anew. `edits` act in every
    pass, at the positions of this text. `points` of the
    choice are kept in the trace of each step, where there is one. With `score_prompt` the first step tells how likely
    each token of the prompt was, with as many `alternatives`.
    """

    ids: tuple[int, ...]
    limits: Limits
    sampling: Sampling = field(default_factory=Sampling)
    seed: int | None = None
    alternatives: int = 0
    recording: Recording | None = None
    force: Mapping[int, int] = field(default_factory=dict)
    until: Callable[[str], object] | None = None
    guess: int = 0
    cached: bool = True
    points: tuple[Point, ...] = ()
    edits: tuple[Edit, ...] = ()
    score_prompt: bool = False

    def __post_init__(self) -> None:
        for name, value in (("alternatives", self.alternatives), ("guess", self.guess)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise CutawayError(f"{name} is {value!r}; it must be a whole number, 0 or more.")
        if self.until is not None and not callable(self.until):
            raise CutawayError(f"until is {self.until!r}; it must be a function that is given the text so far.")
        if self.edits and (self.guess or not self.cached or self.score_prompt):
            raise CutawayError("A response with edits guesses nothing, has its own cache, and scores no prompt.")
        if self.guess and not self.cached:
            raise CutawayError("A guess runs along with a pass over one token, which needs a cache; leave out guess.")

    def reads_like(self, other: "Request") -> bool:
        """Whether a pass over its prompt leaves what one over the other's does, so that one pass does for both."""
        if self.edits or other.edits:  # they count what they did, each in its own passes
            return False
        scored = [(one.score_prompt, one.alternatives * one.score_prompt) for one in (self, other)]
        return self.cached and other.cached and scored[0] == scored[1] and self.ids == other.ids

    @property
    def keeps_steps(self) -> bool:
        """Whether more was asked of each step than its token and text."""
        return self.recording is not None or self.alternatives > 0 or self.score_prompt


class Response:
    """The state of one response: what was said, the random numbers to come, the text held back."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self._history = History(request.ids)
        self._numbers = _numbers(request.seed)
        self._scratch = Scratch()
        self._spelled = tokenizer.vocab_size if tokenizer is not None else 0  # an embedding may have more rows
        before = [token for token in request.ids if token < self._spelled]
        self._text = tokenizer.stream(after=before, skip_special=True) if tokenizer is not None else None
        self._stops = StopStrings(request.limits.stops)
        self._said: list[str] = []

    @property
    def length(self) -> int:
        """Tokens of prompt and response together."""
        return len(self.request.ids) + len(self.tokens)

    def take(
        self,
        logits: np.ndarray,
        trace: Trace | None = None,
        *,
        guessed: bool = False,
        cache: CacheStep | None = None,
    ) -> Step:
        """The next step, from the logits `[V]` of the row before it."""
        index = len(self.tokens)
        self._scratch.begin()
        own = Candidates.of(logits, self._scratch)
        token, record = self._pick(own, logits, index)
        logprob = own.log_probability(token)
        told = alternatives(own, self.request.alternatives) if self.request.alternatives else ()
        self.tokens.append(token)
        self._history.append(token)
        shown = self._shown(token)
        self._said.append(shown)
        if self.finish is None and self.request.until is not None and self.request.until("".join(self._said)):
            self.finish = "callback"
            shown += self._rest()
        if self.finish is not None:
            self._refuse_unreached()
        return Step(
            index,
            token,
            shown,
            logprob,
            self.finish,
            trace,
            told,
            record,
            forced=index in self.request.force,
            guessed=guessed,
            cache=cache,
        )

    def _refuse_unreached(self) -> None:
        """A step that was to be forced and never came is a wish that nobody met."""
        ended = len(self.tokens)
        if late := [step for step in self.request.force if step >= ended]:
            raise CutawayError(
                f"force names step {min(late)}, but the text ended after {ended} token{'s' if ended != 1 else ''} "
                "(steps count from 0); name an earlier step."
            )

    def _pick(self, own: Candidates, logits: np.ndarray, index: int) -> tuple[int, StepRecord | None]:
        """The token, and the record of its choice. One random number is taken for each, forced or not."""
        request, number = self.request, next(self._numbers)
        record, recording = None, request.recording
        if request.points:
            recording = replace(recording or Recording(leading=1, logits=False), whole=True)
        if recording is not None:
            record = taken(own, logits, request.sampling, number, self._history, index, recording)
        forced = request.force.get(index)
        if forced is not None:
            return forced, None if record is None else replace(record, token=forced, interval=None, forced=True)
        if record is not None:
            return record.token, record
        return run_stages(own, request.sampling.stages, self._history).draw(number)[0], None

    def _shown(self, token: int) -> str:
        """What of the token's text may be shown; sets `finish` where this was the last."""
        limits = self.request.limits
        shown = ""
        if token in limits.stop_ids:
            self.finish = "stop token"
        else:
            shown = self._stops.push(self._text.push(token) if self._text is not None and token < self._spelled else "")
            if self._stops.found is not None:
                self.finish = "stop string"
            elif len(self.tokens) == limits.max_tokens:
                self.finish = "length"
            elif limits.context is not None and self.length > limits.context:
                self.finish = "context"
        if self.finish is not None and self.finish != "stop string":
            shown += self._rest()
        return shown

    def _rest(self) -> str:
        """The text that was held back, now that nothing more comes; it may turn out to hold a stop string."""
        rest = self._stops.push(self._text.flush() if self._text is not None else "") + self._stops.flush()
        if self._stops.found is not None:
            self.finish = "stop string"
        return rest


def _numbers(seed: int | None) -> Iterator[float]:
    """What a generator of this seed draws from [0, 1), one number after another; made many at a time."""
    random = np.random.default_rng(seed)
    while True:
        yield from random.random(64).tolist()
