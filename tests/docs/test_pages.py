"""The documentation says what the product does: pages made from it are up to date, commands in it exist."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("what", ["points", "names"])
def test_a_page_of_addresses_is_made_from_the_table_that_the_product_uses(what):
    made = runpy.run_path(str(ROOT / "docs" / f"make_{what}.py"))["page"]()
    assert (ROOT / "docs" / f"{what.upper()}.md").read_text(encoding="utf-8") == made


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_names_exists(page):
    from cutaway.cli import COMMANDS

    for command in re.findall(r"`cutaway ([a-z]+)", page.read_text(encoding="utf-8")):
        assert command in COMMANDS


@pytest.mark.parametrize(
    "path",
    sorted(
        set(
            re.findall(
                r"`((?:src|tests|docs|benchmarks)/[\w/.]+)`",
                "".join(page.read_text(encoding="utf-8") for page in PAGES),
            )
        )
    ),
)
def test_every_file_that_a_page_names_exists(path):
    assert (ROOT / path).exists()


def test_the_page_of_compatibility_names_every_architecture_that_loads_and_no_other():
    from cutaway.checkpoints.families import FAMILIES

    loads = {
        name for family in FAMILIES for key in ("MODEL_TYPES", "GGUF_ARCHITECTURES") for name in getattr(family, key)
    }
    page = (ROOT / "docs" / "COMPATIBILITY.md").read_text(encoding="utf-8")
    rows = [row.split("|")[2:4] for row in page.splitlines() if row.startswith("|") and "---" not in row][1:]
    assert {name for row in rows for cell in row for name in re.findall(r"`(\w+)`", cell)} == loads
