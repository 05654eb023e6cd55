"""What was fetched and kept: where it may lie, taking turns in its folder, trusting what lies there."""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cutaway.places import could_be_written, is_own, preferred_folder, spare_path
from cutaway.progress import progress

CHUNK_BYTES = 1 << 20


def model_folders() -> list[Path]:
    """Where fetched models may lie, the likeliest first; nothing is created.

    The preferred folder is among them even where it is read-only: an image or a shared disk may bring its
    models along. The folder that takes its place is looked at only where it is needed: what an earlier run left
    there must not answer for a cache that can be written.
    """
    wanted, spare = preferred_folder(), spare_path()
    places = [] if wanted is None else [wanted]
    if spare is not None and is_own(spare) and (wanted is None or not could_be_written(wanted)):
        places.append(spare)
    return [place / "models" for place in places]


def is_offline() -> bool:
    """Whether the user has asked, by CUTAWAY_OFFLINE=1, that nothing be fetched."""
    return is_set("CUTAWAY_OFFLINE")


def is_set(variable: str) -> bool:
    """Whether an environment variable holds a yes (1, true, yes, on)."""
    return os.environ.get(variable, "").strip().lower() in {"1", "true", "yes", "on"}


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
            with progress("Waiting for another cutaway that is fetching …", None):
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
