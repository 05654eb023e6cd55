"""`cutaway score` and `cutaway sweep` as a user types them."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import load_file

import cutaway as package


def test_a_text_is_shown_token_by_token_with_its_sums(here):
    ended = here("score", "<BOS> dragon drinks", "--model", "toy")
    assert ended.code == 0
    score = package.load("toy").score("<BOS> dragon drinks")
    rows = ended.out.splitlines()
    assert rows[1].split() == ["0", "–", '"<BOS>"']
    assert rows[2].split() == ["1", f"{score.logprobs[1]:.4f}", '"dragon"']
    assert f"2 of 3 tokens scored, ln p = {score.total:.4f}" in rows[-1]
    assert f"perplexity {math.exp(-score.total / 2):.4f}" in rows[-1]


def test_several_texts_are_summed_and_two_models_compared(here):
    ended = here("score", "<BOS> dragon", "<BOS> dragon drinks", "--model", "toy", "--against", "toy")
    assert ended.code == 0
    assert ended.out.splitlines()[-1].startswith("2 texts: 3 of 5 tokens scored")
    assert "divergence 0 nats" in ended.out.splitlines()[-1]


def test_json_holds_every_tokens_numbers(here):
    ended = here("score", "<BOS> dragon drinks", "--model", "toy", "--against", "toy", "--json")
    told = json.loads(ended.out)
    score = package.load("toy").score("<BOS> dragon drinks")
    found = [token["logprob"] for token in told["texts"][0]["tokens"]]
    assert found[0] is None and found[1:] == score.logprobs[1:].tolist()
    assert told["total"]["perplexity"] == score.perplexity and told["total"]["divergence"] == 0.0


def test_a_file_is_one_text_or_one_a_line(here, tmp_path):
    text = tmp_path / "corpus.txt"
    text.write_text("\ufeff<BOS> dragon drinks\n<BOS> dragon", encoding="utf-8")  # the mark is no part of it
    ended = here("score", "--file", str(text), "--model", "toy", "--context", "3", "--stride", "1")
    assert ended.code == 0
    assert ended.out.startswith("1 text: 4 of 5 tokens scored")
    assert "windows of 3 tokens, 1 apart" in ended.out
    lines = tmp_path / "corpus.jsonl"
    lines.write_text('{"text": "<BOS> dragon drinks"}\n"<BOS> dragon"\n', encoding="utf-8")
    assert here("score", "--file", str(lines), "--model", "toy").out.startswith("2 texts: 3 of 5 tokens scored")


def test_in_a_terminal_the_text_is_coloured_by_surprise(in_a_terminal):
    shown = in_a_terminal("score", "<BOS> dragon drinks", "--model", "toy")
    assert "\x1b[" in shown and "dragon" in shown and "−ln p:" in shown and "perplexity" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "There is no text"),
        (["a", "--file", "b"], "Both texts and --file were given"),
        (["--file", "nowhere.txt"], "nowhere.txt cannot be read"),
        (["<BOS> dragon", "--stride", "2", "--context", "2"], "the stride must be less"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_a_sentence(here, arguments, said):
    ended = here("score", *arguments, "--model", "toy")
    assert ended.code == 2 and said in ended.err and "Traceback" not in ended.err


def test_a_sweep_is_shown_prompt_by_prompt(here):
    ended = here("sweep", "<BOS> dragon", "<BOS>", "--model", "toy", "--point", "layers.0.resid_post | norm")
    assert ended.code == 0
    rows = ended.out.splitlines()
    assert rows[0] == "0 '<BOS> dragon', 2 tokens" and rows[2] == "1 '<BOS>', 1 tokens"
    norms = np.linalg.norm(package.load("toy").trace("<BOS> dragon")["layers.0.resid_post"], axis=1)
    assert [float(number) for number in rows[1].split("[2]")[1].split()] == pytest.approx(norms.tolist(), abs=1e-3)


def test_a_sweep_of_a_file_goes_to_a_folder_and_goes_on(here, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("<BOS> dragon drinks\n<BOS> dragon\n", encoding="utf-8")
    line = ["sweep", "--file", str(prompts), "--model", "toy", "--point", "layers.*.resid_post", "--layout", "rows"]
    line += ["--values", "float16", "--positions", "-1 0", "--to", str(tmp_path / "swept")]
    for _ in range(2):
        ended = here(*line, "--json")
        told = json.loads(ended.out)
        assert (told["prompts"], told["files"]) == (2, ["shard-00000.safetensors"])
    shard = load_file(tmp_path / "swept" / "shard-00000.safetensors")
    assert shard["layers.0.resid_post"].dtype == np.float16 and shard["position"].tolist() == [2, 0, 1, 0]
    ended = here(*line, "--reduce", "mean")
    assert ended.code == 2 and "leave reductions out" in ended.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--point", "logits"], "There is no prompt"),
        (["a", "--point", "logits", "--json"], "say where they go with --to FOLDER"),
        (["a", "--point", "logits", "--positions", "x"], "--positions is 'x'; it takes whole numbers"),
        (["<BOS>", "--point", "layers.*.mpl.out"], "mlp.out"),
    ],
)
def test_what_cannot_be_swept_is_refused_in_a_sentence(here, arguments, said):
    ended = here("sweep", *arguments, "--model", "toy")
    assert ended.code == 2 and said in ended.err and "Traceback" not in ended.err
