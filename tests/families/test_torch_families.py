"""On the torch engine every family computes what the reference engine computes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import streams
import test_bert
import test_deepseek
import test_llama4
import test_parallel_blocks
from cases import GPT2, LLAMA
from compared import deviation, prompt
from decoder_cases import GEMMA, MIXTURES
from llama_like import EVERY

import cutaway
from cutaway.forward.cache import KVCache
from cutaway.forward.transformer import transformer

EXACT, SINGLE = 1e-10, 1e-5  # of the largest value of a point
# bfloat16 keeps 8 bits of a number, float16 11, the weights included; in rows of so few numbers little averages out.
ROUNDED = {"bfloat16": 0.08, "float16": 0.01}

Save = Callable[[Path], Any]
BUILT = {
    **{f"parallel: {name}": build for name, build in test_parallel_blocks.CASES.items()},
    **{f"encoder: {name}": build for name, build in test_bert.CASES.items()},
    **{f"deepseek: {name}": lambda name=name: test_deepseek.reference(name) for name in test_deepseek.CASES},
    **{f"llama 4: {name}": lambda name=name: test_llama4.reference(name) for name in test_llama4.CASES},
}
MODELS: dict[str, Save] = {
    **{case.name: lambda folder, case=case: case.build().save_pretrained(folder) for case in GPT2 + LLAMA},
    **{case.name: lambda folder, case=case: case.save(folder) for case in (*EVERY, *GEMMA, *MIXTURES)},
    **{name: lambda folder, build=build: streams.saved(build(), folder) for name, build in BUILT.items()},
}
every_model = pytest.mark.parametrize("name", MODELS)
some_models = pytest.mark.parametrize(
    "name", [GPT2[1].name, LLAMA[4].name, GEMMA[0].name, MIXTURES[0].name, "deepseek: v3 groups, stretched angles"]
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    known: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in known:
            known[name] = tmp_path_factory.mktemp("torch")
            MODELS[name](known[name])
        return known[name]

    return make


def largest_deviation(found: cutaway.Trace, expected: cutaway.Trace) -> dict[str, float]:
    """How far every point is off; −∞ and undefined cells must be the same ones."""
    off = {}
    for name in expected:
        one, other = found[name], expected[name]
        known = np.isfinite(other)
        assert np.array_equal(np.isfinite(one), known), name
        off[name] = deviation(np.where(known, one, 0), np.where(known, other, 0)) if np.any(other[known]) else 0.0
    return off


@every_model
def test_every_point_is_that_of_the_reference_engine(name: str, made: Any) -> None:
    reference = cutaway.load(made(name), engine="numpy", dtype="float64")
    ids = prompt(reference.spec.vocab_size, 81)
    expected = reference.trace(ids, points=["*"])
    off = largest_deviation(cutaway.load(made(name), engine="torch:cpu", dtype="float64").trace(ids, ["*"]), expected)
    assert max(off.values()) < EXACT, {name: value for name, value in off.items() if not value < EXACT}
    single = cutaway.load(made(name), engine="torch:cpu").trace(ids, ["*"])
    off = largest_deviation(single, expected)
    assert max(off.values()) < SINGLE, {name: value for name, value in off.items() if not value < SINGLE}


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("name", [case.name for case in (*GPT2, *LLAMA)])
def test_half_sizes_of_floats_stay_near_the_reference(name: str, dtype: str, made: Any) -> None:
    reference = cutaway.load(made(name), engine="numpy", dtype="float64")
    ids = prompt(reference.spec.vocab_size, 81)
    found = cutaway.load(made(name), engine="torch:cpu", dtype=dtype).trace(ids).logits
    assert found.dtype == np.float32
    assert deviation(found, reference.trace(ids).logits) < ROUNDED[dtype]


@pytest.mark.parametrize(("dtype", "within"), [("float64", EXACT), ("float32", SINGLE)])
@some_models
def test_decoding_from_the_cache_gives_the_logits_of_the_whole_pass(
    name: str, dtype: str, within: float, made: Any
) -> None:
    model = cutaway.load(made(name), engine="torch:cpu", dtype=dtype)
    ids = np.array(prompt(model.spec.vocab_size, 90))
    whole = model.trace(ids).logits
    for pieces in ([1] * 20, [64, 1, 1, 20, 4], [17, 65, 3]):
        cache, done = KVCache(model.spec, model.engine), 0
        for size in pieces:
            ran = transformer(
                model.engine, model.spec, model.parameters, [ids[done : done + size]], caches=[cache], rows=range(size)
            )
            assert deviation(model.engine.numpy(ran.logits), whole[done : done + size]) < within
            done += size


@pytest.mark.parametrize(("dtype", "within"), [("float64", EXACT), ("float32", SINGLE)])
@some_models
def test_company_changes_nothing_but_the_rounding(name: str, dtype: str, within: float, made: Any) -> None:
    model = cutaway.load(made(name), engine="torch:cpu", dtype=dtype)
    sequences = [np.array(prompt(model.spec.vocab_size, n, seed)) for seed, n in enumerate((5, 70, 1, 16))]
    ran = transformer(model.engine, model.spec, model.parameters, sequences, rows=range(92))
    parts = np.split(model.engine.numpy(ran.logits), [5, 75, 76])
    for sequence, part in zip(sequences, parts, strict=True):
        assert deviation(part, model.trace(sequence).logits) < within
