"""Many prompts, one after another: packed several to a pass, each with the result that it has alone."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cutaway.errors import CutawayError
from cutaway.forward.context import warn_beyond_context
from cutaway.progress import progress
from cutaway.trace.capture.bill import free_memory
from cutaway.trace.prompt import Prompt
from cutaway.trace.prompts import Fed, Given, PromptLike, fed
from cutaway.trace.running import Machine, Watching
from cutaway.trace.sweep.packed_pass import InPrompt, Packed
from cutaway.trace.sweep.prompts import SweepPrompts
from cutaway.trace.trace import Trace


@dataclass(frozen=True, eq=False)
class Sweep:
    """What a sweep runs. `read` makes a prompt of what was given; `reduce` makes a result of a trace."""

    machine: Machine
    read: Callable[[PromptLike], Prompt]
    prompts: SweepPrompts
    asked: Watching
    reduce: Callable[[Trace], Mapping[str, Any]] | None
    tokens_per_pass: int

    def results(self, skipped: int = 0) -> Iterator[tuple[Given, Prompt, Any]]:
        """What was given, what was run for it, and its trace, or what `reduce` made of it; in the order of the prompts.

        The first `skipped` prompts are left out. A bar shows how many are done.
        """
        with progress("Sweeping", self.prompts.count(), "prompts", after=1.0) as advance:
            advance(skipped)
            packed = Packed(self.machine, self.asked)
            for first, given, prompts in self._packs(packed, skipped):
                traces = _traces(packed, first, prompts)[::-1]
                for index, (raw, prompt) in enumerate(zip(given, prompts, strict=True)):
                    trace = traces.pop()  # so that it can go before the pack does
                    result = trace if self.reduce is None else _reduced(self.reduce, trace, first + index)
                    del trace
                    yield raw, prompt.prompt, result
                    del result
                    advance(1)

    def told(self, given: Given) -> Fed:
        """What is run for what was given. Raises CutawayError for what cannot be."""
        return fed(given, self.machine.spec, self.read)

    def _packs(self, packed: Packed, skipped: int) -> Iterator[tuple[int, list[Given], list[Fed]]]:
        """As many prompts at a time as fit into a pass and, with what they keep, into a quarter of the free memory.

        Prompts given as vectors share passes with one another only.
        """
        free = free_memory()
        room = self.asked.limit if self.asked.limit is not None else None if free is None else free // 4
        given: list[Given] = []
        prompts: list[Fed] = []
        first, tokens, kept = skipped, 0, 0
        for index, raw in enumerate(self.prompts.after(skipped), skipped):
            try:
                prompt = self.told(raw)
                cost = packed.bytes(prompt)
            except CutawayError as error:
                raise CutawayError(f"Prompt {index}: {error}") from None
            length = len(prompt.sequence)
            warn_beyond_context(self.machine.spec, 0, length)
            over = tokens + length > self.tokens_per_pass or (room is not None and kept + cost > room)
            if prompts and (over or (prompt.vectors is None) != (prompts[0].vectors is None)):
                yield first, given, prompts
                given, prompts, first, tokens, kept = [], [], index, 0, 0
            given.append(raw)
            prompts.append(prompt)
            tokens, kept = tokens + length, kept + cost
        if prompts:
            yield first, given, prompts


def _reduced(reduce: Callable[[Trace], Mapping[str, Any]], trace: Trace, index: int) -> dict[str, np.ndarray]:
    made = reduce(trace)
    if not isinstance(made, Mapping):
        raise CutawayError(
            f"Prompt {index}: the function given as reduce returned {type(made).__name__}; it must return a dict of "
            "names and numbers or arrays."
        )
    return {str(name): np.asarray(value) for name, value in made.items()}


def _traces(packed: Packed, first: int, prompts: list[Fed]) -> list[Trace]:
    """One pass; an error about one of its prompts names the place in the whole sweep."""
    try:
        return packed.run(prompts)
    except InPrompt as error:
        raise CutawayError(f"Prompt {first + error.index}: {error.why}") from None
