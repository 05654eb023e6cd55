"""`cutaway doctor`: what Cutaway found on this machine, and what is wrong with it, each with the mend."""

import argparse
import os
import platform
import sys
from contextlib import suppress
from importlib import metadata, util
from pathlib import Path
from typing import Any

from cutaway.cli.arguments import DEFAULT_MODEL, megabytes, print_json
from cutaway.errors import CutawayError

_OPTIONAL = ("torch", "transformers", "gguf", "sentencepiece")  # for an engine, and what the tests compare with
_NEEDED = ("numpy", "numba", "tokenizers", "safetensors", "jinja2", "huggingface_hub", "rich")
_LITTLE_MEMORY = 1_000_000_000  # SmolLM2 with a long prompt takes about half of it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(options: argparse.Namespace) -> int:
    found = examine()
    if options.json:
        print_json(found)
    else:
        _show(found)
    return 1 if found["problems"] else 0


def examine() -> dict[str, Any]:
    """Everything that is worth knowing, as plain data. `problems` is what needs a mend."""
    from cutaway import __version__

    problems: list[dict[str, str]] = []
    found: dict[str, Any] = {
        "cutaway": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}",
        "platform": platform.platform(),
        "engine": _engine(problems),
        "torch_engine": _torch_engine(problems),
        "memory": _memory(problems),
        "cache": _cache(problems),
        "models": _models(problems),
        "packages": _packages(problems),
        "optional": {name: _version(name) for name in _OPTIONAL},
    }
    _toy(problems)
    return found | {"problems": problems}


def _engine(problems: list[dict[str, str]]) -> dict[str, Any]:
    """The engine that "auto" takes here, why, and what it computes with."""
    from cutaway.engines import make_engine

    try:
        engine = make_engine()
        if engine.note is not None:
            problems.append(_problem(engine.note, "pip install --upgrade numba, or a NumPy that Numba can work with"))
        if engine.name != "cpu":
            import numpy

            return {"name": engine.name, "why": engine.note, "numpy": numpy.__version__, "processors": os.cpu_count()}
        from cutaway.engines.cpu.threads import describe

        told = describe()
    except CutawayError as error:
        problems.append(_problem(str(error), "see above"))
        return {"name": None, "why": str(error), "processors": os.cpu_count()}
    except Exception as error:  # a compiler or a threading layer may fail in any way; the doctor must not
        problems.append(
            _problem(
                f"The cpu engine does not start ({type(error).__name__}: {error}).",
                "pip install --force-reinstall numba, or use --engine numpy",
            )
        )
        return {"name": None, "why": str(error), "processors": os.cpu_count()}
    return {"name": engine.name, "why": "the fastest that runs here", **told}


def _torch_engine(problems: list[dict[str, str]]) -> dict[str, Any] | None:
    """What the torch engine could compute on, the fastest first; None where torch is not installed."""
    if _version("torch") is None:
        return None
    try:
        from cutaway.engines.torch.devices import described

        return {"devices": described()}
    except Exception as error:  # a driver may fail in any way; the doctor must not
        what = f"torch is installed and does not start ({type(error).__name__}: {error})."
        problems.append(_problem(what, 'pip install --upgrade "cutaway[torch]"; the other engines do not need it'))
        return {"devices": []}


def _memory(problems: list[dict[str, str]]) -> dict[str, int | None]:
    """Bytes of memory, and how many of them can be had now; None where the system does not say."""
    total = available = None
    with suppress(OSError, ValueError, AttributeError):
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        available = page * os.sysconf("SC_AVPHYS_PAGES")
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    # A container may be allowed less than the machine has.
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):
            most = int(Path(limit).read_text())
            if total is None or most < total:
                total = most
                available = min(available or most, most - int(Path(used).read_text()))
    if available is not None and available < _LITTLE_MEMORY:
        problems.append(
            _problem(
                f"Only {megabytes(available)} of memory are free.", "close other programs; long prompts need about 1 GB"
            )
        )
    return {"total": total, "available": available}


def _cache(problems: list[dict[str, str]]) -> dict[str, Any]:
    """The folder for models and compiled kernels: where, whether it can be written, how full it is."""
    import shutil

    from cutaway.places import cache_folder, cache_note

    try:
        folder, note = cache_folder(), cache_note()
    except CutawayError as error:
        problems.append(_problem(str(error), "set CUTAWAY_CACHE to a folder that can be written"))
        return {"folder": None, "writable": False, "bytes": None, "free": None}
    if note is not None:
        problems.append(_problem(note, "make the folder writable, or set CUTAWAY_CACHE"))
    held = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            held += path.lstat().st_size if not path.is_dir() else 0
    free = None
    with suppress(OSError):
        free = shutil.disk_usage(folder).free
    return {"folder": str(folder), "writable": True, "bytes": held, "free": free}


def _models(problems: list[dict[str, str]]) -> list[str]:
    """The models that are here, the published ones checked; and whether those that are not could be fetched."""
    from cutaway.checkpoints import cache, fetch
    from cutaway.checkpoints.sources import DEFAULT_MODEL, known_models

    missing = []
    for model in fetch.PUBLISHED.values():
        try:
            if fetch.find(model) is None and model.name == DEFAULT_MODEL:
                missing.append(model)
        except CutawayError as error:
            problems.append(_problem(str(error), f"cutaway pull {model.name} --force"))
    if missing and cache.is_offline():
        problems.append(
            _problem(
                f"{missing[0].name} is not here and CUTAWAY_OFFLINE forbids fetching it.", "unset CUTAWAY_OFFLINE once"
            )
        )
    elif missing and not fetch.has_pip():
        problems.append(
            _problem(
                f"{missing[0].name} is not here and this Python has no pip to fetch it with.", "python -m ensurepip"
            )
        )
    with suppress(CutawayError):
        return [model.name for model in known_models() if model.here]
    return []


def _packages(problems: list[dict[str, str]]) -> dict[str, str | None]:
    versions = {name: _version(name) for name in _NEEDED}
    for name, version in versions.items():
        if version is None and name != "numba":  # numba's absence is told with the engine
            problems.append(_problem(f"The package {name} is missing.", f"pip install {name}"))
    return versions


def _toy(problems: list[dict[str, str]]) -> None:
    """Run the model that ships with the package: whatever else is broken shows here."""
    try:
        from cutaway.model import load

        likeliest = load("toy").trace("<BOS> dragon drinks", points=["logits"]).next_tokens(1)[0]
    except Exception as error:  # the doctor reports what others would die of
        problems.append(
            _problem(f"The shipped model does not run ({type(error).__name__}: {error}).", "install Cutaway again")
        )
        return
    if likeliest.text != "potion":
        problems.append(
            _problem(
                f'After "<BOS> dragon drinks" the shipped model expects {likeliest.text!r} and not "potion".',
                "install Cutaway again, and report it if that does not help",
            )
        )


def _problem(what: str, mend: str) -> dict[str, str]:
    return {"what": what, "mend": mend}


def _version(module: str) -> str | None:
    """The installed version of a package, None where it cannot be found; it is not imported."""
    if util.find_spec(module) is None:
        return None
    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        return "unknown version"


def _show(found: dict[str, Any]) -> None:
    """The findings, one a line, then what is wrong."""
    engine, memory, cache = found["engine"], found["memory"], found["cache"]
    lines = [("cutaway", found["cutaway"]), ("Python", found["python"]), ("platform", found["platform"])]
    lines.append(("engine", f"{engine['name']}, {engine['why']}" if engine["name"] else f"none: {engine['why']}"))
    names = {
        "threads": "threads",
        "layer": "threading layer",
        "numba": "Numba",
        "numpy": "NumPy",
        "blas": "BLAS",
        "blas_used_by": "BLAS is used by",
    }
    told = {names[key]: value for key, value in engine.items() if key in names}
    if "threads_from" in engine:
        told["threads"] = f"{engine['threads']}: {engine['threads_from']}"
    lines += [("cores", str(engine["processors"])), *told.items()]
    if found["torch_engine"] is None:
        lines.append(("torch engine", 'not installed; pip install "cutaway[torch]"'))
    else:
        lines.append(("torch engine", ", ".join(found["torch_engine"]["devices"]) or "does not start"))
    if memory["total"]:
        free = f", {megabytes(memory['available'])} free" if memory["available"] is not None else ""
        lines.append(("memory", megabytes(memory["total"]) + free))
    if cache["folder"]:
        free = f", {megabytes(cache['free'])} free on its disk" if cache["free"] is not None else ""
        lines.append(("cache", f"{cache['folder']}: writable, holds {megabytes(cache['bytes'])}{free}"))
    lines.append(("models here", ", ".join(found["models"]) or "none"))
    lines.append(("packages", _listed(found["packages"])))
    lines.append(("optional", _listed(found["optional"])))

    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)

    def say(text: Text) -> None:
        console.print(text, soft_wrap=True)

    for name, value in lines:
        say(Text.assemble((f"{name:<16}", "dim"), str(value)))
    for problem in found["problems"]:
        say(Text.assemble((f"{'wrong':<16}", "bold red"), problem["what"]))
        say(Text.assemble((f"{'  mend':<16}", "bold"), problem["mend"]))
    if not found["problems"]:
        say(Text.assemble((f"{'wrong':<16}", "dim"), ("nothing", "#3fa58f")))
    if DEFAULT_MODEL not in found["models"]:
        say(Text(f"The first `cutaway trace` fetches {DEFAULT_MODEL}; `cutaway pull` does it now.", style="dim"))


def _listed(versions: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {version or '(not installed)'}" for name, version in versions.items())
