"""Parameters, counted from the spec alone, are the published totals."""

from dataclasses import replace
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
    "gpt3-175b": 174_604_259_328,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "smollm2-135m": 134_515_008,
    "bert-base": 109_482_240,
    "gemma-3-270m": 268_098_176,
}
ROUNDED = {"llama-4-scout": (107.77, 17.17), "llama-4-maverick": (400.71, 17.18)}  # billions: total, active
ACTIVE = {"mixtral-8x7b": 12_879_925_248, "qwen3-235b-a22b": 22_190_763_520}
EMBEDDINGS = {"gpt2": (50257, 768), "llama-2-7b": (32000, 4096), "smollm2-135m": (49152, 576)}


def test_every_configuration_of_the_catalog_is_checked_against_a_published_total():
    assert set(CATALOG) == {*PUBLISHED, *ROUNDED}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_count_is_the_published_total(name):
    assert catalog_spec(name).count().total == PUBLISHED[name]
    assert catalog_spec(name).name == name


@pytest.mark.parametrize("name", ROUNDED)
def test_llama_4_is_counted_to_the_digits_that_are_published(name):
    count = catalog_spec(name).count()
    assert (round(count.total / 1e9, 2), round(count.active / 1e9, 2)) == ROUNDED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_of_a_mixture_only_the_chosen_experts_work_on_a_token(name):
    assert catalog_spec(name).count().active == ACTIVE[name]


def test_deepseek_v3_has_37_billion_active_parameters_with_and_without_the_input_embedding():
    count = catalog_spec("deepseek-v3").count()
    assert round(count.active / 1e9, 2) == 37.55
    assert round(count.active_without_embedding / 1e9, 2) == 36.63


def test_llama_2_70b_is_17_5_percent_attention_and_81_7_percent_feed_forward():
    count = catalog_spec("llama-2-70b").count()
    assert round(100 * count.parts["attention"] / count.total, 1) == 17.5
    assert round(100 * count.parts["feed_forward"] / count.total, 1) == 81.7


def test_the_lectures_formula_stands_beside_the_exact_count():
    toy, gpt3 = catalog_spec("toy").count(), catalog_spec("gpt3-175b").count()
    assert toy.lecture == toy.total == 2_286
    d, n_layers, n_max = 12288, 96, 2048
    assert gpt3.lecture is not None
    assert round((gpt3.lecture - n_max * d) / 1e9, 3) == 174.574
    assert gpt3.total - gpt3.lecture == n_layers * 4 * d + 2 * d  # attention biases, and the final norm
    for other in ("llama-2-7b", "bert-base"):  # gated; with token types, an embedding norm and a pooler
        assert catalog_spec(other).count().lecture is None
    untied = replace(catalog_spec("gpt2"), tied_head=False)
    assert untied.count().lecture is None


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
