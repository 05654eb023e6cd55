"""`cutaway trace`, as a person types it."""

import json
import os
import re

import numpy as np
import pytest
from safetensors.numpy import load_file

import cutaway as package
from cutaway.points import points_of

TOY = "<BOS> dragon drinks"
MARK = b"\xef\xbb\xbf"  # of UTF-8


def test_the_toy_is_traced_stage_by_stage_down_to_the_next_token(cutaway):
    ended = cutaway("trace", "--model", "toy", TOY)
    assert (ended.code, ended.err) == (0, "")
    model = package.load("toy")
    wanted = [str(p) for p in points_of(model.spec) if p.layer in (None, 0)]
    shown = [line.split()[0] for line in ended.out.splitlines() if " = [" in line]
    assert shown == wanted
    assert re.search(r'^next  1  "potion" +id +4  p 0\.620\d', ended.out, re.MULTILINE)
    assert len(re.findall(r"^layer  \d  attn\.out", ended.out, re.MULTILINE)) == 3


def test_piped_output_is_plain(cutaway):
    out = cutaway("trace", "--model", "toy", TOY).out
    assert "\x1b" not in out
    assert not set(out) & set("┃┠╮╯│█▏▎▍▌▋▊▉─")
    assert all(line == line.rstrip() for line in out.splitlines())


def test_a_terminal_shows_the_model_and_the_tokens_before_the_pass_has_run_and_only_once(in_a_terminal):
    never = "import cutaway.model as m\ndef never(*_, **__): raise KeyboardInterrupt\nm.Model.trace = never"
    begun, whole = (
        re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", in_a_terminal("trace", "--model", "toy", TOY, before=before))
        for before in (never, "")
    )
    assert begun.startswith("toy\n2,286 parameters")
    assert " dragon " in begun and "stage by stage" not in begun
    assert whole.startswith(begun)
    assert whole.count("2,286 parameters") == whole.count("Prompt: 3 tokens") == 1


def test_piped_output_does_not_depend_on_the_width_of_a_terminal(cutaway):
    narrow, wide = (cutaway("trace", "--model", "toy", TOY, env={"COLUMNS": c}).out for c in ("40", "300"))
    assert narrow == wide


@pytest.mark.parametrize("columns", [60, 120])
@pytest.mark.parametrize("more", [[], ["--layer", "1", "--head", "1"], ["--point", "layers.2.mlp.act"]])
def test_a_terminal_gets_colours_and_lines_that_fit(cutaway, columns, more):
    ended = cutaway("trace", "--model", "toy", TOY, *more, env={"FORCE_COLOR": "1", "COLUMNS": str(columns)})
    assert "\x1b[" in ended.out
    lines = re.sub(r"\x1b\[[\d;]*m", "", ended.out).splitlines()
    assert max(map(len, lines)) <= columns


def test_no_color_is_honoured(cutaway):
    out = cutaway(
        "trace", "--model", "toy", TOY, "--layer", "1", "--head", "0", env={"FORCE_COLOR": "1", "NO_COLOR": "1"}
    ).out
    assert not re.search(r"\x1b\[[\d;]*(3[0-8]|4[0-8])[;m]", out)
    assert "░" in out


def test_the_prompt_can_come_from_standard_input_without_its_line_break(cutaway):
    assert (
        cutaway("trace", "--model", "toy", "-", stdin=TOY.encode() + b"\n").out
        == cutaway("trace", "--model", "toy", TOY).out
    )


def test_ids_stand_in_for_a_text(here):
    by_ids, by_text = here("trace", "--model", "toy", "--ids", "0, 5 6"), here("trace", "--model", "toy", TOY)
    assert by_ids.code == 0
    assert by_ids.out.split("stage by stage")[1] == by_text.out.split("stage by stage")[1]


def test_a_layer_counts_from_the_end_where_it_is_negative(here):
    assert (
        here("trace", "--model", "toy", TOY, "--layer", "-1").out
        == here("trace", "--model", "toy", TOY, "--layer", "2").out
    )


def test_a_head_shows_its_pattern_with_the_future_marked(here):
    out = here("trace", "--model", "toy", TOY, "--layer", "1", "--head", "1").out
    pattern = package.load("toy").trace(TOY)["layers.1.attn.pattern"][1]
    rows = [line.split()[3:] for line in out.splitlines() if line.startswith("query")]
    for row, shown in enumerate(rows):
        assert [float(cell) for cell in shown[: row + 1]] == pytest.approx(pattern[row, : row + 1], abs=5e-5)
        assert shown[row + 1 :] == ["·"] * (2 - row)


def test_a_point_is_shown_in_full(here):
    out = here("trace", "--model", "toy", TOY, "--point", "layers.-1.attn.q").out
    q = package.load("toy").trace(TOY, points=["layers.2.attn.q"])["layers.2.attn.q"]
    cells = [line.split()[2:] for line in out.splitlines() if re.match(r" +\d  \"", line)]
    assert np.array(cells, float) == pytest.approx(q.reshape(6, 3), abs=5e-4)


def test_the_lecture_is_named_where_a_chapter_is(here):
    out = here("trace", "--model", "toy", TOY, "--point", "layers.-1.attn.q").out
    assert "(chapter 7.2 of the lecture “Inside the Transformer: The Complete Forward Pass”)" in out


def test_what_does_not_fit_is_said(here):
    out = here("trace", "--model", "toy", TOY, "--point", "layers.0.mlp.act").out
    assert "…" in out
    assert "--save" in out


def test_json_is_one_document_of_finite_numbers(cutaway):
    ended = cutaway("trace", "--model", "toy", TOY, "--json", "--layer", "2", "--point", "layers.2.attn.masked")
    told = json.loads(ended.out, parse_constant=lambda name: pytest.fail(f"{name} in the JSON"))
    assert ended.out.count("\n") == 1
    assert told["model"]["parameters"] == 2286
    assert [token["piece"] for token in told["tokens"]] == ["<BOS>", "dragon", "drinks"]
    assert told["next_tokens"][0]["piece"] == "potion"
    masked = package.load("toy").trace(TOY, points=["layers.2.attn.masked"])["layers.2.attn.masked"]
    shown = np.array(told["values"], float)
    assert np.array_equal(np.isnan(shown), np.isneginf(masked))
    assert np.array_equal(shown[~np.isnan(shown)], masked[np.isfinite(masked)].astype(float))


def test_save_writes_the_tensors_and_nothing_else(here, tmp_path):
    ended = here("trace", "--model", "toy", TOY, "--save", str(tmp_path / "run.safetensors"))
    assert ended.code == 0
    assert os.listdir(tmp_path) == ["run.safetensors"]
    saved = load_file(tmp_path / "run.safetensors")
    assert saved["layers.0.mlp.act"].shape == (3, 24)
    assert np.array_equal(saved["logits"], package.load("toy").trace(TOY).logits)


def test_top_says_how_many_next_tokens(here):
    out = here("trace", "--model", "toy", TOY, "--top", "3").out
    assert len(re.findall(r"^next +\d", out, re.MULTILINE)) == 3
    assert "next other 7 tokens" in out


def test_a_prompt_of_one_token_has_only_itself_to_look_at(here):
    ended = here("trace", "--model", "toy", "<BOS>")
    assert ended.code == 0
    assert '"<BOS>" → "<BOS>" 1.00' in ended.out


def test_a_long_prompt_is_pooled_to_the_width_and_says_so(cutaway):
    ids = " ".join(["0", *["5", "6", "4"] * 42])
    out = cutaway("trace", "--model", "toy", "--ids", ids, "--head", "0", env={"FORCE_COLOR": "1", "COLUMNS": "80"}).out
    plain = re.sub(r"\x1b\[[\d;]*m", "", out)
    assert "the largest weight of 4 × 4 pairs" in " ".join(plain.split())
    assert max(map(len, plain.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "toi", "x"], "There is no model 'toi'. Did you mean toy?"),
        (["--model", "toy", ""], "The prompt is empty"),
        (["--model", "toy"], "There is no prompt"),
        (["--model", "toy", "x", "--ids", "1"], "Both a text and --ids"),
        (["--model", "toy", "--ids", ""], "empty"),
        (["--model", "toy", "--ids", "1 x"], "--ids holds 'x'"),
        (["--model", "toy", "--ids", "1 10"], "Token id 10 at position 1"),
        (["--model", "toy", "--ids", "-1"], "Token id -1 at position 0"),
        (["--model", "toy", "the cat"], "'the'"),
        (["--model", "toy", "--ids", "1 " * 129], "has 129 tokens"),
        (["--model", "toy", TOY, "--layer", "3"], "There is no layer 3: toy has layers 0 to 2"),
        (["--model", "toy", TOY, "--layer", "-4"], "There is no layer -4"),
        (["--model", "toy", TOY, "--head", "2"], "There is no head 2"),
        (["--model", "toy", TOY, "--point", "layers.0.attn.patern"], "layers.0.attn.pattern"),
        (["--model", "toy", TOY, "--point", "layers.0.attn.q_rot"], "nothing turns its queries"),
        (["--model", "toy", TOY, "--point", "layers.*.attn.q"], "name one of them"),
        (["--model", "toy", TOY, "--top", "0"], "ask for at least 1"),
        (["--model", "toy", TOY, "--point", "layers.1.attn.q", "--layer", "2"], "stands in layer 1, and --layer is 2"),
        (["--model", "toy", TOY, "--point", "logits", "--layer", "2"], "logits stands outside the layers"),
        (["--model", "toy", TOY, "--point", "logits", "--top", "3"], "which --point does not show"),
        (["--model", "toy", TOY, "--head", "1", "--top", "3"], "which --head does not show"),
        (["--model", "toy", TOY, "--point", "layers.0.mlp.act", "--head", "1"], "has no heads"),
        (["--model", "toy", TOY, "--engine", "gpu"], "There is no engine 'gpu'"),
        (["--model", "toy", TOY, "--dtype", "float16"], "float16"),
        (["--model", "toy", TOY, "--save", "/nowhere/at/all.safetensors"], "could not be written"),
    ],
)
def test_bad_input_is_refused_with_a_sentence_and_code_2(here, arguments, sentence):
    ended = here("trace", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("cutaway: ")
    assert ended.err.count("\n") == 1
    assert sentence in ended.err


def test_standard_input_that_is_no_text_is_refused(cutaway):
    ended = cutaway("trace", "--model", "toy", "-", stdin=b"caf\xe9")
    assert ended.code == 2
    assert "byte 3 is 0xE9" in ended.err
    ended = cutaway("trace", "--model", "toy", "-", stdin="<BOS>".encode("utf-16"))
    assert ended.code == 2
    assert "Standard input cannot be read: it is UTF-16 text; save it as UTF-8." in ended.err


def test_a_byte_order_mark_is_no_part_of_what_standard_input_says(cutaway):
    plain, marked = (cutaway("trace", "--model", "toy", "-", "--json", stdin=mark + b"<BOS>") for mark in (b"", MARK))
    assert json.loads(marked.out)["tokens"] == json.loads(plain.out)["tokens"]


def test_the_default_model_sees_a_cat(cutaway):
    ended = cutaway("trace", "the cat sat on it", "--json")
    told = json.loads(ended.out)
    assert [token["piece"] for token in told["tokens"]] == ["the", " cat", " sat", " on", " it"]
    assert told["model"]["parameters"] == 134_515_008
    assert len(told["layers"]) == 30
    stage = {stage["point"]: stage for stage in told["stages"]}["layers.0.attn.q"]
    assert (stage["shape_symbols"], stage["shape"]) == (["H", "T", "d_head"], [9, 5, 64])
    total = sum(token["probability"] for token in told["next_tokens"])
    assert 0.5 < total < 1
