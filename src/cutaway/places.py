"""Where Cutaway may keep files of its own: the user's cache folder, or a safe place beside it."""

import getpass
import os
import stat
import sys
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from cutaway.errors import CutawayError


def cache_folder() -> Path:
    """A folder of the user's that can be written; it exists when this returns.

    `$CUTAWAY_CACHE`, else `$XDG_CACHE_HOME/cutaway`, else the platform's own place for caches. Where that
    cannot be written, a private folder among the temporary files takes its place and `cache_note` says so.

    Raises CutawayError where no folder at all can be written.
    """
    return _choose()[0]


def cache_note() -> str | None:
    """Why the cache is not where the user would look for it; None where it is."""
    return _choose()[1]


def preferred_folder() -> Path | None:
    """The user's cache folder by name alone, nothing created; None where there is no home to put it in."""
    try:
        if own := os.environ.get("CUTAWAY_CACHE"):
            return Path(own).expanduser().absolute()
        # The XDG rules say that a relative path there is to be ignored.
        if (shared := os.environ.get("XDG_CACHE_HOME")) and os.path.isabs(shared):
            return Path(shared) / "cutaway"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "cutaway"
        if sys.platform == "win32":
            local = os.environ.get("LOCALAPPDATA")
            return (Path(local) if local else Path.home() / "AppData" / "Local") / "cutaway"
        return Path.home() / ".cache" / "cutaway"
    except RuntimeError:
        return None


def spare_path() -> Path | None:
    """The private folder among the temporary files, by name alone; None where the user has no name."""
    try:
        user = str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()
        return Path(tempfile.gettempdir()) / f"cutaway-{user}"
    except (OSError, KeyError, ImportError):
        return None


def could_be_written(folder: Path) -> bool:
    """Whether `folder`, or the nearest folder above it that exists, takes files, as far as can be told untouched."""
    there = next((place for place in (folder, *folder.parents) if place.exists()), None)
    return there is not None and there.is_dir() and os.access(there, os.W_OK)


def is_own(folder: Path) -> bool:
    """Whether `folder` is a real folder that nobody else may write.

    Temporary folders have predictable names in a place open to all: one that another user made there first
    must not be taken for ours.
    """
    try:
        status = folder.lstat()
    except OSError:
        return False
    if not stat.S_ISDIR(status.st_mode):
        return False
    if not hasattr(os, "getuid"):
        return True
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _choose() -> tuple[Path, str | None]:
    wanted = preferred_folder()
    reason = "there is no home folder" if wanted is None else _why_unwritable(wanted)
    if wanted is not None and reason is None:
        return wanted, None
    spare = _spare_folder()
    place = "The cache folder" if wanted is None else f"The cache folder {wanted}"
    note = f"{place} cannot be written ({reason}), so {spare} is used; CUTAWAY_CACHE can name a better one."
    return spare, note


def _why_unwritable(folder: Path) -> str | None:
    """None where files can be made in `folder` (created if need be), else the system's reason."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Asked by doing: permission bits say little for root, on Windows and on network disks.
        with tempfile.TemporaryFile(dir=folder):
            return None
    except (OSError, ValueError) as error:
        return _reason(error)


def _reason(error: Exception) -> str:
    return (getattr(error, "strerror", None) or str(error)).lower()


def _spare_folder() -> Path:
    spare = spare_path()
    if spare is not None:
        with suppress(OSError):
            spare.mkdir(mode=0o700, exist_ok=True)
        if is_own(spare) and _why_unwritable(spare) is None:
            return spare
    return _folder_of_this_run()


@lru_cache(maxsize=1)
def _folder_of_this_run() -> Path:
    try:
        return Path(tempfile.mkdtemp(prefix="cutaway-"))
    except OSError as error:
        raise CutawayError(
            f"No folder can be written, neither a cache nor a temporary one ({_reason(error)}); "
            "set CUTAWAY_CACHE to a folder that can."
        ) from error
