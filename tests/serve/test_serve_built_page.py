"""The page that ships is built from the source beside it, small, and whole."""

import gzip
import hashlib
import re
from importlib.resources import files
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from cutaway.serve import make_app

STATIC = Path(str(files("cutaway.serve") / "static"))
WEB = Path(__file__).parents[2] / "web"


def test_the_built_page_was_built_from_this_source():
    inside = [path for folder in ("src", "public") for path in (WEB / folder).rglob("*") if path.is_file()]
    paths = [path.relative_to(WEB).as_posix() for path in inside]
    digest = hashlib.sha256()
    for name in sorted([*paths, "index.html", "package.json", "vite.config.ts"]):
        digest.update(f"{name}\n".encode() + (WEB / name).read_bytes())
    assert (STATIC / "built-from.txt").read_text().strip() == digest.hexdigest(), "run: cd web && npm run build"


def test_the_page_is_under_400_kilobytes_gzipped_without_fonts():
    built = [path for path in STATIC.rglob("*") if path.is_file() and path.suffix != ".woff2"]
    assert sum(len(gzip.compress(path.read_bytes())) for path in built) < 400_000


def test_every_file_that_the_page_names_is_there_and_none_is_elsewhere():
    page = (STATIC / "index.html").read_text()
    named = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert named and all(name.startswith("./") and (STATIC / name).is_file() for name in named)
    for style in STATIC.glob("assets/*.css"):
        for name in re.findall(r"url\(([^)]+)\)", style.read_text()):
            name = name.strip("\"'")
            assert name.startswith("data:") or (style.parent / name).is_file(), name


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [("gzip, deflate, br", True), ("br, GZIP;q=0.5", True), ("gzip;q=0", False), ("identity", False), ("", False)],
)
def test_a_file_comes_packed_to_whoever_can_unpack_it_and_is_the_same_file(accepted, packed):
    name = next(path.relative_to(STATIC).as_posix() for path in STATIC.glob("assets/index-*.js"))
    with TestClient(make_app(hosts=("testserver",))) as client:
        told = client.get(f"/{name}", headers={"Accept-Encoding": accepted})
        assert told.content == (STATIC / name).read_bytes()
        assert (told.headers.get("content-encoding") == "gzip") == packed
        assert (int(told.headers["content-length"]) < len(told.content)) == packed
        assert "Accept-Encoding" in told.headers["vary"]
        font = next(path.relative_to(STATIC).as_posix() for path in STATIC.glob("assets/*.woff2"))
        assert "content-encoding" not in client.get(f"/{font}", headers={"Accept-Encoding": accepted}).headers
