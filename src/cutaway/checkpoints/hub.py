"""Models of the Hugging Face Hub, through huggingface_hub and its own cache."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cutaway.checkpoints import cache
from cutaway.errors import CutawayError

PREFIX = "hf:"

# What a model folder is read from; weights that are pickles are not even downloaded. Sub-folders hold the same
# weights in other forms (onnx/, original/), and so do files named consolidated*.
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
_UNWANTED = ["*/*", "consolidated*"]

_REFERENCE = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+?)"
    r"(?:@(?P<before>[^@]+?))?"
    r"(?:/(?P<file>[^@]+\.gguf))?"
    r"(?:@(?P<after>[^@]+))?"
)


@dataclass(frozen=True)
class Reference:
    """`hf:owner/name`, with a revision or a GGUF file where they are given."""

    repo: str
    revision: str | None = None
    file: str | None = None


def parse_reference(source: str) -> Reference:
    """Read `hf:owner/name`, `hf:owner/name@revision`, `hf:owner/name/file.gguf` (also with `@revision`).

    Raises CutawayError for any other form.
    """
    match = _REFERENCE.fullmatch(source.removesuffix("/"))
    if match is None or (match["before"] and match["after"]) or ".." in (match["file"] or "").split("/"):
        raise CutawayError(
            f"{source!r} names no model of the Hub: write hf:owner/name, hf:owner/name@revision or "
            "hf:owner/name/file.gguf."
        )
    return Reference(match["repo"], match["before"] or match["after"], match["file"])


def fetch_from_hub(source: str, *, download: bool = True, force: bool = False) -> Path:
    """The folder (config.json and safetensors) or the GGUF file of a model on the Hub, downloaded if need be.

    Nothing is downloaded without `download`, nor where HF_HUB_OFFLINE or CUTAWAY_OFFLINE is set.

    Raises CutawayError where it cannot be had: unknown, gated, not here and no network, no safetensors in it.
    """
    reference = parse_reference(source)
    local = not download or cache.is_offline() or cache.is_set("HF_HUB_OFFLINE")
    folder = _snapshot(source, reference, local, force)
    if reference.file is not None:
        file = folder / reference.file
        if not file.is_file():
            raise CutawayError(f"{source}: the file {reference.file} is not in {reference.repo}{_if_local(local)}.")
        return file
    missing = [
        what
        for what, glob in (("config.json", "config.json"), ("safetensors", "*.safetensors"))
        if not any(folder.glob(glob))
    ]
    if missing:
        raise CutawayError(
            f"{source} has no {' and no '.join(missing)}{_if_local(local)}; Cutaway reads config.json with "
            "safetensors, or one GGUF file (hf:owner/name/file.gguf), and never pickles."
        )
    return folder


def _if_local(local: bool) -> str:
    return " as far as it is on this machine (nothing was downloaded)" if local else ""


def _snapshot(source: str, reference: Reference, local: bool, force: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        with _bars_only_if_watched():
            return Path(
                snapshot_download(
                    reference.repo,
                    revision=reference.revision,
                    cache_dir=hub_folder(),
                    # A single file also goes this way: hf_hub_download retries for 20 s without a network.
                    allow_patterns=_WANTED if reference.file is None else [reference.file],
                    ignore_patterns=_UNWANTED if reference.file is None else None,
                    local_files_only=local,
                    force_download=force and not local,
                )
            )
    except errors.GatedRepoError as error:
        raise CutawayError(
            f"{source} is gated: accept its terms on its page, then `hf auth login` or set HF_TOKEN."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CutawayError(f"{source}: {reference.repo} has no revision {reference.revision!r}.") from error
    except errors.RepositoryNotFoundError as error:
        raise CutawayError(f"{source}: the Hub has no such model, or a private one (then set HF_TOKEN).") from error
    except errors.LocalEntryNotFoundError as error:
        cause = f" ({_first_line(error.__cause__)})" if error.__cause__ else ""
        why = _why_local() if local else f"the Hub cannot be reached{cause}"
        raise CutawayError(f"{source} is not on this machine, and {why}.") from error
    except (errors.EntryNotFoundError, OSError, ValueError) as error:
        raise CutawayError(f"{source} could not be fetched from the Hub: {_first_line(error)}.") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _why_local() -> str:
    for variable in ("CUTAWAY_OFFLINE", "HF_HUB_OFFLINE"):
        if cache.is_set(variable):
            return f"{variable} forbids fetching it"
    return "fetching it was not asked for (`cutaway pull` does that)"


@contextmanager
def _bars_only_if_watched() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    # The user's own word, by this variable, stands.
    if sys.stderr.isatty() or are_progress_bars_disabled() or os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"):
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def hub_folder() -> Path:
    """The Hub's cache by its own rules, without importing its library (a list must be quick)."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if named := os.environ.get(variable):
            return Path(os.path.expandvars(named)).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(os.path.expandvars(home)).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base).expanduser() / "huggingface" / "hub"


def downloaded() -> list[tuple[str, Path]]:
    """(source, path) of each model in the Hub's cache that Cutaway may be able to read: names and files only."""
    found: list[tuple[str, Path]] = []
    with suppress(OSError):
        for repo in sorted(hub_folder().glob("models--*--*")):
            owner, _, name = repo.name.removeprefix("models--").partition("--")
            snapshot, revision = _latest(repo)
            if snapshot is None:
                continue
            source = f"{PREFIX}{owner}/{name}"
            pin = "" if revision == "main" else f"@{revision}"
            if (snapshot / "config.json").is_file() and any(file.is_file() for file in snapshot.glob("*.safetensors")):
                found.append((source + pin, snapshot))
            for file in sorted(snapshot.rglob("*.gguf")):
                if file.is_file():
                    found.append((f"{source}/{file.relative_to(snapshot).as_posix()}{pin}", file))
    return found


def _latest(repo: Path) -> tuple[Path | None, str]:
    """The snapshot that `main` points to, else the newest one with its commit."""
    with suppress(OSError, ValueError):
        snapshot = repo / "snapshots" / (repo / "refs" / "main").read_text(encoding="utf-8").strip()
        if snapshot.is_dir():
            return snapshot, "main"
    with suppress(OSError):
        snapshots = sorted((repo / "snapshots").iterdir(), key=lambda folder: folder.stat().st_mtime)
        if snapshots:
            return snapshots[-1], snapshots[-1].name
    return None, ""
