"""One vector for each of many texts, packed: what sentence encoders are for."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cutaway.errors import CutawayError
from cutaway.forward.context import warn_beyond_context
from cutaway.forward.pooling import Pooling, one_vector_each
from cutaway.forward.transformer import transformer
from cutaway.trace.finite import first_nonfinite
from cutaway.trace.prompt import Prompt
from cutaway.trace.prompts import PromptLike
from cutaway.trace.running import Machine

EMBEDDED_TOKENS = 8192  # rows of one pass over a list of texts: what stands in memory at once


def text_vectors(
    machine: Machine,
    read: Callable[[PromptLike], Prompt],
    texts: Sequence[PromptLike],
    pooling: Pooling = "mean",
    *,
    unit: bool = False,
) -> np.ndarray:
    """`[texts, d]`: of each text, which `read` makes into ids, the mean of its last rows or its first row.

    Raises CutawayError for what is no list, or an empty one, and for a text that cannot be run, naming it.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Sequence | np.ndarray) or len(texts) == 0:
        raise CutawayError("embed takes a list of texts, with at least one in it.")
    sequences = []
    for index, text in enumerate(texts):
        try:
            sequences.append(np.asarray(read(text).ids))
        except CutawayError as error:
            raise CutawayError(f"Text {index}: {error}") from None
        warn_beyond_context(machine.spec, 0, len(sequences[-1]))
    return np.concatenate([_one_pass(machine, batch, pooling, unit) for batch in _batches(sequences)])


def _one_pass(machine: Machine, sequences: Sequence[np.ndarray], pooling: Pooling, unit: bool) -> np.ndarray:
    ran = transformer(machine.engine, machine.spec, machine.parameters, sequences, rows=())
    rows = machine.engine.numpy(ran.final)
    for segment, sequence in zip(ran.layout.segments, sequences, strict=True):
        if not np.isfinite(rows[segment.start : segment.stop]).all():
            where = first_nonfinite(machine.engine, machine.spec, machine.parameters, sequence.tolist())
            raise CutawayError(f"{machine.spec.name} computes no usable numbers: {where}")
    return one_vector_each(rows, ran.layout, pooling, unit=unit)


def _batches(sequences: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """The sequences in order, as many at a time as fit into one pass; how they are parted changes no bit."""
    batch: list[np.ndarray] = []
    for sequence in sequences:
        if batch and sum(map(len, batch)) + len(sequence) > EMBEDDED_TOKENS:
            yield batch
            batch = []
        batch.append(sequence)
    yield batch
