"""The real model's quantised file by fused layers: the bits of the stages, and `transformers` on the same weights."""

import numpy as np
import pytest
import torch
from compared import deviation
from test_smollm2 import TEXT, built_from

import cutaway
from both_ways import ByStages, Poisoned, Side, assert_same_bits, showable
from cutaway.points import Point

WITHIN = 1e-4  # of the largest logit


@pytest.fixture(scope="module")
def model() -> cutaway.Model:
    return cutaway.load("smollm2-135m", engine="cpu")


def test_a_prompt_and_each_token_after_it_get_the_logits_of_the_dequantised_weights(model: cutaway.Model) -> None:
    """Twelve tokens at once, then one by one from the cache, every layer of it fused."""
    ids = np.array(model.tokenizer.encode(TEXT)[:24])
    with torch.no_grad():
        expected = built_from(model)(torch.tensor(ids[None])).logits[0].numpy()
    side = Side(Poisoned(), model.spec, model.parameters.stored, 1)
    done = 0
    for size in (12, *[1] * 12):
        seen, ran = side.run([ids[done : done + size]], (), [0])
        assert ran.fused == set(range(model.spec.n_layers))
        assert deviation(seen["logits"], expected[done : done + size]) < WITHIN
        assert np.array_equal(seen["logits"].argmax(-1), expected[done : done + size].argmax(-1))
        done += size
    assert done == len(ids)


def test_every_point_of_the_real_model_has_the_bits_of_the_stages(model: cutaway.Model) -> None:
    """A prompt by stages, then one token and a guess of five; the points of the first, a middle and the last layer."""
    ids = np.array(model.tokenizer.encode(TEXT)[:40])
    looked_at = (None, 0, 14, model.spec.n_layers - 1)
    points: list[Point] = [point for point in showable(model.spec) if point.layer in looked_at]
    fused, stages = (Side(kind(), model.spec, model.parameters.stored, 1) for kind in (Poisoned, ByStages))
    for part in (ids[:34], ids[34:35], ids[35:]):
        found, ran = fused.run([part], points, [0])
        expected, by_stages = stages.run([part], points, [0])
        assert ran.fused == (set() if len(part) > 32 else set(range(model.spec.n_layers)))
        assert by_stages.fused == set()
        assert_same_bits(found, expected)
