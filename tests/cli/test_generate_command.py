"""`cutaway generate`, as a person types it."""

import json
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace

import pytest

import cutaway as package
from random_models import LLAMA, random_model

TOY = "<BOS> dragon drinks"


def test_piped_output_is_the_continuation_alone_and_the_rest_is_told_on_stderr(cutaway):
    ended = cutaway("generate", "--model", "toy", TOY, "--max-tokens", "5", "--seed", "1")
    assert ended.code == 0
    expected = package.load("toy").generate(TOY, max_tokens=5, seed=1)
    assert ended.out == expected.text
    assert re.fullmatch(
        r"\n5 tokens, as many as --max-tokens asked for; 3 prompt tokens in [\d.]+ s, "
        r"[\d.,]+ tokens/s \(\w+ engine\)\n",
        ended.err,
    )


def test_a_terminal_shows_the_prompt_first(in_a_terminal):
    shown = in_a_terminal("generate", "--model", "toy", TOY, "--max-tokens", "2", "--temperature", "0")
    assert re.sub(r"\x1b\[[\d;]*m", "", shown).startswith(f"{TOY} potion")


def test_where_both_outputs_go_to_one_place_the_figures_have_a_line_of_their_own():
    command = [sys.executable, "-m", "cutaway", "generate", "--model", "toy", TOY, "--max-tokens", "2", "--seed", "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    text, figures = done.stdout.splitlines()
    assert text == package.load("toy").generate(TOY, max_tokens=2, seed=1).text
    assert figures.startswith("2 tokens, ")


def test_a_prompt_from_a_terminal_is_asked_for():
    own, theirs = pty.openpty()
    command = [sys.executable, "-m", "cutaway", "generate", "--model", "toy", "-", "--temperature", "0"]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as typed:
        os.close(theirs)
        assert typed.stderr.readline().startswith("cutaway: reading the prompt from standard input; end it with Ctrl-D")
        os.write(own, TOY.encode() + b"\n\x04")
        out, _ = typed.communicate(timeout=120)
    os.close(own)
    assert typed.returncode == 0
    assert out.startswith(" potion")


@pytest.mark.filterwarnings("always::UserWarning")  # as for a person; the suite makes errors of them
@pytest.mark.parametrize("command", ["generate", "trace"])
def test_a_text_past_what_the_model_was_made_for_is_said_in_one_line(here, monkeypatch, command):
    monkeypatch.setattr("cutaway.model.load", lambda *_, **__: random_model(replace(LLAMA, context_length=8)))
    ended = here(command, "--ids", "1 2 3 4 5 6 7 8 9")
    assert ended.code == 0
    said = [line for line in ended.err.splitlines() if "made for" in line]
    assert len(said) == 1
    assert said[0].startswith("cutaway: 9 tokens are more than the 8 that small-llama was made for")


def test_control_characters_of_a_model_do_not_reach_a_terminal():
    from cutaway.cli.generate import harmless

    assert harmless("a\x1b[31mb\tc\n\x9bd\x7f") == "a\\x1b[31mb\tc\n\\x9bd\\x7f"


def test_json_is_one_document_that_holds_the_whole_response(here):
    ended = here("generate", "--model", "toy", TOY, "--max-tokens", "4", "--seed", "7", "--top-k", "3", "--json")
    told = json.loads(ended.out)
    expected = package.load("toy").generate(TOY, max_tokens=4, seed=7, top_k=3)
    assert ended.err == ""
    assert told["text"] == expected.text
    assert [token["id"] for token in told["tokens"]] == expected.tokens
    assert [token["logprob"] for token in told["tokens"]] == pytest.approx(expected.logprobs)
    assert told["prompt_ids"] == [0, 5, 6]
    assert told["finish"] == "length"


def test_a_stop_text_ends_it_and_is_left_out(here):
    free = here("generate", "--model", "toy", TOY, "--temperature", "0", "--max-tokens", "6").out
    word = free.split()[-1]
    ended = here("generate", "--model", "toy", TOY, "--temperature", "0", "--max-tokens", "6", "--stop", word)
    assert word not in ended.out
    assert free.startswith(ended.out)
    assert "ended at a --stop text" in ended.err


def test_learned_positions_end_it(here):
    ended = here("generate", "--model", "toy", "--ids", "0 5 6 4 " * 31, "--max-tokens", "100", "--seed", "0")
    assert ended.code == 0
    assert "ended where the model's learned positions end" in ended.err


def test_the_default_model_knows_a_capital(cutaway):
    ended = cutaway("generate", "The capital of France is", "--temperature", "0", "--max-tokens", "1")
    assert ended.out == " Paris"


def test_chat_wraps_the_prompt_as_one_message_and_the_model_ends_its_turn(here):
    ended = here(
        "generate",
        "--chat",
        "Say hello.",
        "--temperature",
        "0",
        "--max-tokens",
        "60",
        "--json",
        "--model",
        "smollm2-135m",
    )
    told = json.loads(ended.out)
    assert told["prompt"].endswith("<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n")
    assert told["prompt_ids"] == package.load("smollm2-135m").tokenizer.encode(told["prompt"])
    assert told["prompt_ids"].count(1) == told["prompt"].count("<|im_start|>")  # no second BOS
    assert told["finish"] == "stop token"
    assert "<|" not in told["text"]


# Looking closer


def test_a_forced_token_is_shown_beside_what_comes_without_it(here):
    arguments = ("generate", "--model", "toy", TOY, "--temperature", "0", "--max-tokens", "6", "--force", "1= troll")
    ended = here(*arguments)
    toy = package.load("toy")
    free, forced = (toy.generate(TOY, 6, 0, force=force) for force in ({}, {1: "troll"}))
    assert ended.code == 0
    assert "as it comes" in ended.out and 'with " troll" at step 1' in ended.out
    assert free.text.strip() in ended.out and forced.text.strip() in ended.out
    assert "They part after 1 token; each token is read by all that follow." in ended.out
    told = json.loads(here(*arguments, "--json").out)
    assert [token["id"] for token in told["free"]["tokens"]] == free.tokens
    assert [token["id"] for token in told["forced"]["tokens"]] == forced.tokens
    assert [token["forced"] for token in told["forced"]["tokens"]] == [False, True, False, False, False, False]


def test_a_forced_step_that_the_text_did_not_reach_is_told(here):
    begun = package.load("toy").generate(TOY, 6, 0)
    ended = here(
        "generate", "--model", "toy", TOY, "--temperature", "0", "--stop", begun.text.split()[0], "--force", "5=troll"
    )
    assert (ended.code, ended.out) == (2, "")
    assert "force names step 5, but the text ended after 1 token (steps count from 0)" in ended.err


def test_without_a_seed_both_continuations_draw_the_same_numbers(here):
    ended = here("generate", "--model", "toy", TOY, "--max-tokens", "8", "--force", "7=troll", "--json")
    told = json.loads(ended.out)
    numbers = [[token["number"] for token in told[name]["tokens"]] for name in ("free", "forced")]
    assert numbers[0] == numbers[1]
    assert [t["id"] for t in told["free"]["tokens"]][:7] == [t["id"] for t in told["forced"]["tokens"]][:7]


def test_greedy_is_shown_beside_the_draws_and_its_loop_is_told(here):
    prompt = "The cat sat on the mat. The cat"
    ended = here("generate", prompt, "--max-tokens", "30", "--seed", "1", "--beside-greedy")
    assert "in a loop from token 0 on: the same 5 tokens, 6 times." in ended.out
    assert ended.out.count("bits of entropy a token") == 2


def test_two_columns_stand_side_by_side_on_a_terminal(in_a_terminal):
    shown = in_a_terminal(
        "generate", "--model", "toy", TOY, "--temperature", "0", "--max-tokens", "6", "--force", "0=troll"
    )
    plain = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
    assert re.search(r'as it comes +│ with "troll" at step 0', plain)
    assert re.search(r"potion.*│.*troll", plain)


def test_each_step_tells_what_was_drawn_and_how_undecided_it_was(here):
    ended = here("generate", "--model", "toy", TOY, "--max-tokens", "3", "--seed", "1", "--top-k", "4", "--steps")
    assert ended.code == 0
    lines = [line for line in ended.out.splitlines() if re.match(r" +\d  ", line)]
    out = package.load("toy").generate(TOY, 3, top_k=4, seed=1, record=True)
    assert len(lines) == 3
    for line, step in zip(lines, out.steps, strict=True):
        assert f"{step.record.entropy:.2f} bit" in line
        assert f"{step.record.number:.4f}" in line
        assert "      4  " in line  # kept


def test_the_steps_are_in_the_document_too(here):
    ended = here(
        "generate", "--model", "toy", TOY, "--max-tokens", "2", "--seed", "1", "--top-k", "4", "--steps", "--json"
    )
    told = json.loads(ended.out)["tokens"]
    assert [stage["stage"] for stage in told[0]["stages"]] == ["logits", "temperature", "top_k"]
    assert told[0]["stages"][2]["kept"] == 4
    assert told[0]["interval"][0] <= told[0]["number"] < told[0]["interval"][1]


def test_nonsense_is_continued_with_little_margin_and_no_token_for_not_knowing(here):
    """Chapter 16.3: every distribution sums to 1, also where nothing is right; only its entropy tells."""

    def first(prompt: str) -> dict:
        return json.loads(here("generate", prompt, "--max-tokens", "1", "--temperature", "0", "--steps", "--json").out)

    known, nonsense = (
        first(prompt)["tokens"][0] for prompt in ("The capital of France is", "The capital of Zorblax is")
    )
    assert nonsense["entropy_bits"] > known["entropy_bits"] + 2
    assert nonsense["margin"] < known["margin"]
    for told in (known, nonsense):
        own = told["stages"][0]
        assert sum(own["leading"].values()) + own["tail"] == pytest.approx(1)


def test_penalties_bias_and_order_reach_the_draw(here):
    base = ("generate", "--model", "toy", TOY, "--max-tokens", "6", "--temperature", "0", "--json")
    toy = package.load("toy")
    for arguments, settings in (
        (("--repetition-penalty", "3"), {"repetition_penalty": 3.0}),
        (("--presence-penalty", "9"), {"presence_penalty": 9.0}),
        (("--frequency-penalty", "9"), {"frequency_penalty": 9.0}),
        (("--logit-bias", "4=-inf", "--logit-bias", "8=3"), {"logit_bias": {4: float("-inf"), 8: 3.0}}),
        (("--typical-p", "0.2", "--order", "llama.cpp"), {"typical_p": 0.2, "order": "llama.cpp"}),
    ):
        told = json.loads(here(*base, *arguments).out)
        expected = toy.generate(TOY, 6, 0, **settings)
        assert [token["id"] for token in told["tokens"]] == expected.tokens


def test_guesses_give_the_same_text_in_fewer_passes(here):
    prompt = "The cat sat on the mat. The cat sat on the mat. The cat sat"
    arguments = ("generate", prompt, "--max-tokens", "16", "--temperature", "0")
    plain, quick = here(*arguments), here(*arguments, "--guess", "8")
    assert quick.out == plain.out
    assert "tokens a pass" not in plain.err


def test_the_cache_is_shown_filling_and_is_in_the_document_too(here):
    arguments = ("generate", "--model", "toy", TOY, "--temperature", "0", "--max-tokens", "6")
    shown, told = here(*arguments, "--show-cache"), json.loads(here(*arguments, "--json").out)["cache"]
    use = package.load("toy").generate(TOY, 6, 0).cache
    assert shown.code == 0 and str(use) in shown.out
    assert told == json.loads(json.dumps(use.as_dict()))
    assert [step["reused"] for step in told["steps"]] == [0, 3, 4, 5, 6, 7]
    assert (told["kept"], told["rows_run"], told["rows_run_without_cache"]) == (True, 8, 3 + 4 + 5 + 6 + 7 + 8)


def test_without_a_cache_the_text_is_the_same_and_the_work_is_not(here):
    arguments = ("generate", "--model", "toy", "--engine", "cpu", TOY, "--max-tokens", "6", "--seed", "4")
    plain, naive = here(*arguments), here(*arguments, "--no-cache")
    assert naive.out == plain.out
    told, cached = (json.loads(here(*arguments, "--json", *more).out) for more in (["--no-cache"], []))
    assert told["tokens"] == cached["tokens"]
    assert (told["settings"]["cache"], cached["settings"]["cache"]) == (False, True)
    assert told["cache"]["flops_without_cache"] == cached["cache"]["flops_without_cache"]
    assert told["cache"]["rows_run"] == told["cache"]["rows_run_without_cache"] > cached["cache"]["rows_run"]
    beside = here(*arguments[:-2], "--no-cache", "--show-cache")  # without a seed of mine
    assert "the very same tokens, bit for bit" in beside.out


def test_both_caches_are_shown_of_two_continuations(here):
    ended = here("generate", "--model", "toy", TOY, "--max-tokens", "3", "--seed=1", "--beside-greedy", "--show-cache")
    assert "The KV cache, drawn at T = 1" in ended.out and "The KV cache, greedy" in ended.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([TOY, "--temperature", "-1"], "The temperature is -1.0"),
        ([TOY, "--temperature", "nan"], "The temperature is nan"),
        ([TOY, "--top-p", "0"], "top_p is 0.0"),
        ([TOY, "--top-p", "1.5"], "top_p is 1.5"),
        ([TOY, "--top-k", "0"], "top_k is 0"),
        ([TOY, "--min-p", "2"], "min_p is 2.0"),
        ([TOY, "--max-tokens", "0"], "max_tokens is 0"),
        ([TOY, "--seed", "-1"], "The seed is -1"),
        ([TOY, "--stop", ""], "A stop string is ''"),
        ([""], "The prompt is empty"),
        (["", "--chat"], "The prompt is empty"),
        (["dragon eats"], "'eats'"),
        (["--ids", "1 " * 129], "has 129 tokens"),
        (["--ids", "1", "--chat"], "--chat wraps a text"),
        ([TOY, "--chat"], "without a chat template"),
        ([TOY, "--force", "troll"], "--force is 'troll'; it takes a step and a text"),
        ([TOY, "--force", "1=elf"], "'elf' is not in this model's vocabulary"),
        ([TOY, "--guess", "2", "--no-cache", "--show-cache"], "leave out guess"),
        ([TOY, "--force", "99=troll", "--max-tokens", "3"], "--force names step 99, but --max-tokens 3 ends at step 2"),
        (
            [TOY, "--force", "2=troll potion", "--max-tokens", "3"],
            "force names step 3, but max_tokens 3 ends at step 2",
        ),
        ([TOY, "--force", "1=troll", "--force", "1=potion"], "--force names step 1 twice, with 'troll' and 'potion'"),
        ([TOY, "--force", "0=troll", "--beside-greedy"], "each show two continuations"),
        ([TOY, "--beside-greedy", "--temperature", "0"], "the draws are greedy themselves"),
        ([TOY, "--logit-bias", "troll=3"], "--logit-bias is 'troll=3'"),
        ([TOY, "--logit-bias", "10=3"], "logit_bias names token 10; toy has ids 0 to 9"),
        ([TOY, "--order", "ollama"], "There is no order 'ollama'"),
        ([TOY, "--guess", "-1"], "guess is -1"),
        ([TOY, "--guess", "2", "--no-cache"], "leave out guess"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_bad_input_is_refused_with_a_sentence_and_code_2(here, arguments, sentence, as_json):
    ended = here("generate", "--model", "toy", *arguments, *(["--json"] if as_json else []))
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("cutaway: ")
    assert ended.err.count("\n") == 1
    assert sentence in ended.err
