"""The KV cache drawn: what its layers hold, how it fills, and the work with it and without it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from rich.text import Text

from cutaway.forward.cache import HeldLayer
from cutaway.spec.work import flops_in_units
from cutaway.trace.capture.bill import in_units
from cutaway.trace.drawing.page import LIKELY, NEGATIVE, POSITIVE, Page, fit

if TYPE_CHECKING:
    from cutaway.generate.cache_use import CacheUse

MOST_STEPS = 16  # lines of the picture that fills; of more steps so many are shown, evenly chosen
FILLING = 40  # columns of a full cache
PLOT = (56, 11)  # columns and lines of the two curves


def draw_cache(use: "CacheUse", page: Page | None = None, *, title: str = "") -> None:
    """Layers, steps and curves; where nothing was kept, what a cache would have saved."""
    page = Page.on() if page is None else page
    page.heading(
        f"The KV cache{', ' if title else ''}{title}",
        "Every token leaves its keys and values in every layer, so that no later pass works them out again."
        if use.kept
        else "Nothing was kept: each step ran the whole text anew. Beside it stands what a cache would have saved.",
    )
    for held in layer_lines(use):
        page.wrapped(held)
    left_out = f" {MOST_STEPS} of {len(use.steps):,} steps are shown." if len(use.steps) > MOST_STEPS else ""
    page.heading(
        "Step by step",
        f"A row is one token in all layers: ░ reused, █ run. FLOPs are counted, not timed.{left_out}",
    )
    _draw_steps(use, page)
    page.heading("All work so far, step by step", "× without a cache, ● with it.")
    without, with_ = list(accumulate(use.flops_without)), list(accumulate(use.flops_with))
    for line in curves(without, with_, min(PLOT[0], page.width - 14)):
        page.line(line)
    page.line()
    page.note(str(use))


def layer_lines(use: "CacheUse") -> list[str]:
    """A line for each run of layers that hold alike, then the sum."""
    lines = []
    for _, run in groupby(use.layers, lambda layer: replace(layer, layer=0)):
        alike = list(run)
        first, last = alike[0], alike[-1]
        name = f"layer {first.layer}" if len(alike) == 1 else f"layers {first.layer} to {last.layer}"
        lines.append(f"{fit(name, 16)}{_held(first, len(alike), use.kept)}")
    total = f"{in_units(use.nbytes)} in {use.rows:,} rows of {in_units(use.row_bytes)}"
    lines.append(f"{fit('together', 16)}{total}; {in_units(use.reserved)} reserved, room for {use.room:,}")
    return lines


def _held(layer: HeldLayer, count: int, kept: bool) -> str:
    told = f"{layer.kind}: {layer.values:,} numbers a token"
    if not kept:
        return told
    told += f", {layer.rows:,} tokens, {in_units(layer.nbytes * count)}"
    if layer.in_reach < layer.rows:
        told += f"; the next token sees {layer.in_reach:,} of them"
    return told


def _draw_steps(use: "CacheUse", page: Page) -> None:
    full = use.prompt_tokens + len(use.steps) - 1
    wide = max(4, min(FILLING, page.width - 58))
    head = f"{'step':>5} {'reused':>7} {'run':>6}  " + fit("", wide) + f"  {'FLOPs with':>10}  {'without a cache':>15}"
    page.line(Text(head, style="bold"))
    for index in chosen(len(use.steps), MOST_STEPS):
        step = use.steps[index]
        old, all_ = (round(rows * wide / full) for rows in (step.reused, step.reused + step.appended))
        if step.appended and old == all_:
            old = max(0, all_ - 1)  # a row that was run is seen, however long the text
            all_ = old + 1
        line = Text(f"{index:5d} {step.reused:7,d} {step.appended:6,d}  ")
        if step.appended:
            line.append("░" * old, style=NEGATIVE).append("█" * (all_ - old), style=LIKELY).append(" " * (wide - all_))
        else:
            line.append(fit("came with another pass", wide), style="dim")
        line.append(f"  {flops_in_units(use.flops_with[index]):>10}  {flops_in_units(use.flops_without[index]):>15}")
        page.line(line)


def chosen(count: int, most: int) -> list[int]:
    """Up to `most` of the first `count` numbers: the first two, the last, and evenly between."""
    if count <= most:
        return list(range(count))
    return sorted({0, 1, *(round(1 + place * (count - 2) / (most - 2)) for place in range(most - 1))})


def curves(upper: Sequence[int], lower: Sequence[int], columns: int = PLOT[0]) -> list[Text]:
    """Two growing sums over the same steps, × and ● in one frame; where both fall on one cell it shows ●."""
    rows = PLOT[1]
    most = max(upper[-1], lower[-1], 1)
    cells = [[" "] * columns for _ in range(rows)]
    for sums, mark in ((upper, "×"), (lower, "●")):
        for column in range(columns):
            at = round(column * (len(sums) - 1) / (columns - 1))
            cells[rows - 1 - round(sums[at] / most * (rows - 1))][column] = mark
    lines = []
    for place, row in enumerate(cells):
        label = {0: flops_in_units(most), rows // 2: flops_in_units(most // 2), rows - 1: "0"}.get(place, "")
        line = Text(f"{label:>10} ┤" if label else f"{'':10} │")
        for mark in row:
            line.append(mark, style={"×": POSITIVE, "●": NEGATIVE}.get(mark, ""))
        lines.append(line)
    last = f"{len(upper) - 1:,}"
    lines.append(Text(f"{'':10} └" + "─" * columns))
    lines.append(Text(f"{'':12}{'step 0':{columns - len(last)}}{last}"))
    return lines
