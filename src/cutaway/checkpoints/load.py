"""From a place on disk to a spec, its weights under our names, and its tokenizer."""

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from cutaway.checkpoints.eight_bit import joined
from cutaway.checkpoints.families import family_of
from cutaway.checkpoints.families.config import Config
from cutaway.checkpoints.families.family import Family
from cutaway.checkpoints.families.names import collect, same_bytes
from cutaway.checkpoints.gguf import GGUFFile, read_gguf
from cutaway.checkpoints.safetensors import find_weights
from cutaway.checkpoints.sources import Location, locate
from cutaway.checkpoints.stored import Tensors
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.reading import read_object
from cutaway.spec import ExpertsSpec, ModelSpec, parameter_shapes
from cutaway.spec.catalog import CATALOG, catalog_spec
from cutaway.text.tokenizer import Tokenizer

_LONGEST_JSON = 64_000_000  # bytes; the longest index of a published checkpoint has a tenth
MOST_EXPERTS = 100_000  # in all layers together; the largest published models have under 30,000


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a checkpoint holds. The weights are still as they lie in the file, mapped into memory."""

    spec: ModelSpec
    weights: Mapping[str, Weight]
    tokenizer: Tokenizer | None
    location: Location
    family: Family | None = None  # that of its names, where it has any but ours
    merged: tuple[str, ...] = ()  # the adapters whose changes its weights hold


def load_checkpoint(location: Location) -> Checkpoint:
    """Read what lies at `location`. Raises CutawayError for whatever is missing, damaged, unknown or contradictory."""
    readers = {"gguf": _from_gguf, "folder": _from_folder, "npz": _from_npz}
    checkpoint = readers[location.kind](location)
    _check_vocabulary(checkpoint)
    return checkpoint


def spec_of(source: str | Path) -> ModelSpec:
    """Only what a model is: by a name of the catalog, a config.json, a folder with one, or a GGUF file's header."""
    if source in CATALOG:
        return catalog_spec(str(source))
    path = Path(source)
    config = path if path.suffix == ".json" else path / "config.json"
    if config.is_file():
        return spec_from_config_file(config)
    if path.exists() or str(source).startswith("hf:"):
        return load_spec(locate(source))
    return catalog_spec(str(source))  # says which names are close


def load_spec(location: Location) -> ModelSpec:
    """Only what the model is: from a GGUF header or a config.json, without looking for weights."""
    if location.kind == "gguf":
        return _gguf_spec(location, read_gguf(location.path))[1]
    if location.kind == "npz":
        return catalog_spec(location.name)
    return spec_from_config_file(location.path / "config.json", location.name)


def spec_from_config_file(path: Path, name: str | None = None) -> ModelSpec:
    """The spec that a `config.json` describes. Raises CutawayError as loading its model would."""
    return _folder_spec(path, name or path.absolute().parent.name)[1]


def _from_gguf(location: Location) -> Checkpoint:
    from cutaway.text.gguf import tokenizer_from_gguf

    file = read_gguf(location.path)
    family, spec = _gguf_spec(location, file)
    weights = collect(file.tensors, family.gguf_sources(spec, file.tensors), parameter_shapes(spec), family.IGNORED)
    tokenizer = tokenizer_from_gguf(file.metadata) if "tokenizer.ggml.model" in file.metadata else None
    return Checkpoint(spec, weights, tokenizer, location, family)


def _gguf_spec(location: Location, file: GGUFFile) -> tuple[Family, ModelSpec]:
    where = f"the metadata of {location.path.name}"
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CutawayError(f"{where} has no 'general.architecture': it does not say what it is.")
    family = family_of(architecture, where, "GGUF_ARCHITECTURES")
    prefix = f"{architecture}."
    config = Config({k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}, where)
    return family, _believable(family.spec_from_gguf(config, file.tensors, location.name), where)


def _from_folder(location: Location) -> Checkpoint:
    from cutaway.text.huggingface import tokenizer_from_folder

    family, spec = _folder_spec(location.path / "config.json", location.name)
    tensors = joined(find_weights(location.path).tensors)
    spec = family.as_stored(spec, tensors)
    sources = family.sources(spec, tensors)
    head = family.STORED_HEAD
    heads = [name for name in tensors if name == head or name.endswith(f".{head}")] if spec.tied_head else []
    for name in heads:
        _check_tied_head(spec, tensors, sources["embed.tokens"].name, name)
    tied = map(re.escape, heads)
    left_out = {**family.LEFT_OUT, **family.unused(spec, tensors)}  # patterns of tensors that belong to other parts
    weights = collect(tensors, sources, parameter_shapes(spec), (*family.IGNORED, *tied, *left_out))
    location = replace(location, origin=location.origin + _left_out(tensors, left_out))
    return Checkpoint(spec, weights, tokenizer_from_folder(location.path), location, family)


def _left_out(tensors: Tensors, parts: Mapping[str, str]) -> str:
    """What is said of a model of which only a part is loaded: "; its vision tower (437 tensors) is left out"."""
    said = ""
    for pattern, what in parts.items():
        count = sum(re.fullmatch(pattern, name) is not None for name in tensors.names)
        if count:
            said += f"; {what} ({count} tensors) is left out"
    return said


def _folder_spec(path: Path, name: str) -> tuple[Family, ModelSpec]:
    where = f"{path.name} of {path.absolute().parent.name}"
    values = read_configuration(path)
    architecture = values.get("model_type")
    if not isinstance(architecture, str):
        raise CutawayError(f"{where} has no 'model_type': it does not say what it is.")
    family = family_of(architecture, where, "MODEL_TYPES")
    return family, _believable(family.spec_from_config(Config(values, where), name), where)


def _believable(spec: ModelSpec, where: str) -> ModelSpec:
    """Refuse a number of experts that nobody has, before a name is made up for every matrix of each."""
    mixtures = [layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, ExpertsSpec)]
    experts = sum(mixture.n_experts for mixture in mixtures)
    if experts > MOST_EXPERTS:
        raise CutawayError(
            f"{where} claims {experts:,} experts in all layers; more than {MOST_EXPERTS:,} are not believed."
        )
    return spec


def _check_tied_head(spec: ModelSpec, tensors: Tensors, embedding: str, head: str) -> None:
    """A head that is stored although it is tied must be the embedding itself."""
    if not same_bytes(tensors[head], tensors[embedding]):
        raise CutawayError(
            f"The configuration of {spec.name} ties the head to the embedding, but the checkpoint holds a "
            f"{head} that differs from {embedding}; set 'tie_word_embeddings' to what is true."
        )


def _from_npz(location: Location) -> Checkpoint:
    from cutaway.data import TOY_TOKENS
    from cutaway.text.words import word_tokenizer

    try:
        with np.load(location.path, allow_pickle=False) as arrays:
            weights = {name: Weight.of(np.atleast_1d(arrays[name])) for name in arrays.files}
    # A file that is no archive of arrays fails in many ways: as a zip, in its compression, as a lone array.
    except (OSError, ValueError, EOFError, BadZipFile, NotImplementedError, zlib.error, TypeError, AttributeError):
        raise CutawayError(f"{location.path} is not the archive of arrays that it should be, or damaged.") from None
    tokenizer = word_tokenizer(TOY_TOKENS) if location.name == "toy" else None
    return Checkpoint(catalog_spec(location.name), weights, tokenizer, location)


def _check_vocabulary(checkpoint: Checkpoint) -> None:
    """A tokenizer may know fewer ids than the embedding has rows (padding), never more."""
    tokenizer, spec = checkpoint.tokenizer, checkpoint.spec
    if tokenizer is not None and tokenizer.vocab_size > spec.vocab_size:
        raise CutawayError(
            f"The tokenizer of {spec.name} knows {tokenizer.vocab_size} tokens, but its embedding has only "
            f"{spec.vocab_size} rows: they do not belong together."
        )


def read_configuration(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CutawayError for what is none, too long, or has a key twice."""
    if not path.exists():
        raise CutawayError(f"{path.parent} has no {path.name}; a model folder needs one beside its weights.")
    return read_object(path, _LONGEST_JSON)
