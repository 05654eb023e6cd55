"""safetensors: a length, a JSON directory, and the bytes of the tensors; and models split over several files.

The file begins with the length of the directory (8 bytes, little endian), then the directory: for each
tensor its dtype, its shape, and where it begins and ends in the bytes that follow. The package's own
reader refuses bfloat16 in NumPy; this one maps the bytes as they are.
"""

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NoReturn

import numpy as np

from cutaway.checkpoints.stored import Tensors, as_weight, map_file, quoted
from cutaway.engines.blocks import BLOCKS
from cutaway.engines.weights import Weight
from cutaway.errors import CutawayError
from cutaway.reading import Unreadable, parsed_object

_WHAT = "a safetensors file"
_READABLE = ("F64", "F32", "F16", "BF16")
# Bytes of one number of the other types, so that their place in the file can be checked as well; types that
# are not here (newer ones, or of less than a byte) are only known by name.
_OTHERS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2}
_OTHERS |= {"U32": 4, "I32": 4, "U64": 8, "I64": 8, "C64": 8}
_BYTES = {kind: BLOCKS[kind].bytes for kind in _READABLE} | _OTHERS
_LONGEST_HEADER = 100_000_000  # the limit of the format's own reader
_MOST_DIMENSIONS = 32
_MOST_NUMBERS = 2**48  # bounds the sizes of an empty tensor, which its bytes do not

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_OTHER_FRAMEWORKS = (".h5", ".msgpack", ".onnx", ".tflite")


@dataclass(frozen=True, eq=False)
class SafetensorsFile:
    """What one safetensors file holds, or several that together are a model.

    `tensors` are mapped, not read. `metadata` is the free text of the file's `__metadata__`.
    """

    paths: tuple[Path, ...]
    tensors: Tensors
    metadata: dict[str, str]
    file_bytes: int

    @property
    def others(self) -> dict[str, str]:
        """Tensors of a dtype that weights cannot have (integer buffers, 8-bit floats): name → dtype."""
        return self.tensors.unreadable


def read_safetensors(path: str | Path) -> SafetensorsFile:
    """Read the directory of one safetensors file and map its tensors.

    Raises CutawayError, with the path and the offending value, for anything that is not a whole, well-formed
    file. Tensors of other dtypes than float64, float32, float16 and bfloat16 do not hinder reading; they are
    refused, by name and dtype, when they are asked for.
    """
    path = Path(path)
    data = map_file(path, _WHAT)
    if len(data) < 8:
        _fail(path, f"it has {len(data)} bytes, fewer than the 8 of the header's length")
    (length,) = struct.unpack_from("<Q", data, 0)
    if length > min(_LONGEST_HEADER, len(data) - 8):
        _fail(
            path,
            f"its header should be {length} bytes long, and the file has {len(data)}. Either it is cut short or it "
            f"is of another format (it begins with {data[:8]!r})",
        )
    directory = _json(path, data[8 : 8 + length])
    metadata = _metadata(path, directory.pop("__metadata__", None))
    everything = np.frombuffer(data, np.uint8)
    return SafetensorsFile((path,), _tensors(path, directory, everything[8 + length :]), metadata, len(data))


def read_sharded(folder: str | Path, index_path: str | Path) -> SafetensorsFile:
    """Read the files that the index lists for each tensor; they lie in `folder`.

    Raises CutawayError where the index is malformed or names a path outside the folder, where a file is
    missing, where a file lacks a tensor that the index finds there, and where two files hold the same tensor.
    """
    folder, index_path = Path(folder), Path(index_path)
    data = map_file(index_path, "the index of a sharded model")
    weight_map = _json(index_path, data[:], "an index of safetensors files").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _fail(index_path, "it has no weight_map that lists a file for each tensor", "an index that can be read")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or _leaves_folder(name):
            raise CutawayError(
                f"{index_path} places the tensor {quoted(tensor)} in {quoted(name)}; "
                "a file in the same folder is needed."
            )
    names = sorted(set(weight_map.values()))
    # os.path.exists, unlike Path.exists, answers for names that no file can have (too long, say).
    missing = [name for name in names if not os.path.exists(folder / name)]
    if missing:
        raise CutawayError(
            f"{len(missing)} of the {len(names)} files that {index_path} lists are missing from {folder}: "
            f"{_listed(missing)}. Fetch them as well."
        )
    shards = {name: read_safetensors(folder / name) for name in names}
    weights: dict[str, Weight] = {}
    unreadable: dict[str, str] = {}
    codes: dict[str, np.ndarray] = {}
    home: dict[str, str] = {}
    for name, shard in shards.items():
        for tensor in (*shard.tensors, *shard.others):
            if tensor in home:
                raise CutawayError(
                    f"The tensor {quoted(tensor)} is in two files of {folder}, {home[tensor]} and {name}; "
                    "each tensor has to be in one."
                )
            home[tensor] = name
        weights.update(shard.tensors)
        unreadable.update(shard.others)
        codes.update(shard.tensors.codes)
    for tensor, name in weight_map.items():
        if home.get(tensor) != name:
            where = f"it is in {home[tensor]}" if tensor in home else "no file has it"
            raise CutawayError(f"{index_path} places the tensor {quoted(tensor)} in {name}, but {where}.")
    return SafetensorsFile(
        paths=tuple(folder / name for name in names),
        tensors=Tensors(folder, weights, unreadable, codes=codes),
        metadata={key: text for shard in shards.values() for key, text in shard.metadata.items()},
        file_bytes=sum(shard.file_bytes for shard in shards.values()),
    )


def find_weights(folder: str | Path) -> SafetensorsFile:
    """Read the weights of a model's folder: `model.safetensors`, else the files of its index, else the only one.

    Raises CutawayError where there are none, and says what is there in their place: pickles, which are never
    opened since they can run code, weights of another framework, a GGUF file, an adapter.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CutawayError(f"There is no folder {folder}; a folder with a model's safetensors files is needed.")
    if (folder / SINGLE_NAME).exists():
        return read_safetensors(folder / SINGLE_NAME)
    if (folder / INDEX_NAME).exists():
        return read_sharded(folder, folder / INDEX_NAME)
    names = sorted(path.name for path in folder.iterdir())
    candidates = [name for name in names if name.endswith(".safetensors")]
    adapters = [name for name in candidates if name.startswith("adapter")]
    if len(candidates) == 1 and not adapters:
        return read_safetensors(folder / candidates[0])
    if adapters:
        raise CutawayError(
            f"{folder} holds an adapter ({_listed(adapters)}), which changes another model and is none itself. "
            "Load that model, and give edits=[cutaway.edits.Adapter(…)] to its runs, or take model.merged(…)."
        )
    if candidates:
        raise CutawayError(
            f"{folder} holds several safetensors files ({_listed(candidates)}) but neither {SINGLE_NAME} nor "
            f"{INDEX_NAME}, which would say which belong together. Fetch the index as well."
        )
    if ggufs := [name for name in names if name.endswith(".gguf")]:
        raise CutawayError(f"{folder} holds no safetensors but {_listed(ggufs)}; give the path of that file.")
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        raise CutawayError(
            f"{folder} holds its weights only as {_listed(pickles)}. Such files are Python pickles, which can run "
            f"any code when they are opened, so Cutaway never does. {SINGLE_NAME} is needed: many models offer it "
            "beside the pickle, and `save_pretrained` of transformers writes it."
        )
    if foreign := [name for name in names if name.endswith(_OTHER_FRAMEWORKS)]:
        raise CutawayError(
            f"{folder} holds weights of another framework ({_listed(foreign)}); {SINGLE_NAME} is needed."
        )
    raise CutawayError(f"{folder} holds no weights; {SINGLE_NAME} or {INDEX_NAME} with its files is needed.")


def _fail(path: Path, what: str, wanted: str = f"{_WHAT} that can be read") -> NoReturn:
    raise CutawayError(f"{path} is not {wanted}: {what}.")


def _listed(names: list[str], most: int = 5) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _json(path: Path, text: bytes, wanted: str = f"{_WHAT} that can be read") -> dict[str, Any]:
    """The JSON object in `text`, read as all JSON is; the same key twice, for one, is refused."""
    try:
        return parsed_object(text)
    except Unreadable as error:
        _fail(path, f"where its JSON should be stands {quoted(text[:40])} ({error})", wanted)


def _metadata(path: Path, metadata: object) -> dict[str, str]:
    if metadata is None:  # absent, or null, which the format's own reader lets pass
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _fail(path, f"its __metadata__ is {quoted(metadata)}; texts by name are allowed there")
    return metadata


def _tensors(path: Path, directory: dict[str, Any], data: np.ndarray) -> Tensors:
    """Map every tensor of the directory; `data` is what follows the header, which they have to fill exactly."""
    weights: dict[str, Weight] = {}
    unreadable: dict[str, str] = {}
    codes: dict[str, np.ndarray] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in directory.items():
        kind, shape, begin, end = _entry(path, name, entry, len(data))
        if kind in _READABLE:
            weights[name] = as_weight(data[begin:end], kind, shape)
        else:
            unreadable[name] = kind
            if kind == "F8_E4M3" and len(shape) == 2:
                codes[name] = data[begin:end].reshape(shape)
        spans.append((begin, end, name))
    at, before = 0, "the header"
    for begin, end, name in sorted(spans):
        if begin != at:
            problem = "overlaps" if begin < at else f"leaves {begin - at} bytes unused after"
            _fail(path, f"the tensor {quoted(name)} {problem} {before}")
        at, before = end, quoted(name)
    if at != len(data):
        _fail(path, f"{len(data) - at} bytes follow the last tensor and belong to none")
    return Tensors(path, weights, unreadable, codes=codes)


def _entry(path: Path, name: str, entry: object, n_bytes: int) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, begin and end of one tensor, checked against one another and against the file."""
    of = f"the tensor {quoted(name)}"
    if not isinstance(entry, dict) or sorted(entry) != ["data_offsets", "dtype", "shape"]:
        _fail(path, f"{of} is described by {quoted(entry)}; dtype, shape and data_offsets are needed")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str):
        _fail(path, f"{of} has the dtype {quoted(kind)}; a name such as F32 is needed")
    if not _whole_numbers(shape) or len(shape) > _MOST_DIMENSIONS:
        _fail(path, f"{of} has the shape {quoted(shape)}; up to {_MOST_DIMENSIONS} whole numbers are needed")
    if prod(max(1, size) for size in shape) > _MOST_NUMBERS:
        _fail(path, f"{of} has the shape {quoted(shape)}, larger than any file")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(path, f"{of} has the offsets {quoted(offsets)}; a begin and an end are needed")
    begin, end = offsets
    if end > n_bytes:
        raise CutawayError(
            f"{path} is cut short: {of} takes the bytes {quoted(begin)} to {quoted(end)} after the header, "
            f"and {n_bytes} are there. Fetch the file again."
        )
    if kind in _BYTES and end - begin != prod(shape) * _BYTES[kind]:
        _fail(
            path,
            f"{of}, {kind} of shape {quoted(shape)}, takes {prod(shape) * _BYTES[kind]} bytes, "
            f"but its offsets {offsets} span {end - begin}",
        )
    return kind, tuple(shape), begin, end


def _whole_numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _leaves_folder(name: str) -> bool:
    """Whether a file name out of an index points anywhere but into the folder, on any system."""
    return (
        not name
        or "\0" in name
        or ".." in PureWindowsPath(name).parts  # splits at both kinds of slash
        or PureWindowsPath(name).anchor != ""
        or PurePosixPath(name).is_absolute()
    )
