"""What the KV cache of a response held, step by step, and how much arithmetic it saved (chapter 15.3).

Every number is counted, none is timed: rows are those that the passes ran, FLOPs are `spec.work`'s, the same that
`cutaway count` tells.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from cutaway.errors import CutawayError
from cutaway.forward.cache import HeldLayer, held_layers
from cutaway.forward.positions import settled
from cutaway.spec import ModelSpec
from cutaway.spec.work import flops_in_units, total_flops

if TYPE_CHECKING:
    from cutaway.trace.drawing.page import Page


@dataclass(frozen=True)
class CacheStep:
    """The pass of one step: so many rows it found in the cache (`reused`), so many it ran and added (`appended`).

    A row is one token's keys and values in every layer. `logits` rows went through the head; `room` tokens fit before
    the arrays grow. A step that a guess gave, or whose prompt another response had read, ran no pass: it appended 0.
    """

    reused: int
    appended: int
    logits: int
    room: int


@dataclass(frozen=True, eq=False, repr=False)
class CacheUse:
    """The cache of one response. `kept` is False where nothing was kept and each step ran the whole text.

    Step i predicts the token at position `prompt_tokens` + i. Print it with `show()`.
    """

    spec: ModelSpec
    dtype: str
    prompt_tokens: int
    kept: bool
    steps: tuple[CacheStep, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise CutawayError("A response without a token has no cache to tell of.")

    def __repr__(self) -> str:
        return f"<CacheUse of {self.spec.name}: {self.rows:,} tokens held, {self.nbytes:,} bytes>"

    def __str__(self) -> str:
        """What the cache saved, in rows and in FLOPs."""
        count, run = len(self.steps), sum(self.lengths)
        cached = sum(self.appended) if self.kept else self.prompt_tokens + count - 1
        with_, without = sum(self.flops_with), sum(self.flops_without)
        found = self.steps[0].reused
        told = f"{count:,} token{'s' if count != 1 else ''} after a prompt of {self.prompt_tokens:,}"
        told += f", of which {found:,} stood in the cache already. " if found else ". "
        told += f"With a cache {cached:,} row{'s' if cached != 1 else ''} are run, each token's once: that grows as n. "
        told += f"Without, {run:,}, the whole text again and again: that grows as n². "
        times = f", {without / with_:,.1f} times as many" if with_ else ""
        return f"{told}Counted in FLOPs {flops_in_units(with_)} against {flops_in_units(without)}{times}."

    @property
    def rows(self) -> int:
        """Tokens whose keys and values are held at the end: all but the last, which no pass has run."""
        return self.prompt_tokens + len(self.steps) - 1 if self.kept else 0

    @property
    def room(self) -> int:
        """How many tokens fit into the arrays."""
        return self.steps[-1].room

    @cached_property
    def layers(self) -> tuple[HeldLayer, ...]:
        """What each layer holds at the end."""
        return held_layers(self.spec, self.rows, self.room, np.dtype(self.dtype).itemsize)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that are held."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def reserved(self) -> int:
        """Bytes of the arrays that they stand in."""
        return sum(layer.reserved for layer in self.layers)

    @property
    def row_bytes(self) -> int:
        """Bytes that one token leaves."""
        return self.spec.count().kv_bytes(1, np.dtype(self.dtype).itemsize)

    @property
    def appended(self) -> tuple[int, ...]:
        """Rows that each step's pass ran."""
        return tuple(step.appended for step in self.steps)

    @property
    def reused(self) -> tuple[int, ...]:
        """Rows that each step's pass found."""
        return tuple(step.reused for step in self.steps)

    @cached_property
    def flops(self) -> tuple[int, ...]:
        """What each step's pass cost."""
        return tuple(
            total_flops(self.spec, step.appended, step.reused, step.logits) if step.appended else 0
            for step in self.steps
        )

    @cached_property
    def flops_without(self) -> tuple[int, ...]:
        """What each step costs where nothing is kept: a pass over the whole text so far."""
        return tuple(total_flops(self.spec, tokens, logits=1) for tokens in self.lengths)

    @cached_property
    def flops_with(self) -> tuple[int, ...]:
        """What each step costs with a cache: what it did cost or, where nothing was kept, what it would have cost."""
        if self.kept:
            return self.flops
        costs, rotaries = [], self.spec.rotaries
        for step, tokens in enumerate(self.lengths):
            holds = step > 0 and all(settled(rotary, tokens - 1, tokens) for rotary in rotaries)
            costs.append(total_flops(self.spec, 1 if holds else tokens, tokens - 1 if holds else 0, 1))
        return tuple(costs)

    @property
    def lengths(self) -> range:
        """How many tokens stand before the one that each step predicts."""
        return range(self.prompt_tokens, self.prompt_tokens + len(self.steps))

    def show(self, page: "Page | None" = None) -> None:
        """Print it: what the layers hold, the cache filling step by step, the work with and without it."""
        from cutaway.generate.draw_cache import draw_cache

        draw_cache(self, page)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        told = zip(self.steps, self.flops_with, self.flops_without, strict=True)
        return {
            "kept": self.kept,
            "rows": self.rows,
            "room": self.room,
            "bytes": self.nbytes,
            "reserved_bytes": self.reserved,
            "bytes_per_token": self.row_bytes,
            "layers": [vars(layer) for layer in self.layers],
            "steps": [
                {"reused": step.reused, "appended": step.appended, "flops": with_, "flops_without_cache": without}
                for step, with_, without in told
            ],
            "rows_run": sum(self.appended),
            "rows_run_without_cache": sum(self.lengths),
            "flops": sum(self.flops_with),
            "flops_without_cache": sum(self.flops_without),
        }
