"""GGUF: one file with everything in it: settings, tokenizer, weights. Versions 2 and 3, little endian.

The file holds, one after the other: the letters GGUF, the version, two counts; the metadata (key, type,
value); the directory of tensors (name, sizes, type, offset); and, from the next multiple of the
alignment on, the tensors. The specification is `docs/gguf.md` of the ggml project. Only the header is
read here; tensors stay in the mapped file.
"""

import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NoReturn

import numpy as np

from cutaway.checkpoints.stored import Tensors, as_weight, map_file, quoted
from cutaway.engines.blocks import BLOCKS, GGUF_TYPES
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError

# The numbers of the metadata types; strings are 8 and arrays 9.
_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_DTYPES = {number: np.dtype(code) for number, code in _NUMBERS.items()} | {_BOOL: np.dtype("u1")}

_UINT32 = struct.Struct("<I")
_UINT64 = struct.Struct("<Q")
_DEFAULT_ALIGNMENT = 32
_MOST_DIMENSIONS = 4  # ggml's own limit
# The least a metadata entry (key length, type, one byte) and a tensor's entry can take: a count that the
# rest of the file cannot hold is refused before anything is read.
_LEAST_ENTRY = 13
_LEAST_TENSOR = 24


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """What a GGUF file holds.

    `metadata` has Python numbers, strings, booleans, and lists of these. `tensors` are mapped, not read; the
    shapes are ours, `[d_out, d_in]` (ggml lists the sizes the other way round).
    """

    path: Path
    version: int
    metadata: dict[str, object]
    tensors: Tensors
    file_bytes: int

    @property
    def unreadable(self) -> dict[str, str]:
        """Tensors stored in a type that cannot be computed with: name → type."""
        return self.tensors.unreadable


@dataclass(frozen=True)
class _Entry:
    """One line of the directory of tensors; `shape` is in our order, `offset` counts from the data's start."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int


class _Header:
    """Reads the header from its start to its end; `at` is the next byte to be read."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.end = path, data, 0, len(data)

    def fail(self, what: str) -> NoReturn:
        raise CutawayError(f"{self.path} is not a GGUF file that can be read: {what}.")

    def cut_short(self) -> NoReturn:
        raise CutawayError(
            f"{self.path} ends in the middle of its header (after {self.end} bytes), or a length in the header "
            f"before byte {self.at} is wrong. Fetch the file again."
        )

    def uint32(self) -> int:
        if self.at + 4 > self.end:
            self.cut_short()
        value: int = _UINT32.unpack_from(self.data, self.at)[0]
        self.at += 4
        return value

    def uint64(self) -> int:
        if self.at + 8 > self.end:
            self.cut_short()
        value: int = _UINT64.unpack_from(self.data, self.at)[0]
        self.at += 8
        return value

    def count(self, of: str, least: int) -> int:
        """A number of things of which each takes `least` bytes at least."""
        count = self.uint64()
        if count * least > self.end - self.at:
            self.fail(f"it claims to hold {count} {of}, more than its {self.end} bytes can")
        return count

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """`count` strings, each a length and its bytes. The one loop that matters for speed: vocabularies."""
        data, at, end, length_at = self.data, self.at, self.end, _UINT64.unpack_from
        found: list[str] = []
        append = found.append
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > end:
                    self.at = start
                    self.cut_short()
                append(str(data[start:at], "utf-8"))
        except struct.error:
            self.at = at
            self.cut_short()
        except UnicodeDecodeError:
            self.fail(f"the string at byte {start} is not UTF-8: {quoted(data[start:at][:40])}")
        self.at = at
        return found

    def numbers(self, kind: int, count: int) -> list[int] | list[float] | list[bool]:
        dtype = _DTYPES[kind]
        if count * dtype.itemsize > self.end - self.at:
            self.cut_short()
        values = np.frombuffer(self.data, dtype, count, self.at)
        if kind == _BOOL:
            if values.size and values.max() > 1:
                self.fail(f"the true-or-false value at byte {self.at} is {values.max()}, neither 0 nor 1")
            values = values.astype(bool)
        self.at += count * dtype.itemsize
        return values.tolist()

    def value(self, key: str) -> object:
        kind = self.uint32()
        if kind == _STRING:
            return self.string()
        if kind in _DTYPES:
            return self.numbers(kind, 1)[0]
        if kind != _ARRAY:
            self.fail(f"the metadata {quoted(key)} has the type number {kind}; types go from 0 to 12")
        item = self.uint32()
        if item == _ARRAY:
            self.fail(f"the metadata {quoted(key)} is an array of arrays, which no model uses")
        if item == _STRING:
            return self.strings(self.count(f"strings in {quoted(key)}", _UINT64.size))
        if item not in _DTYPES:
            self.fail(f"the items of {quoted(key)} have the type number {item}; types go from 0 to 12")
        return self.numbers(item, self.count(f"values in {quoted(key)}", _DTYPES[item].itemsize))

    def metadata(self, count: int) -> dict[str, object]:
        found: dict[str, object] = {}
        for _ in range(count):
            key = self.string()
            if key in found:
                self.fail(f"the metadata {quoted(key)} is given twice")
            found[key] = self.value(key)
        return found

    def entry(self) -> _Entry:
        name = self.string()
        n_dims = self.uint32()
        if n_dims > _MOST_DIMENSIONS:
            self.fail(f"the tensor {quoted(name)} has {n_dims} dimensions; {_MOST_DIMENSIONS} are the most")
        sizes = [self.uint64() for _ in range(n_dims)]
        if 0 in sizes:
            self.fail(f"the tensor {quoted(name)} has a dimension of size 0 (its sizes are {sizes})")
        number = self.uint32()
        if number not in GGUF_TYPES:
            self.fail(
                f"the tensor {quoted(name)} has the type number {number}, which is not known here; "
                f"the types that can be computed with are {', '.join(BLOCKS)}"
            )
        return _Entry(name, GGUF_TYPES[number], tuple(reversed(sizes)), self.uint64())


def read_gguf(path: str | Path) -> GGUFFile:
    """Read the header of a GGUF file and map its tensors.

    Raises CutawayError, with the path and the offending value, for anything that is not a whole, well-formed
    little-endian GGUF file of version 2 or 3. Tensors of a type that cannot be computed with do not hinder
    reading; they are refused, by name and type, when they are asked for.
    """
    path = Path(path)
    data = map_file(path, "a GGUF file")
    header = _Header(path, data)
    version = _version(header)
    n_tensors = header.count("tensors", _LEAST_TENSOR)
    n_entries = header.count("metadata entries", _LEAST_ENTRY)
    metadata = header.metadata(n_entries)
    alignment = _alignment(header, metadata)
    _refuse_part(header, metadata)
    entries = [header.entry() for _ in range(n_tensors)]
    start = -(-header.at // alignment) * alignment
    tensors = _tensors(header, entries, start, alignment)
    return GGUFFile(path, version, metadata, tensors, header.end)


def _version(header: _Header) -> int:
    magic = header.data[:4]
    if magic != b"GGUF":
        header.fail(f"it begins with {magic!r} in place of b'GGUF'")
    header.at = 4
    version = header.uint32()
    if version in (2, 3):
        return version
    if version and version & 0xFFFF == 0:
        header.fail("it was written for big-endian machines; convert the model again for little-endian ones")
    header.fail(f"its version is {version}; versions 2 and 3 can be read")


def _alignment(header: _Header, metadata: dict[str, object]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        header.fail(f"general.alignment is {quoted(alignment)}; it has to be a power of two")
    return alignment


def _refuse_part(header: _Header, metadata: dict[str, object]) -> None:
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise CutawayError(
            f"{header.path} is one of {parts} parts of a model. Join them first, with "
            "`llama-gguf-split --merge` of llama.cpp."
        )


def _tensors(header: _Header, entries: list[_Entry], start: int, alignment: int) -> Tensors:
    """Map every tensor of the directory, after checking that it lies whole and alone in the file."""
    everything = np.frombuffer(header.data, np.uint8)
    weights: dict[str, Weight] = {}
    unreadable: dict[str, str] = {}
    spans: list[tuple[int, int, str]] = []
    for entry in entries:
        name = quoted(entry.name)
        if entry.name in weights or entry.name in unreadable:
            header.fail(f"the tensor {name} is listed twice")
        if entry.offset % alignment:
            header.fail(f"the tensor {name} lies at offset {entry.offset}, no multiple of {alignment}")
        block = BLOCKS.get(entry.kind)
        n_bytes = 0  # not known, and not needed, for a type that is never read
        if block is not None:
            if (width := entry.shape[-1] if entry.shape else 1) % block.weights:
                header.fail(
                    f"a row of the tensor {name} has {width} weights, "
                    f"no multiple of the {block.weights} of a {entry.kind} block"
                )
            n_bytes = prod(entry.shape) // block.weights * block.bytes
        first, last = start + entry.offset, start + entry.offset + n_bytes
        if last > header.end:
            raise CutawayError(
                f"{header.path} is cut short: the tensor {name} takes its bytes {first} to {last}, and the file "
                f"has {header.end}. Fetch it again."
            )
        if block is None:
            unreadable[entry.name] = entry.kind
        else:
            weights[entry.name] = as_weight(everything[first:last], entry.kind, entry.shape)
        spans.append((first, last, entry.name))
    for (_, last, one), (first, _, other) in pairwise(sorted(spans)):
        if first < last:
            header.fail(f"the tensors {quoted(one)} and {quoted(other)} overlap at byte {first}")
    return Tensors(header.path, weights, unreadable)
