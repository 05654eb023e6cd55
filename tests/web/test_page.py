"""The page in a real browser, on the toy: what it shows is what a trace of the same prompt holds."""

import json
import re
from urllib.parse import quote

import numpy as np
import pytest
from playwright.sync_api import Page, expect

from cutaway.generate import Sampling, distribution
from cutaway.points import parse_point

PROMPT = "<BOS> dragon drinks"
PLACE = f"m=toy&p={quote(PROMPT)}"


@pytest.fixture(scope="module")
def trace(toy):
    return toy.trace(PROMPT, points=["*"])


def percents(page: Page) -> dict[str, str]:
    rows = page.locator(".rows .row")
    return {
        row.locator(".piece").inner_text(): row.locator(".p").inner_text()
        for row in (rows.nth(i) for i in range(rows.count()))
    }


def shown(probability: float) -> str:
    if probability == 0:
        return "–"
    if probability < 0.0001:
        return "< 0.01 %"
    return f"{100 * probability:.{2 if probability < 0.1 else 1}f} %"


def slide(page: Page, name: str, value: float) -> None:
    page.get_by_label(name, exact=True).evaluate(
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input', {bubbles: true})); }",
        str(value),
    )


def _number(text: str) -> float:
    """A number as the page writes it."""
    powers = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻−", "0123456789--")
    return float(text.translate(powers).replace("×10", "e"))


def settled(page: Page) -> None:
    """Waits until no pass is under way."""
    expect(page.locator(".stream-panel")).to_have_attribute("aria-busy", "false")


def has_ink(page: Page, selector: str) -> bool:
    """Whether a canvas shows more than one colour."""
    return page.locator(selector).first.evaluate(
        """canvas => {
            const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            return new Set(new Uint32Array(pixels.buffer)).size > 5;
        }"""
    )


def test_the_page_opens_on_the_toy_and_draws_its_numbers(visit):
    page = visit()
    expect(page.get_by_label("Prompt: the text that the model reads")).to_have_value(PROMPT)
    expect(page.locator(".outcome")).to_be_visible()
    assert has_ink(page, ".flow canvas") and has_ink(page, ".stream canvas") and has_ink(page, ".inspector canvas")
    assert page.title() == "Cutaway"


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


def test_an_empty_prompt_says_what_to_do(visit):
    page = visit(PLACE)
    page.get_by_label("Prompt: the text that the model reads").fill("")
    expect(page.get_by_text("Type a text above")).to_be_visible()
    page.get_by_role("button", name="<BOS> troll smashes").click()
    expect(page.locator(".note")).to_contain_text("3 tokens")


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
            assert _number(told) == pytest.approx(weights[i], rel=1e-3, abs=1e-9)
    page.get_by_label("Find a token").fill("dra")
    expect(page.locator(".text .found")).to_have_count(1)


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


def test_an_edited_matrix_shows_the_original_and_the_difference(visit, toy, trace):
    edit = [{"zero": "layers.0.attn.z", "heads": [1]}]
    page = visit(f"{PLACE}&l=1&h=0&at=layers.1.attn.dots&c=2.1&e={quote(json.dumps(edit))}")
    edited = toy.trace(PROMPT, points=["*"], edits=edit)["layers.1.attn.dots"][0, 2, 1]
    original = trace["layers.1.attn.dots"][0, 2, 1]
    expect(page.locator(".cell .was")).to_be_visible()
    assert float(page.locator(".cell .value").get_attribute("data-value")) == pytest.approx(edited)
    assert _number(page.locator(".cell .was b").inner_text()) == pytest.approx(original, rel=1e-4)
    legend = page.locator(".inspector .legend")
    page.get_by_role("button", name="difference", exact=True).click()
    change = trace["layers.1.attn.dots"][0] - toy.trace(PROMPT, points=["*"], edits=edit)["layers.1.attn.dots"][0]
    expect(legend).to_contain_text(f"{np.abs(change).max():.2g}")
    page.get_by_role("button", name="original", exact=True).click()
    expect(legend).to_contain_text(f"{np.abs(trace['layers.1.attn.dots'][0]).max():.2g}")


def test_a_dot_product_is_drawn_as_two_rows_and_the_sum_that_grows_along_them(visit, trace):
    page = visit(f"{PLACE}&l=1&h=0&at=layers.1.attn.dots&c=2.1")
    strip = page.get_by_role("img", name=re.compile("3 products of query of “drinks”"))
    expect(strip).to_be_visible()
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 10)
    q, k = trace["layers.1.attn.q"][0, 2], trace["layers.1.attn.k"][0, 1]
    told = page.get_by_role("tooltip").inner_text()
    assert _number(told.splitlines()[-1].split(": ")[1]) == pytest.approx(float(q[:2] @ k[:2]), rel=1e-3)


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


def test_a_link_to_what_is_not_there_opens_what_is(visit):
    page = visit("m=nowhere&l=99&h=99&at=layers.77.nothing&c=9.9&t=400&e=[]")
    expect(page.locator(".stepper")).to_contain_text("layer 2 of 3")


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


def test_how_much_too_long_a_prompt_is_can_be_seen(visit):
    page = visit(f"m=toy&p={quote('<BOS>' + ' troll' * 79)}")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("The text is too long. The prompt has 80 tokens")
    assert alert.locator(".measure i").evaluate("bar => bar.style.width") == "50%"
    visit.faults.clear()
