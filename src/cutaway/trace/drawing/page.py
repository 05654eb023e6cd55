"""What every drawing in the terminal shares: the page it stands on, its colours, and how numbers and tokens read.

The same colours mean the same thing everywhere: orange and blue are positive and negative, the scale from
dark blue to yellow is for weights that sum to one (both survive red-green blindness, and bring their own
background or are of middling lightness, so that they read on dark and on light). What is masked is
hatched, never blank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.style import Style
from rich.text import Text

POSITIVE = "#d9813b"
NEGATIVE = "#4f8fd0"
ATTENTION = "#8b7fd6"  # what attention adds, everywhere
FEED_FORWARD = "#3fa58f"  # what the feed-forward adds
STREAM = "#9a9a9a"
CHIP = "#ffffff on #47607d"
CHIP_SPACE = "#93abc6 on #47607d"  # the dot that stands for a space
LIKELY = "#c9a227"  # probabilities of next tokens
HATCH = "░"

# Cividis, the colour map made to look alike with and without red-green blindness; low to high.
_WEIGHTS = ((0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 184, 102), (254, 232, 56))

PLAIN_WIDTH = 100
_EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Page:
    """A console, how wide its lines may be, and whether it is plain (no terminal: one record a line, no drawing)."""

    console: Console
    width: int
    plain: bool

    @classmethod
    def on(cls, console: Console | None = None) -> "Page":
        """A page on `console`, or on standard output."""
        console = console or Console(highlight=False)
        plain = not console.is_terminal
        return cls(console, PLAIN_WIDTH if plain else max(40, console.width), plain)

    @property
    def coloured(self) -> bool:
        return not self.plain and self.console.color_system is not None and not self.console.no_color

    def line(self, text: Text | str = "") -> None:
        """Print one line. On a terminal what does not fit is cut off, never wrapped."""
        text = Text(text) if isinstance(text, str) else text
        if self.plain:
            self.console.print(text.plain.rstrip(), soft_wrap=True, markup=False, highlight=False, emoji=False)
        else:
            self.console.print(text, no_wrap=True, overflow="ellipsis", crop=True, highlight=False)

    def heading(self, title: str, note: str = "") -> None:
        """A blank line, a title, and in dim letters what it means, wrapped."""
        self.line()
        self.wrapped(title, "bold")
        if note:
            self.note(note)

    def note(self, text: str) -> None:
        """A sentence to the reader."""
        self.wrapped(text, "dim")

    def wrapped(self, text: str, style: str = "") -> None:
        """A text that goes on in the next line where it must; in plain output it never does."""
        if self.plain:
            self.line(text)
        else:
            self.console.print(Text(text, style=style), highlight=False, width=min(self.width, 110))


def weight_style(weight: float) -> Style:
    """Background and letters for a weight from 0 to 1; the scale follows √weight, so that small ones differ."""
    at = math.sqrt(min(max(weight, 0.0), 1.0)) * (len(_WEIGHTS) - 1)
    low = min(int(at), len(_WEIGHTS) - 2)
    red, green, blue = (round(a + (b - a) * (at - low)) for a, b in zip(_WEIGHTS[low], _WEIGHTS[low + 1], strict=True))
    # Of black and white the one that stands out more; 0.179 is the luminance from which on it is black.
    light = [(c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4) for c in (red, green, blue)]
    letters = "#000000" if 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2] > 0.179 else "#ffffff"
    return Style(color=letters, bgcolor=f"#{red:02x}{green:02x}{blue:02x}")


def fit(text: str, width: int) -> str:
    """`text` in exactly `width` columns: padded, or cut with an ellipsis."""
    if cell_len(text) > width:
        return set_cell_size(text, max(width - 1, 0)) + "…" if width > 0 else ""
    return text + " " * (width - cell_len(text))


def quoted(piece: str | None, position: int | None = None) -> str:
    """A token as it is told: its piece in quotation marks, so that spaces are seen."""
    return f'"{piece}"' if piece is not None else f"position {position}"


def number(value: float | int | None) -> str:
    """A number in seven columns, with as many digits as they hold; "-∞" where there is none (it was masked)."""
    if value is None:
        return "     -∞"
    if isinstance(value, int):
        return f"{value:7d}"
    size = abs(value)
    if size != 0 and (size < 0.00005 or size >= 99999.5):
        return f"{value:7.0e}"
    decimals = 4 if size < 9.99995 else 3 if size < 99.9995 else 2 if size < 999.995 else 1 if size < 9999.95 else 0
    return f"{value:7.{decimals}f}"


def numbers(values: Sequence[float | int | None], count: int) -> Text:
    """The first `count` values in aligned columns, positive and negative in their colours."""
    text = Text()
    for value in values[:count]:
        text.append(" " + number(value), style=sign_style(value))
    return text


def sign_style(value: float | int | None) -> str:
    if value is None:
        return "dim"
    if isinstance(value, int) or value == 0:
        return ""
    return POSITIVE if value > 0 else NEGATIVE


def size(value: float | None) -> str:
    """A length (norm) in three to five digits."""
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 999.95 else f"{value:,.0f}"


def bar(share: float, width: int) -> str:
    """`share` (0 to 1) of `width` columns, drawn to an eighth of a column; something is drawn for all but 0."""
    eighths = max(round(min(max(share, 0.0), 1.0) * width * 8), 1 if share > 0 else 0)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)
