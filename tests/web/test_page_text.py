"""The text of the page and what follows it: typing, sampling, stepping, and what is no text for the model."""

import re
from urllib.parse import quote

import pytest
from page_reading import PLACE, PROMPT, percents, shown, slide
from playwright.sync_api import expect

from cutaway.generate import Sampling, distribution


@pytest.fixture(scope="module")
def trace(toy):
    return toy.trace(PROMPT, points=["*"])


def test_typing_runs_the_model_at_every_key(visit, toy):
    page = visit(PLACE)
    prompt = page.get_by_label("Prompt: the text that the model reads")
    prompt.focus()
    page.keyboard.press("End")
    page.keyboard.type(" troll")
    expect(page.locator(".note")).to_contain_text("4 tokens")
    best = toy.trace(PROMPT + " troll").next_tokens(1)[0]
    expect(page.locator(".rows .piece").first).to_have_text(best.text)
    visit.faults.clear()  # the toy does not know the beginnings of words, and the browser notes what is refused


def test_a_word_that_the_model_does_not_know_is_told_and_forgiven(visit):
    page = visit(PLACE)
    prompt = page.get_by_label("Prompt: the text that the model reads")
    prompt.fill("<BOS> unheard")
    expect(page.get_by_role("alert")).to_contain_text("unheard")
    visit.faults.clear()  # the browser notes the refused request itself
    prompt.fill("<BOS> troll")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_prompt_that_is_too_long_is_told(visit):
    page = visit(f"m=toy&p={quote('<BOS>' + ' troll' * 50)}")
    expect(page.get_by_role("alert")).to_contain_text("takes 40")
    visit.faults.clear()


def test_how_much_too_long_a_prompt_is_can_be_seen(visit):
    page = visit(f"m=toy&p={quote('<BOS>' + ' troll' * 79)}")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("The text is too long. The prompt has 80 tokens")
    assert alert.locator(".measure i").evaluate("bar => bar.style.width") == "50%"
    visit.faults.clear()


def test_an_empty_prompt_says_what_to_do(visit):
    page = visit(PLACE)
    page.get_by_label("Prompt: the text that the model reads").fill("")
    expect(page.get_by_text("Type a text above")).to_be_visible()
    page.get_by_role("button", name="<BOS> troll smashes").click()
    expect(page.locator(".note")).to_contain_text("3 tokens")


def test_temperature_and_filters_resample_the_stored_logits(visit, trace):
    page = visit(PLACE)
    runs: list[str] = []
    page.on("request", lambda request: runs.append(request.url) if request.url.endswith("/api/run") else None)
    for settings in (
        {"temperature": 1.5},
        {"temperature": 0.5},
        {"temperature": 0.5, "top_p": 0.9},
        {"temperature": 0},
    ):
        slide(page, "temperature", settings["temperature"])
        slide(page, "top-p", settings.get("top_p", 1))
        expected = distribution(trace.last_logits, Sampling(**settings))[-1].probabilities
        told = percents(page)
        for token, probability in enumerate(expected):
            assert told[_piece(trace, token)] == shown(probability)
    assert runs == []  # the model has not run again


def _piece(trace, token: int) -> str:
    return next(candidate.text for candidate in trace.next_tokens(10) if candidate.id == token)


def test_the_cut_line_stands_below_the_last_token_that_is_kept(visit):
    page = visit(f"{PLACE}&tp=0.9")
    items = page.locator(".rows > li")
    kept = [items.nth(i).inner_text().split("\n")[0] for i in range(3)]
    assert kept == ["potion", "fire", "glowing"]
    expect(items.nth(3)).to_contain_text("cut by top-p")


@pytest.mark.parametrize("seed", [0, 3])
def test_stepping_draws_the_tokens_that_generate_draws(visit, toy, seed):
    page = visit(f"{PLACE}&s={seed}")
    expected = toy.generate(PROMPT, max_tokens=3, seed=seed)
    for count in range(1, 4):
        page.get_by_role("button", name="Step", exact=True).click()
        expect(page.locator(".note")).to_contain_text(f"{3 + count} tokens")
    text = page.get_by_label("Prompt: the text that the model reads").input_value()
    assert text == toy.tokenizer.decode([0, 5, 6, *expected.tokens])
    page.get_by_role("button", name="Rewind").click()
    expect(page.get_by_label("Prompt: the text that the model reads")).to_have_value(PROMPT)


def test_running_goes_on_until_it_is_stopped(visit):
    page = visit(f"{PLACE}&T=0")
    page.get_by_role("button", name="Run", exact=True).click()
    expect(page.locator(".note")).to_contain_text(re.compile("([7-9]|[1-3][0-9]) tokens"))
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_visible()
