"""The folder where Cutaway keeps what it fetched: finding it, taking turns in it, trusting what lies in it."""

import getpass
import hashlib
import json
import os
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from cutaway.errors import CutawayError
from cutaway.progress import progress

CHUNK_BYTES = 1 << 20


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


def model_folders() -> list[Path]:
    """Where fetched models may lie, the likeliest first; nothing is created.

    The preferred folder is among them even where it is read-only: an image or a shared disk may bring its
    models along.
    """
    wanted, spare = _preferred(), _spare_path()
    places = [] if wanted is None else [wanted]
    if spare is not None and _is_own(spare):
        places.append(spare)
    return [place / "models" for place in places]


def is_offline() -> bool:
    """Whether the user has asked, by CUTAWAY_OFFLINE=1, that nothing be fetched."""
    return is_set("CUTAWAY_OFFLINE")


def is_set(variable: str) -> bool:
    """Whether an environment variable holds a yes (1, true, yes, on)."""
    return os.environ.get(variable, "").strip().lower() in {"1", "true", "yes", "on"}


def _choose() -> tuple[Path, str | None]:
    wanted = _preferred()
    reason = "there is no home folder" if wanted is None else _why_unwritable(wanted)
    if wanted is not None and reason is None:
        return wanted, None
    spare = _spare_folder()
    place = "The cache folder" if wanted is None else f"The cache folder {wanted}"
    note = f"{place} cannot be written ({reason}), so {spare} is used; CUTAWAY_CACHE can name a better one."
    return spare, note


def _preferred() -> Path | None:
    """The folder by name alone; None where there is no home folder to put it in."""
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


def _spare_path() -> Path | None:
    try:
        user = str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()
        return Path(tempfile.gettempdir()) / f"cutaway-{user}"
    except (OSError, KeyError, ImportError):
        return None


def _spare_folder() -> Path:
    spare = _spare_path()
    if spare is not None:
        with suppress(OSError):
            spare.mkdir(mode=0o700, exist_ok=True)
        if _is_own(spare) and _why_unwritable(spare) is None:
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


def _is_own(folder: Path) -> bool:
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


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[bool]:
    """Wait until no other process (or thread) is in this block for the same folder, then enter.

    Yields True, or False on a file system that knows no locks; there, several may be inside. The system
    releases the lock of a process that was killed.
    """
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        locked = _try_lock(handle)
        if locked is False:
            with progress("Waiting for another Cutaway that is fetching", None):
                while (locked := _try_lock(handle)) is False:
                    time.sleep(0.05)
        yield bool(locked)
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool | None:
    """True: the lock is ours; False: another's; None: this file system has none."""
    if sys.platform == "win32":
        import msvcrt

        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            return True
        except OSError:
            return False
    try:
        import fcntl
    except ImportError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None


def checksum(file: Path, stamp: Path) -> str:
    """The sha256 of `file`, in hexadecimal.

    Hashing a model takes half a second at every start, so the sum is kept in `stamp` with the size and the
    time of change that the file had; if either differs, the file is read again.

    Raises OSError where the file cannot be read.
    """
    status = file.stat()
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(stamp.read_text(encoding="utf-8"))
        if (kept["size"], kept["mtime_ns"]) == (status.st_size, status.st_mtime_ns):
            return str(kept["sha256"])
    digest = hashlib.sha256()
    with file.open("rb") as content, progress(f"Checking {file.name}", status.st_size) as advance:
        while chunk := content.read(CHUNK_BYTES):
            digest.update(chunk)
            advance(len(chunk))
    keep_checksum(digest.hexdigest(), status, stamp)
    return digest.hexdigest()


def keep_checksum(sha256: str, status: os.stat_result, stamp: Path) -> None:
    """Let `checksum` answer without reading, as long as a file has this `status`.

    A folder that refuses the stamp costs time at every start, nothing else.
    """
    kept = {"sha256": sha256, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    with suppress(OSError):
        stamp.write_text(json.dumps(kept) + "\n", encoding="utf-8")
