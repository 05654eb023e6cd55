"""`model.embed`: one vector for each text, the same in whatever company."""

import numpy as np
import pytest

import cutaway
from cutaway import CutawayError
from cutaway.engines import make_engine
from cutaway.engines.layout import Layout
from cutaway.forward.pooling import one_vector_each
from cutaway.trace.texts.vectors import EMBEDDED_TOKENS
from random_models import GPT2, POST, random_ids, random_model

LENGTHS = (3, 70, 1, 17, 130)


@pytest.fixture(scope="module", params=("numpy", "cpu"))
def model(request: pytest.FixtureRequest) -> cutaway.Model:
    return random_model(POST, engine=make_engine(request.param, None))


def test_a_vector_is_the_mean_of_a_texts_own_rows_or_the_first_of_them(model: cutaway.Model) -> None:
    texts = [random_ids(POST, length, seed) for seed, length in enumerate(LENGTHS)]
    last = f"layers.{POST.n_layers - 1}.resid_post"
    rows = [model.trace(text)[last].astype(np.float64) for text in texts]
    vectors = model.embed(texts)
    assert vectors.shape == (5, POST.d_model) and vectors.dtype == model.engine.dtype
    assert np.array_equal(vectors, np.stack([row.mean(axis=0) for row in rows]).astype(vectors.dtype))
    assert np.array_equal(model.embed(texts, pooling="first"), np.stack([row[0] for row in rows]).astype(vectors.dtype))


def test_company_changes_no_bit_also_where_the_texts_need_several_passes(model: cutaway.Model) -> None:
    texts = [random_ids(POST, length, seed) for seed, length in enumerate(LENGTHS)]
    together = model.embed(texts)
    for order in ((4, 0, 2), (1,), (3, 3, 1)):
        assert np.array_equal(model.embed([texts[i] for i in order]), together[list(order)])
    many = [random_ids(POST, 190, seed) for seed in range(EMBEDDED_TOKENS // 190 + 3)]
    assert np.array_equal(model.embed(many)[[0, -1]], model.embed([many[0], many[-1]]))


def test_unit_vectors_have_length_1_and_their_own_direction(model: cutaway.Model) -> None:
    texts = [random_ids(POST, length) for length in LENGTHS]
    plain, unit = model.embed(texts).astype(np.float64), model.embed(texts, unit=True).astype(np.float64)
    assert np.allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)
    assert np.allclose(unit * np.linalg.norm(plain, axis=1, keepdims=True), plain, atol=1e-5)
    zeros = one_vector_each(np.zeros((2, 4), np.float32), Layout.of([2]), unit=True)
    assert np.array_equal(zeros, np.zeros((1, 4))), "a vector of zeros has no direction, and no NaN"


def test_a_decoder_gives_the_mean_of_what_its_head_would_read() -> None:
    model = random_model(GPT2)
    ids = random_ids(GPT2, 9)
    assert np.array_equal(model.embed([ids])[0], model.trace(ids)["final.norm"].mean(axis=0))


def test_texts_go_in_as_texts_too() -> None:
    toy = cutaway.load("toy")
    ids = toy.tokenizer.encode("wizard mixes potion")
    assert np.array_equal(toy.embed(["wizard mixes potion", ids]), toy.embed([ids, ids]))


@pytest.mark.parametrize(
    ("texts", "settings", "said"),
    (
        ("one text", {}, "a list of texts"),
        ([], {}, "at least one"),
        ([[1], [2, 99]], {}, r"Text 1: Token id 99"),
        ([[1], []], {}, r"Text 1: The prompt is an empty list"),
        ([list(range(20)) * 11], {}, r"Text 0: .*220 tokens"),
        ([[1]], {"pooling": "max"}, "'mean' or 'first'"),
    ),
)
def test_what_cannot_be_embedded_is_refused_by_its_number(texts: list, settings: dict, said: str) -> None:
    with pytest.raises(CutawayError, match=said):
        random_model(POST).embed(texts, **settings)


def test_a_broken_weight_is_named_and_no_vector_given() -> None:
    model = random_model(POST)
    model.parameters.stored["layers.1.mlp.up.weight"].rows.view(np.float64)[0, 0] = np.nan
    with pytest.raises(CutawayError, match=r"layers\.1\.mlp"):
        model.embed([[1, 2, 3]])
