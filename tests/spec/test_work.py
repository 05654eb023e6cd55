"""The arithmetic of a pass, part by part, is that of the pass."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway.engines.numpy import NumpyEngine
from cutaway.forward.transformer import transformer
from cutaway.spec import parameter_shapes
from cutaway.spec.catalog import catalog_spec
from cutaway.spec.work import pass_work
from random_models import random_ids, random_parameters, specs

PER_NUMBER = 5  # operations that a norm takes


def norm_work(spec, tokens: int) -> int:
    return next(row.flops for row in pass_work(spec, tokens) if row.part == "norms")


@pytest.mark.parametrize("name", ["qwen3-8b", "gemma-3-270m", "deepseek-v3", "llama-3.1-8b", "gpt2"])
def test_a_norm_is_as_wide_as_its_gain_and_goes_over_every_head_where_it_stands_in_heads(name):
    spec = catalog_spec(name)
    numbers = 0
    for gain, shape in parameter_shapes(spec).items():
        if gain.startswith("layers.") and gain.endswith(".gain"):
            attention = spec.layers[int(gain.split(".")[1])].attention
            times = {"q_norm": attention.n_heads, "k_norm": attention.n_kv_heads}.get(gain.split(".")[-2], 1)
            numbers += times * prod(shape)
    assert norm_work(spec, 7) == PER_NUMBER * 7 * numbers


class CountingNorms(NumpyEngine):
    """Counts the numbers that go through a norm."""

    def __init__(self) -> None:
        super().__init__("float64")
        self.normed = 0

    def layer_norm(self, x, gain, eps):
        self.normed += x.size
        return super().layer_norm(x, gain, eps)

    def rms_norm(self, x, gain, eps):
        self.normed += x.size
        return super().rms_norm(x, gain, eps)


@given(specs(), st.integers(1, 5))
def test_the_norms_of_the_layers_are_counted_at_the_numbers_that_a_pass_norms(spec, tokens):
    engine = CountingNorms()
    transformer(engine, spec, random_parameters(spec, engine), [random_ids(spec, tokens)])
    ends = tokens * (spec.embed_norm is not None) + tokens * (spec.final_norm is not None)
    ends += not spec.headless and spec.head_transform is not None  # the head reads the last row only
    assert norm_work(spec, tokens) == PER_NUMBER * (engine.normed - ends * spec.d_model)
