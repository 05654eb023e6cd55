"""`cutaway trace --edit`, as a person types it."""

import json
import re

import pytest

import cutaway as package
from adapters import of_llama, write_adapter, write_llama

TOY = "<BOS> dragon drinks"
HEAD = '{"zero": "layers.0.attn.z", "heads": [0]}'


def test_an_edited_trace_tells_what_each_edit_did_and_the_odds_beside_the_unedited_ones(cutaway):
    ended = cutaway(
        "trace", "--model", "toy", TOY, "--edit", HEAD, "--edit", '{"scale": "layers.1.mlp.out", "factor": 2}'
    )
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    edits = [line for line in lines if line.startswith("edit ")]
    assert edits[0].startswith(
        "edit 1  zero at layers.0.attn.z, heads 0: fired at layers.0.attn.z; 9 of 9 elements changed; logits moved by"
    )
    assert edits[1].startswith("edit 2  scale at layers.1.mlp.out: fired at layers.1.mlp.out; 18 of 18")
    potion = next(line for line in lines if line.startswith('beside  "potion"'))
    assert "unedited 0.6201" in potion
    assert len([line for line in lines if line.startswith("beside")]) == 10


def test_json_holds_the_edits_as_they_can_be_given_again(here):
    told = json.loads(here("trace", "--model", "toy", TOY, "--edit", HEAD, "--json").out)
    model = package.load("toy")
    trace = model.trace(TOY, points=[], edits=[HEAD])
    edit = told["edits"][0]
    assert edit["edit"] == json.loads(HEAD)
    assert (edit["fired"], edit["elements"], edit["changed"]) == ({"layers.0.attn.z": 9}, 9, 9)
    assert edit["moved"]["largest"] == pytest.approx(trace.edits[0].moved.largest)
    assert told["moved"] == edit["moved"]
    beside = {token["piece"]: token for token in told["next_tokens_beside_unedited"]}
    assert beside["potion"]["unedited"] == pytest.approx(model.trace(TOY).next_tokens(1)[0].probability)
    assert {t["piece"]: t["probability"] for t in told["next_tokens"]} == {
        piece: token["probability"] for piece, token in beside.items()
    }


def test_without_an_edit_nothing_is_said_of_edits(here):
    assert "edits" not in json.loads(here("trace", "--model", "toy", TOY, "--json").out)
    assert "edits" not in here("trace", "--model", "toy", TOY).out


@pytest.mark.parametrize("more", [["--head", "1"], ["--point", "layers.0.attn.pattern"]])
def test_a_pattern_is_shown_as_the_edit_left_it(here, more):
    drop = '{"drop": "layers.0.attn.masked", "keys": [1]}'
    plain, edited = (here("trace", "--model", "toy", TOY, *more, *extra).out for extra in ([], ["--edit", drop]))
    assert plain != edited
    assert re.search(r"^edit 1  drop at layers\.0\.attn\.masked, keys 1: fired", edited, re.MULTILINE)


def test_the_mask_can_be_left_out_and_the_next_tokens_are_still_told(here):
    ended = here("trace", "--model", "toy", TOY, "--edit", '{"without": "mask"}')
    assert ended.code == 0 and "next  1 " in ended.out and "edit 1  without mask: fired at layers.0" in ended.out


@pytest.mark.parametrize("columns", [60, 120])
def test_a_terminal_gets_lines_that_fit(cutaway, columns):
    env = {"FORCE_COLOR": "1", "COLUMNS": str(columns)}
    ended = cutaway("trace", "--model", "toy", TOY, "--edit", HEAD, env=env)
    lines = re.sub(r"\x1b\[[\d;]*m", "", ended.out).splitlines()
    assert max(map(len, lines)) <= columns


def test_an_edited_run_is_saved_with_what_was_done(here, tmp_path):
    path = tmp_path / "edited.safetensors"
    assert here("trace", "--model", "toy", TOY, "--edit", HEAD, "--save", str(path)).code == 0
    opened = package.open_trace(path)
    assert opened.told_edits == ["zero at layers.0.attn.z, heads 0: fired at layers.0.attn.z; 9 of 9 elements changed"]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ("zero layers.0.attn.z", "is no JSON"),
        ('{"zap": "layers.0.attn.z"}', "names no kind of edit"),
        ('{"zero": "layers.0.attn.zz"}', "the closest are"),
        ('{"zero": "layers.0.attn.z", "heads": [2]}', "Head 2 was asked for"),
        ('{"knockout": "layers.0.attn.masked", "edges": [[0, 2]]}', "fired nowhere"),
    ],
)
def test_what_is_no_edit_is_refused_in_a_sentence(here, edit, said):
    ended = here("trace", "--model", "toy", TOY, "--edit", edit)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err and "Traceback" not in ended.err


def test_an_edit_that_changes_nothing_is_warned_of(cutaway):
    ended = cutaway("trace", "--model", "toy", TOY, "--edit", '{"scale": "layers.0.attn.z", "factor": 1}')
    assert ended.code == 0 and "cutaway: scale at layers.0.attn.z changed nothing" in ended.err


def test_an_adapter_is_given_by_its_folder(here, tmp_path):
    base, folder = write_llama(tmp_path / "base"), write_adapter(tmp_path / "french", of_llama())
    asked = ("trace", "--model", str(base), "--ids", "1 2 3", "--edit")
    ended = here(*asked, json.dumps({"adapter": str(folder), "scale": 0.5}))
    assert (ended.code, ended.err) == (0, "")
    assert "edit 1  adapter french, 0.5 times: fired at layers.0.attn.q, layers.0.mlp.raw" in ended.out
    told = json.loads(here(*asked, json.dumps({"adapter": str(folder)}), "--json").out)
    assert told["edits"][0]["edit"] == {"adapter": str(folder)}
    assert told["edits"][0]["changed"] == told["edits"][0]["elements"] == 3 * 72
    assert told["edits"][0]["moved"]["largest"] > 0
    ended = here(*asked, json.dumps({"adapter": str(tmp_path / "nowhere")}))
    assert (ended.code, ended.out) == (2, "")
    assert "There is no folder" in ended.err
