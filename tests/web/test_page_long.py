"""A long prompt stays light: only what is in sight stands in the page, and only pooled tensors are fetched."""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, Request, expect

import cutaway
from cutaway.engines.cpu.engine import CpuEngine
from random_models import LLAMA, random_model

NAME = "small-llama"
TOKENS = 2000
MOST_ELEMENTS = 1500
MOST_NUMBERS = 500_000  # of one tensor that is fetched; whole, a pattern would have four million
FIELD = "Prompt: the text that the model reads"


@pytest.fixture(scope="module")
def address(serving, toy) -> Iterator[str]:
    """A server with a small model of rotary positions, which reads the toy's words and any number of them."""
    load = cutaway.model.load
    model = random_model(replace(LLAMA, vocab_size=toy.spec.vocab_size), 0, CpuEngine(), toy.tokenizer, "float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cutaway.model.load", lambda source, **how: model if source == NAME else load(source, **how))
        with serving(NAME) as at:
            yield at


@pytest.fixture(scope="module")
def text() -> str:
    random.seed(0)
    words = ["dragon", "drinks", "potion", "wizard", "mixes", "glowing", "troll", "smashes"]
    return " ".join(["<BOS>", *random.choices(words, k=TOKENS - 1)])


@pytest.fixture
def page(visit, text) -> Page:
    opened = visit(f"m={NAME}&p={quote(text)}")
    expect(opened.locator(".note")).to_contain_text(f"{TOKENS} tokens")
    return opened


def elements(page: Page) -> int:
    return int(page.evaluate("document.querySelectorAll('*').length"))


def test_only_the_tokens_in_sight_stand_in_the_page(page, text):
    assert elements(page) < MOST_ELEMENTS
    marks = page.locator(".prompt [data-token]")
    expect(marks.first).to_have_text("<BOS>")
    assert page.locator(".prompt .text").inner_text().strip("\u200b\n ") == text
    page.locator(".prompt.panel").evaluate("panel => panel.scrollTo(0, panel.scrollHeight)")
    expect(page.locator(f".prompt [data-token='{TOKENS - 1}']")).to_be_visible()
    assert elements(page) < MOST_ELEMENTS


def test_the_list_of_a_heads_tokens_is_as_light_and_every_token_can_be_reached(page):
    page.get_by_role("tab", name="All heads").click()
    heads = LLAMA.n_layers * LLAMA.layers[0].attention.n_heads
    expect(page.locator(f".picture[data-received='{heads}']")).to_be_visible()  # it pushes the list down as it comes
    options = page.get_by_role("listbox", name="The text").get_by_role("option")
    expect(options.first).to_be_visible()
    assert elements(page) < MOST_ELEMENTS and options.count() < TOKENS / 2
    page.get_by_label("Find a token").fill("smashes")
    chosen = page.locator(".words [aria-selected='true']")
    for _ in range(3):
        page.get_by_label("Find a token").press("Enter")
        expect(chosen).to_have_text("smashes")
        expect(chosen).to_be_in_viewport()
    chosen.focus()
    before = int(chosen.get_attribute("data-at") or 0)
    page.keyboard.press("ArrowRight")
    expect(page.locator(f".words [data-at='{before + 1}']")).to_be_focused()
    page.locator(".words .text").evaluate("list => list.scrollTo(0, list.scrollHeight)")
    expect(page.locator(f".words [data-at='{TOKENS - 1}']")).to_be_visible()
    assert elements(page) < MOST_ELEMENTS


def test_only_pooled_tensors_are_fetched(page):
    slices: list[dict] = []

    def asked(request: Request) -> None:
        if request.method == "POST":
            slices.extend(json.loads(request.post_data or "{}").get("slices", []))

    page.on("request", asked)
    page.get_by_label("Next layer").click()
    expect(page.locator(".stepper b").first).to_have_text("1")
    page.get_by_label("Next head").click()
    page.get_by_role("button", name="Step", exact=True).click()
    expect(page.locator(".note")).to_contain_text(f"{TOKENS + 1} tokens")
    page.wait_for_load_state("networkidle")
    assert slices
    for one in slices:
        assert one.get("most_rows", TOKENS) * one.get("most_columns", 2) <= MOST_NUMBERS, one
        if "attn.pattern" in one["point"]:
            assert "head" in one and one["most_rows"] < TOKENS / 2


def test_a_step_goes_on_from_the_run_that_is_shown(page):
    asked: list[dict] = []
    page.on(
        "request",
        lambda request: (
            asked.append(json.loads(request.post_data or "{}")) if request.url.endswith("/api/run") else None
        ),
    )
    for count in (1, 2):
        page.get_by_role("button", name="Step", exact=True).click()
        expect(page.locator(".note")).to_contain_text(f"{TOKENS + count} tokens")
    first, second = asked
    assert first["after"] and second["after"] and first["after"] != second["after"]


def test_a_step_with_an_edit_goes_on_from_both_runs_that_are_shown(page):
    asked: list[dict] = []
    page.on(
        "request",
        lambda request: (
            asked.append(json.loads(request.post_data or "{}")) if request.url.endswith("/api/run") else None
        ),
    )
    page.get_by_role("button", name="head 0 off").click()
    expect(page.locator(".edits .scar")).to_be_visible()
    expect(page.locator(".stream-panel")).to_have_attribute("aria-busy", "false")
    for count in (1, 2):
        page.get_by_role("button", name="Step", exact=True).click()
        expect(page.locator(".note")).to_contain_text(f"{TOKENS + count} tokens")
        expect(page.locator(".stream-panel")).to_have_attribute("aria-busy", "false")
    edited, plain = ([one.get("after") for one in asked if bool(one.get("edits")) is has] for has in (True, False))
    assert edited[0] is None and None not in (*edited[1:], *plain)
    assert len(edited) == len(plain) == 3 and len({*edited, *plain}) >= 5


def test_a_page_that_closes_lets_go_of_its_runs(visit, address):
    place = "m=toy&p=" + quote("<BOS> troll")
    page, other = visit(place), visit(place)
    runs = "performance.getEntriesByType('resource').map(e => e.name.match(/api.runs.[^/]*/)?.[0]).filter(Boolean)"
    (mine,), (others,) = (set(one.evaluate(runs)) for one in (page, other))
    page.close(run_before_unload=True)

    def held(run: str) -> bool:
        return bool(other.evaluate("async (run) => (await fetch(run + '/norms')).ok", run))

    until = time.monotonic() + 20
    while held(mine) and time.monotonic() < until:
        time.sleep(0.1)
    assert mine != others and not held(mine) and held(others)
    visit.faults.clear()  # the browser notes the request for what is gone
