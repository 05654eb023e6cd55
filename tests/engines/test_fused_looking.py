"""Looking into fused layers: what is shown has the stages' bits, is nobody else's, and waits in bounded memory."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from both_ways import ByStages, Poisoned, Side, assert_same_bits, showable
from cutaway.engines.cpu import stack
from cutaway.engines.cpu.engine import CpuEngine
from cutaway.engines.layout import Layout
from cutaway.forward.transformer import transformer
from cutaway.points import Point, Unwatched
from cutaway.spec import ModelSpec
from random_models import LLAMA, random_ids, random_weights, with_attention

DEEP = replace(with_attention(LLAMA, window=9), layers=with_attention(LLAMA, window=9).layers * 4)  # 8 layers


def sides(spec: ModelSpec, *kinds: Callable[[], CpuEngine]) -> list[Side]:
    return [Side(kind(), spec, random_weights(spec, 0, "float32"), 2) for kind in kinds]


@pytest.mark.parametrize("seed", range(12))
def test_whichever_points_are_looked_at_they_have_the_bits_of_the_stages(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fused, stages = sides(DEEP, Poisoned, ByStages)
    points = [point for point in showable(DEEP) if rng.random() < (0.05, 0.3, 0.9)[seed % 3]]
    for lengths in ([7], [1], [1, 3], [20]):
        ids = [random_ids(DEEP, length) for length in lengths]
        slots = range(len(lengths))
        (found, ran), (expected, _) = (side.run(ids, points, slots) for side in (fused, stages))
        assert ran.fused == set(range(DEEP.n_layers))
        assert_same_bits(found, expected)


def test_many_kinds_of_attention_in_many_sequences_keep_their_rules_until_the_run_is_over() -> None:
    layers = tuple(with_attention(LLAMA, window=3 + i).layers[0] for i in range(20))
    spec = replace(LLAMA, layers=layers)
    fused, stages = (Side(kind(), spec, random_weights(spec, 0, "float32"), 5) for kind in (Poisoned, ByStages))
    assert len({layer.attention for layer in layers}) * 5 == 100
    for step in range(3):
        ids = [random_ids(spec, 4, 5 * step + slot) for slot in range(5)]
        (found, ran), (expected, _) = (side.run(ids, (), range(5)) for side in (fused, stages))
        assert ran.fused == set(range(20))
        assert_same_bits(found, expected)


def test_whoever_keeps_one_value_keeps_no_other_alive() -> None:
    (fused,) = sides(DEEP, CpuEngine)
    seen, _ = fused.run([random_ids(DEEP, 2)], showable(DEEP), [0])
    for key, value in seen.items():
        base = value
        while base.base is not None:
            base = base.base
        assert base.nbytes <= value.nbytes + 64, key


def test_what_was_shown_stays_as_it_was_while_later_passes_run() -> None:
    (fused,) = sides(DEEP, CpuEngine)
    shown = []
    for step in range(6):
        seen, _ = fused.run([random_ids(DEEP, 1, step)], showable(DEEP), [0])
        seen = {key: value for key, value in seen.items() if key[0] not in ("keys", "values")}
        shown.append((seen, {key: value.copy() for key, value in seen.items()}))
    for seen, before in shown:
        assert_same_bits(seen, before)


def test_arrays_that_wait_to_be_shown_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that show much are run a few at a time, by halves, whatever the length; the bits are the same."""
    points = [Point(name, layer) for layer in range(DEEP.n_layers) for name in ("attn.pattern", "resid_post")]

    class Looking(Unwatched):
        shown = frozenset({"attn.pattern", "resid_post"})

    counts = []
    for past in range(0, 40_000, 250):
        count = stack.at_one_go(DEEP.layers, Layout.of([1], [past]), [Looking()] * DEEP.n_layers)
        numbers = count * (DEEP.layers[0].attention.n_heads * (past + 1) + DEEP.d_model)
        assert count == 1 or numbers <= stack.MOST_SHOWN
        counts.append(count)
    assert counts == sorted(counts, reverse=True) and set(counts) == {8, 4, 2, 1}
    assert stack.at_one_go(DEEP.layers, Layout.of([1], [8000]), [Unwatched()] * DEEP.n_layers) == 8

    (stages,) = sides(DEEP, ByStages)
    expected, _ = stages.run([random_ids(DEEP, 5)], points, [0])
    for most in (1, 200, 700):
        monkeypatch.setattr(stack, "MOST_SHOWN", most)
        (fused,) = sides(DEEP, Poisoned)
        found, ran = fused.run([random_ids(DEEP, 5)], points, [0])
        assert ran.fused == set(range(DEEP.n_layers))
        assert_same_bits(found, expected)


class Doubled(Unwatched):
    """Twice the last norm."""

    altered = frozenset({"final.norm"})

    def __call__(self, name: str, value: np.ndarray) -> np.ndarray:
        return 2 * value if name == "final.norm" else value

    def at(self, layer: int) -> Unwatched:
        return Unwatched()


@pytest.mark.parametrize("rows", [[2], [0, 1, 2]], ids=["the last row", "all rows"])
def test_the_head_after_fused_layers_is_that_of_the_stages_also_where_its_norm_is_altered(rows: list[int]) -> None:
    for spec in (LLAMA, with_attention(LLAMA, window=2), replace(LLAMA, logit_cap=3.0)):
        fused, stages = sides(spec, Poisoned, ByStages)
        ids = [random_ids(spec, 3)]
        for tap in (None, Doubled()):
            one, other = (
                transformer(side.engine, spec, side.parameters, ids, tap=tap, rows=rows) for side in (fused, stages)
            )
            assert one.fused == set(range(spec.n_layers)) and not other.fused
            assert one.logits is not None and other.logits is not None
            assert np.array_equal(one.logits, other.logits) and np.array_equal(one.final, other.final)
