"""The page's numbers are those of a trace of the same prompt, with the arithmetic that made them."""

import re

import numpy as np
import pytest
from page_reading import PLACE, PROMPT, number
from playwright.sync_api import expect

from cutaway.points import parse_point


@pytest.fixture(scope="module")
def trace(toy):
    return toy.trace(PROMPT, points=["*"])


@pytest.mark.parametrize(
    ("point", "head", "cell"),
    [
        ("embed.tokens", 0, (1, 4)),
        ("embed.out", 0, (2, 5)),
        ("layers.0.resid_pre", 0, (0, 1)),
        ("layers.1.attn.norm", 0, (2, 0)),
        ("layers.1.attn.q", 1, (2, 1)),
        ("layers.1.attn.k", 0, (1, 2)),
        ("layers.2.attn.v", 1, (0, 0)),
        ("layers.1.attn.dots", 1, (2, 1)),
        ("layers.1.attn.scores", 0, (1, 1)),
        ("layers.0.attn.masked", 1, (2, 0)),
        ("layers.2.attn.pattern", 1, (2, 1)),
        ("layers.2.attn.z", 0, (2, 2)),
        ("layers.0.attn.head_out", 1, (1, 3)),
        ("layers.0.attn.out", 0, (1, 5)),
        ("layers.0.resid_mid", 0, (2, 3)),
        ("layers.1.mlp.up", 0, (2, 20)),
        ("layers.1.mlp.act", 0, (0, 23)),
        ("layers.2.mlp.out", 0, (1, 1)),
        ("layers.2.resid_post", 0, (2, 2)),
        ("logits", 0, (2, 4)),
    ],
)
def test_a_cell_shows_the_number_of_the_trace(visit, trace, point, head, cell):
    at = parse_point(point, trace.spec)
    layer = "" if at.layer is None else f"&l={at.layer}"
    page = visit(f"{PLACE}{layer}&h={head}&at={point}&c={cell[0]}.{cell[1]}")
    value = trace[point]
    index = cell if value.ndim == 2 else (head, *cell)
    found = float(page.locator(".cell .value").get_attribute("data-value"))
    assert found == pytest.approx(float(value[index]), rel=1e-12)


def test_hovering_a_number_tells_how_it_was_made(visit, trace):
    page = visit(f"{PLACE}&l=1&h=0&at=layers.1.attn.dots")
    numbers = page.get_by_role("application", name=re.compile("Numbers of layers.1.attn.dots"))
    numbers.scroll_into_view_if_needed()
    box = numbers.bounding_box()
    page.mouse.move(box["x"] + 104 + 20, box["y"] + 22 + 20)
    expect(page.locator(".cell .value")).to_be_visible()
    assert float(page.locator(".cell .value").get_attribute("data-value")) == pytest.approx(
        trace["layers.1.attn.dots"][0, 0, 0]
    )
    total = page.locator(".cell tfoot td").inner_text()
    assert float(total.replace("−", "-")) == pytest.approx(trace["layers.1.attn.dots"][0, 0, 0], abs=1e-3)


def test_a_dot_product_is_drawn_as_two_rows_and_the_sum_that_grows_along_them(visit, trace):
    page = visit(f"{PLACE}&l=1&h=0&at=layers.1.attn.dots&c=2.1")
    strip = page.get_by_role("img", name=re.compile("3 products of query of “drinks”"))
    expect(strip).to_be_visible()
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 10)
    q, k = trace["layers.1.attn.q"][0, 2], trace["layers.1.attn.k"][0, 1]
    told = page.get_by_role("tooltip").inner_text()
    assert number(told.splitlines()[-1].split(": ")[1]) == pytest.approx(float(q[:2] @ k[:2]), rel=1e-3)


def test_a_matrix_zooms_to_its_numbers(visit):
    page = visit(f"{PLACE}&l=1&at=layers.1.mlp.up")
    page.get_by_role("button", name="numbers").click()
    expect(page.get_by_role("button", name="Zoom in")).to_be_disabled()
    page.get_by_role("button", name="Zoom out").click()
    expect(page.get_by_role("button", name="Zoom in")).to_be_enabled()


def test_a_matrix_fills_in_by_itself_from_nothing_to_the_whole(visit):
    page = visit(f"{PLACE}&l=1&at=layers.1.attn.dots")
    page.get_by_role("button", name="fill it in").click()
    filling = page.get_by_role("group", name="Filling it in")
    for sentence in ("Nothing yet: 9 numbers", "One number: row 2, column 0", "One row", "The whole"):
        expect(filling).to_contain_text(sentence)
    expect(page.get_by_role("button", name="Play it again")).to_be_visible()
    page.get_by_role("button", name="show all").click()
    expect(filling).to_have_count(0)


def test_each_stage_of_filling_in_can_be_looked_at_and_less_motion_means_by_hand(visit, trace):
    page = visit(f"{PLACE}&l=1&at=layers.1.attn.dots", reduced_motion="reduce")
    page.get_by_role("button", name="fill it in").click()
    filling = page.get_by_role("group", name="Filling it in")
    expect(filling).to_contain_text("Nothing yet")
    expect(page.locator(".cell .value")).to_have_count(0)
    filling.get_by_role("button", name="one number").click()
    expect(page.locator(".cell .value")).to_be_visible()
    value = float(page.locator(".cell .value").get_attribute("data-value"))
    assert value == pytest.approx(float(trace["layers.1.attn.dots"][0, 2, 0]))
    page.wait_for_timeout(800)
    expect(filling).to_contain_text("One number")  # nothing moves by itself
    filling.get_by_role("button", name="the whole").click()
    expect(filling).to_contain_text("and 1 more heads beside this one")


def test_every_box_of_the_flow_opens(visit):
    page = visit(f"{PLACE}&l=1")
    boxes = page.locator(".flow > button[aria-label*='layers.1.']")
    assert boxes.count() >= 14
    for i in range(boxes.count()):
        box = boxes.nth(i)
        address = re.search(r"layers\.1\.[\w.]+", box.get_attribute("aria-label"))[0]
        box.focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name=address, exact=True)).to_be_visible()
        expect(page.locator(".inspector .problem")).to_have_count(0)


def test_the_inspector_leads_to_where_a_tensor_comes_from_and_goes(visit):
    page = visit(f"{PLACE}&l=1&at=layers.1.attn.pattern")
    page.get_by_role("button", name="layers.1.attn.masked", exact=True).click()
    page.get_by_role("button", name="layers.1.attn.scores", exact=True).click()
    expect(page.get_by_role("heading", name="layers.1.attn.scores")).to_be_visible()
    expect(page.locator(".inspector .formula .katex").first).to_be_visible()
    page.get_by_text("In Python, and as a file").click()
    expect(page.locator("pre")).to_contain_text('trace["layers.1.attn.scores"]')


def test_files_of_a_tensor_and_pictures_of_a_view_can_be_had(visit, trace):
    page = visit(f"{PLACE}&l=1&at=layers.1.attn.q")
    page.get_by_text("In Python, and as a file").click()
    with page.expect_download() as held:
        page.get_by_role("link", name="CSV").click()
    text = held.value.path().read_text()
    numbers = [[float(cell) for cell in line.split(",")[3:]] for line in text.splitlines()[1:]]
    np.testing.assert_allclose(np.ravel(numbers), trace["layers.1.attn.q"].ravel(), rtol=1e-12)
    with page.expect_download() as held:
        page.get_by_role("link", name="safetensors").click()
    assert held.value.suggested_filename == "layers.1.attn.q.safetensors"
    for button in (
        page.locator(".inspector").get_by_role("button", name="PNG"),
        page.locator(".middle").get_by_role("button", name="PNG"),
    ):
        with page.expect_download() as held:
            button.click()
        assert held.value.path().read_bytes().startswith(b"\x89PNG")
