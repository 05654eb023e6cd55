"""Cutaway: see inside a transformer while it runs.

    import cutaway
    model = cutaway.load("smollm2-135m")
    trace = model.trace("the cat sat on it")
    trace["layers.3.attn.pattern"]
    trace.next_tokens(10)
    model.trace("the cat sat on it", edits=[cutaway.edits.Zero("layers.3.attn.z", heads=[5])])

What is heavy is imported when it is first used, so that `import cutaway` is quick.
"""

from cutaway.errors import CutawayError

TYPE_CHECKING = False  # what type checkers take for true; `typing` itself would be a third of the import's time
if TYPE_CHECKING:
    from cutaway.model import Model, count, load
    from cutaway.trace import Trace, edits
    from cutaway.trace.saved import open_trace
    from cutaway.trace.sweep.folder import open_sweep

__version__ = "0.1.0"
__all__ = ["CutawayError", "Model", "Trace", "__version__", "count", "edits", "load", "open_sweep", "open_trace"]

_HOMES = {
    "load": "cutaway.model",
    "count": "cutaway.model",
    "Model": "cutaway.model",
    "Trace": "cutaway.trace",
    "edits": "cutaway.trace",
    "open_sweep": "cutaway.trace.sweep.folder",
    "open_trace": "cutaway.trace.saved",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'cutaway' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What can be asked for, also what has not been imported yet: completion at a prompt shows this."""
    return sorted(__all__)
