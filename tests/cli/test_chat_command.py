"""`cutaway chat`, as a person types it, line after line."""

import json
import os
import pty
import subprocess
import sys

import pytest

MODEL = ("--model", "smollm2-135m", "--temperature", "0", "--max-tokens", "6")


def test_lines_are_answered_and_the_later_one_knows_the_earlier(cutaway, tmp_path):
    talk = tmp_path / "talk.json"
    typed = f"My name is Ada.\nWhat is my name?\n/save {talk}\n/history\n"
    ended = cutaway("chat", *MODEL, "--system", "Be brief.", stdin=typed.encode())
    assert ended.code == 0
    messages = json.loads(talk.read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[0]["content"] == "Be brief."
    assert ended.out.startswith(messages[2]["content"] + "\n" + messages[4]["content"] + "\n")
    assert ended.out.endswith(f"assistant: {messages[4]['content']}\n")
    assert "more were read before" in ended.err.splitlines()[1]


def test_the_first_message_may_stand_on_the_command_line(cutaway):
    ended = cutaway("chat", *MODEL, "Hi", stdin=b"/history\n")
    answer, *history = ended.out.splitlines()
    assert history[0] == "user: Hi"
    assert history[1] == f"assistant: {answer}"


def test_the_cache_shows_that_the_next_turn_runs_only_what_is_new(cutaway):
    ended = cutaway("chat", *MODEL, stdin=b"Hi\nAnd?\n/cache\n")
    first = next(line for line in ended.out.splitlines() if line.startswith("    0 "))
    reused, run = map(int, first.split()[1:3])
    assert reused > run > 1
    assert f"({reused} more were read before)" in ended.err and f"; {run} prompt tokens read" in ended.err
    assert "Nothing is kept yet" in cutaway("chat", *MODEL, stdin=b"/cache\n").err


def test_ids_are_shown_by_role_with_the_words_apart_from_the_template(cutaway):
    ended = cutaway("chat", *MODEL, "--show-ids", stdin=b"Hi\n")
    lines = ended.out.splitlines()
    assert "user, 30 tokens" in lines or any(line.startswith("user, ") for line in lines)
    assert any(line.startswith("message   ") and '"Hi"' in line for line in lines)
    assert any(line.startswith('template  1 "<|im_start|>"') for line in lines)
    assert "assistant, 4 tokens" in lines


def test_a_system_prompt_may_come_from_a_file_and_a_talk_go_on_later(cutaway, tmp_path):
    (tmp_path / "system.txt").write_text("You are a pirate.\n")
    talk = tmp_path / "talk.json"
    first = cutaway(
        "chat", *MODEL, "--system-file", str(tmp_path / "system.txt"), stdin=f"Hello\n/save {talk}\n".encode()
    )
    assert first.code == 0
    again = cutaway("chat", *MODEL, "--load", str(talk), stdin=b"/history\n/regenerate\n/reset\n/history\n")
    assert again.out.startswith("system: You are a pirate.\nuser: Hello\nassistant: ")
    assert again.out.endswith("\nsystem: You are a pirate.\n")


def test_a_line_that_ends_in_a_backslash_goes_on_in_the_next(cutaway):
    ended = cutaway("chat", *MODEL, stdin=b"one\\\ntwo\n/history\n/quit\nnever read\n")
    assert "user: one\ntwo\n" in ended.out
    assert "never" not in ended.out


def test_in_a_terminal_a_wrong_command_is_told_and_the_talk_goes_on():
    own, theirs = pty.openpty()
    command = [sys.executable, "-m", "cutaway", "chat", *MODEL]
    with subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as typed:
        os.close(theirs)
        os.write(own, b"/dance\n/help\n\x04")
        _, err = typed.communicate(timeout=120)
    os.close(own)
    assert typed.returncode == 0
    assert "cutaway: There is no command /dance; /help lists them" in err
    assert "/regenerate" in err


@pytest.mark.parametrize(
    ("arguments", "typed", "sentence"),
    [
        (["--system", "a", "--system-file", "b"], "", "Both --system and --system-file were given"),
        (["--system-file", "/no/such/file"], "", "The system prompt: /no/such/file cannot be read"),
        (["--model", "toy"], "", "toy comes without a chat template"),
        (["--temperature", "-1"], "", "The temperature is -1.0"),
        (["--max-tokens", "0"], "", "max_tokens is 0"),
        (["--load", "/no/such/file"], "", "/no/such/file cannot be read"),
        ([""], "", "The message is empty"),
        ([], "/dance\n", "There is no command /dance"),
        ([], "/save\n", "/save needs a file"),
        ([], "/regenerate\n", "There is nothing to answer yet"),
    ],
)
def test_bad_input_is_refused_with_a_sentence_and_code_2(cutaway, arguments, typed, sentence):
    ended = cutaway("chat", *arguments, stdin=typed.encode())
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("cutaway: ")
    assert sentence in ended.err
