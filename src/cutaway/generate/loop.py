"""The autoregressive loop: one forward pass, one token, again (chapter 15)."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cutaway.generate.sampling import Sampling, sample
from cutaway.generate.stopping import StopStrings
from cutaway.text.tokenizer import Tokenizer
from cutaway.trace import Trace
from cutaway.trace.trace import shortened

Finish = Literal["length", "stop token", "stop string", "context"]


@dataclass(frozen=True, eq=False)
class Step:
    """One turn of the loop.

    `text` is what may be shown now: whole characters only, and nothing that could belong to a stop string, so
    it may be empty, and later hold more than one token's text. `logprob` is the token's natural-log probability
    in the model's own distribution. `finish` says why the loop ended, in its last step.
    """

    index: int
    token: int
    text: str
    logprob: float
    finish: Finish | None = None
    trace: Trace | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Generation:
    """A finished response. Times in seconds: the pass over the prompt, and all later passes together."""

    prompt_ids: list[int]
    tokens: list[int]
    text: str
    logprobs: list[float]
    finish: Finish
    prompt_seconds: float
    decode_seconds: float
    steps: list[Step] = field(default_factory=list)

    def __repr__(self) -> str:
        ended = f"{len(self.tokens)} token{'s' if len(self.tokens) != 1 else ''}, finish {self.finish!r}"
        return f"<Generation of {ended}: {shortened(self.text, 60)}>"

    @property
    def tokens_per_second(self) -> float | None:
        """Passes after the first, per second; None where there was only one."""
        return (len(self.tokens) - 1) / self.decode_seconds if len(self.tokens) > 1 and self.decode_seconds else None


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


def loop(
    advance: Callable[[list[int]], tuple[np.ndarray, Trace | None]],
    ids: Sequence[int],
    sampling: Sampling,
    random: np.random.Generator,
    limits: Limits,
    tokenizer: Tokenizer | None,
) -> Iterator[Step]:
    """Yield one step per token. `advance(ids)` runs the ids that the cache does not hold yet → logits `[V]`."""
    spelled = tokenizer.vocab_size if tokenizer is not None else 0  # an embedding may have more rows than that
    text = tokenizer.stream(after=[i for i in ids if i < spelled], skip_special=True) if tokenizer is not None else None
    stops = StopStrings(limits.stops)
    pending = list(ids)
    length = len(pending)
    for index in range(limits.max_tokens):
        logits, trace = advance(pending)
        token = sample(logits, sampling, random)
        length += 1
        finish: Finish | None = None
        shown = ""
        if token in limits.stop_ids:
            finish = "stop token"
        else:
            shown = stops.push(text.push(token) if text is not None and token < spelled else "")
            if stops.found is not None:
                finish = "stop string"
            elif index + 1 == limits.max_tokens:
                finish = "length"
            elif limits.context is not None and length > limits.context:
                finish = "context"
        if finish is not None and finish != "stop string":
            shown += stops.push(text.flush() if text is not None else "") + stops.flush()
            if stops.found is not None:
                finish = "stop string"
        yield Step(index, token, shown, log_probability(logits, token), finish, trace)
        if finish is not None:
            return
        pending = [token]


def log_probability(logits: np.ndarray, token: int) -> float:
    """ln softmax(logits)[token], in float64."""
    row = logits.astype(np.float64)
    highest = row.max()
    return float(row[token] - highest - np.log(np.exp(row - highest).sum()))


def finished(ids: Sequence[int], steps: Iterator[Step], keep_steps: bool) -> Generation:
    """Run the loop to its end and put the response together."""
    taken: list[Step] = []
    begun = time.perf_counter()
    first = begun
    for step in steps:
        if not taken:
            first = time.perf_counter()
        taken.append(step)
    ended = time.perf_counter()
    return Generation(
        prompt_ids=list(ids),
        tokens=[step.token for step in taken],
        text="".join(step.text for step in taken),
        logprobs=[step.logprob for step in taken],
        finish=taken[-1].finish or "length",
        prompt_seconds=first - begun,
        decode_seconds=ended - first,
        steps=taken if keep_steps else [],
    )
