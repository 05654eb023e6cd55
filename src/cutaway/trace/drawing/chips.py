"""The tokens of a prompt as chips with their ids under them, and the character that several byte tokens spell."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from cutaway.trace.drawing.page import CHIP, CHIP_SPACE, Page, fit

Token = Mapping[str, Any] | None  # as in a report; None where some are left out

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how a token's piece shows a byte that is no whole character


def draw_chips(page: Page, tokens: Sequence[Token]) -> None:
    """Line after line of chips; under the ids a bracket where tokens spell a character only together."""
    above, below, spelled, used = Text(), Text(), Text(), 0
    for run, character in _fitting(page, spelled_runs(tokens)):
        chips = [_piece(page, token) for token in run]
        wide = sum(width + 1 for *_, width in chips) - 1
        if used and used + wide > page.width:
            _draw_line(page, above, below, spelled)
            above, below, spelled, used = Text(), Text(), Text(), 0
        for token, (piece, ident, width) in zip(run, chips, strict=True):
            above.append_text(Text(" … ", style="dim") if token is None else _chip(piece, width)).append(" ")
            below.append(fit(" " + ident, width) + " ", style="dim")
        spelled.append((_bracket(character, wide) if character else " " * wide) + " ", style="dim")
        used += wide + 1
    _draw_line(page, above, below, spelled)


def spelled_runs(tokens: Sequence[Token]) -> Iterator[tuple[list[Token], str | None]]:
    """The tokens in order; several at a time, with the character that they spell, where no single one spells it."""
    at = 0
    while at < len(tokens):
        length, character = _spelled(tokens[at:])
        yield list(tokens[at : at + length]), character
        at += length


def _spelled(tokens: Sequence[Token]) -> tuple[int, str | None]:
    """How many tokens, from the first on, spell a whole text together, and which; 1 where there are no such."""
    held = b""
    for count, token in enumerate(tokens, 1):
        if token is None or not _BYTE.search(token["piece"]):
            break
        held += _bytes(token["piece"])
        try:
            text = held.decode("utf-8").strip()
            return (count, text) if count > 1 and text.isprintable() else (1, None)
        except UnicodeDecodeError as error:
            if error.end < len(held):  # not cut short but wrong
                break
    return 1, None


def _bytes(piece: str) -> bytes:
    parts = _BYTE.split(piece)  # text and two digits in turn
    return b"".join(bytes.fromhex(part) if i % 2 else part.encode() for i, part in enumerate(parts))


def _fitting(page: Page, runs: Iterator[tuple[list[Token], str | None]]) -> Iterator[tuple[list[Token], str | None]]:
    """The runs, those that are wider than a line taken apart."""
    for run, character in runs:
        if len(run) > 1 and sum(_piece(page, token)[2] + 1 for token in run) - 1 > page.width:
            yield from (([token], None) for token in run)
        else:
            yield run, character


def _piece(page: Page, token: Token) -> tuple[str, str, int]:
    """A token's piece and id as they are drawn, and how many columns the chip takes."""
    piece, ident = ("…", "") if token is None else (token["piece"], str(token["id"]))
    piece = fit(piece, min(cell_len(piece), page.width - 4))
    return piece, ident, max(cell_len(piece), len(ident)) + 2


def _draw_line(page: Page, above: Text, below: Text, spelled: Text) -> None:
    page.line(above)
    page.line(below)
    if spelled.plain.strip():
        page.line(spelled)


def _bracket(character: str, width: int) -> str:
    label = f" {character} "
    left, over = divmod(max(0, width - 2 - cell_len(label)), 2)
    return fit("╰" + "─" * left + label + "─" * (left + over) + "╯", width)


def _chip(piece: str, width: int) -> Text:
    """A piece on its coloured ground, its spaces drawn as dots; a piece has none at its end but those it owns."""
    chip = Text(" ", style=CHIP)
    for character in piece:
        chip.append("·" if character == " " else character, style=CHIP_SPACE if character == " " else CHIP)
    chip.append(" " * (width - 1 - cell_len(piece)), style=CHIP)
    return chip
