"""`cutaway sample`, as a person types it: chapter 14's numbers, drawn and as a document."""

import json
import re

import pytest

VALIDATE = "validate=8.3 check=7.1 rest*432=0"  # the tail's exponentials sum to 432


@pytest.fixture
def seen(here):
    """What the lab tells of these arguments."""

    def look(*arguments: str) -> dict:
        ended = here("sample", *arguments, "--json")
        assert (ended.code, ended.err) == (0, "")
        return json.loads(ended.out)

    return look


def at(told: dict, temperature: float) -> dict:
    return next(entry for entry in told["temperatures"] if entry["temperature"] == temperature)


def test_two_logits_alone_give_0_77_and_0_23(seen):
    told = seen("--logits", "validate=8.3 check=7.1")
    assert [round(p, 2) for p in told["probabilities"]] == [0.77, 0.23]


def test_a_tail_takes_its_share_at_t_1_none_at_0_3_and_most_at_2(seen):
    told = seen("--logits", VALIDATE, "--temperatures", "0.3 1 2")
    assert [round(p, 2) for p in at(told, 1)["probabilities"]] == [0.71, 0.21, 0.08]
    assert at(told, 0.3)["probabilities"][0] > 0.98
    assert at(told, 0.3)["probabilities"][2] < 1e-6
    assert at(told, 2)["probabilities"][2] > 0.8
    order = [sorted(entry["probabilities"][:2], reverse=True) for entry in told["temperatures"]]
    assert order == [entry["probabilities"][:2] for entry in told["temperatures"]]  # T never changes the order


def test_the_toys_nucleus_keeps_3_5_and_8_and_more_at_t_2(seen):
    told = seen("<BOS> dragon drinks", "--model", "toy", "--top-p", "0.9 0.95 0.99", "--temperatures", "1 2")
    assert [entry["kept"] for entry in told["filters"]] == [3, 5, 8]
    assert told["rows"][2]["label"] == '"glowing"'
    assert told["cumulative"][1] < 0.9 <= told["cumulative"][2]
    assert {row["label"] for row in told["rows"][8:]} == {'"drinks"', '"<BOS>"'}
    assert [entry["of_rows"][8:] for entry in told["filters"]] == [[0, 0]] * 3
    for label, kept in at(told, 2)["kept"].items():
        assert kept >= at(told, 1)["kept"][label]
    assert at(told, 2)["kept"]["top-p 0.9"] > 3


def test_the_capital_of_france_is_paris_at_0_3_and_now_and_then_another_at_1_5(seen):
    cold = seen("The capital of France is", "--temperature", "0.3")
    assert cold["rows"][0]["label"] == '" Paris"'
    assert cold["draws"]["drawn"][0] >= 995
    warm = seen("The capital of France is", "--temperature", "1.5", "--top-k", "20")
    assert warm["rows"][0]["label"] == '" Paris"'
    assert 300 < warm["draws"]["drawn"][0] < 900
    assert warm["stages"][-1]["kept"] == 20


def test_a_thousand_draws_lie_near_what_is_expected_and_are_the_same_again(seen):
    told = seen("--logits", VALIDATE, "--draws", "5000", "--seed", "3")
    draws = told["draws"]
    assert sum(draws["drawn"]) == 5000 == pytest.approx(sum(draws["expected"]))
    named = zip(draws["drawn"][:3], draws["expected"][:3], strict=True)
    assert sum((drawn - expected) ** 2 / expected for drawn, expected in named) < 18.5  # once in 10,000 runs more
    assert seen("--logits", VALIDATE, "--draws", "5000", "--seed", "3") == told
    assert seen("--logits", VALIDATE, "--draws", "5000", "--seed", "4")["draws"]["drawn"] != draws["drawn"]


def test_the_draws_go_through_the_filters_in_the_order_that_was_asked_for(seen):
    logits = "a=2 b=1.5 c=0.6 d=-0.3 e=-0.8"
    ours = seen("--logits", logits, "--temperature", "0.5", "--top-p", "0.9")
    theirs = seen("--logits", logits, "--temperature", "0.5", "--top-p", "0.9", "--order", "llama.cpp")
    assert [stage["stage"] for stage in ours["stages"]] == ["logits", "temperature", "top_p"]
    assert [stage["stage"] for stage in theirs["stages"]] == ["logits", "top_p", "temperature"]
    assert ours["stages"][-1]["kept"] < theirs["stages"][-1]["kept"]


def test_it_is_drawn_side_by_side_with_the_curve_stretched(here):
    ended = here("sample", "--logits", VALIDATE, "--temperatures", "0.3 1 2")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert re.search(r"validate +8\.30 .*98\.2 %.*71\.0 %.*12\.0 %", ended.out)
    curve = [line for line in lines if line.startswith("T = ") or (line.startswith(" " * 10) and "█" in line)]
    widths = [max(len(line) for line in curve[3 * place : 3 * place + 3]) for place in range(3)]
    assert widths == sorted(widths)
    assert widths[2] - 10 == pytest.approx(2 * (widths[1] - 10), rel=0.15)
    assert "tokens kept" in ended.out
    assert "1,000 draws through temperature 1" in ended.out


def test_a_terminal_of_any_width_shows_it(in_a_terminal):
    shown = in_a_terminal("sample", "--logits", VALIDATE)
    assert "The same curve, stretched by T" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "There is no prompt"),
        (["a b", "--logits", "1 2"], "Both --logits and a prompt"),
        (["--logits", "a=b"], "--logits holds 'a=b'"),
        (["--logits", "a*0=1"], "--logits holds 'a*0=1'"),
        (["--logits", "a=nan"], "--logits holds 'a=nan'"),
        (["--logits", "=3"], "--logits holds '=3'"),
        (["--logits", "a*2000000=1"], "more than a million tokens"),
        (["--logits", ""], "--logits is empty"),
        (["--logits", "a=-inf"], "Every logit is −∞"),
        (["--logits", "1 2", "--temperatures", "hot"], "--temperatures holds 'hot'"),
        (["--logits", "1 2", "--temperatures", ""], "--temperatures is empty"),
        (["--logits", "1 2", "--temperatures", "-1"], "The temperature is -1"),
        (["--logits", "1 2", "--top-p", "1.5"], "top_p is 1.5"),
        (["--logits", "1 2", "--top-k", "2.5"], "top_k is 2.5"),
        (["--logits", "1 2", "--order", "ollama"], "There is no order 'ollama'"),
        (["--logits", "1 2", "--draws", "0"], "0 draws are none to look at"),
        (["--logits", "1 2", "--draws", "100000000000"], "ask for at most 1,000,000"),
        (["--logits", "a=2 a=3"], "--logits names 'a' twice"),
        (["--logits", "1 2", "--rows", "0"], "--rows is 0"),
        (["--logits", "1 2", "--seed", "-1"], "The seed is -1"),
    ],
)
def test_bad_input_is_refused_with_a_sentence_and_code_2(here, arguments, sentence):
    ended = here("sample", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("cutaway: ") and ended.err.count("\n") == 1
    assert sentence in ended.err


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("filters", [[], ["--typical-p", "0.9"], ["--min-p", "0.1", "--temperature", "0.5"]])
def test_logits_farther_apart_than_a_float_reaches_are_shown_without_a_warning(here, filters):
    ended = here("sample", "--logits", "a=1e308 b=-1e308", "--json", *filters)
    assert (ended.code, ended.err) == (0, "")
    told = json.loads(ended.out)
    assert told["draws"]["drawn"] == [1000, 0, 0]
