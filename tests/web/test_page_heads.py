"""All heads of the page in one picture, and one of them step by step."""

import json
import re
from urllib.parse import quote

import pytest
from page_reading import PLACE, PROMPT, has_ink, number
from playwright.sync_api import Locator, Page, expect


@pytest.fixture(scope="module")
def trace(toy):
    return toy.trace(PROMPT, points=["*"])


def test_all_heads_stand_in_one_picture_and_can_be_sorted_and_chosen(visit):
    page = visit(f"{PLACE}&v=heads")
    picture = page.locator(".picture")
    expect(picture).to_have_attribute("data-received", "6")
    assert has_ink(page, ".picture canvas")
    for name in ("previous token", "first token", "itself", "induction", "most decided", "by layer"):
        page.get_by_role("button", name=name, exact=True).click()
        expect(picture).to_have_attribute("aria-label", re.compile(name))
    picture.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("heading", name="Layer 1, head 1")).to_be_visible()


def test_a_token_shows_where_it_looks_and_who_looks_at_it(visit, trace):
    page = visit(f"{PLACE}&v=heads&l=2&h=1")
    words = page.get_by_role("listbox").get_by_role("option")
    pattern = trace["layers.2.attn.pattern"][1]
    words.nth(1).click()
    for way, weights in (("where it looks", pattern[1]), ("who looks at it", pattern[:, 1])):
        page.get_by_role("button", name=way).click()
        for i in (0, 2):
            words.nth(i).hover()
            told = page.locator(".looked").inner_text().split(": ")[1]
            assert number(told) == pytest.approx(weights[i], rel=1e-3, abs=1e-9)
    page.get_by_label("Find a token").fill("dra")
    expect(page.locator(".text .found")).to_have_count(1)


STEPS = ("attn.dots", "attn.scores", "attn.masked", "attn.pattern", "attn.z", "attn.head_out")


def step(page: Page, point: str) -> Locator:
    return page.get_by_role("button", name=re.compile(rf"open {re.escape(point)} of this head"))


def test_one_head_is_shown_in_six_steps_with_their_shapes(visit, trace):
    page = visit(f"{PLACE}&v=heads&l=1&h=1")
    steps = page.get_by_role("list", name="The steps of this head").get_by_role("button")
    expect(steps).to_have_count(6)
    for i, point in enumerate(STEPS):
        rows, columns = trace[f"layers.1.{point}"].shape[1:]
        expect(steps.nth(i)).to_have_accessible_name(re.compile(rf"open {point} of this head, {rows} by {columns}$"))
        expect(steps.nth(i)).to_contain_text(f"{rows} × {columns}")
    for i in range(6):
        assert has_ink(page, f".steps li:nth-child({i + 1}) canvas")


@pytest.mark.parametrize("point", STEPS)
def test_a_cell_of_a_step_opens_with_its_arithmetic(visit, trace, point):
    page = visit(f"{PLACE}&v=heads&l=2&h=1")
    value = trace[f"layers.2.{point}"][1]
    canvas = step(page, point).locator("canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    row, column = 2, value.shape[1] - 1 if value.shape[1] > 3 else 1
    canvas.click(
        position={"x": (column + 0.5) * box["width"] / value.shape[1], "y": (row + 0.5) * box["height"] / len(value)}
    )
    expect(page.get_by_role("heading", name=f"layers.2.{point}", exact=True)).to_be_visible()
    expect(page.locator(".cell .value")).to_be_visible()
    found = float(page.locator(".cell .value").get_attribute("data-value"))
    assert found == pytest.approx(float(value[row, column]), rel=1e-12)
    expect(page.locator(".cell .step, .cell tfoot").first).to_be_visible()
    expect(step(page, point)).to_have_attribute("aria-pressed", "true")


def test_a_step_is_reached_and_opened_with_keys(visit):
    page = visit(f"{PLACE}&v=heads&l=1&h=0")
    step(page, "attn.z").focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="layers.1.attn.head_out", exact=True)).to_be_visible()


@pytest.mark.parametrize(("edited", "changed"), [("layers.1.attn.z", STEPS[4:]), ("layers.0.mlp.out", STEPS)])
def test_a_step_that_an_edit_changed_has_the_original_below_it(visit, edited, changed):
    edit = {"zero": edited} | ({"heads": [1]} if edited.endswith("z") else {})
    page = visit(f"{PLACE}&v=heads&l=1&h=1&e={quote(json.dumps([edit]))}")
    expect(page.locator(".steps canvas.ghost")).to_have_count(len(changed))
    for point in STEPS:
        there = step(page, point)
        expect(there.locator("canvas.ghost")).to_have_count(int(point in changed))
        told = re.compile("the original stands below" if point in changed else r"by \d+$")
        expect(there).to_have_accessible_name(told)


def test_the_steps_are_there_whatever_was_looked_at_before(visit):
    page = visit(f"{PLACE}&l=1")
    page.get_by_role("tab", name="All heads").click()
    expect(step(page, "attn.head_out")).to_be_visible()
    page.keyboard.press("[")
    page.keyboard.press(".")
    expect(page.get_by_role("heading", name="Layer 0, head 1")).to_be_visible()
    expect(page.locator(".steps button")).to_have_count(6)


@pytest.mark.parametrize("width", [390, 1400])
def test_what_opens_out_of_sight_says_so_and_leads_there(visit, width):
    page = visit(f"{PLACE}&v=heads&l=1", width=width, height=600)
    below = page.get_by_role("button", name=re.compile("is open below"))
    expect(below).to_have_count(0)
    step(page, "attn.z").press("Enter")
    below.click()
    expect(page.get_by_role("heading", name="layers.1.attn.z", exact=True)).to_be_in_viewport()
    expect(below).to_have_count(0)
    assert page.evaluate("document.activeElement.getAttribute('role')") == "application"


def test_a_head_that_cannot_be_had_is_not_told_under_the_numbers_of_another(visit):
    page = visit(f"{PLACE}&v=heads&l=1&h=0")
    expect(page.locator(".one")).to_contain_text("%")
    page.route("**/api/**", lambda route: route.abort("connectionrefused"))
    page.get_by_role("button", name="Next head").click()
    expect(page.get_by_role("alert")).to_contain_text("does not answer")
    expect(page.get_by_role("heading", name="Layer 1, head 0")).to_be_visible()
    expect(page.locator(".one")).to_have_attribute("aria-busy", "true")
    step(page, "attn.pattern").locator("canvas").click()
    expect(page.locator(".cell .hint")).to_contain_text("does not answer")
    page.unroute("**/api/**")
    expect(page.get_by_role("heading", name="Layer 1, head 1")).to_be_visible(timeout=15_000)
    visit.faults.clear()
