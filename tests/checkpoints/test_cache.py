"""The cache is where the user would look for it, is always writable, and is not hashed at every start."""

import os
import sys
import tempfile
import threading
from pathlib import Path

import pytest

import cutaway.places
from cutaway.checkpoints import cache
from cutaway.places import cache_folder, cache_note, preferred_folder


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CUTAWAY_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA", "CUTAWAY_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("USERPROFILE", str(tmp_path / "home"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    cutaway.places._folder_of_this_run.cache_clear()


def test_cutaway_cache_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    assert (tmp_path / "mine").is_dir()
    assert not (tmp_path / "xdg").exists()
    assert cache_note() is None


def test_xdg_cache_home_comes_next_and_a_relative_one_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "cutaway"
    monkeypatch.setenv("XDG_CACHE_HOME", "somewhere")
    assert cache_folder().is_relative_to(tmp_path / "home")


@pytest.mark.parametrize(
    ("platform", "place"),
    [("linux", ".cache/cutaway"), ("darwin", "Library/Caches/cutaway"), ("win32", "AppData/Local/cutaway")],
)
def test_else_it_is_the_platforms_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, place: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert preferred_folder() == tmp_path / "home" / place


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTAWAY_CACHE", "~/models")
    assert cache_folder() == tmp_path / "home" / "models"


def test_looking_for_models_creates_nothing(tmp_path: Path) -> None:
    assert cache.model_folders() == [tmp_path / "home" / ".cache" / "cutaway" / "models"]
    assert not (tmp_path / "home").exists()


def test_an_unwritable_cache_is_replaced_and_the_note_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "file" / "cache"))
    folder = cache_folder()
    assert folder.parent == tmp_path / "scratch"
    assert folder.stat().st_mode & 0o077 == 0
    note = cache_note()
    assert note is not None
    assert str(tmp_path / "file" / "cache") in note and "not a directory" in note and str(folder) in note
    # What a read-only cache already holds is still looked for, and found first.
    assert cache.model_folders() == [tmp_path / "file" / "cache" / "models", folder / "models"]


def test_a_folder_that_others_may_write_is_never_taken_for_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "file"))
    planted = tmp_path / "scratch" / f"cutaway-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    assert cache_folder() not in (planted, tmp_path / "file")
    assert planted / "models" not in cache.model_folders()
    planted.rmdir()
    (tmp_path / "elsewhere").mkdir()
    planted.symlink_to(tmp_path / "elsewhere")
    assert cache_folder() != planted
    assert cache_folder() == cache_folder(), "one folder for the whole run"


def test_the_lock_lets_one_in_at_a_time(tmp_path: Path) -> None:
    inside, most = 0, 0

    def visit() -> None:
        nonlocal inside, most
        for _ in range(5):
            with cache.one_at_a_time(tmp_path) as alone:
                assert alone
                inside += 1
                most = max(most, inside)
                threading.Event().wait(0.002)
                inside -= 1

    visitors = [threading.Thread(target=visit) for _ in range(4)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    assert most == 1


def test_the_sum_is_remembered_until_size_or_time_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, stamp = tmp_path / "weights", tmp_path / "weights.sha256"
    file.write_bytes(b"one")
    first = cache.checksum(file, stamp)
    assert first == "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"

    opened: list[Path] = []
    real_open = Path.open

    def counted(self: Path, *args: object, **kwargs: object) -> object:
        opened.append(self)
        return real_open(self, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", counted)
    assert cache.checksum(file, stamp) == first
    assert file not in opened

    before = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    second = cache.checksum(file, stamp)
    assert file in opened and second != first
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    file.write_bytes(b"three")
    assert cache.checksum(file, stamp) not in (first, second)


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"size": 3}', "null", "\x00\x00"])
def test_a_torn_stamp_only_costs_another_reading(tmp_path: Path, torn: str) -> None:
    file, stamp = tmp_path / "weights", tmp_path / "weights.sha256"
    file.write_bytes(b"one")
    expected = cache.checksum(file, stamp)
    stamp.write_text(torn)
    assert cache.checksum(file, stamp) == expected


@pytest.mark.parametrize(("value", "offline"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_offline_is_a_yes_in_the_environment(monkeypatch: pytest.MonkeyPatch, value: str, offline: bool) -> None:
    monkeypatch.setenv("CUTAWAY_OFFLINE", value)
    assert cache.is_offline() is offline
