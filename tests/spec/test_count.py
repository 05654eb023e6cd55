"""Parameters, counted from the spec alone, are the published totals."""

from math import prod

import pytest
from hypothesis import given

from cutaway import CutawayError
from cutaway.spec import FeedForwardSpec, parameter_shapes
from cutaway.spec.catalog import CATALOG, catalog_spec
from random_models import random_weights, specs

PUBLISHED = {
    "toy": 2_286,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "smollm2-135m": 134_515_008,
}
EMBEDDINGS = {"gpt2": (50257, 768), "llama-2-7b": (32000, 4096), "smollm2-135m": (49152, 576)}


def test_every_configuration_of_the_catalog_is_checked_against_a_published_total():
    assert set(CATALOG) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_count_is_the_published_total(name):
    assert catalog_spec(name).count().total == PUBLISHED[name]
    assert catalog_spec(name).name == name


@pytest.mark.parametrize("name", EMBEDDINGS)
def test_the_embedding_is_v_by_d(name):
    spec = catalog_spec(name)
    assert parameter_shapes(spec)["embed.tokens"] == EMBEDDINGS[name]
    assert spec.count().parts["embedding"] == prod(EMBEDDINGS[name])


def test_a_tied_head_is_counted_once_and_an_untied_one_by_itself():
    assert catalog_spec("gpt2").count().parts["head"] == 0
    assert catalog_spec("llama-2-7b").count().parts["head"] == 32000 * 4096


@given(specs())
def test_the_parts_are_all_the_weights_there_are(spec):
    count = spec.count()
    assert count.total == sum(prod(weight.shape) for weight in random_weights(spec).values())


@given(specs())
def test_a_matrix_has_one_row_per_output_and_no_weight_knows_t(spec):
    shapes = parameter_shapes(spec)
    for i, layer in enumerate(spec.layers):
        a, f, d = layer.attention, layer.feed_forward, spec.d_model
        assert shapes[f"layers.{i}.attn.o.weight"] == (d, a.n_heads * a.value_width)
        assert (f"layers.{i}.attn.o.bias" in shapes) == a.out_bias
        if a.latent is None:
            assert shapes[f"layers.{i}.attn.q.weight"] == (a.n_heads * a.d_head, d)
            assert shapes[f"layers.{i}.attn.k.weight"] == (a.n_kv_heads * a.d_head, d)
            assert shapes[f"layers.{i}.attn.v.weight"] == (a.n_kv_heads * a.value_width, d)
            assert (f"layers.{i}.attn.k.bias" in shapes) == a.qkv_bias
        if isinstance(f, FeedForwardSpec):
            assert shapes[f"layers.{i}.mlp.down.weight"] == (d, f.d_ff)
            assert (f"layers.{i}.mlp.gate.weight" in shapes) == f.gated
    assert ("head.weight" in shapes) == (not spec.tied_head)


@given(specs(causal=True))
def test_the_cache_bill_is_what_a_cache_then_holds(spec):
    from cutaway.forward.cache import KVCache
    from cutaway.forward.transformer import transformer
    from random_models import random_ids, random_model

    model = random_model(spec)
    cache = KVCache(spec, model.engine)
    transformer(model.engine, spec, model.parameters, [random_ids(spec, 5)], caches=[cache])
    assert cache.nbytes == spec.count().kv_bytes(5, bytes_per_value=8)


def test_an_unknown_configuration_is_refused_with_the_closest_known_ones():
    with pytest.raises(CutawayError, match=r"No configuration named 'gpt-2' is in the catalog; the closest are gpt2"):
        catalog_spec("gpt-2")
    with pytest.raises(CutawayError, match=r"'zzz'.*toy"):
        catalog_spec("zzz")
