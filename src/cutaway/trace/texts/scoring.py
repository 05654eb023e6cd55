"""Scoring texts: what each token's log-probability is, window by window, in one model or beside another.

A token is predicted from those before it, so the first of a text is scored only where the tokenizer puts another
before it. Texts are packed, never padded: nothing has to be masked out of a sum, and the loss of a text is the same
in any company (on the numpy and cpu engines bit for bit).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from cutaway.engines.layout import BLOCK, Layout
from cutaway.errors import CutawayError
from cutaway.forward.context import warn_beyond_context
from cutaway.forward.head import logits
from cutaway.forward.transformer import Pass, transformer
from cutaway.progress import progress
from cutaway.spec.check import is_whole
from cutaway.text.tokenizer import Tokenizer
from cutaway.trace.finite import first_nonfinite
from cutaway.trace.prompt import Prompt
from cutaway.trace.prompts import PromptLike
from cutaway.trace.running import Machine
from cutaway.trace.sweep.prompts import prompts_of
from cutaway.trace.texts.score import Score


class Scoring(TypedDict, total=False):
    """What may be said of scoring; see `Model.scores`."""

    context: int | None
    stride: int | None
    against: Any


@dataclass(frozen=True, eq=False)
class Scorer:
    """A model to score with; `read` makes ids of a text of any length."""

    machine: Machine
    read: Callable[[PromptLike], Prompt]
    tokenizer: Tokenizer | None


def scores(
    scorer: Scorer, texts: Any, context: int | None, stride: int | None, other: Scorer | None
) -> Iterator[Score]:
    """See `Model.scores`. What cannot be is refused here, before anything is run."""
    machines = [scorer.machine] if other is None else [scorer.machine, other.machine]
    for machine in machines:
        _refuse_encoder(machine)
    if other is not None:
        _refuse_other_vocabulary(scorer, other)
    context, stride = _windowing(machines, context, stride)
    prompts = prompts_of(texts)
    return _scores(scorer, machines, prompts.untyped(), prompts.count(), context, stride)


@dataclass(eq=False)
class _Text:
    prompt: Prompt
    logprobs: np.ndarray
    divergence: np.ndarray | None
    windows: int  # that are still to come
    windowed: bool


@dataclass(frozen=True, eq=False)
class _Window:
    """Tokens `start:stop` of a text; those from `first` on are scored."""

    text: _Text
    start: int
    stop: int
    first: int

    @property
    def ids(self) -> np.ndarray:
        return np.asarray(self.text.prompt.ids[self.start : self.stop])


def _scores(
    scorer: Scorer,
    machines: Sequence[Machine],
    texts: Iterator[PromptLike],
    count: int | None,
    context: int | None,
    stride: int | None,
) -> Iterator[Score]:
    waiting: deque[_Text] = deque()
    pack: list[_Window] = []
    with progress("Scoring", count, "texts", after=1.0) as advance:

        def finished() -> Iterator[Score]:
            while waiting and waiting[0].windows == 0:
                text = waiting.popleft()
                advance(1)
                used = (context, stride) if text.windowed else (None, None)
                yield Score(text.prompt, text.logprobs, text.divergence, *used)

        for index, raw in enumerate(texts):
            try:
                prompt = scorer.read(raw)
            except CutawayError as error:
                raise CutawayError(f"Text {index}: {error}" if count != 1 else str(error)) from None
            empty = np.full(len(prompt.ids), np.nan)
            spans = list(_spans(len(prompt.ids), context, stride))
            longest = max(stop - start for start, stop, _ in spans)
            for machine in machines:
                warn_beyond_context(machine.spec, 0, longest)
            text = _Text(prompt, empty, empty.copy() if len(machines) > 1 else None, len(spans), len(spans) > 1)
            waiting.append(text)
            for span in spans:
                window = _Window(text, *span)
                if pack and sum(w.stop - w.start for w in pack) + span[1] - span[0] > machines[0].tokens_per_pass:
                    _run(machines, pack)
                    pack = []
                    yield from finished()
                pack.append(window)
        if pack:
            _run(machines, pack)
            yield from finished()


def _spans(length: int, context: int | None, stride: int | None) -> Iterator[tuple[int, int, int]]:
    """Windows as (start, stop, first scored): every token but the very first is scored in exactly one."""
    if context is None or stride is None or length <= context:
        yield 0, length, 1
        return
    start, scored = 0, 1
    while scored < length:
        stop = min(start + context, length)
        yield start, stop, scored
        start, scored = start + stride, stop


def _run(machines: Sequence[Machine], pack: Sequence[_Window]) -> None:
    """One pass of each model over the windows, and what it says of their tokens."""
    passes = [_pass(machine, pack) for machine in machines]
    segments = passes[0].layout.segments
    rows, targets, places = [], [], []
    for window, segment in zip(pack, segments, strict=True):
        window.text.windows -= 1
        for position in range(window.first, window.stop):
            rows.append(segment.start + position - window.start - 1)
            targets.append(window.text.prompt.ids[position])
            places.append((window.text, position))
    for start in range(0, len(rows), BLOCK):  # never more than a few rows of V numbers
        part = slice(start, start + BLOCK)
        lines = [_log_softmax(_logits(m, ran, rows[part], pack)) for m, ran in zip(machines, passes, strict=True)]
        own = lines[0]
        for index, ((text, position), target) in enumerate(zip(places[part], targets[part], strict=True)):
            text.logprobs[position] = own[index, target]
        if len(lines) > 1:
            found = _divergences(own, lines[1])
            for (text, position), value in zip(places[part], found, strict=True):
                assert text.divergence is not None
                text.divergence[position] = value


def _pass(machine: Machine, pack: Sequence[_Window]) -> Pass:
    ran = transformer(machine.engine, machine.spec, machine.parameters, [window.ids for window in pack], rows=())
    final = machine.engine.numpy(ran.final)
    if not np.isfinite(final).all():
        for window, segment in zip(pack, ran.layout.segments, strict=True):
            if not np.isfinite(final[segment.start : segment.stop]).all():
                _refuse_nonfinite(machine, window)
    return ran


def _logits(machine: Machine, ran: Pass, rows: Sequence[int], pack: Sequence[_Window]) -> np.ndarray:
    layout: Layout = ran.layout
    made = machine.engine.numpy(logits(machine.engine, machine.spec, machine.parameters, ran.final, layout, rows))
    if np.isnan(made).any() or np.isposinf(made).any():
        row = rows[int(np.flatnonzero(~np.isfinite(made).all(axis=1))[0])]
        for window, segment in zip(pack, layout.segments, strict=True):
            if row < segment.stop:
                _refuse_nonfinite(machine, window)
    return made


def _refuse_nonfinite(machine: Machine, window: _Window) -> None:
    where = first_nonfinite(machine.engine, machine.spec, machine.parameters, window.ids.tolist(), None)
    raise CutawayError(f"{machine.spec.name} computes no usable numbers: {where}")


def _log_softmax(rows: np.ndarray) -> np.ndarray:
    """ℓ − max − ln Σ exp(ℓ − max), in float64."""
    shifted = rows.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _divergences(own: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Σ p ln(p / q) of each row; what rounding makes negative is 0."""
    p = np.exp(own)
    with np.errstate(invalid="ignore"):
        terms = np.where(p > 0, p * (own - other), 0.0)  # a token that p never picks adds nothing
    return np.maximum(terms.sum(axis=-1), 0.0)


def _windowing(machines: Sequence[Machine], context: Any, stride: Any) -> tuple[int | None, int | None]:
    """How long windows are, and how far apart. Raises CutawayError for what cannot be."""
    limits = [limit for machine in machines for limit in (machine.spec.n_max,) if limit is not None]
    made_for = [machine.spec.context_length for machine in machines if machine.spec.context_length is not None]
    for name, value, least in (("context", context, 2), ("stride", stride, 1)):
        if value is not None and (not is_whole(value) or value < least):
            raise CutawayError(f"{name} is {value!r}; it must be a whole number of tokens, at least {least}.")
    if context is not None and limits and context > min(limits):
        raise CutawayError(f"context is {context}; the model has learned positions for {min(limits)} tokens only.")
    if context is None:
        context = min([*limits, *made_for], default=None)
    if context is None:
        if stride is not None:
            raise CutawayError("stride parts a text into windows, whose length the model does not state: give context.")
        return None, None
    if stride is None:
        stride = max(1, context // 2)
    if stride >= context:
        raise CutawayError(
            f"stride is {stride} and context {context}; the stride must be less, or a window's first token would have "
            "none before it."
        )
    return int(context), int(stride)


def _refuse_encoder(machine: Machine) -> None:
    spec = machine.spec
    if spec.headless:
        raise CutawayError(f"{spec.name} is an encoder without a head: it gives vectors, not logits.")
    if not spec.causal:
        raise CutawayError(
            f"{spec.name} reads in both directions: it sees the token that it would have to predict, so a text has no "
            "probability in it."
        )


def _refuse_other_vocabulary(scorer: Scorer, other: Scorer) -> None:
    """The same id must mean the same token to both."""
    one, two = scorer.machine.spec, other.machine.spec
    if one.vocab_size != two.vocab_size:
        raise CutawayError(
            f"{one.name} has {one.vocab_size:,} tokens and {two.name} {two.vocab_size:,}; two models can be compared "
            "token by token only where they share a vocabulary."
        )
    if scorer.tokenizer is None or other.tokenizer is None:
        return
    for token in range(min(scorer.tokenizer.vocab_size, other.tokenizer.vocab_size)):
        here, there = scorer.tokenizer.piece(token), other.tokenizer.piece(token)
        if here != there:
            raise CutawayError(
                f"Token {token} is {here!r} in {one.name} and {there!r} in {two.name}; two models can be compared "
                "token by token only where they share a vocabulary."
            )
