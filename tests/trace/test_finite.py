"""Where numbers stop being numbers is said: the first point, and the weight that holds what is none."""

from dataclasses import replace

import numpy as np
import pytest

from cutaway import CutawayError
from random_models import GPT2, LLAMA, POST, random_ids, spoilt_model


@pytest.mark.parametrize(
    ("spec", "weight", "value", "point"),
    [
        (GPT2, "layers.1.attn.q.weight", np.nan, "layers.1.attn.q"),
        (GPT2, "layers.1.attn.q.weight", np.inf, "layers.1.attn.q"),
        (LLAMA, "layers.0.mlp.down.weight", np.inf, "layers.0.mlp.raw"),
        (LLAMA, "head.weight", np.nan, "logits"),
        (replace(POST, pooler=True), "pooler.weight", np.nan, "pooler.out"),
    ],
)
def test_a_weight_that_is_no_number_is_named_with_the_point_that_it_breaks(spec, weight, value, point):
    said = rf"{spec.name} computes no usable numbers: {point} is -?(nan|inf) at \[.*\]; {weight} holds values"
    with pytest.raises(CutawayError, match=said):
        spoilt_model(spec, weight, (0, 0), value).trace(random_ids(spec, 5))


def test_a_weight_that_only_float64_can_hold_is_not_said_to_hold_what_is_no_number():
    with pytest.raises(CutawayError) as refused:
        spoilt_model(LLAMA, "layers.0.mlp.down.weight", (0, 0), 1e300).trace(random_ids(LLAMA, 5))
    assert "layers.1.attn.norm is nan" in str(refused.value) and "holds values" not in str(refused.value)


def test_a_position_reached_while_generating_is_named_too():
    """The last pass held one token only; what is looked through again is the whole sequence."""
    model = spoilt_model(GPT2, "embed.positions", (7, 3))
    said = r"embed.positions is nan at \[7, 3\]; embed.positions holds values that are not finite"
    for points in ((), ("layers.1.mlp.out",)):
        steps = model.stream(random_ids(GPT2, 5), max_tokens=10, temperature=0, points=points)
        assert [next(steps).index for _ in range(3)] == [0, 1, 2]
        with pytest.raises(CutawayError, match=said):
            next(steps)


NEAR = replace(
    LLAMA, layers=tuple(replace(layer, attention=replace(layer.attention, window=1)) for layer in LLAMA.layers)
)


def test_a_number_that_breaks_in_an_earlier_row_only_is_reported_too():
    """Each token sees itself alone: the last row, and the prediction, stay whole."""
    model = spoilt_model(NEAR, "embed.tokens", (3, 1))
    assert np.isfinite(model.trace([4, 5, 6]).last_logits).all()
    with pytest.raises(CutawayError, match=r"embed.tokens is nan at \[1, 1\]; embed.tokens holds values"):
        model.trace([4, 3, 6], points=["logits"], positions=[-1])


def test_a_number_that_breaks_at_one_kind_of_sentence_is_found_where_that_kind_stands():
    model = spoilt_model(replace(POST, token_types=2), "embed.types", (1, 2))
    assert np.isfinite(model.trace([4, 5, 6]).logits).all()
    with pytest.raises(CutawayError, match=r"embed.types is nan at \[2, 2\]; embed.types holds values"):
        model.trace([4, 5, 6], types=[0, 0, 1])
