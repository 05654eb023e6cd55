"""One small file per family: its configuration into a spec, its tensor names into ours.

These are the only files that know a model's name.
"""

from types import ModuleType

from cutaway.checkpoints.families import gpt2, llama
from cutaway.checkpoints.stored import quoted
from cutaway.errors import CutawayError

FAMILIES: tuple[ModuleType, ...] = (gpt2, llama)


def family_of(architecture: str, where: str, key: str) -> ModuleType:
    """The family whose `key` ("MODEL_TYPE" or "GGUF_ARCHITECTURE") is this; CutawayError lists the known ones."""
    known = {getattr(family, key): family for family in FAMILIES}
    if architecture not in known:
        raise CutawayError(
            f"{where} names the architecture {quoted(architecture)}, which Cutaway cannot compute; "
            f"it can compute {', '.join(sorted(known))}."
        )
    return known[architecture]
