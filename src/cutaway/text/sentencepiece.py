"""SentencePiece's BPE, from the pieces and scores that GGUF files of the Llama kind carry.

It is written here, not handed to the `tokenizers` library, because a list of merges cannot say what
SentencePiece does: equal scores go by position in the text, unused pieces merge and are taken apart
again, and pieces may be built over characters that are no pieces themselves.
Source: Kudo and Richardson, "SentencePiece" (2018), and the behaviour of the `sentencepiece` package.
"""

import re
from collections.abc import Sequence
from enum import IntEnum
from heapq import heapify, heappop, heappush

from cutaway.errors import CutawayError
from cutaway.text.spelling import SPACE_MARK, byte_piece, longest_first

_WORD = re.compile(f"{SPACE_MARK}*[^{SPACE_MARK}]+|{SPACE_MARK}+")
_SPACE_INSIDE = re.compile(f"[^{SPACE_MARK}\0]{SPACE_MARK}")
_WORDS_REMEMBERED = 20_000


class PieceType(IntEnum):
    """What a token is; the numbers are those of GGUF and SentencePiece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class SentencePieceCodec:
    """Merges the neighbours whose union is the piece of the highest score, until none is left."""

    specials_keep_start = True
    shows_own_pieces = False

    def __init__(
        self,
        pieces: Sequence[str],
        scores: Sequence[float],
        types: Sequence[int],
        *,
        unknown_id: int,
        space_prefix: bool,
    ) -> None:
        self.vocab_size = len(pieces)
        self._pieces = pieces
        self._types = types
        self._unknown_id = unknown_id
        self._space_prefix = space_prefix
        self._ids: dict[str, int] = {}
        self._cost: dict[str, float] = {}  # the negative score: the heap takes the smallest first
        self._byte_ids: dict[int, int] = {}
        specials, indivisible = [], []
        for id, (piece, score, kind) in enumerate(zip(pieces, scores, types, strict=True)):
            if kind in (PieceType.CONTROL, PieceType.UNKNOWN):
                specials.append(piece)
                continue
            if kind == PieceType.BYTE:
                self._byte_ids[_byte_of(id, piece)] = id
                continue
            marked = piece.replace(" ", SPACE_MARK)
            self._ids[marked] = id
            self._cost[marked] = -score
            if kind == PieceType.USER_DEFINED:
                indivisible.append(marked)
        self._special_ids = {piece: id for id, piece in enumerate(pieces) if piece in set(specials)}
        self._special_pattern = longest_first(specials)
        self._indivisible_pattern = longest_first(indivisible)
        self._unused = {piece for piece, id in self._ids.items() if types[id] == PieceType.UNUSED}
        # Where no piece has a space after another character, no merge crosses the start of a word, so
        # that words can be encoded one by one, and remembered.
        self._word_by_word = not _SPACE_INSIDE.search("\0".join(self._cost))
        self._remembered: dict[str, list[int]] = {}

    def encode(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = []
        for part in _parted(text, self._special_pattern if special else None):
            if special and part in self._special_ids:
                ids.append(self._special_ids[part])
            else:
                ids.extend(self._encode_ordinary(part))
        return ids

    def _encode_ordinary(self, text: str) -> list[int]:
        marked = (" " + text if self._space_prefix else text).replace(" ", SPACE_MARK)
        ids: list[int] = []
        for part in _parted(marked, self._indivisible_pattern):
            id = self._ids.get(part)
            if id is not None and self._types[id] == PieceType.USER_DEFINED:
                ids.append(id)
                continue
            for word in _WORD.findall(part) if self._word_by_word else [part]:
                ids.extend(self._encode_word(word))
        return self._join_unknowns(ids)

    def _encode_word(self, word: str) -> list[int]:
        ids = self._remembered.get(word)
        if ids is None:
            ids = self._merge(word)
            if len(self._remembered) >= _WORDS_REMEMBERED:
                self._remembered.clear()
            if len(word) <= 64:
                self._remembered[word] = ids
        return ids

    def _merge(self, text: str) -> list[int]:
        """BPE over `text`: a heap of possible merges, ordered by score and then from left to right."""
        symbols: list[str] = list(text)  # "" where a symbol has gone into its left neighbour
        before = list(range(-1, len(symbols) - 1))
        after = [*range(1, len(symbols)), -1]
        halves: dict[str, tuple[str, str]] = {}  # what each unused piece was made of
        heap: list[tuple[float, int, int, str]] = []

        def candidate(left: int, right: int) -> tuple[float, int, int, str] | None:
            piece = symbols[left] + symbols[right]
            cost = self._cost.get(piece)
            if cost is None:
                return None
            if piece in self._unused:
                halves[piece] = symbols[left], symbols[right]
            return cost, left, right, piece

        heap = [entry for left in range(len(symbols) - 1) if (entry := candidate(left, left + 1))]
        heapify(heap)
        while heap:
            _, left, right, piece = heappop(heap)
            if not symbols[left] or not symbols[right] or len(symbols[left]) + len(symbols[right]) != len(piece):
                continue  # one of the two has merged with another neighbour meanwhile
            symbols[left], symbols[right] = piece, ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
                if entry := candidate(left, after[left]):
                    heappush(heap, entry)
            if before[left] >= 0 and (entry := candidate(before[left], left)):
                heappush(heap, entry)
        return [id for symbol in symbols if symbol for id in self._ids_of(symbol, halves)]

    def _ids_of(self, symbol: str, halves: dict[str, tuple[str, str]]) -> list[int]:
        if symbol in self._unused and symbol in halves:
            left, right = halves[symbol]
            return [*self._ids_of(left, halves), *self._ids_of(right, halves)]
        id = self._ids.get(symbol)
        if id is not None:
            return [id]
        if not self._byte_ids:
            return [self._unknown_id]
        return [self._byte_ids.get(byte, self._unknown_id) for byte in symbol.encode("utf-8")]

    def _join_unknowns(self, ids: list[int]) -> list[int]:
        """Neighbouring unknown characters are one unknown token, as SentencePiece counts them."""
        unknown = self._unknown_id
        if unknown not in ids:
            return ids
        return [id for place, id in enumerate(ids) if id != unknown or place == 0 or ids[place - 1] != unknown]

    def name(self, id: int) -> str:
        return self._pieces[id]

    def token_bytes(self, id: int, *, at_start: bool) -> bytes:
        piece, kind = self._pieces[id], self._types[id]
        if kind == PieceType.BYTE:
            return bytes([_byte_of(id, piece)])
        if kind not in (PieceType.CONTROL, PieceType.UNKNOWN):
            piece = piece.replace(SPACE_MARK, " ")
            if at_start and self._space_prefix:
                piece = piece.removeprefix(" ")
        return piece.encode("utf-8")


def _byte_of(id: int, piece: str) -> int:
    byte = byte_piece(piece)
    if byte is None:
        raise CutawayError(f"Token {id}, {piece!r}, is marked as a byte but is not written like <0x0A>.")
    return byte[0]


def _parted(text: str, pattern: re.Pattern[str] | None) -> list[str]:
    """`text` cut into what `pattern` finds and what lies between, without empty parts."""
    if pattern is None:
        return [text] if text else []
    parts, end = [], 0
    for match in pattern.finditer(text):
        parts += [text[end : match.start()], match[0]]
        end = match.end()
    return [part for part in (*parts, text[end:]) if part]
