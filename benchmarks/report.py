"""Rows as figures, and figures as a table."""

import statistics
from typing import Any

from pairing import Turns
from rows import Row

BY_TOKENS = ("decode", "context", "busy", "watched", "prefill")


def figures(row: Row, turns: Turns, file_bytes: int, bytes_per_second: float) -> dict[str, Any]:
    """A measured row. The ratio is the median of the pairs' ratios, not the ratio of the medians."""
    result: dict[str, Any] = head(row) | {
        "ours": _spread([turn.ours for turn in turns.kept]),
        "pairs": len(turns.kept),
        "set_aside": turns.set_aside,
        "others_took_processors": turns.elsewhere,
        "file_bytes": file_bytes,
        "one_read_s": file_bytes / bytes_per_second,
        "ceiling_tokens_per_s": row.tokens / (row.reads * file_bytes / bytes_per_second),
    }
    pairs = [(turn.ours, turn.theirs) for turn in turns.kept if turn.theirs is not None]
    if pairs:
        ratios = [a / b - 1 if row.judged == "slower" else b / a for a, b in pairs]
        value = statistics.median(ratios)
        result |= {
            "theirs": _spread([theirs for _, theirs in pairs]),
            "ratio": value,
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
        }
        if row.bar is not None:
            result["met"] = value <= row.bar if row.judged == "slower" else value >= row.bar
    return result


def head(row: Row) -> dict[str, Any]:
    """What is known of a row before it is measured."""
    against = row.theirs.who if row.theirs is not None else None
    return {
        "group": row.group,
        "what": row.what,
        "against": "cutaway, not looking" if against == "cutaway" else against,
        "judged": row.judged,
        "bar": row.bar,
        "tokens": row.tokens,
    }


def single(group: str, what: str, unit: str, values: list[float], bar: float | None) -> dict[str, Any]:
    """A row without another side: its median must not pass the bar."""
    value = statistics.median(values)
    met = {} if bar is None else {"met": value <= bar}
    told = {"group": group, "what": what, "judged": "at most", "unit": unit, "bar": bar, "value": value}
    return told | {"value_min": min(values), "value_max": max(values), "runs": len(values)} | met


def table(results: list[dict[str, Any]]) -> str:
    """All rows in Markdown, which reads as text too."""
    lines = [
        "| | ours | theirs | ratio (of pairs: from, to) | bar | met | by reading alone | others took |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(line, results)])


def line(result: dict[str, Any]) -> str:
    """One row of the table."""
    return "| " + " | ".join(_cells(result)) + " |"


def _cells(result: dict[str, Any]) -> list[str]:
    met = {True: "yes", False: "**no**", None: "–"}[result.get("met")]
    if result["judged"] == "at most":
        unit, low, high = result["unit"], result["value_min"], result["value_max"]
        value = f"{result['value']:.4g} {unit} ({low:.4g} to {high:.4g})"
        return [result["what"], value, "", "", _bar(result), met, "", ""]
    if "failed" in result and "ours" not in result:
        return [result["what"], "", "", result["failed"], _bar(result), "–", "", ""]
    ours, theirs = _amount(result, "ours"), _amount(result, "theirs") if "theirs" in result else ""
    ratio = result.get("failed", "")
    if "ratio" in result:
        low, high = result["ratio_min"], result["ratio_max"]
        if result["judged"] == "slower":
            ratio = f"{result['ratio']:+.1%} ({low:+.1%}, {high:+.1%})"
        else:
            ratio = f"{result['ratio']:.2f} ({low:.2f}, {high:.2f})"
    reading = f"{result['ceiling_tokens_per_s']:,.0f} tokens/s"
    if result["group"] not in BY_TOKENS:
        reading = f"{result['one_read_s'] * 1e3:.1f} ms"
    others = result["others_took_processors"]
    took = "" if others is None else f"{others:.2f}"
    if result["set_aside"]:
        took += f" ({result['set_aside']} pairs set aside)"
    return [result["what"], ours, theirs, ratio, _bar(result), met, reading, took]


def _bar(result: dict[str, Any]) -> str:
    bar = result["bar"]
    if bar is None:
        return "–"
    if result["judged"] == "slower":
        return f"at most {bar:+.1%}"
    return f"at most {bar:g} {result['unit']}" if result["judged"] == "at most" else f"{bar:g}"


def _amount(result: dict[str, Any], side: str) -> str:
    seconds = result[side]
    if result["group"] in BY_TOKENS:
        rates = [result["tokens"] / seconds[key] for key in ("median_s", "max_s", "min_s")]
        digits = 1 if rates[0] < 1000 else 0
        return "{:,.{d}f} tokens/s ({:,.{d}f} to {:,.{d}f})".format(*rates, d=digits)
    return "{:,.1f} ms ({:,.1f} to {:,.1f})".format(*(seconds[key] * 1e3 for key in ("median_s", "min_s", "max_s")))


def _spread(seconds: list[float]) -> dict[str, Any]:
    told = {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}
    return told | {"seconds": seconds}
