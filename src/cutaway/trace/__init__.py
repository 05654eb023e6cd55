"""Watching a pass: what is kept, what follows from it, and whether it all holds together."""

from cutaway.trace import edits
from cutaway.trace.next_tokens import NextToken, softmax
from cutaway.trace.prompt import Prompt
from cutaway.trace.trace import Trace

__all__ = ["NextToken", "Prompt", "Trace", "edits", "softmax"]
