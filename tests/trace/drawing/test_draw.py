"""What the terminal shows: real numbers, in lines that fit, masked cells hatched."""

import io
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

import cutaway
from cutaway.points import parse_point
from cutaway.spec import AttentionSpec, FeedForwardSpec, LayerSpec, ModelSpec, NormSpec
from cutaway.trace.capture.plan import overview_points
from cutaway.trace.drawing.chips import draw_chips
from cutaway.trace.drawing.heatmap import draw_head
from cutaway.trace.drawing.overview import draw_trace
from cutaway.trace.drawing.page import Page, bar, fit, number, size, weight_style
from cutaway.trace.drawing.tensor import draw_point
from random_models import random_ids, random_model, specs


@pytest.fixture(scope="module")
def model():
    return cutaway.load("toy")


def drawn(draw, *arguments, width=None, **keywords):
    """The letters that a drawing leaves on a terminal of this width; on a pipe where there is none."""
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=width is not None, color_system="truecolor")
    draw(*arguments, console=console, **keywords)
    return re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())


@pytest.mark.parametrize("width", [40, 80, 120, 200])
@pytest.mark.parametrize("length", [1, 2, 20, 128])
def test_lines_fit_whatever_the_prompt_and_the_width(model, width, length):
    ids = np.random.default_rng(0).integers(0, 10, length)
    trace = model.trace(ids, points=overview_points(model.spec, 2))
    pages = [
        drawn(draw_trace, trace, 2, width=width),
        drawn(draw_head, trace, 2, 1, width=width),
        drawn(draw_point, trace, "layers.2.attn.masked", width=width),
    ]
    for page in pages:
        assert max(cell_len(line) for line in page.splitlines()) <= width


def test_a_bare_trace_shows_itself_and_says_what_it_did_not_keep(model, capsys):
    model.trace("<BOS> dragon drinks").show(layer=1)
    out = capsys.readouterr().out
    assert re.search(r"^layers\.1\.mlp\.up .* not captured", out, re.MULTILINE)
    assert re.search(r'^next  1  "potion"', out, re.MULTILINE)


def test_a_bare_trace_says_once_how_to_capture_what_it_lacks(model):
    page = drawn(draw_trace, model.trace("<BOS> dragon drinks"), 1)
    assert page.count("were not captured: trace with points=[…, 'layers.1.*'] for all of this layer") == 1
    whole = drawn(draw_trace, model.trace("<BOS> dragon drinks", points=["*"]), 1)
    assert "not captured" not in whole


@pytest.mark.parametrize("width", [40, 60, 80])
def test_no_meaning_is_cut_off_where_the_page_is_narrow(model, width):
    trace = model.trace("<BOS> dragon drinks", points=overview_points(model.spec, 1))
    page = drawn(draw_trace, trace, 1, width=width)
    letters = re.sub(r"[┃┠╮╯│─┋]", " ", page)
    for point in trace.points:
        words = parse_point(point, model.spec).info.meaning.split()
        assert re.search(r"\s+".join(map(re.escape, words)), letters), point


def chips(pieces, width=100):
    tokens = [{"position": i, "id": 100 + i, "piece": piece} for i, piece in enumerate(pieces)]
    return drawn(lambda console: draw_chips(Page.on(console), tokens), width=width).splitlines()


def test_tokens_that_spell_a_character_only_together_stand_over_it():
    above, below, spelled = chips(["a", "<0xE6><0x97>", "<0xA5>", "b", " <0xE6>", "<0x9C>", "<0xAC>"])
    first, second = (re.search(f"╰─+ {character} ─+╯", spelled) for character in "日本")
    assert above[first.start() :].startswith(" <0xE6><0x97> ")
    assert cell_len(spelled[: first.end()]) == above.index("<0xA5>") + len("<0xA5> ")
    assert cell_len(spelled[: second.start()]) == above.index("·<0xE6>") - 1
    assert below.split() == ["100", "101", "102", "103", "104", "105", "106"]


@pytest.mark.parametrize(
    "pieces",
    [
        ["a", "b"],
        ["<0xE6><0x97>", "b"],
        ["<0xE6>"],
        ["<0xFF>", "<0xFE>"],
        ["<0xE6>", "<0x41>"],
        ["<0x>", "日"],
        ["<0x1B>", "<0x5B>"],
        ["<0xC2>", "<0x9B>"],
    ],
)
def test_tokens_that_spell_nothing_together_have_no_bracket(pieces):
    assert len(chips(pieces)) == 2


@given(st.text(min_size=1, max_size=12), st.integers(40, 90))
def test_every_character_that_was_cut_into_bytes_is_shown_and_lines_fit(text, width):
    pieces = [f"<0x{byte:02X}>" if ord(c) > 127 else c for c in text if c.isprintable() for byte in c.encode()]
    lines = chips(pieces, width=width)
    assert max((cell_len(line) for line in lines), default=0) <= width
    brackets = sum(line.count("╰") for line in lines)
    assert brackets == sum(ord(c) > 127 for c in text if c.isprintable())


def test_rows_of_some_positions_bear_their_own_tokens(model):
    trace = model.trace("<BOS> dragon drinks fire", positions=[2, 1])
    page = drawn(draw_head, trace, 1, 0)
    assert re.findall(r'^query +(\d+) ("\S+")', page, re.MULTILINE) == [("2", '"drinks"'), ("1", '"dragon"')]
    assert '"drinks" (at 2) → "dragon" (at 1)' in page
    assert "the row of token 1 (" in drawn(draw_trace, trace, 1)


def test_the_stream_is_a_band_that_each_sub_layer_leaves_and_joins(model):
    trace = model.trace("<BOS> dragon drinks", points=overview_points(model.spec, 1))
    page = drawn(draw_trace, trace, 1, width=200)
    marks = {line[4:].split()[0]: line[:3] for line in page.splitlines() if " = [" in line}
    assert marks["layers.1.resid_pre"] == "┃  "
    assert marks["layers.1.attn.norm"] == marks["layers.1.mlp.norm"] == "┠─╮"
    assert marks["layers.1.attn.pattern"] == "┃ │"
    assert marks["layers.1.attn.out"] == marks["layers.1.mlp.out"] == "┠─╯"
    assert "layer 0" in page and "layer 2" in page


def test_a_heatmap_shows_each_weight_and_hatches_what_is_masked(model):
    trace = model.trace("<BOS> dragon drinks potion")
    page = drawn(draw_head, trace, 0, 1, width=120)
    rows = [line for line in page.splitlines() if re.match(r" +\d \"", line)]
    for query, row in enumerate(rows):
        shown = [float(text) for text in re.findall(r"\d\.\d\d", row)]
        assert shown == pytest.approx(trace["layers.0.attn.pattern"][1, query, : query + 1], abs=0.00501)
        assert ("░" in row) == (query < 3)


@given(specs(), st.integers(1, 6), st.sampled_from([None, 40, 100, 200]), st.data())
def test_any_model_can_be_drawn(spec, length, width, data):
    layer = data.draw(st.integers(0, spec.n_layers - 1))
    wanted = overview_points(spec, layer)
    trace = random_model(spec).trace(random_ids(spec, length), points=wanted)
    page = drawn(draw_trace, trace, layer, width=width, head=-1)
    assert all(str(point) in page for point in wanted if point.layer in (None, layer))
    assert (f"layers.{layer}.attn.pattern, head" in drawn(draw_head, trace, layer, -1, width=width)) or width == 40
    assert str(spec.d_model) in drawn(draw_point, trace, data.draw(st.sampled_from(wanted)), width=width)


def test_an_encoder_hides_nothing():
    block = LayerSpec(
        AttentionSpec(2, 2, 4, causal=False), FeedForwardSpec(16, "gelu"), NormSpec("layer", 1e-5), "post"
    )
    trace = random_model(ModelSpec("encoder", 11, 8, (block,))).trace([1, 2, 3])
    page = drawn(draw_head, trace, 0, 0, width=80)
    assert not any("░" in line for line in page.splitlines() if re.match(r" +\d \"", line))


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 9.99996, -99.9996, 0.00004, 12345.6, -1e9, 1e-30, 3, 49151, None])
def test_a_number_takes_seven_columns(value):
    assert len(number(value)) == 7 or abs(value) >= 1e6


@pytest.mark.parametrize("value", [0.0012, 3.14159, 27.1828, 161.803, 20328.8])
def test_a_length_is_told_to_three_digits(value):
    assert float(size(value).replace(",", "")) == pytest.approx(value, rel=5e-3, abs=5e-3)


def test_a_bar_is_as_long_as_its_share_and_never_vanishes():
    assert bar(1.0, 10) == "█" * 10
    assert bar(0.5, 10) == "█" * 5 + " " * 5
    assert bar(0.0, 10) == " " * 10
    assert bar(1e-9, 10).strip()
    assert bar(2.0, 4) == "████"


def test_wide_letters_are_cut_at_columns():
    assert [cell_len(fit(text, 5)) for text in ("日本語の", "ab", "abcdefgh", "日")] == [5] * 4


def test_the_letters_on_every_weight_can_be_read():
    """A contrast of at least 4.5, as for text on the web."""

    def luminance(color):
        parts = [(c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4) for c in color.get_truecolor()]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    for weight in np.linspace(0, 1, 101):
        style = weight_style(float(weight))
        lighter, darker = sorted((luminance(style.color), luminance(style.bgcolor)), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5
