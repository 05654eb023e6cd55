"""The sampling lab drawn on a terminal: bars side by side, a curve that is stretched, marks for what is kept."""

from rich.text import Text

from cutaway.generate.lab import Lab, stretched
from cutaway.trace.drawing.page import HATCH, LIKELY, NEGATIVE, POSITIVE, STREAM, Page, bar, fit

LEVELS = " ▁▂▃▄▅▆▇█"
CURVE_ROWS = 3
LABEL = 18


def draw_lab(lab: Lab, title: str, page: Page | None = None) -> None:
    """Draw all of it on the page, or on standard output; `title` says what the logits are those of."""
    page = Page.on() if page is None else page
    page.wrapped(title)
    _temperatures(page, lab)
    _stretch(page, lab)
    _filters(page, lab)
    _draws(page, lab)


def percent(share: float) -> str:
    """A probability in six columns: "71.2 %", "0.03 %", "<0.01%" for what is smaller and not 0."""
    of_hundred = 100 * share
    if of_hundred == 0:
        return "   0 %"
    if of_hundred < 0.005:
        return "<0.01%"
    return f"{of_hundred:4.2f} %" if of_hundred < 9.995 else f"{of_hundred:4.1f} %" if of_hundred < 99.95 else " 100 %"


def _temperatures(page: Page, lab: Lab) -> None:
    page.heading(
        "The distribution at several temperatures",
        "Every logit is divided by T before softmax. The order of the tokens stays; how much the likeliest has, and "
        "how much is left for the tail, does not.",
    )
    wide = max(4, min(16, (page.width - LABEL - 8) // len(lab.heated) - 9))
    column = wide + 9
    head = Text(fit("", LABEL) + " logit ")
    for heated in lab.heated:
        head.append(fit(f"  T = {heated.temperature:g}", column), style="bold")
    page.line(head)
    for place, row in enumerate(lab.rows):
        line = Text(fit(row.label, LABEL)).append(f"{row.logit:6.2f} ", style="dim")
        for heated in lab.heated:
            _share(line, heated.shares[place], wide, LIKELY)
        page.line(line)
    if lab.others:
        line = Text(fit(f"{lab.others:,} others", LABEL) + "       ", style="dim")
        for heated in lab.heated:
            _share(line, heated.others, wide, STREAM)
        page.line(line)
    for label, values in (
        ("entropy (bits)", [f"{heated.entropy:.2f}" for heated in lab.heated]),
        ("as undecided as", [_choices(2**heated.entropy) for heated in lab.heated]),
    ):
        page.line(Text(fit(label, LABEL + 7) + "".join(fit(f"  {value}", column) for value in values), style="dim"))


def _share(line: Text, share: float, wide: int, style: str) -> None:
    line.append("  " + bar(share, wide), style=style).append(percent(share) + " ")


def _choices(number: float) -> str:
    return f"1 in {number:,.1f}" if number < 100 else f"1 in {number:,.0f}"


def _stretch(page: Page, lab: Lab) -> None:
    """For each temperature e^(−gap/T) over the gap to the largest logit, with a mark where each token lies."""
    page.heading(
        "The same curve, stretched by T",
        "What a token weighs beside the likeliest, by how far its logit lies below the largest. At T = 2 the curve is "
        "twice as wide as at T = 1; its peak stays where and what it is.",
    )
    wide = min(page.width - 10, 80)
    top = max(row.logit for row in lab.rows)
    own = [top - row.logit for row in lab.rows if row.logit > float("-inf")]
    reach = max(4.0, min(16.0, max(own, default=4.0) * 1.1))
    gaps = [reach * (column + 0.5) / wide for column in range(wide)]
    marked = {min(wide - 1, int(gap / reach * wide)) for gap in own if gap <= reach}
    for heated in lab.heated:
        values = [1.0 if column == 0 else value for column, value in enumerate(stretched(gaps, heated.temperature))]
        for level in reversed(range(CURVE_ROWS)):
            label = f"T = {heated.temperature:g}" if level == CURVE_ROWS - 1 else ""
            line = Text(fit(label, 10), style="bold")
            for column, value in enumerate(values):
                eighths = max(0, min(8, round(8 * (value * CURVE_ROWS - level))))
                line.append(LEVELS[eighths], style=LIKELY if column in marked else STREAM)
            page.line(line)
    line = Text(" " * 10)
    for column in range(wide):
        line.append("▲" if column in marked else "─", style=LIKELY if column in marked else "dim")
    page.line(line)
    ticks = [" "] * wide
    for gap in range(0, int(reach) + 1, 2):
        place = int(gap / reach * wide)
        for offset, letter in enumerate(str(gap)):
            if place + offset < wide:
                ticks[place + offset] = letter
    page.line(Text(" " * 10 + "".join(ticks), style="dim"))
    page.note("▲ the tokens named above; their bars at each T are the curve's heights, divided by the sum of all.")


def _filters(page: Page, lab: Lab) -> None:
    page.heading(
        f"What each filter by itself keeps at T = {lab.sampling.temperature:g}",
        "top-k keeps a fixed number, top-p walks down the sums until they reach p, min-p compares with the likeliest.",
    )
    wide = max(len(entry.label) for entry in lab.filters) + 2
    page.line(
        Text(
            fit("", LABEL) + "     p     sum  " + "".join(fit(entry.label, wide) for entry in lab.filters),
            style="bold",
        )
    )
    for place, row in enumerate(lab.rows):
        line = Text(fit(row.label, LABEL)).append(f" {percent(lab.shares[place])} {percent(lab.sums[place])}  ")
        for entry in lab.filters:
            _mark(line, entry.of_rows[place], len(row.ids), wide)
        page.line(line)
    line = Text(fit("tokens kept", LABEL + 16), style="bold")
    for entry in lab.filters:
        line.append(fit(f"{entry.kept:,}", wide))
    page.line(line)
    page.line()
    page.line(Text(fit("kept at", LABEL + 16) + "".join(fit(entry.label, wide) for entry in lab.filters), style="dim"))
    for heated in lab.heated:
        counts = "".join(fit(f"{kept:,}", wide) for kept in heated.kept)
        page.line(Text(fit(f"  T = {heated.temperature:g}", LABEL + 16) + counts))


def _mark(line: Text, kept: int, size: int, wide: int) -> None:
    if kept == 0:
        line.append(fit(HATCH * 3, wide), style="dim")
    elif kept == size:
        line.append(fit("███" if size == 1 else f"all {size:,}", wide), style=LIKELY)
    else:
        line.append(fit(f"{kept:,} of {size:,}", wide), style=LIKELY)


def _draws(page: Page, lab: Lab) -> None:
    draws = lab.draws
    page.heading(
        f"{draws.count:,} draws through {_chain(lab)}",
        f"What is expected beside what came up (seed {draws.seed}).",
    )
    wide = max(8, min(30, (page.width - LABEL - 26) // 2))
    page.line(Text(fit("", LABEL) + fit("  expected", wide + 10) + "  drawn", style="bold"))
    most = max(*draws.drawn, *draws.expected, 1)
    labels = [row.label for row in lab.rows] + ([f"{lab.others:,} others"] if lab.others else [])
    for label, expected, drawn in zip(labels, draws.expected, draws.drawn, strict=False):
        line = Text(fit(label, LABEL))
        line.append("  " + bar(expected / most, wide), style=NEGATIVE).append(f"{expected:7.1f} ")
        line.append("  " + bar(drawn / most, wide), style=POSITIVE).append(f"{drawn:5,}")
        page.line(line)


def _chain(lab: Lab) -> str:
    """ "temperature 0.7 → top-p 0.9 (keeps 3)" """
    told: list[str] = []
    for record in lab.stages[1:]:
        name, value = record.name, getattr(lab.sampling, record.name, None)
        shown = f" {value:g}" if isinstance(value, int | float) else ""
        kept = f" (keeps {record.kept:,})" if record.removed else ""
        told.append(f"{name.replace('_', '-')}{shown}{kept}")
    return " → ".join(told)


def told(lab: Lab) -> dict:
    """The lab as one JSON document; probabilities in full."""
    return {
        "rows": [
            {"label": row.label, "ids": list(row.ids) if len(row.ids) == 1 else len(row.ids), "logit": row.logit}
            for row in lab.rows
        ],
        "others": lab.others,
        "temperatures": [
            {
                "temperature": heated.temperature,
                "probabilities": list(heated.shares),
                "others": heated.others,
                "entropy_bits": heated.entropy,
                "kept": {entry.label: kept for entry, kept in zip(lab.filters, heated.kept, strict=True)},
            }
            for heated in lab.heated
        ],
        "temperature": lab.sampling.temperature,
        "probabilities": list(lab.shares),
        "cumulative": list(lab.sums),
        "filters": [
            {"filter": entry.label, "kept": entry.kept, "of_rows": list(entry.of_rows)} for entry in lab.filters
        ],
        "stages": [
            {
                "stage": record.name,
                "kept": record.kept,
                "removed": record.removed,
                "removed_share": record.removed_share,
            }
            for record in lab.stages
        ],
        "draws": {
            "count": lab.draws.count,
            "seed": lab.draws.seed,
            "drawn": list(lab.draws.drawn),
            "expected": list(lab.draws.expected),
        },
    }
