"""A model of the Hugging Face Hub is found, fetched where that is allowed, and refused in one sentence."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import are_progress_bars_disabled
from lying_models import hub_snapshot, model_folder
from stand_in_index import refusal

from cutaway.checkpoints import fetch, hub, sources

pytestmark = pytest.mark.usefixtures("machine")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("hf:a/b", hub.Reference("a/b")),
        ("hf:a/b/", hub.Reference("a/b")),
        ("hf:a-1/b.c_d", hub.Reference("a-1/b.c_d")),
        ("hf:a/b@v1.0", hub.Reference("a/b", "v1.0")),
        ("hf:a/b@refs/pr/1", hub.Reference("a/b", "refs/pr/1")),
        ("hf:a/b/c.gguf", hub.Reference("a/b", None, "c.gguf")),
        ("hf:a/b/sub/c.gguf@v1", hub.Reference("a/b", "v1", "sub/c.gguf")),
        ("hf:a/b@v1/c.gguf", hub.Reference("a/b", "v1", "c.gguf")),
    ],
)
def test_references_to_the_hub(source: str, expected: hub.Reference) -> None:
    assert hub.parse_reference(source) == expected


@pytest.mark.parametrize(
    "source", ["hf:", "hf:gpt2", "hf:a/b/c", "hf:a/b/c.bin", "hf:a/b@", "hf:a b/c", "hf:a/b/../../c.gguf"]
)
def test_other_forms_are_refused(source: str) -> None:
    assert "hf:owner/name" in refusal(lambda: sources.locate(source))


class Snapshots:
    """Stands in for huggingface_hub.snapshot_download: records how it was asked, then answers."""

    def __init__(self, answer: Path | Exception) -> None:
        self.answer = answer
        self.asked: dict[str, Any] = {}
        self.bars_disabled = False

    def __call__(self, repo: str, **how: Any) -> str:
        self.asked = {"repo": repo, **how}
        self.bars_disabled = are_progress_bars_disabled()
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def answering(monkeypatch: pytest.MonkeyPatch, answer: Path | Exception) -> Snapshots:
    snapshots = Snapshots(answer)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshots)
    return snapshots


def test_a_model_of_the_hub_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(tmp_path / "snapshot")
    snapshots = answering(monkeypatch, folder)
    found = sources.locate("hf:owner/name@v2")
    assert (found.path, found.kind, found.name) == (folder, "folder", "hf:owner/name@v2")
    assert snapshots.asked["repo"] == "owner/name" and snapshots.asked["revision"] == "v2"
    assert not snapshots.asked["local_files_only"]
    patterns = snapshots.asked["allow_patterns"]
    assert not [pattern for pattern in patterns if "bin" in pattern or pattern in ("*", "*.*")]
    assert snapshots.bars_disabled and not are_progress_bars_disabled(), "no bars where no terminal watches"


def test_one_gguf_file_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "snapshot").mkdir()
    snapshots = answering(monkeypatch, tmp_path / "snapshot")
    assert "big.gguf is not in owner/name" in refusal(lambda: sources.locate("hf:owner/name/big.gguf"))
    assert snapshots.asked["allow_patterns"] == ["big.gguf"]
    (tmp_path / "snapshot" / "big.gguf").touch()
    found = sources.locate("hf:owner/name/big.gguf")
    assert (found.kind, found.path) == ("gguf", tmp_path / "snapshot" / "big.gguf")


def test_pulling_by_force_downloads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = answering(monkeypatch, model_folder(tmp_path / "snapshot"))
    assert fetch.fetch("hf:owner/name", force=True) == tmp_path / "snapshot"
    assert snapshots.asked["force_download"]


@pytest.mark.parametrize("variable", ["CUTAWAY_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_only_what_is_here_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """With the real huggingface_hub and its real cache on disk."""
    monkeypatch.setenv(variable, "1")
    said = refusal(lambda: sources.locate("hf:owner/name"))
    assert "not on this machine" in said and variable in said
    snapshot = hub_snapshot(tmp_path, "owner/name", "a" * 40)
    model_folder(snapshot)
    assert sources.locate("hf:owner/name").path == snapshot
    assert sources.locate("hf:owner/name@" + "a" * 40).path == snapshot
    assert "not on this machine" in refusal(lambda: sources.locate("hf:owner/name@v9"))
    (snapshot / "model.safetensors").unlink()
    assert "has no safetensors" in refusal(lambda: sources.locate("hf:owner/name"))


def test_without_download_the_network_is_left_alone() -> None:
    assert "cutaway pull" in refusal(lambda: sources.locate("hf:owner/name", download=False))


def from_the_hub(kind: type[Exception]) -> Exception:
    try:
        return kind("some words", response=MagicMock())  # type: ignore[call-arg]
    except TypeError:
        return kind("some words")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (errors.GatedRepoError, "is gated"),
        (errors.RepositoryNotFoundError, "no such model"),
        (errors.RevisionNotFoundError, "no revision 'v3'"),
        (errors.LocalEntryNotFoundError, "the Hub cannot be reached"),
        (errors.HfHubHTTPError, "could not be fetched from the Hub: some words"),
        (errors.HFValidationError, "could not be fetched from the Hub: some words"),
        (errors.EntryNotFoundError, "could not be fetched from the Hub: some words"),
        (OSError, "could not be fetched from the Hub: some words"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], said: str
) -> None:
    answering(monkeypatch, from_the_hub(kind))
    sentence = refusal(lambda: sources.locate("hf:owner/name@v3"))
    assert sentence.startswith("hf:owner/name@v3") and said in sentence and "\n" not in sentence


def test_a_repository_with_nothing_but_pickles_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "config.json").write_text("{}")
    answering(monkeypatch, tmp_path / "snapshot")
    said = refusal(lambda: sources.locate("hf:owner/name"))
    assert "has no safetensors" in said and "never pickles" in said
