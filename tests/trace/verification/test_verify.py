"""The identities hold for every model that a spec can describe, and each of them notices when something is wrong."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutaway.engines import numpy as reference
from cutaway.engines.numpy import NumpyEngine
from cutaway.engines.protocol import Linear
from cutaway.engines.weights import Weight
from cutaway.forward import positions
from cutaway.spec import (
    ACTIVATIONS,
    FeedForwardSpec,
    HeadTransformSpec,
    NormSpec,
)
from cutaway.trace.verification import check as check_file
from cutaway.trace.verification.check import Check, deviation
from cutaway.trace.verification.verify import verify
from random_models import GPT2, LIKE, LLAMA, POST, random_ids, random_model, random_parameters, specs

RMS = NormSpec("rms", 1e-6)


def failing(checks) -> set[str]:
    return {check.name for check in checks if not check.holds}


@settings(max_examples=60)
@given(specs(), st.integers(1, 40), st.integers(0, 5))
def test_every_check_holds_for_any_model_and_prompt(spec, length, seed):
    engine = NumpyEngine("float64")
    checks = list(verify(engine, spec, random_parameters(spec, engine, seed), random_ids(spec, length, seed)))
    assert failing(checks) == set()


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("length", [1, 63, 64, 81, 130])
def test_every_check_holds_at_the_edges_of_blocks(like, length):
    spec, engine = LIKE[like], NumpyEngine("float64")
    checks = list(verify(engine, spec, random_parameters(spec, engine), random_ids(spec, length)))
    assert failing(checks) == set()
    assert ("cached decoding = the whole pass" in {check.name for check in checks}) == spec.causal


@pytest.mark.parametrize("like", LIKE)
def test_every_check_holds_in_float32_too(like):
    spec, engine = LIKE[like], NumpyEngine("float32")
    assert failing(verify(engine, spec, random_parameters(spec, engine), random_ids(spec, 40))) == set()


def test_a_deviation_is_relative_to_the_largest_value_and_a_nan_never_holds():
    assert deviation(np.array([1.0, 2.5]), np.array([1.0, 2.0])) == 0.25
    assert deviation(np.zeros(2), np.zeros(2)) == 0
    assert not Check("c", deviation(np.array([np.nan, 0.0]), np.ones(2)), 1e-5).holds
    assert Check("c", 1e-6, 1e-5).holds
    assert not Check("c", 2e-5, 1e-5).holds


# The checks between passes, each against an engine that has the fault it looks for.


class Drifting(NumpyEngine):
    """Computes a little differently every time."""

    def __init__(self) -> None:
        super().__init__("float64")
        self.calls = 0

    def linear(self, x, linear, layout):
        self.calls += 1
        return super().linear(x, linear, layout) * (1 + 1e-13 * self.calls)


class CopiesWrongly(NumpyEngine):
    def copy(self, values):
        return values * (1 + 1e-15) + 1e-15


class DotsByTheMoment(NumpyEngine):
    """Dots that come out a little differently once the passes are over: on access not what they were."""

    IN_THREE_PASSES = 3 * 2 * 10  # two layers, ten rows one by one

    def __init__(self) -> None:
        super().__init__("float64")
        self.calls = 0

    def dots(self, q, k):
        self.calls += 1
        return super().dots(q, k) + (1e-13 if self.calls > self.IN_THREE_PASSES else 0)


class MixesSequences(NumpyEngine):
    """All rows in one product, whichever sequence they belong to, and a trace of each in all others."""

    def linear(self, x, linear, layout):
        return super().linear(x, linear, layout) + 1e-9 * x.sum()


class ForgetsPositions(NumpyEngine):
    """A single row is taken for the first of its sequence: the cache's offset is lost."""

    def rotate(self, x, cosines, sines, pairing):
        if x.shape[1] == 1:
            cosines, sines = np.ones_like(cosines), np.zeros_like(sines)
        return super().rotate(x, cosines, sines, pairing)


class GroupsHeadsWrongly(NumpyEngine):
    """Query head h reads key head h mod H_kv: the other order of grouping."""

    def dots(self, q, k):
        return np.einsum("hrd,hsd->hrs", q, np.tile(k, (len(q) // len(k), 1, 1)))


class TurnsBackwards(NumpyEngine):
    """Every length is kept, and every distance between two tokens counted the other way."""

    def rotate(self, x, cosines, sines, pairing):
        return super().rotate(x, cosines, -sines, pairing)


class PairsOtherwise(NumpyEngine):
    """Neighbours turn together where the checkpoint's pairs stand half a head apart."""

    def rotate(self, x, cosines, sines, pairing):
        return super().rotate(x, cosines, sines, "adjacent")


class SmallEps(NumpyEngine):
    def rms_norm(self, x, gain, eps):
        return super().rms_norm(x, gain, 0.0)


FAULTY = [
    ("looking changes nothing, bit for bit", Drifting),
    ("values patched in from the same pass change nothing, bit for bit", CopiesWrongly),
    ("patterns worked out on access are those of the pass, bit for bit", DotsByTheMoment),
    ("company changes nothing, bit for bit", MixesSequences),
    ("cached decoding = the whole pass", ForgetsPositions),
    ("q · k, scaled, = the scores, query heads beside their key head", GroupsHeadsWrongly),
    ("each norm is the norm of the stream that it reads", SmallEps),
    ("each pair of q and k is turned by its position's angle", TurnsBackwards),
    ("each pair of q and k is turned by its position's angle", PairsOtherwise),
]


@pytest.mark.parametrize(("check", "faulty"), FAULTY, ids=[faulty.__name__ for _, faulty in FAULTY])
def test_each_check_between_passes_notices_an_engine_with_that_fault(check, faulty):
    engine = faulty()
    checks = verify(engine, LLAMA, random_parameters(LLAMA, engine), random_ids(LLAMA, 10))
    assert check in failing(checks)


# What a check shares with the pass, it cannot check: the parts of the pass are exchanged for wrong ones.


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_activation_that_is_wrong_wherever_the_pass_takes_it_from_is_noticed(kind, monkeypatch):
    layers = tuple(replace(layer, feed_forward=FeedForwardSpec(20, kind)) for layer in GPT2.layers)
    spec, right = replace(GPT2, layers=layers), reference.ACTIVATIONS[kind]
    engine = NumpyEngine("float64")
    parameters, ids = random_parameters(spec, engine), random_ids(spec, 10)
    assert failing(verify(engine, spec, parameters, ids)) == set()
    monkeypatch.setitem(reference.ACTIVATIONS, kind, lambda x: right(x) * (1 + 1e-9))
    wrong = "φ(up) or φ(gate) · up = act, of what the feed-forward reads"
    assert failing(verify(engine, spec, parameters, ids)) == {wrong}


def test_a_head_whose_activation_is_wrong_is_noticed(monkeypatch):
    spec, engine = replace(POST, head_transform=HeadTransformSpec("gelu", RMS)), NumpyEngine("float64")
    layers = tuple(replace(layer, feed_forward=FeedForwardSpec(20, "relu")) for layer in POST.layers)
    spec = replace(spec, layers=layers)
    monkeypatch.setitem(reference.ACTIVATIONS, "gelu", reference.gelu_tanh)
    checks = verify(engine, spec, random_parameters(spec, engine), random_ids(spec, 10))
    assert failing(checks) == {"final.norm · W_Uᵀ (+ bias) = logits"}


def test_a_softmax_that_is_wrong_wherever_the_pass_takes_it_from_is_noticed(monkeypatch):
    right = reference.softmax
    monkeypatch.setattr(reference, "softmax", lambda scores: right(scores) ** (1 + 1e-9))
    engine = NumpyEngine("float64")
    checks = verify(engine, GPT2, random_parameters(GPT2, engine), random_ids(GPT2, 10))
    assert "softmax of the scores that may be seen = the pattern" in failing(checks)


def test_angles_that_are_wrong_in_the_table_of_the_pass_are_noticed(monkeypatch):
    right = positions.frequencies
    monkeypatch.setattr(positions, "frequencies", lambda spec, length: right(replace(spec, base=9_999.0), length))
    engine = NumpyEngine("float64")
    positions._kept_turns.cache_clear()
    try:
        found = failing(verify(engine, LLAMA, random_parameters(LLAMA, engine), random_ids(LLAMA, 10)))
    finally:
        positions._kept_turns.cache_clear()
    assert found == {"each pair of q and k is turned by its position's angle"}


def test_no_file_that_checks_takes_arithmetic_from_an_engine():
    folder = Path(check_file.__file__).parent
    files = [folder / f"{name}.py" for name in ("check", "identities", "attention", "feedforward")]
    imports = {line for file in files for line in file.read_text(encoding="utf-8").splitlines() if "cutaway.e" in line}
    assert imports == {"from cutaway.engines.protocol import Gain, Linear"}


def test_a_model_verifies_itself_on_a_prompt_of_its_own_choice_or_ours(toy):
    assert failing(toy.verify()) == set()
    assert failing(toy.verify("<BOS> dragon drinks")) == set()


def test_a_weight_that_was_read_wrongly_does_not_make_the_model_contradict_itself():
    """What the identities cannot see: they say that the arithmetic holds, not that the weights are the right ones."""
    model = random_model(GPT2)
    model.parameters.layers[0]["attn.q"] = Linear(Weight.of(np.ones((12, 12))))
    assert failing(model.verify()) == set()
