"""A progress bar is seen on a terminal, after as long as it was told to wait, and nowhere else."""

import io
import re
import sys

import pytest

from cutaway import progress as module
from cutaway.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Standard error as a terminal; pytest would put its own back between a fixture and its test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    return stream


def letters(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stream.getvalue())


def test_a_bar_counts_what_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    with progress("Running toy", 3, "layers") as advance:
        advance(2)
    assert "Running toy" in letters(terminal)
    assert "2/3" in letters(terminal)


def test_where_the_end_is_not_known_no_amount_is_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    with progress("Waiting for another cutaway that is fetching …", None):
        pass
    assert "Waiting for another cutaway that is fetching …" in letters(terminal)
    assert "?" not in letters(terminal) and "bytes" not in letters(terminal)


def test_what_ends_before_its_time_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress("Running toy", 4, "layers", after=1.0) as advance:
        advance(1)
        now[0] = 0.9
        advance(1)
    assert terminal.getvalue() == ""


def test_what_takes_longer_shows_all_that_is_done_already(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    real, late = module.time.monotonic, [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: real() + late[0])
    with progress("Running toy", 4, "layers", after=600.0) as advance:
        advance(2)
        late[0] = 600.0
        advance(1)
    assert "3/4" in letters(terminal)


def test_nothing_is_drawn_where_no_terminal_watches(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("Running toy", 3, "layers") as advance:
        advance(3)
    assert capfd.readouterr() == ("", "")
