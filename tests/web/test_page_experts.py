"""A mixture of experts in the page: who scores, who is chosen, what each adds, and what follows without one."""

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from playwright.sync_api import Page, expect

import cutaway

TEXT = "the cat sat on a mat because it was tired"


@pytest.fixture(scope="module")
def address(serving, mixture) -> Iterator[str]:
    with serving(mixture) as at:
        yield at


@pytest.fixture(scope="module")
def model(mixture):
    return cutaway.load(mixture)


@pytest.fixture(scope="module")
def trace(model):
    return model.trace(TEXT, points=["*"])


@pytest.fixture
def place(mixture) -> str:
    return f"m={Path(mixture).name}&p={quote(TEXT)}&l=1"


def told(page: Page, row: int) -> list[str]:
    return (
        page.get_by_role("table", name="What the chosen experts add")
        .locator("tbody tr")
        .nth(row)
        .locator("th, td")
        .all_inner_texts()
    )


def number(text: str) -> float:
    return float(text.replace("−", "-").removesuffix(" %"))


@pytest.mark.parametrize("token", [0, 5])
def test_the_chosen_experts_are_told_with_score_gate_and_what_they_add(visit, place, trace, token):
    page = visit(f"{place}&t={token}")
    chosen, gates = trace["layers.1.moe.chosen"][token], trace["layers.1.moe.gates"][token]
    given, whole = trace["layers.1.moe.expert_out"][token], trace["layers.1.mlp.raw"][token]
    expect(page.get_by_role("heading", name=f"Who works on {TEXT.split()[token]}")).to_be_visible()
    expect(page.get_by_role("table", name="What the chosen experts add")).not_to_contain_text("…")
    for row, (expert, gate, out) in enumerate(zip(chosen, gates, given, strict=True)):
        name, score, weight, length, share, _ = told(page, row)
        assert int(name) == expert
        assert number(score) == pytest.approx(trace["layers.1.moe.scores"][token, expert], rel=1e-2)
        assert number(weight) == pytest.approx(gate, rel=1e-2)
        assert number(length) == pytest.approx(np.linalg.norm(gate * out), rel=1e-2)
        assert number(share) == pytest.approx(100 * (gate * out) @ whole / (whole @ whole), rel=6e-2, abs=0.1)


def test_an_expert_tells_which_tokens_come_to_it(visit, place, trace):
    page = visit(place)
    expert = int(trace["layers.1.moe.chosen"][-1, 0])
    page.get_by_role("group", name="The router's scores of all experts").get_by_role("button").nth(expert).click()
    rows, _ = np.nonzero(trace["layers.1.moe.chosen"] == expert)
    chips = page.locator(".users .chip")
    expect(chips).to_have_count(len(rows))
    assert [chip.split()[0] for chip in chips.all_inner_texts()] == [TEXT.split()[row] for row in rows]
    assert f"x={expert}" in page.url
    chips.first.click()
    expect(page.get_by_role("heading", name=f"Who works on {TEXT.split()[rows[0]]}")).to_be_visible()


def test_an_expert_is_switched_off_from_its_drawing_and_its_tokens_go_to_others(visit, place, model, trace):
    page = visit(place)
    experts = page.get_by_role("button", name="experts, layers.1.moe.expert_out")
    box = experts.bounding_box()
    expert = int(trace["layers.1.moe.chosen"][-1, 0])
    height = (box["height"] - 34) / 8
    experts.click(position={"x": box["width"] / 2, "y": 30 + (expert + 0.5) * height})
    expect(page.get_by_role("heading", name=f"Expert {expert}", exact=True)).to_be_visible()
    page.get_by_role("button", name=f"expert {expert} off", exact=True).click()
    expect(page.locator(".scar")).to_contain_text(f"layer 1, expert {expert} off")
    expect(page.locator(".users")).to_contain_text("Switched off")
    edited = model.trace(TEXT, points=["*"], edits=[{"drop": "layers.1.moe.scores", "experts": [expert]}])
    for row, chosen in enumerate(edited["layers.1.moe.chosen"][-1]):
        names = page.get_by_role("table", name="What the chosen experts add").locator("tbody th")
        expect(names.nth(row)).to_have_text(str(chosen))
    best = edited.next_tokens(1)[0]
    expect(page.locator(".rows .piece").first).to_have_text(best.text)


@pytest.mark.parametrize(
    ("point", "at", "index"),
    [
        ("moe.scores", "3.6", (3, 6)),
        ("moe.gates", "3.1", (3, 1)),
        ("moe.expert_out", "4.7", (4, 0, 7)),
        ("mlp.raw", "9.2", (9, 2)),
    ],
)
def test_a_cell_of_a_mixture_tells_its_number_and_its_arithmetic(visit, place, trace, point, at, index):
    page = visit(f"{place}&at=layers.1.{point}&c={at}")
    value = page.locator(".cell .value")
    expect(value).to_be_visible()
    assert float(value.get_attribute("data-value")) == pytest.approx(float(trace[f"layers.1.{point}"][index]), rel=1e-6)
    expect(page.locator(".cell .step, .cell tfoot").first).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_axe_finds_no_serious_fault_in_a_mixture(visit, place, scheme, width):
    page = visit(f"{place}&t=2&x=3&at=layers.1.moe.expert_out&c=2.1", width=width, color_scheme=scheme, bypass_csp=True)
    expect(page.locator(".cell .value")).to_be_visible()
    page.evaluate((resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    assert [fault["help"] for fault in found["violations"] if fault["impact"] in ("serious", "critical")] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
