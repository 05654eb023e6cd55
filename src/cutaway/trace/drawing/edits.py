"""What edits did, as plain data and drawn: where each fired, how far the logits moved, the odds with and without."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.text import Text

from cutaway.errors import CutawayError
from cutaway.trace.drawing.page import LIKELY, Page, bar, fit, quoted
from cutaway.trace.next_tokens import softmax

if TYPE_CHECKING:
    from cutaway.trace.trace import Trace


def edits_told(trace: "Trace", top: int = 10) -> dict[str, Any]:
    """The edits of a run and its next tokens with and without them; nothing for a run without edits.

    This runs the unedited pass and, where there are several edits, one with each of them alone. `next_tokens` are the
    `top` likeliest of either run; models that tell none have none.
    """
    if not trace.edits:
        return {}
    told: dict[str, Any] = {
        "edits": [
            {
                "edit": _plain(report.edit),
                "told": str(report),
                "fired": report.fired,
                "elements": report.elements,
                "changed": report.changed,
                "moved": _moved(report.moved) if trace.has_logits else None,
            }
            for report in trace.edits
        ]
    }
    if not trace.predicts:
        return told
    before, after = softmax(trace.edited.unedited_logits), trace.probabilities
    chosen = {int(i): None for p in (after, before) for i in (-p).argsort(kind="stable")[:top]}
    told["moved"] = _moved(trace.edited.moved)
    told["next_tokens_beside_unedited"] = [
        {
            "id": token,
            "piece": trace.piece(token),
            "probability": float(after[token]),
            "unedited": float(before[token]),
        }
        for token in sorted(chosen, key=lambda i: -after[i])
    ]
    return told


def draw_edits(page: Page, told: Mapping[str, Any]) -> None:
    """Each edit in a line, then the next tokens of both runs side by side."""
    edits = told.get("edits")
    if not edits:
        return
    page.heading(
        "What the edits did", "How far the logits moved: the largest change of one, and Σ p ln(p / q) against no edit."
    )
    for index, edit in enumerate(edits, 1):
        moved = edit["moved"]
        how_far = f"; logits moved by up to {moved['largest']:.3g}, {moved['divergence']:.3g} nats" if moved else ""
        page.wrapped(f"{'edit ' if page.plain else ''}{index}  {edit['told']}{how_far}")
    tokens = told.get("next_tokens_beside_unedited", [])
    if not tokens:
        return
    page.heading("The next token, beside the unedited run")
    wide = min(24, max(len(quoted(token["piece"])) for token in tokens) + 1)
    for token in tokens:
        change = token["probability"] - token["unedited"]
        name = fit(quoted(token["piece"]), wide)
        if page.plain:
            page.line(
                f"beside  {name} id {token['id']:>6}  p {token['probability']:.4f}  unedited {token['unedited']:.4f}"
                f"  change {change:+.4f}"
            )
            continue
        length = max(4, min(25, (page.width - wide - 34) // 2))
        line = Text("  ").append(name).append(f"{token['probability']:8.2%} ")
        line.append(bar(token["probability"], length), style=LIKELY)
        line.append(f" was {token['unedited']:8.2%} ").append(bar(token["unedited"], length), style="dim")
        page.line(line)


def _plain(edit: Any) -> Any:
    try:
        return edit.to_json()
    except CutawayError:  # a trace in memory or a function: told in words only
        return None


def _moved(moved: Any) -> dict[str, float]:
    return {"largest": moved.largest, "divergence": moved.divergence}
