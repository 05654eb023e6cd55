"""Watching a pass: what is kept, what follows from it, and whether it all holds together.

Here stand one watched pass and what it leaves. `prompts` reads what people give, a `prompt` is what it becomes;
`running` runs it; the `trace` hands out the `values` by address, those too that `derive` works out from the stored
ones, and tells the `next_tokens`. Two runs are held against each other in `difference`; `export` writes a trace to a
file that `saved` opens; `connected` is what it offers of gradients; `finite` finds where a number first stopped being
one. Around it are rooms, each with a face that says what stands where: `capture` (what is kept, and its bill), `edits`,
`gradients`, `sweep` (many prompts), `texts` (scores and vectors), `drawing`, `verification`.
"""

from cutaway.trace import edits
from cutaway.trace.next_tokens import NextToken, softmax
from cutaway.trace.prompt import Prompt
from cutaway.trace.trace import Trace

__all__ = ["NextToken", "Prompt", "Trace", "edits", "softmax"]
