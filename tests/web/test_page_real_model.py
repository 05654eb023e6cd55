"""The page on a real model, and what a checker of accessibility finds in it. It may fetch the model."""

import re
from collections.abc import Iterator
from importlib import resources
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

import cutaway

pytestmark = pytest.mark.network

TEXT = "When Mary and John went to the store, John gave a drink to"
PLACE = f"m=smollm2-135m&p={quote(TEXT)}"


@pytest.fixture(scope="module")
def address(serving) -> Iterator[str]:
    with serving("smollm2-135m") as at:
        yield at


@pytest.fixture(scope="module")
def trace():
    return cutaway.load("smollm2-135m").trace(TEXT, points=["*"])


@pytest.fixture(scope="module")
def axe() -> str:
    return (resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("point", "head", "cell"),
    [
        ("embed.tokens", 0, (3, 100)),
        ("layers.12.attn.q", 4, (9, 63)),
        ("layers.12.attn.q_rot", 4, (9, 33)),
        ("layers.12.attn.dots", 8, (13, 2)),
        ("layers.29.attn.pattern", 3, (13, 1)),
        ("layers.5.attn.z", 2, (7, 11)),
        ("layers.7.mlp.act", 0, (4, 1500)),
        ("layers.29.resid_post", 0, (13, 575)),
        ("logits", 0, (13, 17321)),
    ],
)
def test_a_cell_shows_the_number_of_the_trace(visit, trace, point, head, cell):
    layer = re.match(r"layers\.(\d+)\.", point)
    page = visit(f"{PLACE}{f'&l={layer[1]}' if layer else ''}&h={head}&at={point}&c={cell[0]}.{cell[1]}")
    expect(page.locator(".cell .value")).to_be_visible(timeout=120_000)
    value = trace[point]
    found = float(page.locator(".cell .value").get_attribute("data-value"))
    assert found == float(value[cell if value.ndim == 2 else (head, *cell)])


def test_the_likeliest_tokens_are_those_of_the_trace(visit, trace):
    page = visit(PLACE)
    expect(page.locator(".rows .piece").first).to_have_text("·Mary", timeout=120_000)
    pieces = page.locator(".rows .piece")
    assert [pieces.nth(i).inner_text().replace("·", " ") for i in range(12)] == [t.text for t in trace.next_tokens(12)]


def test_the_atlas_holds_all_270_heads(visit):
    page = visit(f"{PLACE}&v=heads")
    expect(page.locator(".picture")).to_have_attribute("data-received", "270", timeout=120_000)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["layer", "heads"])
@pytest.mark.parametrize("width", [390, 1440])
def test_axe_finds_no_serious_fault(visit, axe, view, scheme, width):
    page = visit(
        f"{PLACE}&v={view}&l=3&h=2&t=2&at=layers.3.attn.pattern&c=5.2&tp=0.9&e=%5B%7B%22zero%22%3A%22layers.3.attn.out%22%7D%5D",
        width=width,
        color_scheme=scheme,
        bypass_csp=True,
    )
    expect(page.locator(".cell .value")).to_be_visible(timeout=120_000)
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    serious = [
        f"{fault['id']}: {fault['help']}: {node['html'][:200]}"
        for fault in found["violations"]
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]
    assert serious == []
