"""Watching a pass: what is kept, what follows from it, and whether it all holds together."""

from cutaway.trace import edits
from cutaway.trace.trace import NextToken, Prompt, Trace, softmax

__all__ = ["NextToken", "Prompt", "Trace", "edits", "softmax"]
