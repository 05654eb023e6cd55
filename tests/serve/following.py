"""Runs of texts that follow one another: the models, what of a run is another bit, and which rows were computed."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from cutaway.engines.cpu.engine import CpuEngine
from cutaway.forward import transformer as forward
from cutaway.model import Model
from cutaway.points import points_of
from cutaway.serve import passes
from cutaway.serve.runs import Run
from cutaway.spec import (
    AttentionSpec,
    DynamicScaling,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    ModelSpec,
    NormSpec,
    RotarySpec,
    RouterSpec,
)
from random_models import GPT2, LLAMA, random_model, with_attention, with_layers

LATENT = AttentionSpec(
    4, 4, 6, rotary=RotarySpec(10_000.0, 2, "adjacent"), latent=LatentSpec(6, 5, 4, 2, NormSpec("rms", 1e-6)), d_value=5
)
EXPERTS = ExpertsSpec(4, FeedForwardSpec(6, "silu", gated=True), RouterSpec(2))
SPECS = {
    "grouped, rotary": LLAMA,
    "learned positions": GPT2,
    "windows": with_attention(LLAMA, window=5),
    "chunks": with_attention(LLAMA, chunk=18),
    "latents": with_layers(LLAMA, attention=LATENT),
    "experts": with_layers(LLAMA, feed_forward=EXPERTS),
    "side by side": with_layers(LLAMA, parallel=True),
    "norms after": with_layers(LLAMA, placement="post"),
    "angles that hang on the length": with_attention(
        LLAMA, rotary=RotarySpec(100.0, 6, scaling=DynamicScaling(2.0, 30))
    ),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def cpu_model(spec: ModelSpec, seed: int = 0) -> Model:
    return random_model(spec, seed, CpuEngine(), dtype="float32")


def run(model: Model, ids: Sequence[int], former: Run | None = None) -> Run:
    return Run(model, model.prompt(list(ids)), (), former)


def differing(found: Run, ids: Sequence[int]) -> list[str]:
    """The points at which a run is not, bit for bit, the trace of its text."""
    whole = found.model.trace(list(ids), points=["*"])
    wanted = [point for point in points_of(found.model.spec) if point.name != "tokens"]
    for layer in range(found.model.spec.n_layers):  # as many layers as one run holds on to
        of_layer = [point for point in wanted if point.layer == layer]
        look = found.look(of_layer)
        for point in of_layer:
            if not np.array_equal(look.value(point), whole[point], equal_nan=True):
                return [str(point)]
    outside = [point for point in wanted if point.layer is None]
    look = found.look(outside)
    return [str(point) for point in outside if not np.array_equal(look.value(point), whole[point], equal_nan=True)]


@contextmanager
def overviews() -> Iterator[None]:
    """Every prompt is held to be a long one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "ALL_AT_ONCE", 0)
        yield


class Rows:
    """Counts the rows that passes compute."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[int] = []
        pass_over = forward.transformer

        def counted(engine, spec, parameters, sequences, **settings):  # type: ignore[no-untyped-def]
            self.seen.append(sum(map(len, sequences)))
            return pass_over(engine, spec, parameters, sequences, **settings)

        patch.setattr("cutaway.trace.running.transformer", counted)
