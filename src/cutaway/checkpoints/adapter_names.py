"""What an adapter calls a matrix, and which of our projections that is: by the family's own table of names.

An adapter names modules of the Hugging Face model that it was trained on, whatever file the base model is read from
here. The matrices of a GGUF file come to us with their rows in Hugging Face's order, so nothing else is to be undone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cutaway.checkpoints.families.family import Family
from cutaway.checkpoints.families.names import Source
from cutaway.checkpoints.stored import Tensors
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.spec import ModelSpec, parameter_shapes

# What may stand before a module's name in a Hugging Face model: with its head, or the part alone that has the layers.
_BEFORE = ("", "model.", "transformer.", "gpt_neox.", "bert.", "language_model.model.", "model.language_model.")


@dataclass(frozen=True)
class Part:
    """One of our projections, and where its outputs stand among those of the module that holds it."""

    name: str  # ours, without ".weight": "layers.3.attn.q"
    source: Source
    shape: tuple[int, int]  # [d_out, d_in]

    def outputs(self, up: Weight) -> Weight:
        """The rows of a module's `up` `[outputs, r]` that make this projection's: what is done to its own rows."""
        if self.source.change is None:
            return up
        if self.source.by_input:  # the change turns what it is given, one row per input, and so it is given that
            return self.source.change(Weight.of(_numbers(up).T))
        return self.source.change(up)


@dataclass(frozen=True)
class Module:
    """A module that an adapter can name: what is added to it is added to one of our projections, or to several."""

    parts: tuple[Part, ...]

    @property
    def d_in(self) -> int:
        return self.parts[0].shape[1]

    @property
    def d_out(self) -> int:
        return sum(part.shape[0] for part in self.parts)


def modules_of(spec: ModelSpec, family: Family) -> dict[str, Module]:
    """Every module that an adapter of this model can name → what it is here."""
    shapes = parameter_shapes(spec)
    modules: dict[str, Module] = {}
    for before in _BEFORE:
        found: dict[str, list[Part]] = {}
        for ours, source in family.sources(spec, _beginning_with(before)).items():
            projection = ours.endswith(".weight") and source.name.endswith(".weight") and len(shapes[ours]) == 2
            if projection:
                d_out, d_in = shapes[ours]
                part = Part(ours.removesuffix(".weight"), source, (d_out, d_in))
                found.setdefault(source.name.removesuffix(".weight"), []).append(part)
        modules |= {name: Module(tuple(parts)) for name, parts in found.items()}
    return modules


def tables_of(spec: ModelSpec, family: Family) -> dict[str, str]:
    """The modules with a row for each token, position or kind → the table that is theirs here."""
    found: dict[str, str] = {}
    for before in _BEFORE:
        names = family.sources(spec, _beginning_with(before))
        tables = [
            table for table in ("embed.tokens", "embed.positions", "embed.types", "head.weight") if table in names
        ]
        found |= {names[table].name.removesuffix(".weight"): table for table in tables}
    return found


def listed(names: Sequence[str], most: int = 3) -> str:
    """Some names in a sentence."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _beginning_with(before: str) -> Tensors:
    """A checkpoint's names, as far as a family's table asks what stands before them; it holds no numbers."""
    nothing = Weight.of(np.zeros(1, np.float32))
    return Tensors(
        Path("the adapter's model"), {f"{before}{n}": nothing for n in ("layers.", "embed_tokens.weight")}, {}
    )


def _numbers(weight: Weight) -> np.ndarray:
    """A matrix in the precision that holds every number of it."""
    return weight.dequantise(np.float64 if weight.kind == "F64" else np.float32)


def refuse_unfitting(module: str, down: Weight, up: Weight, rank: int, of: Module, where: str, model: str) -> None:
    """Raise CutawayError, with both shapes, unless the two matrices of an adapter fit the module and the rank."""
    for name, found, needed in (
        ("lora_A", down.shape, (rank, of.d_in)),
        ("lora_B", up.shape, (of.d_out, rank)),
    ):
        if found != needed:
            raise CutawayError(
                f"{where}: {module}.{name} has shape {list(found)}, but {model} with rank {rank} (adapter_config.json) "
                f"needs {list(needed)}; the adapter was made for another model, or its config for another adapter."
            )
