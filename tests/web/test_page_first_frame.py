"""What is drawn first of a new text: the flow, from one answer; the rest of the page follows, and says the same."""

import re
from urllib.parse import quote

import numpy as np
import pytest
from playwright.sync_api import Page, expect

TEXT, LONGER = "<BOS> dragon drinks", "<BOS> dragon drinks potion wizard"
FIELD = "Prompt: the text that the model reads"

# Notes what is asked of the server and which canvases are drawn, in order; `then` happens as the flow is first drawn.
TYPE = """([label, text, then]) => {
  window.noted = [];
  const ask = window.fetch;
  window.fetch = (...what) => {
    window.noted.push(String(what[0]).split("/").at(-1).split("?")[0]);
    return ask(...what);
  };
  const type = (value) => {
    const field = document.querySelector(`textarea[aria-label="${label}"]`);
    field.value = value;
    field.dispatchEvent(new InputEvent("input", {bubbles: true}));
  };
  const clear = CanvasRenderingContext2D.prototype.clearRect;
  CanvasRenderingContext2D.prototype.clearRect = function (...at) {
    const where = ["flow", "stream", "inspector"].find((name) => this.canvas.closest(`.${name}`));
    if (where === "flow" && then !== null && !window.noted.includes("flow")) queueMicrotask(() => type(then));
    if (where) window.noted.push(where);
    return clear.apply(this, at);
  };
  type(text);
}"""


def type_text(page: Page, text: str, then: str | None = None) -> None:
    page.evaluate(TYPE, [FIELD, text, then])


def says(page: Page, toy, text: str) -> None:
    """The likeliest tokens are those of this text, and so is their number."""
    trace = toy.trace(text, points=[])
    best = trace.next_tokens(1)[0]
    expect(page.locator(".note")).to_contain_text(f"{len(trace.prompt.ids)} tokens")
    expect(page.locator(".rows .piece").first).to_have_text(best.text)
    expect(page.locator(".rows .row").first).to_have_attribute("title", re.compile(f"^id {best.id},"))
    expect(page.locator(".stream-panel")).to_have_attribute("aria-busy", "false")


def test_the_flow_of_a_new_text_is_drawn_from_one_answer_before_all_else(visit, toy):
    page = visit(f"m=toy&p={quote(TEXT)}")
    page.wait_for_load_state("networkidle")
    type_text(page, LONGER)
    says(page, toy, LONGER)
    noted = page.evaluate("noted")
    assert noted[:2] == ["run", "flow"]
    assert noted.count("flow") == 1 and {"stream", "inspector", "tensors"} <= set(noted[2:])


def test_a_text_typed_while_the_rest_is_still_to_be_drawn_is_what_stands_there_in_the_end(visit, toy):
    page = visit(f"m=toy&p={quote(TEXT)}")
    page.wait_for_load_state("networkidle")
    type_text(page, LONGER, then="<BOS> troll smashes fire")
    says(page, toy, "<BOS> troll smashes fire")
    assert page.evaluate("noted").count("run") == 2


def test_a_head_that_is_turned_to_while_a_text_runs_is_the_head_that_is_drawn(visit):
    drawn = "document.querySelector('.flow canvas').toDataURL()"
    wanted = visit(f"m=toy&p={quote(LONGER)}&h=1")
    wanted.wait_for_load_state("networkidle")
    picture = wanted.evaluate(drawn)
    page = visit(f"m=toy&p={quote(TEXT)}&h=0")
    page.wait_for_load_state("networkidle")
    page.evaluate(
        """([label, text]) => {
          const field = document.querySelector(`textarea[aria-label="${label}"]`);
          field.value = text;
          field.dispatchEvent(new InputEvent("input", {bubbles: true}));
          document.querySelector('[aria-label="Next head"]').click();
        }""",
        [FIELD, LONGER],
    )
    page.wait_for_function(f"picture => {drawn} === picture", arg=picture)


def test_the_stream_tells_the_medians_of_a_text_and_the_lengths_of_a_chosen_token(visit, toy):
    page = visit(f"m=toy&p={quote(LONGER)}&l=1")
    trace = toy.trace(LONGER, points=["layers.1.attn.out", "layers.1.mlp.out"])
    lengths = {
        name: np.linalg.norm(trace[f"layers.1.{name}.out"], axis=-1).astype(np.float64) for name in ("attn", "mlp")
    }
    stream = page.get_by_role("slider", name=re.compile("residual stream"))

    def told() -> list[float]:
        words = stream.get_attribute("aria-valuetext") or ""
        return [float(word) for word in re.findall(r"(?:attention adds|feed-forward) ([\d.]+)", words)]

    assert told() == pytest.approx([np.median(lengths["attn"]), np.median(lengths["mlp"])], rel=2e-3)
    page.locator(".lanes button").nth(3).click()
    expect(page.locator(".prompt .selected")).to_have_text(re.compile("potion"))
    assert told() == pytest.approx([lengths["attn"][3], lengths["mlp"][3]], rel=2e-3)
