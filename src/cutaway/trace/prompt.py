"""What a pass ran on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """What was run: ids, how each token reads, and what tokenizing added, in one sentence."""

    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    added: str
    text: str | None = None
