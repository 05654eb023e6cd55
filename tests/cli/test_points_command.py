"""`cutaway points`, as a person types it."""

import json

import cutaway as package
from cutaway.generate import ORDERS
from cutaway.points import all_points, find_points


def test_every_address_of_a_model_is_listed_with_shape_meaning_and_chapter(cutaway):
    ended = cutaway("points", "toy")
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    model = package.load("toy")
    assert sum(line.startswith("layers.0:3.") for line in lines) == 20
    found = [str(p) for line in lines[:-1] for p in find_points([line.split()[0]], model.spec, all_points(model.spec))]
    assert sorted(found) == sorted(model.points)
    line = next(line for line in lines if line.startswith("layers.0:3.attn.z "))
    assert line.split()[1:9] == ["[H,", "T,", "d_head]", "2", "×", "T", "×", "3"]
    assert line.endswith("each head's mix of values (7.3)")


def test_json_holds_each_layers_addresses_by_themselves(here):
    told = json.loads(here("points", "toy", "--json").out)
    assert (told["model"], told["layers"]) == ("toy", 3)
    assert [point["address"] for point in told["points"]] == package.load("toy").points
    z = next(point for point in told["points"] if point["address"] == "layers.2.attn.z")
    assert (z["symbols"], z["shape"], z["chapter"]) == (["H", "T", "d_head"], ["2", "T", "3"], "7.3")


def test_the_choice_of_a_token_has_addresses_where_one_can_be_made(here):
    lines = here("points", "toy", "--only", "sample.*").out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [f"sample.{name}" for name in STAGES]
    assert "softmax of the logits divided by T (14.2)" in lines[4]
    assert "sample." not in here("points", "bert-base").out
    ended = here("points", "bert-base", "--only", "sample.top_k")
    assert ended.code == 2 and "bert-base is an encoder: nothing is drawn from what it gives" in ended.err


STAGES = [*ORDERS["cutaway"], "draw", "token"]


def test_a_configuration_without_weights_has_addresses_too(here):
    out = here("points", "deepseek-v3", "--only", "layers.*.moe.*").out
    assert out.splitlines()[0].startswith("layers.3:61.moe.router_logits")
    assert "T × 256" in out


def test_layers_that_differ_stand_in_lines_of_their_own(here):
    out = here("points", "gemma-3-270m", "--only", "layers.*.attn.q_rot").out
    assert [line.split()[0] for line in out.splitlines()[:2]] == ["layers.0:5.attn.q_rot", "layers.5.attn.q_rot"]


def test_names_of_other_tools_are_understood_and_unknown_ones_refused(here):
    assert here("points", "toy", "--only", "blocks.1.attn.hook_pattern").out.startswith("layers.1.attn.pattern ")
    ended = here("points", "toy", "--only", "layers.0.attn.q_rot")
    assert ended.code == 2 and "learned positions" in ended.err
    ended = here("points", "nothing-of-that-name")
    assert ended.code == 2 and ended.out == ""


def test_where_key_and_value_heads_are_fewer_it_is_told_which_heads_are_meant(here):
    assert "a capture's heads= are query heads" in " ".join(here("points", "smollm2-135m").out.split())
    assert "heads=" not in here("points", "gpt2").out
