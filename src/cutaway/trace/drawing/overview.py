"""A pass drawn in the terminal, in the order of the pass; plain lines, one record each, where it is not a terminal."""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from cutaway.trace.drawing.chips import draw_chips
from cutaway.trace.drawing.edits import draw_edits
from cutaway.trace.drawing.page import (
    ATTENTION,
    FEED_FORWARD,
    LIKELY,
    STREAM,
    Page,
    bar,
    fit,
    number,
    numbers,
    quoted,
    size,
)
from cutaway.trace.drawing.report import report

if TYPE_CHECKING:
    from cutaway.trace.trace import Trace

_MOST_TOKENS = 200  # shown one by one
_NARROWEST = 24  # columns in which a meaning can be read
_ONE_LINE = 170  # columns from which on a stage takes one line


def draw_trace(
    trace: "Trace",
    layer: int = 0,
    console: Console | None = None,
    *,
    head: int | None = None,
    top: int = 10,
    origin: str | None = None,
    opened: bool = False,
) -> None:
    """Draw the whole pass, with the stages of layer `layer` in full; `head` picks the head whose rows are shown.

    `opened` leaves out the model and the prompt: `draw_opening` has drawn them before the pass ran. Raises
    CutawayError for a layer or head that the model does not have.
    """
    page = Page.on(console)
    told = report(trace, layer, head, top, origin=origin, first=24)
    if not opened:
        draw_opening(told, console)
    draw_stages(page, told)
    draw_layers(page, told)
    draw_next_tokens(page, told)
    draw_edits(page, told)


def draw_opening(told: Mapping[str, Any], console: Console | None = None) -> None:
    """The model and the prompt, of a `report` or of its `opening`."""
    page = Page.on(console)
    draw_model(page, told)
    draw_tokens(page, told)


def draw_model(page: Page, told: Mapping[str, Any]) -> None:
    """What ran: name and sizes, then engine, precision and where the weights are from."""
    model = told["model"]
    heads = _either(model["heads"])
    if model["kv_heads"] not in (model["heads"], None):
        heads += f" heads ({model['kv_heads']} for keys and values)"
    else:
        heads += " heads"
    sizes = (
        f"{model['parameters']:,} parameters: {model['layers']} layers × {heads} × d_head {_either(model['d_head'])}, "
        f"d {model['d_model']}, V {model['vocab_size']:,}"
    )
    computed = f"{model['engine']} engine, {model['dtype']}"
    if model["origin"]:
        computed += f"; {model['origin']}"
    if page.plain:
        page.line(f"model {model['name']}: {sizes}")
        page.line(f"computed by: {computed}")
    else:
        page.line(Text(model["name"], style="bold"))
        page.wrapped(sizes)
        page.note(computed)


def draw_tokens(page: Page, told: Mapping[str, Any]) -> None:
    """The prompt as chips with ids, and what tokenizing added to it."""
    tokens: Sequence[Mapping[str, Any]] = told["tokens"]
    page.heading(f"Prompt: {len(tokens)} token{'s' if len(tokens) != 1 else ''}", told["prompt"]["added"])
    shown = _ends(tokens, _MOST_TOKENS)
    if page.plain:
        for token in shown:
            page.line(
                "…" if token is None else f"token {token['position']:>4}  id {token['id']:>6}  {quoted(token['piece'])}"
            )
    else:
        draw_chips(page, shown)
    if len(shown) < len(tokens):
        page.note(f"The first and last of {len(tokens)} tokens are shown; --json has all of them.")


def draw_stages(page: Page, told: Mapping[str, Any]) -> None:
    """Every stage outside the layers and in one layer: address, meaning, shape, and a row of real values."""
    stages = told["stages"]
    token = told["tokens"][told["row"]]
    whose = "last token's row" if token is told["tokens"][-1] else f"row of token {token['position']}"
    heads = f"; of head {told['head']} where a stage has heads" if told["model"]["heads"] != 1 else ""
    page.heading(
        f"The pass, stage by stage, through layer {told['layer']} (of 0 to {told['model']['layers'] - 1})",
        f"Values: the first numbers of the {whose} ({quoted(token['piece'])}){heads}. ‖x‖: the length of that row.",
    )
    shapes = [_shape(stage) for stage in stages]
    address_width = max(len(stage["point"]) for stage in stages) + 2
    shape_width = max(map(len, shapes)) + 1
    meaning_width = max(len(stage["meaning"]) for stage in stages) + 1
    before = ""
    for stage, shape, (first_mark, second_mark) in zip(stages, shapes, _gutter(stages), strict=True):
        skipped = _skipped(before, stage["point"], told)
        before = stage["point"]
        if skipped and not page.plain:
            page.line(Text.assemble(("┋", STREAM), (f"     {skipped}", "dim italic")))
        if page.plain:
            row = "not captured" if stage["values"] is None else numbers(stage["values"], 6).plain.strip()
            length = f"  norm {size(stage['norm'])}" if stage["norm"] is not None else ""
            page.line(
                f"{fit(stage['point'], address_width)} {fit(shape, shape_width)} {row}{length}  # {stage['meaning']}"
            )
            continue
        address = _address(stage["point"], address_width)
        if page.width >= _ONE_LINE:
            meaning = Text(stage["meaning"].ljust(meaning_width), style="dim")
            room = page.width - 4 - address_width - meaning_width - shape_width
            page.line(Text.assemble(first_mark, address, meaning, fit(shape, shape_width), _values(stage, room)))
        else:
            beside, *under = _told_in(stage["meaning"], page.width - 4 - address_width, page.width - 6)
            page.line(Text.assemble(first_mark, address, (beside, "dim")))
            for part in under:
                page.line(Text.assemble(second_mark, " " * (address_width if beside else 2), (part, "dim")))
            room = page.width - 6 - shape_width
            page.line(Text.assemble(second_mark, "  ", fit(shape, shape_width), _values(stage, room)))

    missing = sum(stage["values"] is None for stage in stages)
    if missing:
        page.note(
            f"{missing} of these stages were not captured: trace with points=[…, 'layers.{told['layer']}.*'] for all "
            "of this layer, or points=['*'] for everything."
        )


def _told_in(meaning: str, beside: int, under: int) -> list[str]:
    """A meaning in lines of `beside` columns; where those are few, nothing beside and then lines of `under` columns."""
    return wrap(meaning, beside) if beside >= _NARROWEST else ["", *wrap(meaning, under)]


def _skipped(before: str, point: str, told: Mapping[str, Any]) -> str:
    """Which layers stand between this stage and the one drawn before it."""
    layer, count = told["layer"], told["model"]["layers"]
    was_inside, is_inside = before.startswith("layers."), point.startswith("layers.")
    if was_inside == is_inside:
        return ""
    first, last = (0, layer - 1) if is_inside else (layer + 1, count - 1)
    if first > last:
        return ""
    return f"layers {first} to {last}" if first < last else f"layer {first}"


def _values(stage: Mapping[str, Any], room: int) -> Text:
    """As many numbers as fit into `room` columns beside the row's length."""
    if stage["values"] is None:
        return Text(f" not captured; points=[…, {stage['point']!r}] keeps it", style="dim italic")
    length = Text(f" ‖x‖ {size(stage['norm'])}" if stage["norm"] is not None else "", style="dim")
    values = numbers(stage["values"], max(1, (room - 13) // 8))
    values.pad_right(max(1, (room - 13) // 8) * 8 - len(values))
    return values + length


def _shape(stage: Mapping[str, Any]) -> str:
    symbols = ", ".join(stage["shape_symbols"])
    return f"[{symbols}] = {stage['shape']}" if stage["shape"] is not None else f"[{symbols}]"


def _address(point: str, width: int) -> Text:
    """`layers.3.` in small letters, the name in bold ones; in full, so that it can be copied to --point."""
    parts = point.split(".", 2)
    prefix = ".".join(parts[:2]) + "." if parts[0] == "layers" else ""
    return Text.assemble((prefix, "dim"), (fit(point[len(prefix) :], width - len(prefix)), "bold"))


def _gutter(stages: Sequence[Mapping[str, Any]]) -> list[tuple[Text, Text]]:
    """The stream as a band down the left edge; each sub-layer branches off it and joins it again."""
    marks: list[tuple[Text, Text]] = []
    begun, inside = False, None
    for stage in stages:
        name = stage["point"].split(".", 2)[2] if stage["point"].startswith("layers.") else stage["point"]
        part = {"attn": "attn", "mlp": "mlp", "moe": "mlp"}.get(name.split(".")[0])
        colour = ATTENTION if part == "attn" else FEED_FORWARD
        if name.endswith(".sum"):  # the sum stands on the stream already
            part = None
        begun = begun or name == "embed.out"
        band = ("┃", STREAM) if begun else " "
        if part is None:
            both = Text.assemble(band, "   ")
            marks.append((both, both))
        elif name.endswith(".out") and part == inside:
            first = Text.assemble(("┠", STREAM), ("─╯ ", colour))
            marks.append((first, Text.assemble(band, "   ")))
        else:
            opening = part != inside
            first = Text.assemble(("┠", STREAM), ("─╮ ", colour)) if opening else Text.assemble(band, (" │ ", colour))
            marks.append((first, Text.assemble(band, (" │ ", colour))))
        inside = None if name.endswith(("attn.out", "mlp.out")) else part
    return marks


def draw_layers(page: Page, told: Mapping[str, Any]) -> None:
    """One row a layer: what attention and the feed-forward add, the stream they leave, the strongest edge."""
    layers = told["layers"]
    several = len(told["tokens"]) > 1
    page.heading(
        "The layers at a glance",
        ("Mean length of what is added to the stream, and of the stream; " if several else "Length of what is added ")
        + (
            "then the strongest attention edge, query → key. The first token is left out of both (models rest their "
            "attention on it and let its stream grow a hundredfold), and so is attention to oneself."
            if several
            else "to the stream, and of the stream."
        ),
    )
    if page.plain:
        for layer in layers:
            page.line(
                f"layer {layer['layer']:>2}  attn.out {size(layer['attn_out']):>7}  "
                f"mlp.out {size(layer['mlp_out']):>7}  resid_post {size(layer['resid_post']):>7}  {_edge(layer)}"
            )
        return
    largest = max((layer[k] or 0.0) for layer in layers for k in ("attn_out", "mlp_out")) or 1.0
    length = max(6, min(24, (page.width - 66) // 2))
    head = Text.assemble(("layer ", "dim"))
    head.append(fit("attn.out", length + 9), style=ATTENTION)
    head.append(fit("mlp.out", length + 9), style=FEED_FORWARD)
    head.append("resid_post  ", style="dim").append("strongest edge", style="dim")
    page.line(head)
    for layer in layers:
        chosen = layer["layer"] == told["layer"]
        line = Text(f"{layer['layer']:>4}{'◂' if chosen else ' '} ", style="bold" if chosen else "")
        for key, colour in (("attn_out", ATTENTION), ("mlp_out", FEED_FORWARD)):
            line.append(bar((layer[key] or 0.0) / largest, length), style=colour)
            line.append(f" {size(layer[key]):>6}  ")
        line.append(f"{size(layer['resid_post']):>9}  ", style="dim")
        line.append(fit(_edge(layer), max(0, page.width - line.cell_len)))
        page.line(line)


def _edge(layer: Mapping[str, Any]) -> str:
    edge = layer["strongest_edge"]
    if edge is None:
        return ""
    query, key = (quoted(edge[end]["piece"], edge[end]["position"]) for end in ("query", "key"))
    return f"head {edge['head']}: {query} → {key} {edge['weight']:.2f}"


def draw_next_tokens(page: Page, told: Mapping[str, Any]) -> None:
    """The likeliest next tokens with their probabilities, and what is left for all others."""
    likeliest = told["next_tokens"]
    if not likeliest:  # an encoder does not say what comes next
        return
    page.heading("The next token", "softmax of the last row of the logits; nothing is filtered, the temperature is 1.")
    rest = told["model"]["vocab_size"] - len(likeliest)
    left = max(0.0, 1.0 - sum(token["probability"] for token in likeliest))
    wide = min(24, max(len(quoted(token["piece"])) for token in likeliest) + 1)
    for rank, token in enumerate(likeliest, 1):
        if page.plain:
            page.line(
                f"next {rank:>2}  {fit(quoted(token['piece']), wide)} id {token['id']:>6}  p {token['probability']:.4f}"
                f"  logit {token['logit']:8.4f}"
            )
            continue
        length = max(8, min(50, page.width - wide - 34))
        line = Text.assemble((f"{rank:>4}  ", "dim"))
        line.append(fit(quoted(token["piece"]), wide), style="bold" if rank == 1 else "")
        line.append(f"{token['probability']:8.2%}  ")
        line.append(bar(token["probability"] / likeliest[0]["probability"], length), style=LIKELY)
        line.append(f"  logit {number(token['logit'])}", style="dim")
        page.line(line)
    if rest > 0:
        page.note(
            f"      the other {rest:,} tokens together: {left:.2%}"
            if not page.plain
            else f"next other {rest} tokens: p {left:.4f}"
        )


def _ends(items: Sequence[Any], most: int) -> list[Any]:
    """All items, or the first and last ones with None between."""
    if len(items) <= most:
        return list(items)
    return [*items[: most * 3 // 4], None, *items[-(most // 4) :]]


def _either(value: object) -> str:
    return "various" if value is None else str(value)
