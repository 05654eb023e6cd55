"""From the start of a process to the first token on the terminal, as who types `cutaway generate` waits for it."""

import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping

LONGEST = 300  # seconds; the first run on a machine compiles kernels
CONTROL = re.compile(rb"\x1b(?:\[[0-9;?]*[A-Za-z]?|\][^\x07]*\x07?)?")


def first_token(model: str, prompt: str, environment: Mapping[str, str]) -> float:
    """Seconds until the first token of a response stands after its prompt.

    On a terminal of its own where the system has such, else through a pipe, on which the prompt is not shown. Python
    may keep its bytecode, as it does for people: to compile all modules anew takes a third of a second.
    """
    command = [sys.executable, "-m", "cutaway", "generate", "--model", model, "--max-tokens", "1", "--temperature", "0"]
    command.append(prompt)
    environment = {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begun = time.perf_counter()
    if sys.platform == "win32":
        return _through_a_pipe(command, environment, begun)
    master, terminal = os.openpty()
    child = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=dict(environment))
    os.close(terminal)
    try:
        return _until_after(prompt.encode(), master, begun)
    finally:
        child.kill()
        child.wait()
        os.close(master)


def _until_after(prompt: bytes, terminal: int, begun: float) -> float:
    shown = b""
    while time.perf_counter() - begun < LONGEST:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the other end was closed
            break
        now = time.perf_counter()
        shown += part
        if CONTROL.sub(b"", shown).partition(prompt)[2].strip():
            return now - begun
    raise RuntimeError(f"no token came: {shown[-300:]!r}")


def _through_a_pipe(command: list[str], environment: Mapping[str, str], begun: float) -> float:
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(environment)) as child:
        assert child.stdout is not None
        first = child.stdout.read(1)
        seconds = time.perf_counter() - begun
        child.kill()
    if not first:
        raise RuntimeError("no token came")
    return seconds
