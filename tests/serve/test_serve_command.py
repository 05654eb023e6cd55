"""`cutaway serve` as a person types it."""

import json
import re
import signal
import socket
import subprocess
import sys
from urllib.request import urlopen

import pytest

from cutaway.cli import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "70000"], "0 to 65535"),
        (["--longest", "0"], "at least 1"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--host", "203.0.113.7"], "cannot listen"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(arguments, words, capsys):
    assert main(["serve", "--no-browser", "--port", "0", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_port_that_is_taken_is_told(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", "--no-browser", "--port", str(taken.getsockname()[1])]) == 2
    assert "--port picks another" in capsys.readouterr().err


def test_answers_are_sent_without_waiting_for_acknowledgements():
    """asyncio switches Nagle's algorithm off only on sockets that say that they are TCP's."""
    from cutaway.cli.serve import _listener

    with _listener("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_it_prints_its_address_serves_the_page_and_ends_with_ctrl_c():
    command = [sys.executable, "-m", "cutaway", "serve", "--model", "toy", "--port", "0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stderr is not None
        address = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())
        assert address, server.stderr.read()
        with urlopen(address[0]) as page:
            assert b"<title>Cutaway</title>" in page.read()
        with urlopen(address[0] + "api/models") as models:
            assert json.load(models)["default"] == "toy"
        server.send_signal(signal.SIGINT)
        server.wait(30)
        assert server.returncode in (0, 130) and server.stderr.read() == ""
