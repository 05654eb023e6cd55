"""When a response ends, and which of its text may already be shown."""

from collections.abc import Sequence

from cutaway.errors import CutawayError


class StopStrings:
    """Holds text back while it could still turn out to be the beginning of a stop string.

    `push` returns what is safe to show; once a stop string is complete `found` is set and the text ends
    before it. A stop string may span any number of tokens, and be one letter long. Of several the one that is
    complete first counts (the longer of two that end together), however the text was cut into tokens.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            stops = (stops,)
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise CutawayError(f"A stop string is {stop!r}; it must be a text of at least one character.")
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns what may be shown now."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        hits = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if hits:
            at, self.found = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            shown, self._held = self._held[:at], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """The text that was held back, when nothing more comes."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
