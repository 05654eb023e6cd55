"""Watching a pass: what is kept, what follows from it, and whether it all holds together."""

from cutaway.trace.trace import NextToken, Prompt, Trace, softmax

__all__ = ["NextToken", "Prompt", "Trace", "softmax"]
