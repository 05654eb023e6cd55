"""The codec that works through the `tokenizers` library, which does the encoding; the bytes of each token
are worked out here, from the vocabulary's own spelling, so that streams and decoding cannot disagree."""

import json
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any

from cutaway.errors import CutawayError
from cutaway.text.spelling import CHARACTER_OF_BYTE, SPACE_MARK, byte_level_bytes, byte_piece

if TYPE_CHECKING:
    import tokenizers

Speller = Callable[[str, bool], bytes]
"""From a piece of the vocabulary, and whether the text begins with it, to the bytes it adds."""

_KNOWN_DECODERS = "ByteLevel, ByteFallback, Fuse, Metaspace, Replace, Strip and WordPiece"


class LibraryCodec:
    """Encodes through `tokenizers.Tokenizer`; its own additions, truncation and padding are switched off."""

    def __init__(self, inner: "tokenizers.Tokenizer") -> None:
        self._inner = inner
        inner.no_truncation()  # a tokenizer.json may cut texts at 128 tokens, or pad them
        inner.no_padding()
        self._lock = Lock()  # `encode_special_tokens` is a setting of the shared object, not an argument
        self._added = {id: token.content for id, token in inner.get_added_tokens_decoder().items()}
        self.special_ids = {id for id, token in inner.get_added_tokens_decoder().items() if token.special}
        self.vocab_size = self._count_ids()
        decoder = _settings_of(inner.decoder)
        self._spell, self._joins_words = _speller(decoder)
        self.specials_keep_start = not self._joins_words
        self.shows_own_pieces = self._joins_words
        self._missing_bytes = self._bytes_without_token(decoder)

    def _count_ids(self) -> int:
        base = self._inner.get_vocab_size(with_added_tokens=False)
        if base and self._inner.id_to_token(base - 1) is None:  # the ids leave gaps: look at every one
            base = max(self._inner.get_vocab(with_added_tokens=False).values()) + 1
        return max([base, *(id + 1 for id in self._added)])

    def _bytes_without_token(self, decoder: dict[str, Any] | None) -> frozenset[int]:
        """The bytes that byte-level BPE would drop without a word, for want of a token and of an unknown."""
        if decoder is None or decoder.get("type") != "ByteLevel" or getattr(self._inner.model, "unk_token", None):
            return frozenset()
        find = self._inner.token_to_id
        return frozenset(byte for byte, character in CHARACTER_OF_BYTE.items() if find(character) is None)

    def encode(self, text: str, *, special: bool) -> list[int]:
        with self._lock:
            self._inner.encode_special_tokens = not special
            try:
                ids = self._inner.encode(text, add_special_tokens=False).ids
            except Exception as error:  # the library raises bare Exception, a word without token for one
                raise CutawayError(f"This tokenizer cannot write the text ({error}).") from None
        if self._missing_bytes and not self._missing_bytes.isdisjoint(text.encode("utf-8")):
            self._refuse_dropped_bytes(text, ids)
        return ids

    def _refuse_dropped_bytes(self, text: str, ids: list[int]) -> None:
        written = b"".join(self.token_bytes(id, at_start=False) for id in ids)
        lost = next((c for c in text if c.encode("utf-8") not in written), None)
        if lost is not None:
            raise CutawayError(
                f"This vocabulary has no tokens for the bytes of {lost!r}, so the text cannot be written with it."
            )

    def name(self, id: int) -> str:
        piece = self._inner.id_to_token(id)
        if piece is None:
            raise CutawayError(
                f"Token {id} is a gap in this vocabulary of {self.vocab_size} ids: it stands for nothing."
            )
        return piece

    def token_bytes(self, id: int, *, at_start: bool) -> bytes:
        literal = self._added.get(id)
        if literal is None:
            return self._spell(self.name(id), at_start)
        if self._joins_words and not at_start:
            literal = " " + literal
        return literal.encode("utf-8")

    def around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer's own post-processor would put before and after a text."""
        inner = self._inner
        if inner.post_processor is None:
            return [], []
        probe = self._probe()
        processed = inner.post_process(probe, add_special_tokens=True)
        is_added = processed.special_tokens_mask
        begin = is_added.index(0) if 0 in is_added else len(is_added)
        return processed.ids[:begin], processed.ids[begin + len(probe.ids) :]

    def _probe(self) -> "tokenizers.Encoding":
        """Any text that this vocabulary writes with one token or more."""
        some_pieces = (self._inner.id_to_token(id) for id in range(min(self.vocab_size, 1000)) if id not in self._added)
        for text in ("a", *some_pieces):
            with suppress(Exception):  # a vocabulary of words refuses the words that it does not have
                encoding = self._inner.encode(text, add_special_tokens=False)
                if encoding.ids:
                    return encoding
        raise CutawayError("This tokenizer cannot write a single one of its own tokens, so it cannot be used.")


def _settings_of(part: Any) -> dict[str, Any] | None:
    """The JSON form of a decoder or another part of a `tokenizers.Tokenizer`."""
    return None if part is None else json.loads(part.__getstate__())


def _speller(decoder: dict[str, Any] | None) -> tuple[Speller, bool]:
    """How pieces become bytes under this decoder, and whether it joins tokens with spaces."""
    if decoder is None:
        return (lambda piece, at_start: (piece if at_start else " " + piece).encode("utf-8")), True
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {part["type"] for part in parts}
    if kinds == {"ByteLevel"}:
        return (lambda piece, at_start: byte_level_bytes(piece)), False
    if kinds == {"WordPiece"}:
        return _word_piece_speller(parts[0]["prefix"], parts[0]["cleanup"]), True
    return _marked_space_speller(parts), False


def _word_piece_speller(prefix: str, cleanup: bool) -> Speller:
    def spell(piece: str, at_start: bool) -> bytes:
        if not at_start:
            piece = piece[len(prefix) :] if piece.startswith(prefix) else " " + piece
        if cleanup:
            for loose in _LOOSE:
                piece = piece.replace(loose, loose.removeprefix(" "))
            piece = piece.replace(" do not", " don't")
        return piece.encode("utf-8")

    return spell


# What the WordPiece decoder's clean-up closes up, token by token.
_LOOSE = (" .", " ?", " !", " ,", " n't", " 'm", " 's", " 've", " 're")


def _marked_space_speller(parts: list[dict[str, Any]]) -> Speller:
    """SentencePiece's manner: a visible mark for the space, perhaps bytes by name, perhaps a space dropped
    at the start."""
    replacements: list[tuple[str, str]] = []
    by_name = drops_space = False
    for part in parts:
        match part:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Metaspace"}:
                replacements.append((part.get("replacement", SPACE_MARK), " "))
                drops_space |= part.get("prepend_scheme", "always") != "never"
            case {"type": "ByteFallback"}:
                by_name = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                drops_space = True
            case {"type": "Fuse"} | {"type": "Strip", "start": 0, "stop": 0}:
                pass
            case _:
                raise CutawayError(
                    f"This tokenizer decodes through {part['type']}, in a way that is not known here; "
                    f"known are {_KNOWN_DECODERS}."
                )

    def spell(piece: str, at_start: bool) -> bytes:
        if by_name and (byte := byte_piece(piece)) is not None:
            return byte
        for old, new in replacements:
            piece = piece.replace(old, new)
        return (piece.removeprefix(" ") if at_start and drops_space else piece).encode("utf-8")

    return spell
