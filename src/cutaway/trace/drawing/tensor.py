"""One tensor of a pass in full, as a table that people can read; what does not fit is left out and said."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from cutaway.points import LECTURE, Point, parse_point, shape_symbols
from cutaway.trace.drawing.edges import hidden_cells
from cutaway.trace.drawing.edits import draw_edits
from cutaway.trace.drawing.overview import draw_opening
from cutaway.trace.drawing.page import HATCH, Page, fit, number, quoted, sign_style, weight_style
from cutaway.trace.drawing.report import head_index, report

if TYPE_CHECKING:
    from cutaway.trace.trace import Trace

_MOST_ROWS = 60  # of one table
_PLAIN_COLUMNS = 16


def draw_point(
    trace: "Trace",
    point: str | Point,
    console: Console | None = None,
    *,
    head: int | None = None,
    origin: str | None = None,
    opened: bool = False,
) -> None:
    """Draw the tensor at `point`: one row per token, head by head where it has heads (or only `head`).

    `opened` leaves out the model and the prompt. Raises CutawayError for a point that the model does not have or
    the trace did not keep, or a head outside the layer.
    """
    point = parse_point(point, trace.spec)
    page = Page.on(console)
    layer = point.layer or 0
    value = trace[point]
    told = report(trace, layer, head, origin=origin)
    info = point.info
    if not opened:
        draw_opening(told, console)
    page.heading(
        f"{point}  [{', '.join(shape_symbols(point, trace.spec))}] = {list(value.shape)}",
        f"{_sentence(info.meaning)} Why: {info.reason} (chapter {info.chapter} of the lecture “{LECTURE}”).",
    )
    pieces = [quoted(token["piece"]) for token in told["tokens"]]
    rows = [pieces[row] for row in trace.rows]
    keys = [str(position) for position in range(trace.past)] + pieces if info.shape[-1] == "S" else None
    hidden = hidden_cells(trace, layer) if point.name in ("attn.masked", "attn.pattern") else None
    cropped = False
    if value.ndim == 1:
        cropped = _table(page, value[None, :], ["id"], pieces, point)
    elif value.ndim == 2:
        cropped = _table(page, value, rows, keys, point)
    else:
        axis = next(axis for axis, symbol in enumerate(info.shape) if symbol != "T")
        value = np.moveaxis(value, axis, 0)
        kind = {"H": "head", "H_kv": "key/value head", "k": "chosen expert"}.get(info.shape[axis], info.shape[axis])
        chosen = range(value.shape[0])
        if head is not None and kind.endswith("head"):
            index = head_index(trace.spec, layer, head)
            n_heads = trace.spec.layers[layer].attention.n_heads
            chosen = range(index * value.shape[0] // n_heads, index * value.shape[0] // n_heads + 1)
        for at in chosen:
            page.line()
            page.line(Text(f"{kind} {at}", style="bold"))
            cropped |= _table(page, value[at], rows, keys, point, hidden)
    draw_edits(page, told)
    if cropped:
        page.line()
        page.note("Not all of it fits here: --json prints every number, --save FILE.safetensors keeps the tensor.")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _table(
    page: Page,
    value: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str] | None,
    point: Point,
    hidden: np.ndarray | None = None,
) -> bool:
    """One matrix; returns whether any of it had to be left out."""
    label_width = min(max(map(cell_len, rows)), 18) + 6
    most = _PLAIN_COLUMNS if page.plain else max(1, (page.width - label_width - 2) // 8)
    shown_columns = _chosen(value.shape[1], most)
    shown_rows = _chosen(value.shape[0], _MOST_ROWS)
    header = Text(" " * label_width, style="dim")
    for column in shown_columns:
        name = "…" if column is None else str(column) if columns is None else columns[column]
        header.append(" …" if column is None else " " + (name.rjust(7) if columns is None else fit(name, 7)))
    page.line(header)
    for row in shown_rows:
        if row is None:
            page.line(Text("   …", style="dim"))
            continue
        line = Text.assemble((f"{row:>4}  ", "dim"))
        line.append(fit(rows[row], label_width - 6))
        for column in shown_columns:
            if column is None:
                line.append(" …", style="dim")
            elif hidden is not None and hidden[row, column]:
                line.append(" " + ("·".rjust(7) if page.plain else HATCH * 7), style="dim")
            else:
                line.append_text(_cell(page, value[row, column], point))
        page.line(line)
    return None in shown_columns or None in shown_rows


def _cell(page: Page, value: Any, point: Point) -> Text:
    plain = int(value) if isinstance(value, np.integer) else float(value)
    if point.name == "attn.pattern" and page.coloured:
        return Text(" ").append(number(plain), style=weight_style(float(plain)))
    return Text(" ").append(number(plain), style=sign_style(plain))


def _chosen(length: int, most: int) -> list[int | None]:
    """All indices, or the first and the last few with None where some are left out."""
    if length <= most:
        return list(range(length))
    ending = min(3, most // 4)
    return [*range(most - ending - 1), None, *range(length - ending, length)]
