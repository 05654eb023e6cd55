"""A fresh machine for each test that looks for models or fetches them, and an index in the place of the real one."""

from pathlib import Path

import pytest
from huggingface_hub.utils import enable_progress_bars
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


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, an empty Hub cache, an empty working folder."""
    for variable in ("CUTAWAY_OFFLINE", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    enable_progress_bars()  # a test that used transformers may have switched them off for the whole process
