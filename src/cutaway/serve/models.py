"""The models that a page may choose, by name only; loaded once, each in a thread of its own, the toy first."""

import asyncio
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from cutaway.errors import CutawayError
from cutaway.serve.protocol import ModelEntry, State

if TYPE_CHECKING:
    from cutaway.model import Model

TOY = "toy"
MOST_LOADED = 3  # models in memory at a time, the toy not counted


class Models:
    """Names → models. `named` are further sources that the person who started the server gave by name or path."""

    def __init__(self, named: Iterable[str] = (), engine: str = "auto", dtype: str | None = None) -> None:
        self._engine, self._dtype = engine, dtype
        self._given = {_short(source): source for source in named}
        self._loading: dict[str, asyncio.Task[Model]] = {}

    def entries(self) -> list[ModelEntry]:
        """Every model that can be named, and how it stands with it."""
        from cutaway.checkpoints.sources import known_models

        found: dict[str, ModelEntry] = {}
        for known in known_models():
            # What the server was started with may be fetched; a page cannot make it fetch anything else.
            state, note = self._state(known.name, known.here or known.name in self._given)
            if state == "absent":
                note = known.where.replace("`", "")
            found[known.name] = ModelEntry(known.name, known.title, known.size_bytes, state, note)
        for name, source in self._given.items():
            if name not in found:
                state, note = self._state(name, True)
                found[name] = ModelEntry(name, source if source != name else name, 0, state, note)
        return list(found.values())

    def check(self, name: object) -> str:
        """`name`, where it is one of the list and on this machine. Raises CutawayError, as for any path."""
        entries = {entry.name: entry for entry in self.entries()}
        if not isinstance(name, str) or name not in entries:
            raise CutawayError(f"There is no model {str(name)[:80]!r} here; there are {', '.join(entries)}.")
        if entries[name].state == "absent":
            raise CutawayError(f"{name} is not on this machine. {entries[name].note}")
        return name

    def begin(self, name: str) -> "asyncio.Task[Model]":
        """Start loading `name` (a checked name) if nothing has; the task that ends with the model."""
        task = self._loading.get(name)
        if task is None or task.cancelled() or (task.done() and task.exception() is not None):
            self._let_go()
            task = asyncio.get_running_loop().create_task(asyncio.to_thread(self._load, name))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # told by `state`, not as a log
            self._loading[name] = task
        else:  # the latest used stands last
            self._loading[name] = self._loading.pop(name)
        return task

    async def get(self, name: object) -> "Model":
        """The model, once it is loaded. Raises CutawayError for an unknown name or a model that cannot be loaded."""
        # Of a model in memory nothing is asked on the disk, which a keystroke would wait for.
        ready = isinstance(name, str) and self._state(name, False)[0] == "ready"
        checked = str(name) if ready else self.check(name)
        return await asyncio.shield(self.begin(checked))

    def _load(self, name: str) -> "Model":
        from cutaway.model import load

        # The toy runs on plain NumPy: it must answer before kernels have been compiled.
        engine, dtype = ("numpy", None) if name == TOY else (self._engine, self._dtype)
        model = load(self._given.get(name, name), engine=engine, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.trace([0], points=())  # the first pass compiles or unpacks what all later ones use
        return model

    def _let_go(self) -> None:
        done = [name for name, task in self._loading.items() if task.done() and name != TOY]
        for name in done[: max(0, len(done) - MOST_LOADED + 1)]:
            del self._loading[name]

    def _state(self, name: str, here: bool) -> tuple[State, str]:
        task = self._loading.get(name)
        if task is None:
            return ("here", "") if here else ("absent", "")
        if not task.done():
            return "loading", ""
        if task.cancelled():
            return "failed", "Loading was interrupted."
        error = task.exception()
        if error is not None:
            return "failed", str(error) if isinstance(error, CutawayError) else "It could not be loaded."
        return "ready", ""


def _short(source: str) -> str:
    """What a page calls a source: a name stays, of a path only the last part is told."""
    return source if source.startswith("hf:") else Path(source).name or source
