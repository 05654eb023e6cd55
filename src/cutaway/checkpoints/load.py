"""From a place on disk to a spec, its weights under our names, and its tokenizer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cutaway.checkpoints.families import family_of
from cutaway.checkpoints.families.config import Config
from cutaway.checkpoints.families.names import collect, same_bytes
from cutaway.checkpoints.gguf import read_gguf
from cutaway.checkpoints.safetensors import find_weights
from cutaway.checkpoints.sources import Location
from cutaway.checkpoints.stored import Tensors
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.spec import ModelSpec
from cutaway.spec.catalog import catalog_spec
from cutaway.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a checkpoint holds. The weights are still as they lie in the file, mapped into memory."""

    spec: ModelSpec
    weights: Mapping[str, Weight]
    tokenizer: Tokenizer | None
    location: Location


def load_checkpoint(location: Location) -> Checkpoint:
    """Read what lies at `location`. Raises CutawayError for whatever is missing, damaged, unknown or contradictory."""
    readers = {"gguf": _from_gguf, "folder": _from_folder, "npz": _from_npz}
    checkpoint = readers[location.kind](location)
    _check_vocabulary(checkpoint)
    return checkpoint


def _from_gguf(location: Location) -> Checkpoint:
    from cutaway.text.gguf import tokenizer_from_gguf

    file = read_gguf(location.path)
    where = f"the metadata of {location.path.name}"
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CutawayError(f"{where} has no 'general.architecture': it does not say what it is.")
    family = family_of(architecture, where, "GGUF_ARCHITECTURES")
    prefix = f"{architecture}."
    config = Config({k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}, where)
    spec = family.spec_from_gguf(config, file.tensors, location.name)
    weights = collect(file.tensors, family.gguf_sources(spec, file.tensors), family.IGNORED)
    tokenizer = tokenizer_from_gguf(file.metadata) if "tokenizer.ggml.model" in file.metadata else None
    return Checkpoint(spec, weights, tokenizer, location)


def _from_folder(location: Location) -> Checkpoint:
    from cutaway.text.huggingface import tokenizer_from_folder

    where = f"config.json of {location.path.name}"
    values = _read_json(location.path / "config.json")
    architecture = values.get("model_type")
    if not isinstance(architecture, str):
        raise CutawayError(f"{where} has no 'model_type': it does not say what it is.")
    family = family_of(architecture, where, "MODEL_TYPES")
    spec = family.spec_from_config(Config(values, where), location.name)
    tensors = find_weights(location.path).tensors
    sources = family.sources(spec, tensors)
    _check_tied_head(spec, tensors, sources["embed.tokens"].name)
    weights = collect(tensors, sources, (*family.IGNORED, *(["lm_head.weight"] if spec.tied_head else [])))
    return Checkpoint(spec, weights, tokenizer_from_folder(location.path), location)


def _check_tied_head(spec: ModelSpec, tensors: Tensors, embedding: str) -> None:
    """A head that is stored although it is tied must be the embedding itself."""
    if not spec.tied_head or "lm_head.weight" not in tensors:
        return
    if not same_bytes(tensors["lm_head.weight"], tensors[embedding]):
        raise CutawayError(
            f"The configuration of {spec.name} ties the head to the embedding, but the checkpoint holds an "
            f"lm_head.weight that differs from {embedding}; set 'tie_word_embeddings' to what is true."
        )


def _from_npz(location: Location) -> Checkpoint:
    from cutaway.data import TOY_TOKENS
    from cutaway.text.words import word_tokenizer

    try:
        with np.load(location.path, allow_pickle=False) as arrays:
            weights = {name: Weight.of(arrays[name]) for name in arrays.files}
    except (OSError, ValueError, EOFError) as error:
        raise CutawayError(f"{location.path} could not be read: {error}. Reinstall cutaway to restore it.") from None
    return Checkpoint(catalog_spec(location.name), weights, word_tokenizer(TOY_TOKENS), location)


def _check_vocabulary(checkpoint: Checkpoint) -> None:
    """A tokenizer may know fewer ids than the embedding has rows (padding), never more."""
    tokenizer, spec = checkpoint.tokenizer, checkpoint.spec
    if tokenizer is not None and tokenizer.vocab_size > spec.vocab_size:
        raise CutawayError(
            f"The tokenizer of {spec.name} knows {tokenizer.vocab_size} tokens, but its embedding has only "
            f"{spec.vocab_size} rows: they do not belong together."
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CutawayError(f"{path.parent} has no {path.name}; a model folder needs one beside its weights.") from None
    except (OSError, ValueError) as error:
        raise CutawayError(f"{path} could not be read as JSON: {error}.") from None
    if not isinstance(values, dict):
        raise CutawayError(f"{path} holds {type(values).__name__}, not the object that a configuration is.")
    return values
