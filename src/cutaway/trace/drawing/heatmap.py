"""One head's attention pattern as a heatmap: queries down, keys across, colour and number the weight."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from cutaway.trace.drawing.edges import hidden_cells
from cutaway.trace.drawing.edits import draw_edits
from cutaway.trace.drawing.overview import draw_opening
from cutaway.trace.drawing.page import HATCH, Page, fit, quoted, weight_style
from cutaway.trace.drawing.report import head_index, layer_index, report

if TYPE_CHECKING:
    from cutaway.trace.trace import Trace

_WIDEST_CELL = 9
_NUMBER_CELL = 4  # columns from which on a cell holds its number
_PLAIN_KEYS = 40  # columns of a plain table


def draw_head(
    trace: "Trace",
    layer: int,
    head: int,
    console: Console | None = None,
    *,
    origin: str | None = None,
    opened: bool = False,
) -> None:
    """Draw the pattern of one head, under the model and the prompt.

    A prompt too long for the width is pooled: each cell then shows the largest weight of a square of pairs,
    and a sentence says so. `opened` leaves out the model and the prompt. Raises CutawayError for a layer or head
    that the model does not have.
    """
    layer = layer_index(trace.spec, layer)
    head = head_index(trace.spec, layer, head)
    page = Page.on(console)
    told = report(trace, layer, head, origin=origin)
    address = f"layers.{layer}.attn.pattern"
    pattern = np.asarray(trace[address][head], np.float64)
    hidden = hidden_cells(trace, layer)
    pieces = [quoted(token["piece"]) for token in told["tokens"]]
    keys = [f"{position}" for position in range(trace.past)] + pieces
    queries: list[int] = (trace.rows + trace.past).tolist()  # positions, of the rows that the trace holds
    if not opened:
        draw_opening(told, console)
    page.heading(
        f"{address}, head {head}: who listens to whom",
        "Row: the token that asks; column: the token that it reads. Each row is a softmax: its weights sum to 1. "
        f"{HATCH if not page.plain else '·'} is masked: it may not be seen.",
    )
    if page.plain:
        _table(page, pattern, hidden, queries, keys)
    else:
        _map(page, pattern, hidden, queries, keys)
        _legend(page)
    _strongest(page, pattern, queries, keys)
    draw_edits(page, told)


def _map(page: Page, pattern: np.ndarray, hidden: np.ndarray, queries: Sequence[int], keys: Sequence[str]) -> None:
    label_width = min(max(cell_len(keys[query]) for query in queries), max(10, page.width // 5)) + 5
    room = page.width - label_width - 1
    columns = pattern.shape[1]
    cell = min(_WIDEST_CELL, max(map(cell_len, keys)) + 1, room // columns)
    if cell < _NUMBER_CELL:
        cell = _NUMBER_CELL if room // columns >= _NUMBER_CELL else 2
    pool = -(-columns * cell // room)  # how many tokens share a cell, so that all fit
    if pool > 1:
        page.note(
            f"{columns} tokens do not fit side by side: each cell shows the largest weight of {pool} × {pool} pairs. "
            "--json and --save have every weight."
        )
        pattern, hidden = _pooled(pattern, hidden, pool)
    _key_labels(page, keys, label_width, cell, pool)
    for query, weights, masked in zip(queries[::pool], pattern, hidden, strict=True):
        line = Text.assemble((f"{query:>4} ", "dim"))
        line.append(fit(keys[query], label_width - 5))
        for weight, is_masked in zip(weights, masked, strict=True):
            line.append_text(_cell(float(weight), bool(is_masked), cell, page.coloured))
        page.line(line)


def _cell(weight: float, masked: bool, width: int, coloured: bool) -> Text:
    if masked:
        return Text(HATCH * width, style="dim")
    if width >= _NUMBER_CELL:
        shown = (f"{weight:.2f}" if width > 4 or weight > 0.995 else f"{weight:.2f}"[1:]).center(width)
    else:  # without colours, tenths
        shown = " " * width if coloured else f"{min(int(weight * 10), 9)}".center(width)
    return Text(shown, style=weight_style(weight) if coloured else "")


def _key_labels(page: Page, keys: Sequence[str], label_width: int, cell: int, pool: int) -> None:
    """The keys over their columns: as tokens where there is room, else every tenth position."""
    line = Text(" " * label_width)
    if cell >= _NUMBER_CELL and pool == 1:
        for key in keys:
            # Cut short, the quotation marks and the space would leave nothing of the token.
            name = key if cell_len(key) < cell else key[1:-1].strip() or key
            line.append(fit(name, cell - 1) + " ")
    else:
        marks = [" "] * (len(keys) // pool + 1) * cell
        step = 5
        for column in range(0, -(-len(keys) // pool), step):
            for offset, digit in enumerate(str(column * pool)):
                if column * cell + offset < len(marks):
                    marks[column * cell + offset] = digit
        line.append("".join(marks), style="dim")
    page.line(line)


def _pooled(pattern: np.ndarray, hidden: np.ndarray, pool: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest weight of each square; masked where all of the square is."""
    rows, columns = pattern.shape
    padding = ((0, -rows % pool), (0, -columns % pool))
    weights = np.pad(np.where(hidden, 0.0, pattern), padding)
    masked = np.pad(hidden, padding, constant_values=True)
    squares = (weights.shape[0] // pool, pool, weights.shape[1] // pool, pool)
    largest: np.ndarray = weights.reshape(squares).max((1, 3))
    return largest, np.asarray(masked.reshape(squares).all((1, 3)))


def _legend(page: Page) -> None:
    line = Text("\nweight  ")
    for weight in (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0):
        line.append(f"{weight:^5g}", style=weight_style(weight) if page.coloured else "")
    line.append("  ").append(HATCH * 4, style="dim").append(" masked")
    page.line(line)


def _table(page: Page, pattern: np.ndarray, hidden: np.ndarray, queries: Sequence[int], keys: Sequence[str]) -> None:
    """The weights as numbers, one row a line."""
    shown = min(pattern.shape[1], _PLAIN_KEYS)
    if shown < pattern.shape[1]:
        page.note(f"The first {shown} of {pattern.shape[1]} keys are shown; --json and --save have every weight.")
    wide = min(max(cell_len(keys[query]) for query in queries), 20) + 1
    page.line(" " * (wide + 11) + "".join(fit(key, 8) + " " for key in keys[:shown]))
    for query, weights, masked in zip(queries, pattern, hidden, strict=True):
        cells = "".join(
            fit("·" if m else f"{w:.4f}", 8) + " " for w, m in zip(weights[:shown], masked[:shown], strict=True)
        )
        page.line(f"query {query:>4} {fit(keys[query], wide)}{cells}")


def _strongest(page: Page, pattern: np.ndarray, queries: Sequence[int], keys: Sequence[str]) -> None:
    """The strongest edges in words, those to the first token and to oneself left out where there are others."""
    columns = np.arange(pattern.shape[1])[None, :]
    proper = np.where((columns > 0) & (columns != np.array(queries)[:, None]), pattern, 0.0)
    if not proper.any():
        return
    best: list[Any] = np.argsort(-proper, axis=None, kind="stable")[:5].tolist()
    page.heading("Its strongest edges", "Query → key; those to the first token and to oneself are left out.")
    for place in best:
        row, column = divmod(place, pattern.shape[1])
        if proper[row, column] > 0:
            query = queries[row]
            page.line(f"{proper[row, column]:6.4f}  {keys[query]} (at {query}) → {keys[column]} (at {column})")
