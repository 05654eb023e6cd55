"""From logits to a token: what each stage keeps, in which order, and what it refuses."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway import CutawayError
from cutaway.generate import Sampling, distribution, sample
from cutaway.generate.candidates import Candidates

LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 4), min_size=1, max_size=15).map(np.array)  # many ties
MASS = st.floats(0.01, 1.0)


def last(logits, **settings) -> np.ndarray:
    return distribution(np.asarray(logits, np.float64), Sampling(**settings))[-1].probabilities


def kept(logits, **settings) -> list[int]:
    return np.flatnonzero(last(logits, **settings)).tolist()


def of(probabilities) -> np.ndarray:
    """Logits whose softmax these are."""
    return np.log(np.asarray(probabilities))


# Temperature


@given(LOGITS, st.integers(0, 99))
def test_temperature_0_takes_the_likeliest_and_the_lowest_id_among_equals(logits, seed):
    expected = logits.tolist().index(logits.max())
    assert sample(logits, Sampling(temperature=0, top_k=3, top_p=0.5), np.random.default_rng(seed)) == expected
    stages = distribution(logits, Sampling(temperature=0))
    assert [(stage.name, stage.kept) for stage in stages] == [("temperature", 1)]


@given(LOGITS, st.floats(0.05, 20))
def test_temperature_stretches_the_logits_and_keeps_their_order(logits, temperature):
    p = last(logits, temperature=temperature)
    assert p.sum() == pytest.approx(1, abs=1e-12)
    for a, b in zip(range(len(p)), range(1, len(p)), strict=False):
        if min(p[a], p[b]) > 1e-300:
            ratio = math.exp((logits[a] - logits[b]) / temperature)
            assert p[a] / p[b] == pytest.approx(ratio, rel=1e-9)


@pytest.mark.parametrize("temperature", [1e-12, 1e-300, 5e-324])
def test_a_temperature_of_almost_0_is_almost_greedy_and_no_number_breaks(temperature):
    assert last([10.0, 9.0, -500.0], temperature=temperature).tolist() == [1, 0, 0]
    assert last([-10.0, 9.0, 9.0], temperature=temperature).tolist() == [0, 0.5, 0.5]


def test_a_very_high_temperature_makes_all_tokens_equally_likely():
    np.testing.assert_allclose(last([10.0, 0.0, -10.0], temperature=1e300), 1 / 3)


# top-k


@given(LOGITS, st.integers(1, 20))
def test_top_k_keeps_exactly_k_the_lowest_ids_among_equals(logits, k):
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    assert kept(logits, top_k=k) == sorted(order[:k])


def test_top_k_of_ties_alone_keeps_the_first_k():
    assert kept([1.0] * 6, top_k=4) == [0, 1, 2, 3]


# top-p


@given(LOGITS, MASS)
def test_top_p_keeps_the_smallest_set_that_reaches_p_the_crossing_token_included(logits, mass):
    p = last(logits)
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    chosen = kept(logits, top_p=mass)
    assert chosen == sorted(order[: len(chosen)])  # the likeliest ones
    assert len(chosen) >= 1
    assert p[order[: len(chosen)]].sum() >= mass - 1e-12 or len(chosen) == len(p)
    assert p[order[: len(chosen) - 1]].sum() < mass + 1e-12


def test_top_p_at_a_sum_that_is_reached_exactly_takes_no_more():
    assert kept(of([0.5, 0.25, 0.125, 0.125]), top_p=0.5) == [0]
    assert kept(of([0.5, 0.25, 0.125, 0.125]), top_p=0.75) == [0, 1]
    assert kept(of([0.5, 0.25, 0.125, 0.125]), top_p=0.7500001) == [0, 1, 2]


def test_top_p_of_almost_nothing_keeps_one():
    assert kept(of([0.25] * 4), top_p=1e-9) == [0]


@given(LOGITS)
def test_top_p_1_keeps_every_token(logits):
    assert kept(logits, top_p=1.0) == list(range(len(logits)))


def test_top_p_over_a_wide_flat_vocabulary_counts_right():
    """Nuclei larger than the head of the distribution that is sorted first."""
    logits = np.zeros(50_000)
    for mass in (0.001, 0.3, 0.9):
        assert len(kept(logits, top_p=mass)) == pytest.approx(50_000 * mass, abs=1)


# min-p


@given(LOGITS, st.floats(0, 1))
def test_min_p_keeps_what_has_at_least_that_share_of_the_likeliest(logits, share):
    p = last(logits)
    assert kept(logits, min_p=share) == [i for i in range(len(p)) if p[i] >= share * p.max()]


def test_min_p_0_keeps_all_and_1_keeps_the_likeliest_and_its_equals():
    assert kept([1.0, 3.0, 3.0], min_p=0.0) == [0, 1, 2]
    assert kept([1.0, 3.0, 3.0], min_p=1.0) == [1, 2]


# Stages together


def test_the_stages_come_in_the_stated_order_and_each_says_what_it_left():
    p = [0.4, 0.3, 0.2, 0.1]
    stages = distribution(of(p), Sampling(temperature=1.0, top_k=3, top_p=0.7, min_p=0.9))
    assert [(stage.name, stage.kept) for stage in stages] == [
        ("temperature", 4),
        ("top_k", 3),
        ("top_p", 2),
        ("min_p", 1),
    ]
    np.testing.assert_allclose(stages[1].probabilities, [4 / 9, 3 / 9, 2 / 9, 0])
    np.testing.assert_allclose(stages[2].probabilities, [4 / 7, 3 / 7, 0, 0])  # 4/9 + 3/9 is the first above 0.7
    assert stages[3].probabilities.tolist() == [1, 0, 0, 0]


def test_temperature_comes_before_top_p_so_heat_widens_the_nucleus():
    logits = of([0.7, 0.2, 0.06, 0.04])
    assert len(kept(logits, top_p=0.85)) == 2
    assert len(kept(logits, top_p=0.85, temperature=2)) == 3


def test_by_default_nothing_is_filtered():
    stages = distribution(np.array([3.0, 1.0, -20.0]), Sampling())
    assert [(stage.name, stage.kept) for stage in stages] == [("temperature", 3)]


@given(LOGITS, st.integers(1, 15), st.integers(1, 15), MASS, MASS, st.floats(0, 1))
def test_a_tighter_setting_keeps_a_part_of_what_a_looser_one_keeps(logits, k, more, mass, larger, share):
    for tight, loose in (
        ({"top_k": min(k, more)}, {"top_k": max(k, more)}),
        ({"top_p": min(mass, larger)}, {"top_p": max(mass, larger)}),
        ({"min_p": share}, {"min_p": share / 2}),
        ({"top_k": k, "top_p": mass}, {"top_k": k}),
        ({"top_k": k, "top_p": mass, "min_p": share}, {"top_k": k, "top_p": mass}),
    ):
        assert set(kept(logits, **tight)) <= set(kept(logits, **loose))


@given(LOGITS, st.integers(1, 9), MASS, st.floats(0, 1), st.integers(0, 999))
def test_every_stage_leaves_a_distribution_and_the_token_comes_from_the_last(logits, k, mass, share, seed):
    sampling = Sampling(0.8, k, mass, share)
    stages = distribution(logits, sampling)
    for stage in stages:
        assert stage.probabilities.sum() == pytest.approx(1, abs=1e-12)
        assert stage.kept == np.count_nonzero(stage.probabilities) >= 1
    token = sample(logits, sampling, np.random.default_rng(seed))
    assert stages[-1].probabilities[token] > 0


# Drawing


@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.3, 1e-17, 1.0]), min_size=1, max_size=900).filter(any),
    st.floats(0, 1 - 2**-53),
)
def test_whatever_the_number_it_falls_into_the_interval_of_a_token_that_has_a_share(weights, number):
    with np.errstate(divide="ignore"):
        candidates = Candidates.of(np.log(np.array(weights)))
    for at in (0.0, 5e-324, number, 1 - 2**-53):
        token, low, high = candidates.draw(at)
        assert weights[token] > 0
        assert low - 1e-12 <= at <= high + 1e-12
        assert high - low == pytest.approx(weights[token] / sum(weights), abs=1e-12)


def test_frequencies_of_20000_draws_are_the_probabilities():
    logits, random = of([0.3, 0.25, 0.2, 0.1, 0.08, 0.05, 0.02]), np.random.default_rng(12)
    sampling = Sampling(temperature=1.0)
    drawn = np.bincount([sample(logits, sampling, random) for _ in range(20_000)], minlength=7)
    expected = 20_000 * last(logits)
    statistic = ((drawn - expected) ** 2 / expected).sum()
    assert statistic < 27.9  # a right sampler passes this, chi-square with 6 degrees of freedom, 9,999 times in 10,000


def test_each_seed_has_its_own_reproducible_draws():
    logits = of([0.25] * 4)

    def draws(seed: int) -> list[int]:
        random = np.random.default_rng(seed)
        return [sample(logits, Sampling(), random) for _ in range(30)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)


# What cannot be drawn from


@pytest.mark.parametrize(
    ("logits", "said"),
    [
        ([0.0, float("nan"), 1.0], "The logit of token 1 is nan; nothing can be drawn from that"),
        ([0.0, 1.0, float("inf")], "The logit of token 2 is inf; nothing can be drawn from that"),
        ([-np.inf, -np.inf], "Every logit is −∞: no token is left to draw"),
        ([], r"Sampling needs one row of logits \[V\], not an array of shape \[0\]"),
        ([[1.0, 2.0]], r"not an array of shape \[1, 2\]"),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_no_token_can_be_drawn_from_are_refused(logits, said, temperature):
    with pytest.raises(CutawayError, match=said):
        sample(np.array(logits), Sampling(temperature=temperature), np.random.default_rng(0))


def test_a_token_of_minus_infinity_is_merely_impossible():
    assert kept([0.0, -np.inf, 1.0]) == [0, 2]
    assert kept([0.0, -np.inf, 1.0], top_k=3) == [0, 2]
    assert kept([0.0, -np.inf, 1.0], top_p=1.0, min_p=0.0) == [0, 2]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": -0.1}, r"The temperature is -0\.1; it must be 0 \(greedy\) or a positive number"),
        ({"temperature": float("nan")}, "The temperature is nan"),
        ({"temperature": float("inf")}, "The temperature is inf"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1, or left out"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_k": 2.5}, r"top_k is 2\.5; it must be a whole number"),
        ({"top_p": 0.0}, r"top_p is 0\.0; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, r"top_p is 1\.1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": -0.1}, r"min_p is -0\.1; it must lie between 0 and 1"),
        ({"min_p": 1.5}, r"min_p is 1\.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, said):
    with pytest.raises(CutawayError, match=said):
        Sampling(**settings)


@given(LOGITS)
def test_a_log_probability_is_the_logarithm_of_the_models_own_probability(logits):
    p = last(logits)
    for token in range(len(logits)):
        assert math.exp(Candidates.of(logits).log_probability(token)) == pytest.approx(p[token], rel=1e-9)
