"""What a sweep left in a folder, read back: `folder[17]["layers.3.resid_post"]`."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cutaway.errors import CutawayError
from cutaway.reading import Unreadable, parsed_object
from cutaway.trace.sweep.layout import FORMAT

INDEX = "index.json"


@dataclass(frozen=True)
class ShardTold:
    """One file: its first prompt, how many prompts and tokens it is of, its bytes, and a digest of the prompts."""

    file: str
    first: int
    prompts: int
    tokens: int
    size: int
    digest: str


@dataclass
class Index:
    """What index.json says: the settings of the sweep, its shards in order, and whether all prompts are done."""

    settings: dict[str, Any]
    shards: list[ShardTold]
    complete: bool = False

    @property
    def prompts(self) -> int:
        return sum(shard.prompts for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        tokens = sum(shard.tokens for shard in self.shards)
        return {
            "format": FORMAT,
            "settings": self.settings,
            "complete": self.complete,
            "prompts": self.prompts,
            "tokens": tokens,
            "shards": [asdict(shard) for shard in self.shards],
        }


def read_index(folder: Path) -> Index:
    """The index of a sweep. Raises CutawayError where there is none that this version can read."""
    path = folder / INDEX
    try:
        told = parsed_object(path.read_bytes())
        if told["format"] != FORMAT:
            raise CutawayError(f"{path} is of another kind ({told['format']!r}) than the sweeps of this version.")
        return Index(told["settings"], [ShardTold(**shard) for shard in told["shards"]], bool(told["complete"]))
    except FileNotFoundError:
        raise CutawayError(f"There is no sweep in {folder}: it has no {INDEX}.") from None
    except (OSError, ValueError, Unreadable, KeyError, TypeError) as error:  # ValueError: a NUL in the path
        raise CutawayError(f"{path} is no index of a sweep ({error}).") from None


class SweepFolder:
    """A sweep on disk. With the layout `prompts` it reads like a list of dicts of arrays, one for each prompt."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        self._index = read_index(self.path)
        self._open: tuple[str, Any] | None = None

    def __repr__(self) -> str:
        told = "" if self.complete else ", not finished"
        return f"<SweepFolder {str(self.path)!r}: {len(self):,} prompts in {len(self.files):,} files{told}>"

    @property
    def complete(self) -> bool:
        """Whether every prompt is done."""
        return self._index.complete

    @property
    def settings(self) -> dict[str, Any]:
        """What was asked for."""
        return self._index.settings

    @property
    def files(self) -> list[Path]:
        """The shards, in the order of the prompts."""
        return [self.path / shard.file for shard in self._index.shards]

    def __len__(self) -> int:
        return self._index.prompts

    def __getitem__(self, prompt: int) -> dict[str, np.ndarray]:
        """The arrays of one prompt by address, its tokens under "ids". Raises CutawayError for another layout."""
        if self.settings["layout"] != "prompts":
            raise CutawayError(
                f"This sweep is laid out as {self.settings['layout']}: read its `files`; only the layout 'prompts' "
                "is read prompt by prompt."
            )
        if not -len(self) <= prompt < len(self):
            raise IndexError(f"Prompt {prompt} was asked for; the sweep holds prompts 0 to {len(self) - 1}.")
        number = prompt % len(self)
        shard = next(shard for shard in self._index.shards if number < shard.first + shard.prompts)
        file = self._file(shard.file)
        lead = f"{number}/"
        names = [name for name in file.offset_keys() if name.startswith(lead)]
        return {name.removeprefix(lead): file.get_tensor(name) for name in names}

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[number] for number in range(len(self)))

    def _file(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if self._open is None or self._open[0] != name:
            try:
                self._open = name, safe_open(self.path / name, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise CutawayError(f"{self.path / name} is no whole safetensors file ({error}).") from None
        return self._open[1]


def open_sweep(folder: str | Path) -> SweepFolder:
    """The sweep that `model.sweep(…, to=folder)` wrote, finished or not. Raises CutawayError where there is none."""
    return SweepFolder(folder)
