"""`cutaway points`: every address of a model, with its shape, its meaning and the chapter that explains it."""

import argparse
from typing import TYPE_CHECKING, Any

from cutaway.cli.arguments import DEFAULT_MODEL, print_json

if TYPE_CHECKING:
    from cutaway.points import Point
    from cutaway.spec import ModelSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=DEFAULT_MODEL,
        help="a name, a name of the catalog, a config.json, a folder with one, a GGUF file; no weights are read "
        f"({DEFAULT_MODEL} if not given)",
    )
    parser.add_argument("--only", metavar="PATTERN", help="only addresses like this one, such as 'layers.3.attn.*'")
    parser.add_argument("--json", action="store_true", help="print one JSON document, every layer by itself")


def run(options: argparse.Namespace) -> int:
    from cutaway.checkpoints.load import spec_of
    from cutaway.points import all_points, find_points

    spec = spec_of(options.model)
    points = all_points(spec)
    if options.only is not None:
        points = find_points([options.only], spec, points)
    if options.json:
        print_json({"model": spec.name, "layers": spec.n_layers, "points": [_told(point, spec) for point in points]})
        return 0
    rows = [(address, _told(point, spec)) for address, point in _grouped(points, spec)]
    from cutaway.trace.drawing.page import Page

    page = Page.on()
    wide = max(len(address) for address, _ in rows)
    shapes = [f"[{', '.join(told['symbols'])}]" for _, told in rows]
    sizes = [" × ".join(told["shape"]) for _, told in rows]
    symbols_wide, sizes_wide = max(map(len, shapes)), max(map(len, sizes))
    for (address, told), shape, size in zip(rows, shapes, sizes, strict=True):
        line = (
            f"{address:<{wide}}  {shape:<{symbols_wide}}  {size:<{sizes_wide}}  {told['meaning']} ({told['chapter']})"
        )
        page.line(line)
    page.note(
        "The last number is the chapter. T tokens, S keys that are seen. Layers that are alike stand in one line: "
        "layers.0:3 are layers 0, 1 and 2."
        + " Each of the H_kv key/value heads serves several query heads: a capture's heads= are query heads, and of "
        "keys and values those that serve them are kept; an edit's heads= are a point's own."
        * any("H_kv" in point.info.shape and _shared(point, spec) for point in points)
    )
    return 0


def _grouped(points: "list[Point]", spec: "ModelSpec") -> "list[tuple[str, Point]]":
    """Each address once, layers that are alike as a range of them."""
    runs: dict[int, tuple[int, int]] = {}
    start = 0
    for i in range(1, spec.n_layers + 1):
        if i == spec.n_layers or spec.layers[i] != spec.layers[start]:
            runs |= {layer: (start, i) for layer in range(start, i)}
            start = i
    shown: dict[str, Any] = {}
    held = {(point.name, point.layer) for point in points}
    for point in points:
        if point.layer is None:
            shown[str(point)] = point
            continue
        first, last = runs[point.layer]
        whole = last - first > 1 and all((point.name, layer) in held for layer in range(first, last))
        shown.setdefault(f"layers.{first}:{last}.{point.name}" if whole else str(point), point)
    return list(shown.items())


def _shared(point: "Point", spec: "ModelSpec") -> bool:
    """Whether a layer has fewer key/value heads than query heads."""
    attention = spec.layers[point.layer or 0].attention
    return attention.n_kv_heads < attention.n_heads


def _told(point: "Point", spec: "ModelSpec") -> dict[str, Any]:
    from cutaway.points import shape_of, shape_symbols

    symbols = shape_symbols(point, spec)
    sizes = shape_of(point, spec, 1)
    return {
        "address": str(point),
        "symbols": list(symbols),
        "shape": [symbol if symbol in "TS" else str(size) for symbol, size in zip(symbols, sizes, strict=True)],
        "meaning": point.info.meaning,
        "reason": point.info.reason,
        "chapter": point.info.chapter,
    }
