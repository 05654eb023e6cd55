"""`cutaway count` says what a configuration holds and costs, from its description alone."""

import json

import pytest

import cutaway
from cutaway.cli import main
from cutaway.spec import AttentionSpec
from cutaway.spec.catalog import catalog_spec
from cutaway.spec.work import pass_work, total_flops, visible_pairs


def counted(capsys, *arguments):
    assert main(["count", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_llama_2_70b_is_mostly_feed_forward(capsys):
    assert main(["count", "llama-2-70b"]) == 0
    out = capsys.readouterr().out
    assert "68,976,648,192" in out and "17.5%" in out and "81.7%" in out


@pytest.mark.parametrize("name", ["gpt2", "smollm2-135m", "llama-2-70b"])
def test_only_attention_is_quadratic_in_t_and_everything_else_doubles(capsys, name):
    parts = {row["part"]: row for row in counted(capsys, name, "--tokens", "4096")["work"]["parts"]}
    quadratic = {name for name, row in parts.items() if row["quadratic"]}
    assert quadratic == {"attention scores and mix", "attention softmax"}
    for part, row in parts.items():
        assert row["times_at_twice_T"] == pytest.approx(4 if part in quadratic else 2, rel=1e-3)


@pytest.mark.parametrize("window", [None, 3, 7])
@pytest.mark.parametrize("chunk", [None, 4, 5])
@pytest.mark.parametrize("past", [0, 2, 6])
def test_the_pairs_counted_are_those_that_may_see_each_other(window, chunk, past):
    spec = AttentionSpec(1, 1, 2, window=window, chunk=chunk)
    for tokens in (1, 5, 9):
        pairs = sum(
            (window is None or q - k < window) and (chunk is None or q // chunk == k // chunk)
            for q in range(past, past + tokens)
            for k in range(q + 1)
        )
        assert visible_pairs(spec, tokens, past) == pairs


def test_a_product_costs_two_flops_a_weight_and_row():
    spec = catalog_spec("gpt2")
    work = {row.part: row.flops for row in pass_work(spec, 10)}
    d = 768
    assert work["attention projections"] == 2 * 10 * 12 * 4 * d * d
    assert work["head"] == 2 * 10 * d * 50257


def test_the_passes_of_a_cached_text_add_up_to_the_whole_pass():
    spec = catalog_spec("smollm2-135m")
    steps = sum(total_flops(spec, 1, past) for past in range(20))
    assert steps == total_flops(spec, 20)


def test_t_is_in_no_weight_shape_and_in_every_activation_shape(capsys):
    shapes = counted(capsys, "toy", "--tokens", "37", "--shapes")["shapes"]
    assert not any(37 in shape or 74 in shape for shape in shapes["weights"].values())
    for row in shapes["activations"]:
        assert row["changed"] == [symbol in "TS" for symbol in row["symbols"]]
        assert any(row["changed"])


def test_the_cache_of_latents_says_what_it_saves(capsys):
    told = counted(capsys, "deepseek-v3", "--context", "1000")["bytes"]
    values = 61 * 1000 * 2
    assert told["kv_cache_float16"] == values * (512 + 64)
    assert told["kv_cache_float16_saved_by_latents"] == values * (128 * (192 + 128) - (512 + 64))
    assert counted(capsys, "gpt2")["bytes"]["kv_cache_float16_saved_by_latents"] == 0
    assert main(["count", "deepseek-v3"]) == 0
    assert "latents in place of keys and values save" in capsys.readouterr().out


def test_a_configuration_of_ones_own_is_gpt_3(capsys):
    sizes = ["--layers", "96", "--d-model", "12288", "--heads", "96"]
    assert counted(capsys, *sizes)["parameters"]["total"] == 174_604_259_328


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpt2", "= 124,401,408; the 38,400 more here are the attention biases (4d a layer) and the final norm (2d)"),
        ("toy", "= 2,286; that is all of them"),
    ],
)
def test_what_the_lecture_counts_is_told_with_what_it_leaves_out(capsys, name, said):
    assert main(["count", name]) == 0
    out = capsys.readouterr().out
    assert "  chapter 13.3 of the lecture “Inside the Transformer: The Complete Forward Pass” counts\n" in out
    assert f"  V·d + n_max·d + N(12d² + 9d) {said}\n" in out


def test_two_configurations_stand_side_by_side(capsys):
    assert main(["count", "gpt2", "--compare", "smollm2-135m"]) == 0
    assert "134,515,008" in capsys.readouterr().out


def test_a_config_json_is_enough(capsys, tmp_path):
    config = {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for given in (tmp_path, tmp_path / "config.json"):
        assert counted(capsys, str(given))["parameters"]["total"] == 124_439_808
        assert cutaway.count(given).total == 124_439_808


def test_the_bounds_of_this_machine_are_positive_and_ordered(capsys):
    speed = counted(capsys, "smollm2-135m", "--measure")["speed"]
    rates = speed["tokens_per_second_by_memory"]
    assert 0 < rates["float32"] < rates["Q8_0"] < rates["Q4_0"]
    assert speed["tokens_per_second_by_arithmetic"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["llama-2-70"], "llama-2-70b"),
        ([], "No configuration was named"),
        (["--layers", "2", "--d-model", "10", "--heads", "3"], "3 equal heads"),
        (["--layers", "2", "--d-model", "-4", "--heads", "2"], "at least 1"),
        (["--layers", "2"], "--d-model"),
        (["--layers", "2", "--d-model", "8", "--heads", "2", "--kv-heads", "1"], "--kv-heads"),
        (["gpt2", "--tokens", "0"], "--tokens"),
        (["gpt2", "--layers", "3", "--d-ff", "8"], "gpt2 has its own sizes; leave out --layers, --d-ff"),
        (["gpt2", "--like", "llama"], "leave out --like"),
        (["gpt2", "--compare", "nothing-like-it"], "nothing-like-it"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(capsys, arguments, says):
    assert main(["count", *arguments]) == 2
    assert says in capsys.readouterr().err
