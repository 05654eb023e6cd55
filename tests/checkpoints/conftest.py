"""A cache of its own for each test that fetches, and an index in the place of the real one."""

from pathlib import Path

import pytest
from stand_in_index import FILE, Index, serving

from cutaway.checkpoints import fetch


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where fetched models are kept; the one that is published is `FILE`."""
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CUTAWAY_OFFLINE", raising=False)
    monkeypatch.setattr(fetch, "PUBLISHED", {"tiny": FILE})
    return tmp_path / "cache" / "models"


@pytest.fixture
def index(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    return serving(Index(tmp_path), FILE, monkeypatch)
