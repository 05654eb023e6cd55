"""Rotary angles: every scaling turns every pair as `transformers` and llama.cpp do, from each way of writing it."""

import random
from math import log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_like import float64_only
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cutaway.checkpoints.families.config import Config
from cutaway.checkpoints.families.gguf_rope import gguf_rotary
from cutaway.checkpoints.families.rope import rotary
from cutaway.checkpoints.stored import Tensors
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.forward.positions import frequencies, settled
from cutaway.spec import FactorScaling, LinearScaling, RotarySpec, YarnScaling


def spec_of(values: dict[str, Any], dims: int = 8, **more: Any) -> RotarySpec:
    return rotary(Config(values, "config.json"), dims, **more)


def _llama3(pick: random.Random, original: int) -> dict[str, Any]:
    low = pick.choice([1.0, 0.5, 2.0])
    ends = {"low_freq_factor": low, "high_freq_factor": low * pick.choice([1.5, 2.0, 4.0])}
    return {"original_max_position_embeddings": original, **ends}


def _yarn(pick: random.Random, original: int) -> dict[str, Any]:
    may = {
        "attention_factor": [0.7, 1.2],
        "mscale": [1.0, 0.707, 0.0],
        "mscale_all_dim": [1.0, 0.5, 0.0],
        "beta_fast": [32, 16, 64.0],
        "beta_slow": [1, 2, 0.5],
        "truncate": [True, False],
        "partial_rotary_factor": [1.0],
    }
    chosen = {key: pick.choice(values) for key, values in may.items() if pick.random() < 0.5}
    return {"original_max_position_embeddings": original, **chosen}


def _longrope(pick: random.Random, original: int, pairs: int) -> dict[str, Any]:
    lists = {key: [pick.uniform(1, 30) for _ in range(pairs)] for key in ("short_factor", "long_factor")}
    own = {"attention_factor": pick.choice([0.7, 1.2])} if pick.random() < 0.5 else {}
    return {"original_max_position_embeddings": original, **lists, **own}


@pytest.mark.parametrize("kind", ("default", "linear", "dynamic", "llama3", "yarn", "longrope"))
def test_pairs_turn_as_in_transformers(kind: str) -> None:
    pick = random.Random(kind)
    for _ in range(250):
        dims, original = pick.choice([4, 8, 10, 64, 128]), pick.choice([16, 64, 100, 8192])
        longest = original * pick.choice([1, 2, 7])
        rope: dict[str, Any] = {"rope_type": kind, "rope_theta": pick.choice([37.5, 1e4, 5e5, 1e6])}
        if kind != "default" and not (kind == "longrope" and pick.random() < 0.5):
            rope["factor"] = pick.choice([1.0, 1.5, 8.0, 32.0, 40])
        more = {"llama3": _llama3, "yarn": _yarn, "longrope": lambda p, o, n=dims // 2: _longrope(p, o, n)}
        rope |= more.get(kind, lambda *_: {})(pick, original)
        length = pick.choice([1, original, original + 1, longest, longest + 1, 3 * longest])
        config = LlamaConfig(
            hidden_size=4 * dims, num_attention_heads=4, max_position_embeddings=longest, rope_parameters=dict(rope)
        )
        with float64_only():
            if kind == "default":
                expected, magnitude = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
            else:
                expected, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
        outside = {"max_position_embeddings": longest}
        old = {"rope_theta": rope["rope_theta"]}
        scaling = {("type" if key == "rope_type" else key): value for key, value in rope.items() if key not in old}
        for written in ({"rope_parameters": rope}, old | {"rope_scaling": scaling}, old | {"rope_parameters": scaling}):
            found, multiplier = frequencies(spec_of(outside | written, dims), length)
            assert np.allclose(found, expected.numpy(), rtol=1e-12, atol=0), rope
            assert multiplier == pytest.approx(magnitude, rel=1e-12), rope


def test_what_is_not_written_is_the_default() -> None:
    assert spec_of({}) == RotarySpec(10_000.0, 8)
    assert spec_of({}, default_base=1e6, pairing="adjacent") == RotarySpec(1e6, 8, "adjacent")
    assert spec_of({"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": {}}).base == 5e5
    per_layer = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    assert spec_of({"rope_theta": 5.0}, parameters=per_layer) == RotarySpec(1e6, 8, scaling=LinearScaling(8.0))
    assert spec_of({"rope_theta": 5.0}, parameters={}, default_base=7.0) == RotarySpec(7.0, 8)


def test_the_original_length_stated_outside_counts_and_the_longest_stands_in_for_the_factor() -> None:
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    values = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    scaling = spec_of(values | {"rope_scaling": {"type": "longrope", **lists}}).scaling
    assert isinstance(scaling, FactorScaling) and scaling.original == 4096
    assert scaling.magnitude == pytest.approx(sqrt(1 + log(32) / log(4096)), rel=1e-15)
    yarn = spec_of(values | {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 2048}}).scaling
    assert yarn == YarnScaling(32.0, 4096, magnitude=YarnScaling.growth(32.0))


@pytest.mark.parametrize(
    ("rope", "named"),
    (
        ({"rope_type": "proportional"}, "'proportional'"),
        ({"rope_type": "default", "factor": 2.0}, "'factor'"),
        ({"rope_type": "linear", "factor": 2.0, "alpha": 3.0}, "'alpha'"),
        ({"rope_type": "linear"}, "'factor'"),
        ({"rope_type": "linear", "factor": 0.0}, "factor"),
        ({"rope_type": "linear", "factor": "8"}, "'factor'"),
        ({"rope_type": "yarn", "type": "linear", "factor": 2.0}, "which is it"),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 32}, "original_max"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "high"),
        ({"rope_type": "yarn", "factor": 8.0, "beta_fast": 1.0, "beta_slow": 2.0}, "fast"),
        ({"rope_type": "yarn", "factor": 8.0, "attention_factor": 0.0}, "magnitude"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 4}, "short_factor"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.0] * 3}, "rotary factors"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.0, 2.0, 3.0, None]}, "list of numbers"),
        ({"rope_type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.0, 2.0, 3.0, -4.0]}, "-4.0"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "mrope_section": [1, 1, 2]}, "mrope_section"),
        ({"full_attention": {"rope_type": "default"}}, "full_attention"),
        ({"rope_theta": -1.0}, "rotary base"),
    ),
    ids=str,
)
def test_settings_that_are_not_known_or_make_no_sense_are_refused(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(CutawayError, match=named):
        spec_of({"rope_parameters": rope, "max_position_embeddings": 64})


def test_two_spellings_that_differ_are_refused() -> None:
    with pytest.raises(CutawayError, match="differ"):
        spec_of({"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}})


def test_a_part_of_the_head_is_held_against_what_turns() -> None:
    half = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
    assert spec_of(half, 8, d_head=16).dims == 8
    with pytest.raises(CutawayError, match="partial_rotary_factor"):
        spec_of(half, 16, d_head=16)


def test_only_scalings_that_look_at_the_length_unsettle_what_was_turned() -> None:
    longer = {"max_position_embeddings": 64}
    dynamic = spec_of(longer | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert settled(dynamic, 5, 64) and not settled(dynamic, 64, 65) and not settled(dynamic, 65, 66)
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    long = spec_of(longer | {"rope_scaling": {"type": "longrope", **lists}})
    assert settled(long, 5, 32) and not settled(long, 32, 33) and settled(long, 33, 1000)
    assert settled(spec_of(longer | {"rope_scaling": {"type": "yarn", "factor": 2.0}}), 1, 1000)


def from_gguf(values: dict[str, Any], tensors: dict[str, list[float]] | None = None) -> RotarySpec:
    weights = {name: Weight.of(np.array(array, np.float32)) for name, array in (tensors or {}).items()}
    config = Config({"context_length": 64, **values}, "the metadata")
    found = gguf_rotary(config, Tensors(Path("tiny.gguf"), weights, {}), 8)
    config.refuse_unread(("context_length",))
    return found


FREQS = {"rope_freqs.weight": [1.0, 1.0, 2.5, 8.0]}
SHORT_AND_LONG = {"rope_factors_short.weight": [1.0] * 4, "rope_factors_long.weight": [1.0, 2.0, 4.0, 8.0]}


@pytest.mark.parametrize(
    ("values", "tensors", "scaling"),
    (
        ({}, {}, None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 8.0}, {}, None),
        ({"rope.scaling.factor": 8.0}, {}, LinearScaling(8.0)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, {}, None),
        ({"rope.scale_linear": 4.0}, {}, LinearScaling(4.0)),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.scale_linear": 4.0}, {}, LinearScaling(8.0)),
        ({}, FREQS, FactorScaling((1.0, 1.0, 2.5, 8.0), (1.0, 1.0, 2.5, 8.0), 64)),
        ({"rope.scaling.factor": 2.0}, FREQS, FactorScaling((2.0, 2.0, 5.0, 16.0), (2.0, 2.0, 5.0, 16.0), 64)),
        ({"rope.scaling.attn_factor": 1.5}, {}, FactorScaling((1.0,) * 4, (1.0,) * 4, 64, 1.5)),
        ({"rope.scaling.attn_factor": 1.19, "rope.scaling.original_context_length": 16}, SHORT_AND_LONG,
         FactorScaling((1.0,) * 4, (1.0, 2.0, 4.0, 8.0), 16, 1.19)),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}, {},
         YarnScaling(4.0, 16, magnitude=YarnScaling.growth(4.0))),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.5,
          "rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.attn_factor": 0.5}, {},
         YarnScaling(4.0, 64, 16.0, 2.0, 0.5 * YarnScaling.growth(4.0) / YarnScaling.growth(4.0, 0.5))),
    ),
    ids=str,
)  # fmt: skip
def test_gguf_says_it_as_llama_cpp_reads_it(values: dict[str, Any], tensors: dict[str, Any], scaling: Any) -> None:
    assert from_gguf(values, tensors) == RotarySpec(10_000.0, 8, scaling=scaling)


@pytest.mark.parametrize(
    ("values", "tensors", "named"),
    (
        ({"rope.scaling.type": "ntk"}, {}, "'ntk'"),
        ({"rope.scaling.type": "longrope"}, {}, "rope_factors_short"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, FREQS, "which is it"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": 0.5}, {}, "ext"),
        ({"rope.scaling.yarn_beta_fast": 16.0}, {}, "yarn_beta_fast"),
        ({"rope.scaling.alpha": 2.0}, {}, "alpha"),
        ({}, {"rope_freqs.weight": [1.0] * 3}, "4 pairs"),
        ({}, {"rope_factors_long.weight": [1.0] * 4}, "both are needed"),
        ({}, {"rope_freqs.weight": [1.0, 1.0, 0.0, 1.0]}, "0.0"),
    ),
    ids=str,
)
def test_gguf_scalings_that_cannot_be_computed_are_refused(
    values: dict[str, Any], tensors: dict[str, Any], named: str
) -> None:
    with pytest.raises(CutawayError, match=named):
        from_gguf(values, tensors)
