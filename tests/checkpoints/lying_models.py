"""Folders that look like models, where a machine may keep them."""

from pathlib import Path


def model_folder(path: Path, *weights: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text("{}")
    for name in weights or ("model.safetensors",):
        (path / name).write_bytes(b"12345678")
    return path


def hub_snapshot(tmp_path: Path, repo: str, commit: str, main: bool = True) -> Path:
    """A folder as huggingface_hub keeps it."""
    base = tmp_path / "hub" / ("models--" + repo.replace("/", "--"))
    snapshot = base / "snapshots" / commit
    snapshot.mkdir(parents=True)
    if main:
        (base / "refs").mkdir()
        (base / "refs" / "main").write_text(commit)
    return snapshot
