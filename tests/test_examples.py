"""Chapter 7's example: the shipped arrays have the scores that the course states."""

import numpy as np
import pytest

from cutaway.examples import cat_sat_on_it, make_example


def test_the_last_query_meets_the_keys_with_the_scores_of_the_course():
    example = cat_sat_on_it()
    scores = example.q @ example.k.T
    assert example.tokens == ("the", "cat", "sat", "on", "it")
    np.testing.assert_allclose(scores[-1], [3.2, 12.8, 5.6, 2.4, 7.2], rtol=0, atol=1e-12)
    assert abs(scores[0, 0] - 2.1) < 1e-12


def test_every_score_is_a_moderate_number_with_one_decimal():
    example = cat_sat_on_it()
    scores = example.q @ example.k.T
    np.testing.assert_allclose(scores, scores.round(1), rtol=0, atol=1e-12)
    assert scores.max() < 13
    assert scores.min() > 0


def test_queries_keys_and_values_are_five_rows_of_64_in_float64():
    example = cat_sat_on_it()
    for array in (example.q, example.k, example.v):
        assert array.shape == (5, 64)
        assert array.dtype == np.float64


def test_nobody_can_alter_the_example_by_accident():
    example = cat_sat_on_it()
    with pytest.raises(ValueError, match="read-only"):
        example.q[0, 0] = 1.0


def test_the_shipped_file_is_what_its_maker_makes():
    example, made = cat_sat_on_it(), make_example()
    for name in ("q", "k", "v"):
        np.testing.assert_allclose(getattr(example, name), made[name], rtol=0, atol=1e-10)
