"""What a family's file may say, what it must, and what holds of a family that says nothing of it."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from inspect import signature
from types import ModuleType
from typing import Any, Protocol

from cutaway.checkpoints.families.config import Config
from cutaway.checkpoints.families.names import Source
from cutaway.checkpoints.stored import Tensors
from cutaway.errors import CutawayError
from cutaway.spec import ModelSpec


class FamilyFile(Protocol):
    """What every family's file must define; the rest of `Family` has a default."""

    __name__: str

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]: ...

    def spec_from_config(self, config: Config, name: str) -> ModelSpec: ...

    def sources(self, spec: ModelSpec, tensors: Tensors) -> dict[str, Source]: ...


def _as_configured(spec: ModelSpec, tensors: Tensors) -> ModelSpec:
    return spec


def _nothing(spec: ModelSpec, tensors: Tensors) -> dict[str, str]:
    return {}


def _no_gguf(*_: object) -> Any:
    raise CutawayError("This family has no GGUF files of its own.")  # registering it has made sure of that


@dataclass(frozen=True)
class Family:
    """One family: what its file defines under these names, and the defaults for what it leaves out."""

    MODEL_TYPES: tuple[str, ...]  # the values of `model_type` in a config.json that are read here
    spec_from_config: Callable[[Config, str], ModelSpec]  # (config, name) → the spec that a config.json describes
    sources: Callable[[ModelSpec, Tensors], dict[str, Source]]  # (spec, tensors) → our names → Hugging Face's
    # The same for GGUF files: values of `general.architecture`, and the two functions, needed where there are any.
    GGUF_ARCHITECTURES: tuple[str, ...] = ()
    spec_from_gguf: Callable[[Config, Tensors, str], ModelSpec] = _no_gguf  # (config, tensors, name)
    gguf_sources: Callable[[ModelSpec, Tensors], dict[str, Source]] = _no_gguf  # (spec, tensors)
    # Keys of a configuration that change nothing in the pass, beside those that no family is changed by.
    HARMLESS: tuple[str, ...] = ()
    GGUF_HARMLESS: tuple[str, ...] = ()
    IGNORED: tuple[str, ...] = ()  # patterns of tensors that are no weights: buffers
    STORED_HEAD: str = "lm_head.weight"  # how the head is called where it is stored although it is tied
    # Patterns of tensors that belong to other parts than the one computed, and what is said of such a part.
    LEFT_OUT: Mapping[str, str] = field(default_factory=dict)
    unused: Callable[[ModelSpec, Tensors], dict[str, str]] = _nothing  # the same, where only the tensors tell
    as_stored: Callable[[ModelSpec, Tensors], ModelSpec] = _as_configured  # what a configuration leaves to the tensors


_TAKES = {
    "spec_from_config": ("config", "name"),
    "spec_from_gguf": ("config", "tensors", "name"),
    **dict.fromkeys(("sources", "gguf_sources", "unused", "as_stored"), ("spec", "tensors")),
}
_REQUIRED = tuple(f.name for f in fields(Family) if f.default is MISSING and f.default_factory is MISSING)
_PATTERNS = ("IGNORED", "LEFT_OUT")
HOOKS = tuple(f.name for f in fields(Family))


def registered(files: Sequence[FamilyFile]) -> tuple[Family, ...]:
    """The families that these files define.

    Raises CutawayError for a file that lacks what it must have, has a hook of the wrong kind or, by its name, a
    misspelt one, and for an architecture that two files claim.
    """
    owners: dict[tuple[str, str], str] = {}
    families = []
    for file in files:
        family = _family(file)
        for key in ("MODEL_TYPES", "GGUF_ARCHITECTURES"):
            for architecture in getattr(family, key):
                other = owners.setdefault((key, architecture), file.__name__)
                if other != file.__name__:
                    raise CutawayError(f"{other} and {file.__name__} both have {architecture!r} in their {key}.")
        families.append(family)
    return tuple(families)


def _family(file: FamilyFile) -> Family:
    defined = {hook: getattr(file, hook) for hook in HOOKS if hasattr(file, hook)}
    _refuse_misspelt(file, defined)
    needed = _REQUIRED
    if defined.get("GGUF_ARCHITECTURES"):
        needed = (*_REQUIRED, "spec_from_gguf", "gguf_sources")
    missing = [hook for hook in needed if hook not in defined]
    if missing:
        raise CutawayError(f"{file.__name__} lacks {', '.join(missing)}, which a family must define.")
    for hook, value in defined.items():
        if (wrong := _wrong(hook, value)) is not None:
            raise CutawayError(f"{hook} of {file.__name__} {wrong}.")
    return Family(**defined)


def _refuse_misspelt(file: FamilyFile, defined: Collection[str]) -> None:
    """A public name that is nearly that of a hook which the file lacks."""
    lacking = {hook.lower(): hook for hook in HOOKS if hook not in defined}
    for name, value in vars(file).items():
        if name.startswith("_") or name in HOOKS or isinstance(value, ModuleType):
            continue
        close = get_close_matches(name.lower(), lacking, n=1, cutoff=0.8)
        if close:
            raise CutawayError(
                f"{file.__name__} defines {name}, which nothing asks for, and no {lacking[close[0]]}: is that meant?"
            )


def _wrong(hook: str, value: object) -> str | None:
    """What is wrong with the value of a hook; None where nothing is."""
    if hook in _TAKES:
        if not callable(value) or tuple(signature(value).parameters) != _TAKES[hook]:
            return f"must be a function of ({', '.join(_TAKES[hook])})"
        return None
    if hook == "STORED_HEAD":
        return None if isinstance(value, str) else f"is {value!r}; it must be the name of a tensor"
    if hook == "LEFT_OUT":
        texts = isinstance(value, Mapping) and all(isinstance(text, str) for pair in value.items() for text in pair)
        kind = "map patterns of names to what they are"
    else:
        texts = isinstance(value, tuple) and all(isinstance(text, str) for text in value)
        kind = "be a tuple of texts"
    if not texts:
        return f"is {value!r}; it must {kind}"
    for pattern in value if hook in _PATTERNS else ():  # type: ignore[attr-defined]
        try:
            re.compile(pattern)
        except re.error as error:
            return f"holds {pattern!r}, which is no pattern: {error}"
    return None
