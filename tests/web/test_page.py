"""The page in a real browser, on the toy: it opens, comes back to a place, and can be used by keys and on a phone."""

import json
import re
from urllib.parse import quote

import numpy as np
import pytest
from page_reading import PLACE, PROMPT, has_ink, percents, settled
from playwright.sync_api import expect


def test_the_page_opens_on_the_toy_and_draws_its_numbers(visit):
    page = visit()
    expect(page.get_by_label("Prompt: the text that the model reads")).to_have_value(PROMPT)
    expect(page.locator(".outcome")).to_be_visible()
    assert has_ink(page, ".flow canvas") and has_ink(page, ".stream canvas") and has_ink(page, ".inspector canvas")
    assert page.title() == "Cutaway"


def test_a_link_brings_back_the_very_same_place(visit):
    edits = quote(json.dumps([{"zero": "layers.1.attn.z", "heads": [0]}]))
    place = f"{PLACE}&l=1&h=1&at=layers.1.attn.pattern&c=2.1&t=1&T=0.7&k=5&tp=0.9&mp=0.1&s=4&e={edits}"
    page = visit(place)

    def state() -> list[str]:
        expect(page.locator(".cell .value")).to_be_visible()
        expect(page.locator(".scar")).to_be_visible()
        return [
            page.locator(selector).first.inner_text()
            for selector in (".rows", ".settings", ".cell .value", ".stepper", ".edits")
        ]

    before, url = state(), page.url
    page.get_by_role("button", name="Next layer").or_(page.get_by_title("Next layer (])")).first.click()
    page.get_by_role("tab", name="All heads").click()
    assert page.url != url
    page.goto("about:blank")
    page.goto(url)
    assert state() == before and page.url == url


def test_a_link_to_what_is_not_there_opens_what_is(visit):
    page = visit("m=nowhere&l=99&h=99&at=layers.77.nothing&c=9.9&t=400&e=[]")
    expect(page.locator(".stepper")).to_contain_text("layer 2 of 3")


def test_what_was_done_is_undone_and_done_again(visit):
    page = visit(f"{PLACE}&l=0&h=0")
    before = percents(page)
    page.get_by_role("button", name="head 0 off").click()
    settled(page)
    expect(page.locator(".scar")).to_have_count(1)
    page.get_by_role("button", name="Undo", exact=True).click()
    expect(page.locator(".scar")).to_have_count(0)
    settled(page)
    expect(page.locator(".rows .bar u")).to_have_count(0)
    assert percents(page) == before
    page.get_by_role("button", name="Redo").click()
    expect(page.locator(".scar")).to_have_count(1)


def test_the_whole_page_can_be_used_with_keys_alone(visit):
    page = visit(f"{PLACE}&l=0&h=0")
    page.keyboard.press("]")
    page.keyboard.press(".")
    expect(page.locator(".stepper")).to_contain_text("layer 1 of 3")
    expect(page.locator(".stepper")).to_contain_text("head 1 of 2")
    page.keyboard.press("2")
    expect(page.locator(".picture")).to_be_visible()
    page.keyboard.press("1")
    expect(page.locator(".flow")).to_be_visible()
    page.get_by_role("slider", name=re.compile("Layer")).focus()
    page.keyboard.press("End")
    expect(page.locator(".stepper")).to_contain_text("layer 2 of 3")
    page.locator(".flow").get_by_role("button", name=re.compile("^neurons, layers.2")).focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="layers.2.mlp.act")).to_be_visible()
    page.get_by_role("application", name=re.compile("Numbers of layers.2.mlp.act")).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.locator(".cell .value")).to_be_visible()
    assert "c=1.1" in page.url
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    expect(page.locator(".inspector")).to_have_count(0)
    page.keyboard.press("s")
    expect(page.locator(".note")).to_contain_text("4 tokens")
    page.keyboard.press("u")
    expect(page.locator(".note")).to_contain_text("3 tokens")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    page.keyboard.type(" troll")
    expect(page.locator(".note")).to_contain_text("4 tokens")
    visit.faults.clear()  # as above: the beginnings of the word were refused


@pytest.mark.parametrize("view", ["layer", "heads"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_at_the_width_of_a_phone_nothing_is_wider_than_it(visit, view, scheme):
    page = visit(
        f"{PLACE}&l=1&v={view}&at=layers.1.attn.pattern&c=2.1",
        width=360,
        height=740,
        color_scheme=scheme,
        has_touch=True,
    )
    expect(page.locator(".cell .value")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (np.mean([int(part) for part in re.findall(r"\d+", ground)]) < 128) == (scheme == "dark")


def test_a_server_that_has_gone_is_told_and_its_return_is_noticed(visit):
    page = visit(PLACE)
    page.route("**/api/**", lambda route: route.abort("connectionrefused"))
    page.get_by_label("Prompt: the text that the model reads").fill("<BOS> troll")
    expect(page.get_by_role("alert")).to_contain_text("does not answer")
    expect(page.get_by_role("button", name="Run it again")).to_be_enabled()
    expect(page.locator(".stale").first).to_be_visible()  # what is drawn is still the former text
    page.unroute("**/api/**")
    expect(page.get_by_role("alert")).to_have_count(0, timeout=15_000)
    expect(page.locator(".note")).to_contain_text("2 tokens")
    expect(page.locator(".stale")).to_have_count(0)
    visit.faults.clear()


def test_while_the_first_pass_runs_the_page_says_so(browser, address):
    page = browser.new_page()
    page.route("**/api/run", lambda route: None)
    page.goto(address)
    expect(page.get_by_text("The first pass is running")).to_be_visible()
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_before_its_program_has_come_the_page_says_that_it_opens(browser, address, scheme):
    page = browser.new_page(color_scheme=scheme)
    page.route("**/*.js", lambda route: None)
    page.goto(address, wait_until="commit")
    expect(page.get_by_role("status")).to_have_text("Cutaway is opening…")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (np.mean([int(part) for part in re.findall(r"\d+", ground)]) < 128) == (scheme == "dark")
    page.close()


@pytest.mark.parametrize("view", ["layer", "heads"])
def test_a_phone_zoomed_to_twice_the_size_still_needs_no_scrolling_sideways(visit, view):
    page = visit(f"{PLACE}&l=1&v={view}&at=layers.1.attn.head_out&c=2.1", width=195, height=420)
    expect(page.locator(".cell .value")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 195
