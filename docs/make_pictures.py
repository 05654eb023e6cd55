"""Draw docs/trace.svg, the picture in the README: what `cutaway trace "the cat sat on it"` prints, 104 columns wide.

python docs/make_pictures.py
"""

import io
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

import cutaway
from cutaway.trace.capture.plan import overview_points
from cutaway.trace.drawing.overview import draw_trace

PROMPT = "the cat sat on it"
COLUMNS = 104

# The ground is neither black nor white, so that the picture stands on pages of both kinds.
THEME = TerminalTheme(
    (24, 26, 31),
    (218, 220, 224),
    [
        (24, 26, 31),
        (204, 90, 80),
        (63, 165, 143),
        (201, 162, 39),
        (79, 143, 208),
        (139, 127, 214),
        (80, 170, 180),
        (218,) * 3,
    ],
)

# rich's own form, without the fonts that it would have a reader's browser fetch from elsewhere
FORM = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" xml:space="preserve">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; white-space: pre; }}
.{unique_id}-title {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 18px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    """Trace the prompt with the default model and save the drawing beside this file."""
    model = cutaway.load()
    trace = model.trace(PROMPT, points=overview_points(model.spec, 0))
    console = Console(
        record=True, width=COLUMNS, force_terminal=True, color_system="truecolor", file=io.StringIO(), highlight=False
    )
    draw_trace(trace, console=console, origin=model.origin)
    path = Path(__file__).parent / "trace.svg"
    title = f'cutaway trace "{PROMPT}"'
    path.write_text(
        console.export_svg(title=title, theme=THEME, code_format=FORM, unique_id="cutaway"), encoding="utf-8"
    )
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
