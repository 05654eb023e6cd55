"""Text that arrives token by token, cut only between whole characters."""

import codecs
from collections.abc import Sequence
from typing import Protocol


class Spells(Protocol):
    """What a stream needs of a tokenizer."""

    def contribution(self, id: int, *, at_start: bool, skip_special: bool = False) -> tuple[bytes, bool]:
        """The bytes that `id` adds to a text, and whether the text still counts as not begun after it."""


class TextStream:
    """Turns ids into text as they come; made by `Tokenizer.stream`.

    A character whose bytes are spread over several tokens comes out with the last of them. All pieces
    together, the `flush` at the end included, are exactly `Tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Spells, *, after: Sequence[int] = (), skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._at_start = True
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for id in after:
            self.push(id)  # what it gives is text that stands already; a character left open is ours to finish

    def push(self, id: int) -> str:
        """The whole characters that this token completes, "" while a character is still open."""
        contribution, self._at_start = self._tokenizer.contribution(
            id, at_start=self._at_start, skip_special=self._skip_special
        )
        return self._decoder.decode(contribution)

    def flush(self) -> str:
        """What is left at the end: "", or one "\\ufffd" where the last character was never completed."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
