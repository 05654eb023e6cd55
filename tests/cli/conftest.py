"""The command line as a person uses it: a process of its own, or `main` in this one where only words are checked."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable

import pytest

from cutaway.cli import main


class Ended:
    """What a command left: exit code, standard output and standard error."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def cutaway() -> Callable[..., Ended]:
    """`cutaway("trace", …)` in a process of its own; `stdin` is piped in, `env` is added to the environment."""

    def run(*arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> Ended:
        environment = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "NO_COLOR", "COLUMNS")}
        done = subprocess.run(
            [sys.executable, "-m", "cutaway", *arguments],
            input=stdin,
            capture_output=True,
            env=environment | (env or {}),
            timeout=300,
        )
        return Ended(done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8"))

    return run


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """The same in this process: quicker."""

    def run(*arguments: str) -> Ended:
        capfd.readouterr()
        code = main(arguments)
        return Ended(code, *capfd.readouterr())

    return run


@pytest.fixture
def in_a_terminal() -> Callable[..., str]:
    """`in_a_terminal("trace", …)`: what a command shows where standard output is a terminal; `before` is run first."""

    def run(*arguments: str, before: str = "") -> str:
        code = f"import sys\n{before}\nfrom cutaway.cli import main\nsys.exit(main(sys.argv[1:]))"
        own, theirs = pty.openpty()
        with subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"TERM": "xterm-256color"},
        ):
            os.close(theirs)
            shown = b""
            try:
                while chunk := os.read(own, 4096):
                    shown += chunk
            except OSError:  # how Linux says that the other end has closed
                pass
            os.close(own)
        return shown.decode("utf-8").replace("\r\n", "\n")

    return run
