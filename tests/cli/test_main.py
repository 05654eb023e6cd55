"""The command line as a whole: help, versions, exit codes, and what nobody should ever see."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.request import urlopen

import pytest

import cutaway as package
from cutaway.cli import COMMANDS, main

ROOT = Path(__file__).parents[2]


def test_help_lists_every_command_with_its_purpose(here):
    ended = here("--help")
    assert ended.code == 0
    for name, (purpose, _) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(purpose)}$", ended.out, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_a_purpose_and_an_example(here, name):
    ended = here(name, "--help")
    purpose, example = COMMANDS[name]
    assert ended.code == 0
    assert purpose in ended.out
    assert example in ended.out


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "serve"])
def test_the_example_of_a_command_works_when_it_is_pasted(cutaway, name):
    program, *arguments = shlex.split(COMMANDS[name][1])
    ended = cutaway(*arguments)
    assert program == "cutaway"
    assert ended.code == 0, ended.err
    assert ended.out


def test_the_example_of_serve_answers_until_it_is_told_to_stop():
    program, *arguments = shlex.split(COMMANDS["serve"][1])
    assert program == "cutaway"
    command = [sys.executable, "-u", "-m", "cutaway", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "BROWSER": "true"}) as server:
        assert server.stdout is not None
        try:
            address = re.search(r"http://\S+", server.stdout.readline())
            assert address
            with urlopen(address.group(), timeout=60) as answer:
                assert b"<title>Cutaway" in answer.read()
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(60) in (0, -signal.SIGTERM)  # once it is done, it ends by the signal that it was sent


def test_the_version_is_that_of_the_package(cutaway):
    assert cutaway("--version").out == f"cutaway {package.__version__}\n"


def test_help_loads_nothing_heavy():
    asked = "import sys; from cutaway.cli import main; code = main(['trace', '--help']); print(code, *sys.modules)"
    out = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout
    loaded = out.splitlines()[-1].split()
    assert loaded[0] == "0"
    assert not {"numpy", "numba", "rich", "tokenizers", "cutaway.model"} & set(loaded)


def test_no_command_prints_the_help_and_is_an_error(here):
    ended = here()
    assert ended.code == 2
    assert "commands:" in ended.out


@pytest.mark.parametrize(
    "arguments",
    [["trase", "x"], ["trace", "--layers", "3"], ["trace", "--layer", "three"], ["verify"], ["trace", "--lay", "1"]],
)
def test_what_cannot_be_read_is_refused_with_code_2_and_without_a_traceback(here, arguments):
    ended = here(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert "usage:" in ended.err
    assert "Traceback" not in ended.err


def test_a_reader_that_leaves_early_is_no_fault():
    shell = f"{shlex.quote(sys.executable)} -m cutaway trace --model toy '<BOS> dragon drinks' | head -n 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert done.stdout.startswith("model toy")
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["trace", "generate"])
def test_where_nobody_reads_the_code_is_141_whoever_wrote(command):
    read, write = os.pipe()
    os.close(read)
    arguments = [sys.executable, "-m", "cutaway", command, "--model", "toy", "<BOS> dragon drinks"]
    done = subprocess.run(arguments, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_output_that_cannot_be_written_is_told_in_a_sentence():
    if not os.path.exists("/dev/full"):
        return  # this system has no full disk to offer
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cutaway", "models"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 2
    assert done.stderr.startswith("cutaway: the output could not be written")
    assert "Traceback" not in done.stderr


def test_an_interruption_is_quiet(here, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("cutaway.model.load", interrupted)
    ended = here("trace", "--model", "toy", "x")
    assert (ended.code, ended.out, ended.err) == (130, "", "")


def test_an_interruption_while_the_command_line_is_still_loading_is_quiet():
    code = """
import sys
class Interrupted:
    def find_spec(self, name, path, target=None):
        if name == "cutaway.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from cutaway.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_almost_nothing_is_loaded_before_an_interruption_is_caught():
    code = "import sys; before = set(sys.modules); import cutaway.__main__; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cutaway", "cutaway.__main__", "cutaway.errors"]


def test_the_command_that_is_installed_begins_with_that_very_function():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert scripts == {"cutaway": "cutaway.__main__:main"}


@pytest.mark.parametrize(("typed", "meant"), [("trac", "trace"), ("generat", "generate"), ("model", "models")])
def test_a_mistyped_command_is_told_the_one_that_may_be_meant(here, typed, meant):
    assert f"there is no command '{typed}'. Did you mean {meant}?" in here(typed, "x").err


def test_a_text_without_quotation_marks_is_told_about_them(here):
    assert 'cutaway trace "the cat sat"' in here("trace", "the", "cat", "sat", "--top", "3").err
    assert "quotation marks" not in here("trace", "the cat", "--tops", "3").err


def test_main_takes_the_processes_own_arguments_where_none_are_given(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["cutaway", "--version"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("cutaway ")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(
    "command", ["generate wizard --model toy --max-tokens 2", "chat --model toy", "trace wizard --model toy"]
)
def test_a_stream_that_was_closed_before_the_start_is_none_and_no_fault(command, closed):
    line = f"{shlex.quote(sys.executable)} -m cutaway {command} {closed}"
    ended = subprocess.run(["sh", "-c", line], input=b"", capture_output=True, timeout=300, check=False)
    assert ended.returncode == (2 if command.startswith("chat") else 0)
    assert b"Traceback" not in ended.stderr
