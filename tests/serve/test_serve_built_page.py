"""The page that ships is built from the source beside it, small, and whole."""

import gzip
import hashlib
import re
from importlib.resources import files
from pathlib import Path

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
