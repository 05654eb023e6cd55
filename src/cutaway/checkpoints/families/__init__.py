"""One small file per family: its configuration into a spec, its tensor names into ours.

These are the only files that know a model's name.
"""

from cutaway.checkpoints.families import (
    bert,
    deepseek,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    llama,
    llama4,
    mistral,
    mixtral,
    phi,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from cutaway.checkpoints.families.family import Family, FamilyFile, registered
from cutaway.checkpoints.stored import quoted
from cutaway.errors import CutawayError

FILES: tuple[FamilyFile, ...] = (
    bert,
    deepseek,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    llama,
    llama4,
    mistral,
    mixtral,
    phi,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
FAMILIES = registered(FILES)


def family_of(architecture: str, where: str, key: str) -> Family:
    """The family that lists this in its `key` ("MODEL_TYPES" or "GGUF_ARCHITECTURES").

    Raises CutawayError, with the list of the known ones, for any other.
    """
    known = {name: family for family in FAMILIES for name in getattr(family, key)}
    if architecture not in known:
        raise CutawayError(
            f"{where} names the architecture {quoted(architecture)}, which Cutaway cannot compute; "
            f"it can compute {', '.join(sorted(known))}."
        )
    return known[architecture]
