"""A file of stored tensors: mapped into memory, and asked for its weights by name.

Both formats stand on this. What a person has in place of a weight file by mistake (the pointer that Git
leaves for a large file, the page of an error, a pickle under another name) is recognised here.
"""

import mmap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, NoReturn

import numpy as np

from cutaway.engines.blocks import BLOCKS
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError


def quoted(text: object) -> str:
    """A value out of a file, fit for a message: in quotes, control characters escaped, cut at 80 signs."""
    shown = repr(text)
    return shown if len(shown) <= 80 else f"{shown[:76]}…{shown[-1]}"


def map_file(path: Path, what: str) -> mmap.mmap:
    """The bytes of the file, mapped read-only: nothing is read before it is used.

    `what` names the format expected ("a GGUF file"). Raises CutawayError where there is no file, where it
    is a folder, empty or not readable, and where its beginning shows that it is something else.
    """
    try:
        mode = path.stat().st_mode
        if S_ISDIR(mode):
            raise CutawayError(f"{path} is a folder; {what} is needed here.")
        if not S_ISREG(mode):
            raise CutawayError(f"{path} is not an ordinary file; {what} is needed here.")
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise CutawayError(f"{path} is empty (0 bytes); it should be {what}. Fetch it again.")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise CutawayError(f"There is no file {path}; {what} was expected there.") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file system can hold
        raise CutawayError(f"{quoted(str(path))} could not be opened: {error}.") from None
    _refuse_impostor(path, mapped[:512], what)
    return mapped


def _refuse_impostor(path: Path, start: bytes, what: str) -> None:
    """Raise if the first bytes of the file are those of something commonly found in a weight file's place."""
    if start.startswith(b"version https://git-lfs"):
        raise CutawayError(
            f"{path} is not {what} but the pointer that Git LFS keeps in its place. "
            "Fetch the file itself with `git lfs pull`, or download it from where it is hosted."
        )
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        raise CutawayError(
            f"{path} is not {what} but a web page, probably an error or a log-in page saved by a download. "
            "Fetch it again and look at the page if it happens twice."
        )
    if start.startswith(b"PK\x03\x04"):
        raise CutawayError(
            f"{path} is not {what} but a zip archive, as PyTorch's pickled checkpoints are. "
            "Cutaway never unpickles; save the model as safetensors."
        )


class Tensors(dict[str, Weight]):
    """The weights of a file by name; a plain dictionary, but for what it does with a name it lacks.

    `tensors[name]` of an absent name raises CutawayError. `unreadable` holds the tensors that are stored in
    a type which cannot be computed with, name → type. Nobody need ask for those (position buffers), but
    asking for one raises, also by `in` and `get`: a weight taken for absent would give other numbers.
    `codes` are the bytes of those among them that are matrices of 8-bit floats, `uint8 [d_out, d_in]`, which mean
    nothing without their scales; `made` holds weights that are put together when they are first asked for.
    """

    def __init__(
        self,
        source: Path,
        weights: Mapping[str, Weight],
        unreadable: Mapping[str, str],
        *,
        codes: Mapping[str, np.ndarray] | None = None,
        made: Mapping[str, Callable[[], Weight]] | None = None,
    ) -> None:
        super().__init__(weights)
        self.source = source
        self.unreadable = dict(unreadable)
        self.codes = dict(codes or {})
        self.made = dict(made or {})

    @property
    def names(self) -> list[str]:
        """Every tensor: those that can be had, and those that cannot."""
        return list(dict.fromkeys((*self, *self.made, *self.unreadable)))

    def _refuse(self, name: str) -> NoReturn:
        raise CutawayError(
            f"{self.source}: the tensor {quoted(name)} is stored as {self.unreadable[name]}, which cannot be "
            f"computed with. The types that can are {', '.join(BLOCKS)}."
        )

    def __missing__(self, name: str) -> Weight:
        if name in self.made:
            self[name] = weight = self.made[name]()
            return weight
        if name in self.unreadable:
            self._refuse(name)
        raise CutawayError(f"{self.source} has no tensor {quoted(name)}{_nearest(name, self)}.")

    def __contains__(self, name: object) -> bool:
        if name in self.unreadable:
            self._refuse(str(name))
        return super().__contains__(name) or name in self.made

    def get(self, name: str, default: Any = None) -> Any:
        """The weight, or `default` where the file has no tensor of this name."""
        if name in self.unreadable:
            self._refuse(name)
        if name in self.made:
            return self[name]
        return super().get(name, default)


def _nearest(name: str, names: Iterable[str]) -> str:
    """A remark that names what was probably meant, if anything is close."""
    from difflib import get_close_matches

    close = get_close_matches(name, list(names), n=1, cutoff=0.8)
    return f"; the nearest is {quoted(close[0])}" if close else ""


def as_weight(data: np.ndarray, kind: str, shape: tuple[int, ...]) -> Weight:
    """The bytes `uint8 [bytes]` of one tensor as a Weight of this type and shape, on the same memory.

    The caller has checked that the bytes are as many as type and shape ask for. A scalar becomes a vector
    of one number.
    """
    shape = shape or (1,)
    block = BLOCKS[kind]
    row_bytes = shape[-1] // block.weights * block.bytes
    n_rows = 1
    for size in shape[:-1]:
        n_rows *= size
    return Weight(kind, shape, data.reshape(n_rows, row_bytes))
