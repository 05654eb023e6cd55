"""A spec says what a model is, and refuses, in one sentence, what no model can be."""

from dataclasses import replace

import pytest

from cutaway import CutawayError
from cutaway.spec import (
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    PositionsSpec,
    RotarySpec,
    describe,
)
from random_models import GPT2, LLAMA

LAYER = LayerSpec(AttentionSpec(2, 1, 4), FeedForwardSpec(8, "relu"), None)
REFUSED = {
    "The kind of norm is 'batch'; it must be 'layer' or 'rms'.": lambda: NormSpec("batch", 1e-5),
    "The eps of a norm is -1; it must be a small number, 0 or more.": lambda: NormSpec("rms", -1),
    "The eps of a norm is nan; it must be a small number, 0 or more.": lambda: NormSpec("rms", float("nan")),
    "The rotary base is 0; it must be a positive number.": lambda: RotarySpec(0, 4),
    "The rotary base is inf; it must be a positive number.": lambda: RotarySpec(float("inf"), 4),
    "The rotary dims is 3; it must be a positive even number.": lambda: RotarySpec(1e4, 3),
    "The rotary dims is 0; it must be a positive even number.": lambda: RotarySpec(1e4, 0),
    "The rotary pairing is 'odd'; it must be 'halves' or 'adjacent'.": lambda: RotarySpec(1e4, 4, "odd"),
    "The n_heads is 0; it must be a positive whole number.": lambda: AttentionSpec(0, 1, 4),
    "The n_kv_heads is 0; it must be a positive whole number.": lambda: AttentionSpec(2, 0, 4),
    "The d_head is -4; it must be a positive whole number.": lambda: AttentionSpec(2, 2, -4),
    "The n_kv_heads is 2; it must be a divisor of n_heads = 3, so that every key head serves as many query heads.": (
        lambda: AttentionSpec(3, 2, 4)
    ),
    "The rotary dims is 8; it must be at most 4.": lambda: AttentionSpec(2, 2, 4, rotary=RotarySpec(1e4, 8)),
    "The attention scale is 0.0; it must be a positive number.": lambda: AttentionSpec(2, 2, 4, scale=0.0),
    "The d_ff is 0; it must be a positive whole number.": lambda: FeedForwardSpec(0, "relu"),
    "The activation is 'tanh'; it must be one of gelu, gelu_tanh, relu, silu.": lambda: FeedForwardSpec(8, "tanh"),
    "The norm placement is 'both'; it must be 'pre' or 'post'.": lambda: replace(LAYER, placement="both"),
    "The kind of positions is 'alibi'; it must be 'learned' or 'sinusoidal'.": lambda: PositionsSpec("alibi"),
    "The n_max of learned positions is None; it must be a positive number.": lambda: PositionsSpec("learned"),
    "The vocab_size is 0; it must be a positive whole number.": lambda: ModelSpec("m", 0, 4, (LAYER,)),
    "The d_model is 0; it must be a positive whole number.": lambda: ModelSpec("m", 9, 0, (LAYER,)),
    "The number of layers is 0; it must be at least 1.": lambda: ModelSpec("m", 9, 4, ()),
    "The d_model is 5; it must be even for sinusoidal positions.": (
        lambda: ModelSpec("m", 9, 5, (LAYER,), PositionsSpec("sinusoidal"))
    ),
    "The embed_scale is nan; it must be a finite number other than 0.": (
        lambda: ModelSpec("m", 9, 4, (LAYER,), embed_scale=float("nan"))
    ),
    "The context_length is 0; it must be a positive number, or None where there is none.": (
        lambda: ModelSpec("m", 9, 4, (LAYER,), context_length=0)
    ),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_no_model_can_be_is_refused_with_the_value_and_what_would_be_right(sentence):
    with pytest.raises(CutawayError) as refusal:
        REFUSED[sentence]()
    assert str(refusal.value) == sentence


def test_a_spec_cannot_be_changed_by_accident():
    with pytest.raises(AttributeError):
        GPT2.d_model = 3


def test_scores_are_scaled_by_one_over_the_root_of_d_head_unless_the_spec_says_otherwise():
    assert AttentionSpec(2, 2, 64).score_scale == 1 / 8
    assert AttentionSpec(2, 2, 64, scale=0.25).score_scale == 0.25


def test_only_learned_positions_limit_the_length():
    assert GPT2.n_max == 200
    assert LLAMA.n_max is None
    assert replace(GPT2, positions=PositionsSpec("sinusoidal", 50)).n_max is None


def test_a_model_is_causal_where_every_layer_is():
    blind = replace(LAYER, attention=replace(LAYER.attention, causal=False))
    assert ModelSpec("m", 9, 4, (LAYER, LAYER)).causal
    assert not ModelSpec("m", 9, 4, (LAYER, blind)).causal


def test_a_value_is_shared_where_all_layers_agree_on_it():
    other = replace(LAYER, attention=replace(LAYER.attention, n_heads=4))
    spec = ModelSpec("m", 9, 4, (LAYER, other))
    assert spec.same_in_all_layers("attention.d_head") == 4
    assert spec.same_in_all_layers("attention.n_heads") is None


def test_a_description_is_plain_data_that_tells_equal_layers_once():
    import json

    other = replace(LAYER, placement="post")
    told = describe(ModelSpec("m", 9, 4, (LAYER, LAYER, other, LAYER), PositionsSpec("learned", 7)))
    assert [run["layers"] for run in told["layers"]] == ["0:2", "2:3", "3:4"]
    assert told["layers"][1]["placement"] == "post"
    assert told["n_layers"] == 4
    assert told["positions"] == {"kind": "learned", "n_max": 7}
    assert json.loads(json.dumps(told)) == told
