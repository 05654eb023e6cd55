"""Changing a model in the page: what follows is what a trace with the same edit holds, with the original beside it."""

import json
from urllib.parse import quote

import numpy as np
import pytest
from page_reading import PLACE, PROMPT, number, percents, settled, shown
from playwright.sync_api import expect


@pytest.fixture(scope="module")
def trace(toy):
    return toy.trace(PROMPT, points=["*"])


def test_a_head_is_switched_off_and_on_again_with_the_original_beside_it(visit, toy):
    page = visit(f"{PLACE}&l=0&h=1")
    before = percents(page)
    page.get_by_role("button", name="head 1 off").click()
    chip = page.locator(".scar")
    expect(chip).to_contain_text("layer 0, head 1 off")
    edited = toy.trace(PROMPT, edits=[{"zero": "layers.0.attn.z", "heads": [1]}])
    best = edited.next_tokens(1)[0]
    expect(page.locator(".rows .piece").first).to_have_text(best.text)
    assert percents(page)[best.text] == shown(best.probability)
    expect(page.locator(".rows .bar u").first).to_be_attached()  # the original's bar
    page.get_by_role("button", name="continue both").click()
    plain = toy.generate(PROMPT, max_tokens=24, temperature=0).tokens
    expect(page.locator(".both dd").first).to_contain_text(" ".join(toy.piece(token) for token in plain[:5]))
    chip.get_by_role("button").click()
    expect(chip).to_have_count(0)
    settled(page)
    expect(page.locator(".rows .bar u")).to_have_count(0)
    assert percents(page) == before


@pytest.mark.parametrize("part", ["the mask", "the division by √d", "positions", "residual paths", "any norm"])
def test_the_model_runs_without_a_part_of_its_architecture(visit, toy, part):
    page = visit(PLACE)
    page.get_by_label("Run without a part of the architecture").select_option(label=part)
    expect(page.locator(".scar")).to_contain_text(f"without {part}")
    name = {"the mask": "mask", "the division by √d": "scale", "residual paths": "residuals", "any norm": "norms"}.get(
        part, part
    )
    best = toy.trace(PROMPT, edits=[{"without": name}]).next_tokens(1)[0]
    expect(page.locator(".rows .piece").first).to_have_text(best.text)


def test_an_edge_of_attention_is_cut_at_the_cell_that_is_pinned(visit, toy):
    page = visit(f"{PLACE}&l=1&h=0&at=layers.1.attn.pattern&c=2.1")
    page.get_by_role("button", name="cut 2 → 1").click()
    expect(page.locator(".scar")).to_contain_text("“drinks” no longer looks at “dragon”")
    expect(page.locator(".cell .value")).to_have_attribute("data-value", "0")


def test_an_edited_matrix_shows_the_original_and_the_difference(visit, toy, trace):
    edit = [{"zero": "layers.0.attn.z", "heads": [1]}]
    page = visit(f"{PLACE}&l=1&h=0&at=layers.1.attn.dots&c=2.1&e={quote(json.dumps(edit))}")
    edited = toy.trace(PROMPT, points=["*"], edits=edit)["layers.1.attn.dots"][0, 2, 1]
    original = trace["layers.1.attn.dots"][0, 2, 1]
    expect(page.locator(".cell .was")).to_be_visible()
    assert float(page.locator(".cell .value").get_attribute("data-value")) == pytest.approx(edited)
    assert number(page.locator(".cell .was b").inner_text()) == pytest.approx(original, rel=1e-4)
    legend = page.locator(".inspector .legend")
    page.get_by_role("button", name="difference", exact=True).click()
    change = trace["layers.1.attn.dots"][0] - toy.trace(PROMPT, points=["*"], edits=edit)["layers.1.attn.dots"][0]
    expect(legend).to_contain_text(f"{np.abs(change).max():.2g}")
    page.get_by_role("button", name="original", exact=True).click()
    expect(legend).to_contain_text(f"{np.abs(trace['layers.1.attn.dots'][0]).max():.2g}")
