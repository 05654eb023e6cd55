"""Every stage: against transformers' own processors, by hand, in any order, and over distributions of every kind."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway import CutawayError
from cutaway.generate import ORDERS, History, Sampling, distribution, sample
from cutaway.generate.candidates import Candidates
from cutaway.generate.sampling import run_stages
from cutaway.generate.scratch import Scratch

NO_HISTORY = History()

# Ties, −∞, one token, all equal, huge ranges.
ANY_LOGIT = st.sampled_from([0.0, 1.0, 1.0, -3.0, 2.5, 80.0, -80.0, 1e300, -1e300, 1e-300, -np.inf])
ANY = st.lists(ANY_LOGIT, min_size=1, max_size=12).filter(lambda row: any(np.isfinite(row))).map(np.array)
SHARE = st.sampled_from([1e-9, 0.3, 0.5, 0.9, 0.999999, 1.0])


def left(logits, history=NO_HISTORY, **settings) -> np.ndarray:
    """The distribution that is drawn from."""
    return distribution(np.asarray(logits, np.float64), Sampling(**settings), history)[-1].probabilities


def kept(logits, history=NO_HISTORY, **settings) -> list[int]:
    return np.flatnonzero(left(logits, history, **settings)).tolist()


# Against transformers


def of_transformers(logits: np.ndarray, prompt: list[int], *processors) -> np.ndarray:
    """What transformers' processors, one after another, leave to draw from."""
    import torch

    scores = torch.tensor(logits, dtype=torch.float64)[None]
    for processor in processors:
        scores = processor(torch.tensor([prompt]), scores)
    return torch.softmax(scores, -1)[0].numpy()


@st.composite
def rows_without_ties(draw: st.DrawFn) -> np.ndarray:
    count = draw(st.integers(2, 400))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    return random.standard_normal(count) * draw(st.sampled_from([0.1, 1.0, 5.0, 40.0]))


@given(rows_without_ties(), st.floats(0.05, 5))
def test_temperature_is_that_of_transformers(logits, temperature):
    from transformers import TemperatureLogitsWarper

    expected = of_transformers(logits, [0], TemperatureLogitsWarper(temperature))
    np.testing.assert_allclose(left(logits, temperature=temperature), expected, rtol=1e-9, atol=1e-300)


@given(rows_without_ties(), st.integers(1, 400))
def test_top_k_is_that_of_transformers(logits, k):
    from transformers import TopKLogitsWarper

    np.testing.assert_allclose(left(logits, top_k=k), of_transformers(logits, [0], TopKLogitsWarper(k)), rtol=1e-9)


@given(rows_without_ties(), st.floats(0.01, 0.999))
def test_top_p_is_that_of_transformers(logits, p):
    from transformers import TopPLogitsWarper

    np.testing.assert_allclose(left(logits, top_p=p), of_transformers(logits, [0], TopPLogitsWarper(p)), rtol=1e-9)


@given(rows_without_ties(), st.floats(0.001, 1))
def test_min_p_is_that_of_transformers(logits, share):
    from transformers import MinPLogitsWarper

    np.testing.assert_allclose(
        left(logits, min_p=share), of_transformers(logits, [0], MinPLogitsWarper(share)), rtol=1e-9
    )


@given(rows_without_ties(), st.floats(0.01, 0.999))
def test_typical_is_that_of_transformers(logits, p):
    from transformers import TypicalLogitsWarper

    np.testing.assert_allclose(
        left(logits, typical_p=p), of_transformers(logits, [0], TypicalLogitsWarper(p)), rtol=1e-9
    )


@given(rows_without_ties(), st.floats(0.2, 3), st.data())
def test_the_repetition_penalty_is_that_of_transformers(logits, penalty, data):
    from transformers import RepetitionPenaltyLogitsProcessor

    ids = data.draw(st.lists(st.integers(0, len(logits) - 1), min_size=1, max_size=9))
    cut = data.draw(st.integers(0, len(ids)))
    history = History(ids[:cut], ids[cut:])  # prompt and response alike
    expected = of_transformers(logits, ids, RepetitionPenaltyLogitsProcessor(penalty))
    np.testing.assert_allclose(left(logits, history, repetition_penalty=penalty), expected, rtol=1e-9)


@given(rows_without_ties(), st.data())
def test_logit_bias_is_that_of_transformers(logits, data):
    from transformers import SequenceBiasLogitsProcessor

    ids = data.draw(st.lists(st.integers(0, len(logits) - 1), min_size=1, max_size=5, unique=True))
    biases = {token: data.draw(st.sampled_from([-5.0, -0.5, 0.25, 7.0])) for token in ids}
    processor = SequenceBiasLogitsProcessor({(token,): bias for token, bias in biases.items()})
    expected = of_transformers(logits.astype(np.float32).astype(np.float64), [0], processor)
    given_row = logits.astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(left(given_row, logit_bias=biases), expected, rtol=1e-5, atol=1e-12)


@given(rows_without_ties(), st.floats(0.3, 2), st.integers(1, 60), st.floats(0.3, 0.99), st.floats(0.001, 0.2))
def test_the_chain_of_transformers_is_the_order_that_bears_its_name(logits, temperature, k, p, share):
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    chain = (TemperatureLogitsWarper(temperature), TopKLogitsWarper(k), TopPLogitsWarper(p), MinPLogitsWarper(share))
    ours = left(logits, temperature=temperature, top_k=k, top_p=p, min_p=share, order="hf")
    np.testing.assert_allclose(ours, of_transformers(logits, [0], *chain), rtol=1e-9)


# By hand


def test_the_repetition_penalty_divides_what_is_positive_and_multiplies_what_is_negative():
    logits, history = [2.0, -2.0, 2.0, -2.0, 0.0], History([0], [1])
    weights = np.exp([1.0, -4.0, 2.0, -2.0, 0.0])
    np.testing.assert_allclose(left(logits, history, repetition_penalty=2.0), weights / weights.sum())


def test_presence_subtracts_once_and_frequency_as_often_as_a_token_was_said():
    logits, history = np.zeros(4), History([3, 3], [1, 1, 1, 2])  # the prompt does not count
    for settings, expected in (
        ({"presence_penalty": 0.5}, [0, -0.5, -0.5, 0]),
        ({"frequency_penalty": 0.5}, [0, -1.5, -0.5, 0]),
        ({"presence_penalty": 1.0, "frequency_penalty": -0.25}, [0, -0.25, -0.75, 0]),
    ):
        weights = np.exp(expected)
        np.testing.assert_allclose(left(logits, history, **settings), weights / weights.sum())


def test_a_bias_of_minus_infinity_bans_a_token_whatever_else_is_set():
    logits = [9.0, 1.0, 0.0]
    assert kept(logits, logit_bias={0: -np.inf}) == [1, 2]
    assert kept(logits, logit_bias={0: -np.inf}, temperature=0) == [1]
    told = distribution(np.array(logits), Sampling(logit_bias={0: -np.inf}))[0]
    assert (told.kept, told.removed, told.removed_ids.tolist()) == (2, 1, [0])
    assert told.removed_share == pytest.approx(math.exp(9) / (math.exp(9) + math.exp(1) + 1))


def test_typical_prefers_what_is_as_surprising_as_the_whole():
    logits = np.log([0.6, 0.2, 0.1, 0.1])  # H = 1.09 nats; −ln p is 0.51, 1.61, 2.30, 2.30
    assert kept(logits, typical_p=0.1) == [1]
    assert kept(logits, typical_p=0.21) == [0, 1]
    flat = np.log([0.4, 0.12, 0.12, 0.12, 0.12, 0.12])  # H = 1.64: 0.12 has 2.12, 0.4 has 0.92
    assert kept(flat, typical_p=0.1) == [1]  # the likeliest leaves
    assert kept(flat, typical_p=0.5) == [1, 2, 3, 4, 5]


def test_t_0_5_with_top_p_0_9_means_different_distributions_in_different_engines():
    p = np.array([0.5, 0.3, 0.12, 0.05, 0.03])
    ours = left(np.log(p), temperature=0.5, top_p=0.9)
    theirs = left(np.log(p), temperature=0.5, top_p=0.9, order="llama.cpp")
    hot = p**2 / (p**2).sum()
    np.testing.assert_allclose(ours, [*(hot[:2] / hot[:2].sum()), 0, 0, 0])  # cold first: two reach 0.9
    three = p[:3] ** 2 / (p[:3] ** 2).sum()
    np.testing.assert_allclose(theirs, [*three, 0, 0])  # three reach 0.9, and are cooled


def test_vllm_applies_min_p_before_top_k_and_so_may_leave_fewer():
    logits = np.log([0.4, 0.35, 0.2, 0.05])
    assert [stage.name for stage in Sampling(1, 3, 0.9, 0.1, order="vllm").stages] == [
        "temperature",
        "min_p",
        "top_k",
        "top_p",
    ]
    assert kept(logits, top_p=0.76, min_p=0.3) == [0, 1, 2]  # 0.40 + 0.35 do not reach 0.76 of all
    assert kept(logits, top_p=0.76, min_p=0.3, order="vllm") == [0, 1]  # but of the three that min-p leaves they do


# Orders


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_has_every_stage_once(order):
    assert sorted(ORDERS[order]) == sorted(ORDERS["cutaway"])


def test_an_order_may_be_written_out_and_leave_out_what_is_not_used():
    logits = np.log([0.5, 0.3, 0.2])
    assert kept(logits, temperature=0.2, top_p=0.6, order=["top_p", "temperature"]) == [0, 1]
    assert kept(logits, temperature=0.2, top_p=0.6, order=["temperature", "top_p"]) == [0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"order": "ollama"}, "There is no order 'ollama'; there are cutaway, hf, vllm"),
        ({"order": ["top_k", "heat"]}, "There is no stage 'heat'"),
        ({"order": ["temperature", "temperature"]}, "names a stage twice"),
        ({"order": ["temperature"], "top_k": 3}, "leaves out top_k, which is set"),
        ({"order": 3}, "order is 3"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be a number above 0"),
        ({"repetition_penalty": "1"}, "repetition_penalty is '1'"),
        ({"presence_penalty": math.inf}, "presence_penalty is inf"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"typical_p": 0}, "typical_p is 0"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias names token -1"),
        ({"logit_bias": {"a": 2.0}}, "logit_bias names token 'a'"),
        ({"logit_bias": {3: math.inf}}, "The logit_bias of token 3 is inf"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"top_p": Fraction(10**400)}, "top_p is "),
        ({"logit_bias": {3: 10**400}}, "The logit_bias of token 3 is 1000"),
        ({"logit_bias": [3]}, r"logit_bias is \[3\]; it must map"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, said):
    with pytest.raises(CutawayError, match=said):
        Sampling(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.75},
        {"top_p": 0.5},
        {"min_p": 0.25},
        {"typical_p": 0.5},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.5, "frequency_penalty": 0.25},
        {"logit_bias": {0: 0.5}},
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.parametrize("kind", [Fraction, np.float32, np.float16])
def test_numbers_of_any_kind_do_what_the_same_floats_do(settings, kind):
    def of_kind(value):
        return {token: kind(bias) for token, bias in value.items()} if isinstance(value, dict) else kind(value)

    logits, history = [1.0, 3.0, 2.5, -1.0], History([1], [2, 2, 3])
    expected = left(logits, history, **settings)
    found = left(logits, history, **{name: of_kind(value) for name, value in settings.items()})
    assert np.array_equal(found, expected)


def test_a_stage_that_leaves_no_token_or_no_number_is_named():
    with pytest.raises(CutawayError, match="After the stage logit_bias every logit is −∞: no token is left"):
        left([0.0, 1.0], logit_bias={0: -np.inf, 1: -np.inf})
    with pytest.raises(CutawayError, match="After the stage repetition_penalty the logit of token 1 is inf"):
        left([0.0, 1e300], History([1]), repetition_penalty=1e-300)


# Over distributions of every kind


@given(
    ANY, st.sampled_from([0.0, 1e-9, 0.5, 1.0, 3.0]), st.integers(1, 13), SHARE, st.sampled_from([0.0, 0.1, 1.0]), SHARE
)
def test_whatever_the_logits_a_distribution_is_left_and_its_tokens_were_possible(
    logits, temperature, k, p, share, typical
):
    for order in ORDERS:
        settings = Sampling(temperature, k, p, share, typical, order=order)
        told = distribution(logits, settings)
        for stage in told:
            assert stage.probabilities.sum() == pytest.approx(1, abs=1e-9)
            assert 1 <= stage.kept <= len(logits)
            assert stage.shares.sum() + stage.tail == pytest.approx(1, abs=1e-9)
            assert 0 <= stage.removed_share <= 1
        token = sample(logits, settings, np.random.default_rng(0))
        assert np.isfinite(logits[token])
        assert told[-1].probabilities[token] > 0


@given(ANY, st.integers(0, 5))
def test_greedy_takes_the_lowest_id_of_the_likeliest(logits, seed):
    token = sample(logits, Sampling(temperature=0), np.random.default_rng(seed))
    assert token == int(np.argmax(logits))


@given(ANY)
def test_one_constant_on_every_logit_changes_no_probability(logits):
    """softmax(ℓ + c) = softmax(ℓ), chapter 14.2"""
    small = np.clip(logits, -100, 100)
    np.testing.assert_allclose(left(small), left(small + 17.5), rtol=1e-9, atol=1e-30)


@given(st.integers(300, 3000), st.floats(0.001, 0.999), st.sampled_from([0.0, 1e-3, 1.0, 4.0]), st.integers(0, 99))
def test_the_smallest_set_that_reaches_p_is_found_without_sorting(count, p, spread, seed):
    random = np.random.default_rng(seed)
    logits = np.round(random.standard_normal(count) * spread, 2)  # many ties
    shares = left(logits)
    order = np.lexsort((np.arange(count), -logits))
    found = kept(logits, top_p=p)
    assert found == sorted(order[: len(found)].tolist())
    reached = np.cumsum(shares[order])
    assert reached[len(found) - 1] >= p - 1e-12
    assert len(found) == 1 or reached[len(found) - 2] < p + 1e-12


@given(st.integers(300, 2000), st.integers(1, 2000), st.integers(0, 99))
def test_top_k_of_many_ties_keeps_exactly_k_and_the_lowest_ids(count, k, seed):
    logits = np.random.default_rng(seed).integers(0, 4, count).astype(float)
    order = np.lexsort((np.arange(count), -logits))
    assert kept(logits, top_k=k) == sorted(order[:k].tolist())


@given(ANY, st.integers(0, 10**6))
def test_memory_that_is_used_again_changes_no_result(logits, seed):
    """The loop works in one scratch; nothing of an earlier, longer row may be left in it."""
    scratch, random = Scratch(), np.random.default_rng(seed)
    settings = Sampling(0.7, 5, 0.9, 0.01, 0.9, 1.2, 0.1, 0.2, {0: 0.5})
    history = History([0, 1], [2])
    run_stages(Candidates.of(random.standard_normal(30), scratch), settings.stages, history)
    scratch.begin()
    number = random.random()
    again = run_stages(Candidates.of(logits, scratch), settings.stages, history)
    fresh = run_stages(Candidates.of(logits), settings.stages, history)
    assert again.draw(number) == fresh.draw(number)
    assert again.ids.tolist() == fresh.ids.tolist()


@given(rows_without_ties(), st.data())
def test_leading_candidates_stay_right_when_some_logits_change(logits, data):
    """They are carried over a penalty instead of being looked for again."""
    before = Candidates.of(logits)
    before.leading(data.draw(st.integers(1, 40)))
    places = np.array(sorted(data.draw(st.sets(st.integers(0, len(logits) - 1), min_size=1, max_size=30))))
    change = np.array([data.draw(st.sampled_from([-9.0, -0.5, 0.0, 0.3])) for _ in places])
    after = before.changed(places, logits[places] + change, "test")
    row = logits.copy()
    row[places] += change
    expected = np.lexsort((np.arange(len(row)), -row))[:20]
    assert after.leading(20).tolist() == expected.tolist()
    assert after.total == pytest.approx(np.exp(row - row.max()).sum())


@given(rows_without_ties(), st.data())
def test_banned_tokens_are_out_as_if_the_model_itself_had_ruled_them_out(logits, data):
    """One ban after another, each told by what is left and by where it stands."""
    ids = st.sets(st.integers(0, len(logits) - 1), max_size=len(logits) // 3)
    left, row = Candidates.of(logits), logits.copy()
    for banned in (data.draw(ids), data.draw(ids)):
        places, _ = left.positions(np.array(sorted(banned, reverse=True), dtype=np.intp))
        if len(places):
            left = left.changed(places, np.full(len(places), -np.inf), "test")
        row[list(banned)] = -np.inf
    expected = np.flatnonzero(row > -np.inf)
    assert left.ids_at(np.arange(len(left))).tolist() == expected.tolist()
    every = np.arange(-1, len(logits) + 1)
    places, which = left.positions(every)
    assert every[which].tolist() == expected.tolist() and places.tolist() == list(range(len(expected)))
    of_model, number = Candidates.of(row), data.draw(st.floats(0, 1, exclude_max=True))
    assert left.draw(number) == of_model.draw(number)
    assert left.ids.tolist() == of_model.ids.tolist() == expected.tolist()
    assert left.logits.tolist() == of_model.logits.tolist() and left.total == of_model.total
    assert left.ids_at(left.best) == row.argmax()


@pytest.mark.parametrize("order", ORDERS)
@given(st.integers(1, 700), st.integers(0, 10**6))
def test_float32_logits_are_drawn_from_as_the_same_numbers_in_float64(order, count, seed):
    random = np.random.default_rng(seed)
    logits = (4 * random.standard_normal(count)).astype(np.float32)
    history = History(random.integers(0, count, 3).tolist(), random.integers(0, count, 3).tolist())
    bias = {0: 0.1, **({1: -np.inf} if count > 1 else {})}
    settings = Sampling(0.7, 300, 0.95, 0.001, 0.97, 1.1, 0.3, 0.2, bias, order)
    for one, other in zip(
        distribution(logits, settings, history),
        distribution(logits.astype(np.float64), settings, history),
        strict=True,
    ):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.logits.tolist() == other.logits.tolist() and one.logits.dtype == np.float64
        assert one.probabilities.tolist() == other.probabilities.tolist()
