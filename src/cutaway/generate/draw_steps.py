"""Continuations side by side, and the steps of one: how sure each was, and what else it might have been."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from cutaway.generate.draw_lab import percent
from cutaway.generate.loop import Generation
from cutaway.generate.repetition import Repetition, repetition
from cutaway.generate.response import Step
from cutaway.trace.drawing.page import LIKELY, NEGATIVE, POSITIVE, Page, bar, fit, quoted

Piece = Callable[[int], str]
BETWEEN = " │ "
ENTROPY_SHOWN = 12.0  # bits that fill the bar of a step


@dataclass(frozen=True)
class Continuation:
    """One response to a prompt, under a name; `said` is the text of each token, `forced` the steps that were given."""

    title: str
    out: Generation
    said: Sequence[str]
    forced: frozenset[int] = frozenset()


def draw_beside(one: Continuation, other: Continuation, page: Page | None = None) -> None:
    """Both responses in two columns: what they share dim, a forced token marked, and how each repeats itself."""
    page = Page.on() if page is None else page
    shared = common(one.out.tokens, other.out.tokens)
    if page.plain:
        for continuation in (one, other):
            page.heading(continuation.title)
            page.line("".join(continuation.said).strip("\n"))
            page.note(measures(continuation.out))
        page.line()
        page.note(told_apart(shared, len(one.out.tokens), len(other.out.tokens)))
        return
    wide = (page.width - len(BETWEEN)) // 2
    page.line()
    _row(page, Text(one.title, style="bold"), Text(other.title, style="bold"), wide)
    columns = [wrapped(coloured(continuation, shared), wide) for continuation in (one, other)]
    for place in range(max(map(len, columns))):
        left, right = (column[place] if place < len(column) else Text() for column in columns)
        _row(page, left, right, wide)
    notes = [wrapped(Text(measures(continuation.out), style="dim"), wide) for continuation in (one, other)]
    page.line(Text("─" * wide + "─┴─" + "─" * wide, style="dim"))
    for place in range(max(map(len, notes))):
        left, right = (note[place] if place < len(note) else Text() for note in notes)
        _row(page, left, right, wide, between="   ")
    page.line()
    page.note(told_apart(shared, len(one.out.tokens), len(other.out.tokens)))


def draw_beside_cached(without: Generation, with_: Generation, page: Page | None = None) -> None:
    """Two runs of one request, one that kept nothing and one with a cache: whether they say the same, and the clock."""
    page = Page.on() if page is None else page
    shared = common(without.tokens, with_.tokens)
    if shared == len(without.tokens) == len(with_.tokens):
        exactly = without.logprobs == with_.logprobs
        told = "Run again both ways: the very same tokens" + (", bit for bit." if exactly else ", equal to rounding.")
    else:
        told = f"Run again both ways: rounding parted them after {shared} tokens."
    times = [out.prompt_seconds + out.decode_seconds for out in (without, with_)]
    told += f" By the clock {times[0]:.2f} s without a cache, {times[1]:.2f} s with it."
    page.note(told)


def told_apart(shared: int, *lengths: int) -> str:
    """Where two responses part, as a sentence."""
    if shared == max(lengths):
        return "They are the same, token by token."
    if shared == 0:
        return "They differ from the first token on; each token is read by all that follow."
    return f"They part after {shared} token{'s' if shared != 1 else ''}; each token is read by all that follow."


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many first tokens are the same."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def measures(out: Generation) -> str:
    """How a response repeats itself, and how undecided the model was, in one sentence each."""
    told = _repeats(repetition(out.tokens), len(out.tokens))
    records = [step.record for step in out.steps if step.record is not None]
    if records:
        mean = sum(record.entropy for record in records) / len(records)
        told += f" {mean:.2f} bits of entropy a token."
    return told


def _repeats(found: Repetition, count: int) -> str:
    tokens = f"{count} token{'s' if count != 1 else ''}, "
    if found.loop is not None:
        period = f"{found.loop.period} token{'s' if found.loop.period != 1 else ''}"
        return f"{tokens}in a loop from token {found.loop.start} on: the same {period}, {found.loop.rounds:.3g} times."
    return f"{tokens}{100 * found.repeated:.0f} % of its runs of four stood before."


def draw_steps(
    steps: Sequence[Step], piece: Piece, page: Page | None = None, *, title: str = "", others: int = 4
) -> None:
    """One line for each step: token, its probability, entropy, margin, where the number fell, and the runners-up."""
    page = Page.on() if page is None else page
    page.heading(
        f"Step by step{', ' if title else ''}{title}",
        "p, entropy and margin (the likeliest's lead) are the model's own, before temperature and filters. Softmax "
        "always gives a distribution: there is no token for not knowing, only a flat one.",
    )
    wide = min(18, max((cell_len(quoted(piece(step.token))) for step in steps), default=8) + 1)
    head = fit("step", 6) + fit("token", wide) + f" {'p':>6}  " + fit("entropy", 22) + fit("margin", 8)
    head += fit("number", 8) + fit("fell between", 15) + f"{'kept':>6}  " + "instead it might have been"
    page.line(Text(head, style="bold"))
    for step in steps:
        page.line(_step(step, piece, wide, others))


def _step(step: Step, piece: Piece, wide: int, others: int) -> Text:
    record = step.record
    if record is None:
        return Text(f"{step.index:4d}  {quoted(piece(step.token))}")
    own = record.stages[0]
    line = Text(f"{step.index:4d}  ")
    line.append(fit(quoted(piece(step.token)), wide), style=POSITIVE if step.forced else LIKELY)
    line.append(f" {percent(math.exp(step.logprob))}  ")
    line.append(bar(record.entropy / ENTROPY_SHOWN, 10), style=NEGATIVE).append(f"{record.entropy:6.2f} bit  ")
    line.append(f"{record.margin:6.3f}  ")
    if record.interval is None:
        line.append(f"{'forced':23}", style=POSITIVE)
    else:
        low, high = record.interval
        line.append(f"{record.number:6.4f}  {low:6.4f}–{high:6.4f}  ")
    line.append(f"{record.stages[-1].kept:6,}  ")
    runners = [(token, share) for token, share in zip(own.ids.tolist(), own.shares, strict=True) if token != step.token]
    told = ", ".join(f"{quoted(piece(token))} {percent(share).strip()}" for token, share in runners[:others])
    return line.append(told, style="dim")


def coloured(continuation: Continuation, shared: int) -> Text:
    """The text: what both begin with dim, forced tokens in their colour."""
    text = Text()
    for place, said in enumerate(continuation.said):
        style = f"bold {POSITIVE}" if place in continuation.forced else "dim" if place < shared else ""
        text.append(said, style=style)
    text.rstrip()
    return text


def wrapped(text: Text, wide: int) -> list[Text]:
    """Lines of at most `wide` columns."""
    from rich.console import Console

    console = Console(width=wide, no_color=True)
    return [line for line in text.wrap(console, wide, overflow="fold")] or [Text()]


def _row(page: Page, left: Text, right: Text, wide: int, between: str = BETWEEN) -> None:
    line = left.copy()
    line.rstrip()
    line.append(" " * max(0, wide - line.cell_len)).append(between, style="dim").append_text(right)
    page.line(line)
