"""Guessing the next tokens from the text itself, so that one pass may give several (prompt lookup).

What follows the last few tokens is often what followed them before: in code, in lists, in a text that is
quoted. The guess runs along with the next pass, each of its rows gives the logits that a pass of its own would
have given, and the response takes them one by one for as long as what it draws is what was guessed. So the
tokens are the very same, drawn or greedy; only the number of passes differs. (Leviathan et al. 2023 for the
principle; Saxena 2023 for looking in the prompt)
"""

from collections.abc import Sequence

LONGEST = 3  # of the last tokens, so many are looked for, and fewer where those were never seen
SHORTEST = 2
WEIGHT = 0.2  # of the newest measurement among the older ones
PAUSE = 32  # tokens without a guess after guesses that did not pay; doubled each time, up to
LONGEST_PAUSE = 512


class Lookup:
    """Where each run of two and three tokens last stood in a sequence."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self.extend(ids)

    def extend(self, ids: Sequence[int]) -> None:
        """More tokens of the sequence."""
        for token in ids:
            self._ids.append(token)
            end = len(self._ids) - 1  # runs that end before this token: what followed them is known now
            for length in range(SHORTEST, LONGEST + 1):
                if end >= length:
                    self._after[tuple(self._ids[end - length : end])] = end

    def guess(self, count: int) -> list[int]:
        """Up to `count` tokens that followed when the last ones stood there before; [] where they never did."""
        for length in range(LONGEST, SHORTEST - 1, -1):
            place = self._after.get(tuple(self._ids[-length:]))
            if place is not None and len(self._ids) >= length:
                # Where the text repeats itself the guess runs into its own end and goes on from what it says there.
                said = self._ids[place : place + count]
                while len(said) < count and len(said) > 0:
                    said.append(said[len(said) - (len(self._ids) - place)])
                return said[:count]
        return []


class Payoff:
    """Whether guessing pays, from what passes took and gave: tokens a second with guesses against without.

    Where it does not, there is a pause, longer each time; tokens never depend on it.
    """

    def __init__(self) -> None:
        self._plain: float | None = None  # seconds of a pass without a guess
        self._guessed: float | None = None  # seconds of a pass with one
        self._gained: float | None = None  # tokens that such a pass gives
        self._paused = 0
        self._pause = PAUSE

    def wanted(self) -> bool:
        """Whether to guess now. The first passes do not, so that there is something to compare with."""
        if self._plain is None:
            return False
        if self._paused:
            self._paused -= 1
            return False
        return True

    def note(self, seconds: float, guessed: int, tokens: int) -> None:
        """A pass took `seconds` with `guessed` tokens added, and gave `tokens`."""
        if not guessed:
            self._plain = _mixed(self._plain, seconds)
            return
        self._guessed, self._gained = _mixed(self._guessed, seconds), _mixed(self._gained, tokens)
        if self._plain is not None and self._gained * self._plain < self._guessed:
            self._paused, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
            self._guessed = self._gained = None
        elif tokens > guessed:
            self._pause = PAUSE


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else (1 - WEIGHT) * old + WEIGHT * new
