"""The autoregressive loop: one forward pass, one token, again (chapter 15)."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cutaway.errors import CutawayError
from cutaway.generate.batch import Batch
from cutaway.generate.cache_use import CacheStep, CacheUse
from cutaway.generate.choice import values_of
from cutaway.generate.response import Finish, Request, Response, Step
from cutaway.spec import ModelSpec
from cutaway.text.tokenizer import Tokenizer
from cutaway.trace import Trace
from cutaway.trace.edits.edited import EditReport, summed
from cutaway.trace.trace import shortened


@dataclass(frozen=True, eq=False, repr=False)
class Generation:
    """A finished response. Times in seconds: the pass over the prompt, and all later passes together.

    `steps` are there where traces, records or alternatives were asked for. `cache` tells what the KV cache held, step
    by step, and the work with and without it: `out.cache.show()`; None where nothing was said. `edits` tells what each
    edit did in all passes together, and how far it moved the logits of the last token.
    """

    prompt_ids: list[int]
    tokens: list[int]
    text: str
    logprobs: list[float]
    finish: Finish
    prompt_seconds: float
    decode_seconds: float
    steps: list[Step] = field(default_factory=list)
    passes: int = 0
    cache: CacheUse | None = None
    edits: tuple[EditReport, ...] = ()

    def __repr__(self) -> str:
        ended = f"{len(self.tokens)} token{'s' if len(self.tokens) != 1 else ''}, finish {self.finish!r}"
        return f"<Generation of {ended}: {shortened(self.text, 60)}>"

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first, per second; None where there was only one."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 and self.decode_seconds else None

    @property
    def tokens_per_pass(self) -> float | None:
        """1, and more where guesses came true; None where nothing was said."""
        return len(self.tokens) / self.passes if self.passes else None


def loop(
    advance: Callable[[list[int]], tuple[np.ndarray, Trace | None]],
    request: Request,
    tokenizer: Tokenizer | None,
    room: Callable[[], int] = lambda: 0,
) -> Iterator[Step]:
    """Yield one step per token. `advance(ids)` runs the ids that the cache does not hold yet → logits `[V]`.

    `room()` tells how many tokens fit into that cache.
    """
    response = Response(request, tokenizer)
    pending = list(request.ids)
    done: tuple[EditReport, ...] = ()
    while response.finish is None:
        logits, trace = advance(pending)
        step = response.take(logits, trace, cache=None if trace is None else _found(trace, room()))
        if trace is not None and trace.edits:
            done = summed(done, trace.edits)
            step = step if step.finish is None else replace(step, edits=done)
        if trace is not None and step.record is not None and request.points:
            trace.add(values_of(step.record, request.points))
            step = step if request.recording is not None else replace(step, record=None)
        yield step
        pending = [step.token]


def _found(trace: Trace, room: int) -> CacheStep:
    """What the pass of a trace found in its cache and added."""
    return CacheStep(trace.past, len(trace.prompt.ids), 1, room)


class Collected:
    """Steps as they come, and when."""

    def __init__(self) -> None:
        self.begun = self.first = self.last = time.perf_counter()
        self.steps: list[Step] = []
        self.failure: BaseException | None = None

    def add(self, event: Step | BaseException | None) -> None:
        """What a batch delivers."""
        self.last = time.perf_counter()
        if isinstance(event, Step):
            self.first = self.last if not self.steps else self.first
            self.steps.append(event)
        elif event is not None:
            self.failure = event

    def generation(self, request: Request, kind: tuple[ModelSpec, str], keep_steps: bool) -> Generation:
        """The response that the steps make. Raises what went wrong."""
        if self.failure is not None:
            raise self.failure
        steps = self.steps
        return Generation(
            prompt_ids=list(request.ids),
            tokens=[step.token for step in steps],
            text="".join(step.text for step in steps),
            logprobs=[step.logprob for step in steps],
            finish=(steps[-1].finish or "cancelled") if steps else "cancelled",
            prompt_seconds=self.first - self.begun,
            decode_seconds=self.last - self.first,
            steps=steps if keep_steps else [],
            passes=sum(not step.guessed for step in steps),
            cache=cache_of(request, steps, kind),
            edits=steps[-1].edits if steps else (),
        )


def cache_of(request: Request, steps: Sequence[Step], kind: tuple[ModelSpec, str]) -> CacheUse | None:
    """The use that a response made of its cache; `kind` is the model and the type of its numbers."""
    told = tuple(step.cache for step in steps if step.cache is not None)
    return CacheUse(*kind, len(request.ids), request.cached, told) if told else None


def finished(
    request: Request, steps: Iterator[Step], kind: tuple[ModelSpec, str], keep_steps: bool = False
) -> Generation:
    """Run the loop to its end and put the response together; `keep_steps` where its steps are wanted."""
    collected = Collected()
    for step in steps:
        collected.add(step)
    return collected.generation(request, kind, keep_steps or request.keeps_steps)


def all_finished(batch: Batch, requests: Sequence[Request]) -> list[Generation]:
    """Run all requests to their ends in one batch; responses in the order of the requests."""
    collected = [Collected() for _ in requests]
    for request, one in zip(requests, collected, strict=True):
        batch.submit(request, one.add)
    while batch.step():
        pass
    made = []
    for index, (request, one) in enumerate(zip(requests, collected, strict=True)):
        try:
            made.append(one.generation(request, batch.kind, request.keeps_steps))
        except CutawayError as error:
            raise CutawayError(f"Prompt {index}: {error}") from None
    return made
