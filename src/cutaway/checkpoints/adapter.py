"""LoRA adapters as PEFT writes them: `adapter_config.json` beside `adapter_model.safetensors` (Hu et al. 2021).

An adapter stands beside a base model: to some of its matrices it adds scale · up · down, both narrow; with `use_dora`
it says besides how long each row of the whole shall be. Here it is read for one model, under our names, its numbers
left as they lie in the file.
"""

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cutaway.checkpoints.adapter_config import AdapterConfig, read_adapter_config
from cutaway.checkpoints.adapter_lengths import with_lengths
from cutaway.checkpoints.adapter_names import Module, listed, modules_of, refuse_unfitting, tables_of
from cutaway.checkpoints.families.family import Family
from cutaway.checkpoints.load import Checkpoint, read_configuration
from cutaway.checkpoints.safetensors import read_safetensors
from cutaway.checkpoints.stored import Tensors, quoted
from cutaway.engines.protocol import LowRank
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.spec import ModelSpec

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>A|B)(?:\.[^.]+)?\.weight")
_MAGNITUDE = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_magnitude_vector(?:\.[^.]+)?")
_EMBEDDED = re.compile(r".*\.lora_embedding_[AB](?:\..*)?")
_COPY = re.compile(r"^(?:base_model\.model\.)?|(?:\.base_layer)?\.weight$")  # around the name of what is saved whole
# Words of a model's name that tell nothing of what it was made from.
_GENERAL = frozenset(
    ("base", "bit", "bnb", "chat", "gguf", "instruct", "large", "lora", "merged", "model", "small", "tiny")
)


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter, read for one model: what it adds to each projection, by its name ("layers.3.attn.q")."""

    name: str
    parts: Mapping[str, LowRank]

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices as they are stored; what several projections share is counted once."""
        return sum({id(w.rows): w.rows.nbytes for part in self.parts.values() for w in (part.down, part.up)}.values())


def adapter_files(source: str | Path) -> tuple[Path, Path]:
    """The configuration and the weights of the adapter in a folder, or of one .safetensors file beside its config."""
    path = Path(source)
    if path.suffix == ".safetensors" and not os.path.isdir(path):
        return path.parent / CONFIG_NAME, path
    return path / CONFIG_NAME, path / WEIGHTS_NAME


def read_adapter(source: str | Path, base: Checkpoint) -> Adapter:
    """The adapter at `source`, for this base model.

    Raises CutawayError where a file is missing or damaged, for every setting that is not honoured, for tensors that
    the model has no place for, that are missing, of another shape, or not finite. Warns where the adapter says that
    it was trained on a model of quite another name.
    """
    config_path, path = adapter_files(source)
    spec, family = base.spec, base.family
    if family is None:
        raise CutawayError(f"{spec.name} has no Hugging Face names, by which an adapter says what it changes.")
    _refuse_what_is_none(config_path, path)
    config = read_adapter_config(
        read_configuration(config_path), f"{CONFIG_NAME} of {config_path.absolute().parent.name}"
    )
    tensors = read_safetensors(path).tensors
    modules = modules_of(spec, family)
    pairs = _pairs(tensors, base, family, modules, path, config.magnitudes)
    _check_targets(config, pairs, modules, path)
    parts: dict[str, LowRank] = {}
    for name, (down, up, lengths) in pairs.items():
        module = modules[name]
        refuse_unfitting(name, down, up, config.rank_of(name), module, str(path), spec.name)
        if lengths is not None and lengths.shape != (module.d_out, 1):
            raise CutawayError(
                f"{path} has {lengths.shape[0]:,} magnitudes for {name}, which has {module.d_out:,} outputs."
            )
        for part in module.parts:
            if part.name in parts:
                raise CutawayError(f"{path} changes {part.name} twice, the second time as {name}.")
            added = LowRank(down, part.outputs(up), config.scale_of(name))
            if lengths is not None:
                added = with_lengths(added, part.outputs(lengths), base, part.name)
            parts[part.name] = added
    _warn_of_another_base(config, spec.name)
    return Adapter(path.absolute().parent.name if path.name == WEIGHTS_NAME else path.stem, parts)


def _refuse_what_is_none(config: Path, weights: Path) -> None:
    # os.path, not Path: it says no of a name that no file can have (too long, with a NUL), where Path raises.
    folder = config.parent
    if not os.path.isdir(folder):
        raise CutawayError(f"There is no folder {folder}; an adapter is one with {CONFIG_NAME} and {WEIGHTS_NAME}.")
    if not os.path.isfile(config):
        raise CutawayError(f"{folder} has no {CONFIG_NAME}; an adapter as PEFT saves it has one beside its weights.")
    if os.path.isfile(weights):
        return
    pickle = weights.with_suffix(".bin")
    if os.path.isfile(pickle):
        raise CutawayError(
            f"{folder} has its adapter as a pickle ({pickle.name}), which can run any code when it is opened, so "
            f"Cutaway never does; PEFT saves {WEIGHTS_NAME} unless it is told otherwise."
        )
    raise CutawayError(f"{folder} has no {weights.name}, the adapter's weights.")


def _pairs(
    tensors: Tensors, base: Checkpoint, family: Family, modules: Mapping[str, Module], path: Path, magnitudes: bool
) -> dict[str, tuple[Weight, Weight, Weight | None]]:
    """The two matrices of every module in the file, and with `magnitudes` the column `[d_out, 1]` of its lengths."""
    found: dict[str, dict[str, Weight]] = {}
    lengths: dict[str, Weight] = {}
    whole = tables_of(base.spec, family)
    for tensor in tensors.names:
        match = _TENSOR.fullmatch(tensor)
        if magnitudes and (of := _MAGNITUDE.fullmatch(tensor)):
            if of["module"] in lengths:
                raise CutawayError(f"{path} holds the lengths of {of['module']} twice.")
            lengths[of["module"]] = _column(tensor, tensors[tensor], path)
            continue
        if match is None and (copied := whole.get(_COPY.sub("", tensor))) is not None:
            _check_copy(tensor, tensors[tensor], copied, base, path)
            continue
        if match is None:
            raise CutawayError(f"{path}: {_unknown(tensor)}")
        name = match["module"]
        if name not in modules:
            raise CutawayError(f"{path}: {_no_module(name, base.spec, family)}")
        sides = found.setdefault(name, {})
        if match["side"] in sides:
            raise CutawayError(f"{path} holds lora_{match['side']} of {name} twice.")
        sides[match["side"]] = _finite(tensor, tensors[tensor], path)
    for name, sides in found.items():
        if len(sides) < 2:
            raise CutawayError(f"{path} holds only lora_{min(sides)} of {name}: the file is incomplete.")
    if not found:
        raise CutawayError(f"{path} holds no tensors: an adapter that changes nothing.")
    if magnitudes and lengths.keys() != found.keys():
        raise CutawayError(
            f"{path} holds lora_magnitude_vector or the two matrices of {listed(sorted(lengths.keys() ^ found.keys()))}"
            ", not all three: with 'use_dora' each module has them."
        )
    return {name: (sides["A"], sides["B"], lengths.get(name)) for name, sides in found.items()}


def _check_copy(tensor: str, found: Weight, ours: str, base: Checkpoint, path: Path) -> None:
    """PEFT saves the embedding and the head whole where the head is adapted: they may be there, if they are ours."""
    own = base.weights.get(ours, base.weights["embed.tokens"])
    if found.shape != own.shape:
        raise CutawayError(
            f"{path}: {tensor} has shape {list(found.shape)}, that of {base.spec.name} {list(own.shape)}: it was "
            "trained with another vocabulary."
        )
    step = max(1, (1 << 22) // own.shape[-1])
    for start in range(0, own.shape[0], step):
        one, other = (weight.dequantise(np.float32, start, start + step) for weight in (found, own))
        if not np.array_equal(one, other):
            raise CutawayError(
                f"{path} holds a {tensor} that differs from {ours} of {base.spec.name}: it was trained as well, or the "
                "base is stored in another precision. Only lora_A and lora_B are applied; save the adapter with "
                "save_embedding_layers=False if it was not trained."
            )


def _unknown(tensor: str) -> str:
    if _EMBEDDED.fullmatch(tensor):
        return (
            f"{quoted(tensor)} changes an embedding, which is looked up and often also the head; only matrices that "
            "are multiplied can be adapted."
        )
    return (
        f"the tensor {quoted(tensor)} is neither lora_A nor lora_B of a module; what else an adapter may hold "
        "(magnitudes, biases, replaced modules) is refused rather than left out."
    )


def _no_module(name: str, spec: ModelSpec, family: Family) -> str:
    if name in tables_of(spec, family):
        return f"{name} is an embedding of {spec.name}; only matrices that are multiplied can be adapted."
    if spec.tied_head and name.endswith(family.STORED_HEAD.removesuffix(".weight")):
        return f"the head of {spec.name} is its embedding, so {name} cannot be changed by itself."
    return f"{spec.name} has no matrix {quoted(name)}; the adapter was made for another model."


def _finite(name: str, weight: Weight, path: Path) -> Weight:
    if len(weight.shape) != 2:
        raise CutawayError(f"{path}: {quoted(name)} has shape {list(weight.shape)}; a matrix is needed.")
    if not np.isfinite(weight.dequantise(np.float64 if weight.kind == "F64" else np.float32)).all():
        raise CutawayError(f"{path}: {quoted(name)} holds values that are not finite.")
    return weight


def _column(name: str, weight: Weight, path: Path) -> Weight:
    if len(weight.shape) != 1:
        raise CutawayError(
            f"{path}: {quoted(name)} has shape {list(weight.shape)}; one length for each output is needed."
        )
    return _finite(
        name, Weight.of(weight.dequantise(np.float64 if weight.kind == "F64" else np.float32)[:, None]), path
    )


def _check_targets(
    config: AdapterConfig, pairs: Mapping[str, object], modules: Mapping[str, Module], path: Path
) -> None:
    """The file must hold what its configuration says, no more and no less."""
    known = {config.targets} if isinstance(config.targets, str) else set(config.targets)
    if known == {"all-linear"}:
        return
    named = f"'target_modules' = {quoted(_shown(config.targets))} of {config.where}"
    surplus = [name for name in pairs if not config.targets_module(name)]
    if surplus:
        raise CutawayError(f"{path} holds {listed(surplus)}, which {named} (with its other settings) does not name.")
    # Whether the model was trained with its head or without shows in how the modules of its layers are called.
    before = {_before_layers(name) for name in pairs} - {None}
    missing = [n for n in modules if _before_layers(n) in before and config.targets_module(n) and n not in pairs]
    if missing:
        raise CutawayError(f"{path} lacks {listed(missing)}, which {named} names: the file is incomplete.")


def _before_layers(module: str) -> str | None:
    """What stands before the numbered part of a module's name; None where it has none."""
    match = re.match(r"(.*?)[^.]+\.\d+\.", module)
    return None if match is None else match[1]


def _shown(targets: tuple[str, ...] | str) -> object:
    return targets if isinstance(targets, str) else list(targets)


def _warn_of_another_base(config: AdapterConfig, name: str) -> None:
    """A name on the Hub that shares no word with the model's own; a path on somebody's machine tells nothing."""
    base = config.base or ""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", base) or base.startswith((".", "/")) or Path(base).exists():
        return
    theirs, ours = _words(base.partition("/")[2]), _words(name)
    if theirs and ours and not theirs & ours:
        warnings.warn(
            f"The adapter was trained on {base!r} (base_model_name_or_path of {config.where}), and its shapes fit "
            f"{name}; if that is another model, what they compute together means nothing.",
            stacklevel=2,
        )


def _words(name: str) -> set[str]:
    """The words of a model's name that tell models apart, with no numbers in them: "smollm", "qwen"."""
    return {word for word in re.findall(r"[a-z]{3,}", name.lower()) if word not in _GENERAL}
