"""How a vocabulary writes bytes down, and how a token is shown to people.

Byte-level vocabularies (GPT-2 and everything after it) write each of the 256 bytes as one printable
character, so that a space is "Ġ" and a line feed is "Ċ". SentencePiece writes a space as "▁" and a byte
that begins no known character as "<0xE2>".
"""

import re
from collections.abc import Iterable

SPACE_MARK = "▁"  # SentencePiece's visible space, U+2581
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Character to byte: printable Latin-1 stands for itself, the other 68 bytes move to U+0100 upwards."""
    itself = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in itself}
    moved = (byte for byte in range(256) if byte not in set(itself))
    alphabet.update({chr(256 + place): byte for place, byte in enumerate(moved)})
    return alphabet


BYTE_OF_CHARACTER = _byte_alphabet()
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def byte_level_bytes(piece: str) -> bytes:
    """The bytes that a byte-level piece stands for; a piece outside the alphabet stands for itself."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in piece])
    except KeyError:
        return piece.encode("utf-8")


def byte_piece(piece: str) -> bytes | None:
    """The one byte that a piece such as "<0xE2>" stands for, None for any other piece."""
    match = BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else None


def shown(contribution: bytes) -> str:
    """A token's bytes as people read them: spaces stay, line feeds and other invisible characters are
    written as escapes ("\\\\n"), bytes that make no whole character as "<0xE2>"."""
    characters = contribution.decode("utf-8", errors="surrogateescape")
    return "".join(_visible(character) for character in characters)


def _visible(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # how `surrogateescape` carries a byte that could not be decoded
        return f"<0x{code - 0xDC00:02X}>"
    if character == " " or character.isprintable():
        return character
    return character.encode("unicode_escape").decode("ascii")


def longest_first(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds any of `texts`, the longest where several begin; None for no texts at all."""
    ordered = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None
