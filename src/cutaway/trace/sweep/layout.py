"""How the results of a sweep lie in its shards: prompt by prompt, as rows of tokens, or as a table of numbers.

- `prompts`: a tensor `N/address` for each prompt N and address, beside `N/ids`. Any shapes.
- `rows`: one matrix `[tokens, width]` for each address, all prompts below one another, with heads side by side; beside
  them `token_ids`, `prompt` and `position`, one number for each row. What trainers of dictionaries read.
- `table`: a Parquet file with one row for each prompt and one column for each address, each a single number.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cutaway.errors import CutawayError
from cutaway.points import POINTS
from cutaway.trace.capture.plan import Plan
from cutaway.trace.prompt import Prompt
from cutaway.trace.trace import rows_asked

FORMAT = "cutaway sweep 1"
LAYOUTS = {"prompts": ".safetensors", "rows": ".safetensors", "table": ".parquet"}
_DTYPES = ("float16", "float32", "float64")
_NAMES = {"float16": "F16", "float32": "F32", "float64": "F64", "int64": "I64", "int32": "I32", "bool": "BOOL"}
_NAMES |= {"int8": "I8", "int16": "I16", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64"}


@dataclass(frozen=True)
class Layout:
    """`dtype` is that of the floats in the files; None leaves them as they are."""

    name: str
    dtype: str | None

    @classmethod
    def read(cls, name: Any, dtype: Any) -> "Layout":
        """The layout of this name. Raises CutawayError for an unknown one, and for `table` without pyarrow."""
        if name not in LAYOUTS:
            raise CutawayError(f"There is no layout {name!r}; it may be {', '.join(LAYOUTS)}.")
        if dtype is not None and dtype not in _DTYPES:
            raise CutawayError(f"The values of a sweep are float16, float32 or float64, not {dtype!r}.")
        if name == "table":
            _parquet()
        return cls(name, dtype)

    @property
    def suffix(self) -> str:
        return LAYOUTS[self.name]

    def shard(self, first: int) -> "Shard":
        """A new shard, whose first prompt is number `first`."""
        kind = {"prompts": ByPrompt, "rows": ByRow, "table": Table}[self.name]
        return kind(first, self.dtype)

    def check(self, plan: Plan, by_function: bool) -> None:
        """Raise CutawayError for points that have no place in this layout."""
        if self.name != "rows":
            return
        if by_function or plan.reduced:
            raise CutawayError("Rows are of whole values: leave reductions out, or choose layout='prompts'.")
        for point in plan.points:
            symbols = point.info.shape
            if "T" not in symbols or "S" in symbols or len(symbols) < 2 or point.name == "moe.chosen":
                raise CutawayError(
                    f"{point} is [{', '.join(symbols)}], which is no row of numbers for each token; leave it out, or "
                    "choose layout='prompts'."
                )


class Shard:
    """What is gathered until a file is full; `nbytes` is what it holds in memory."""

    def __init__(self, first: int, dtype: str | None) -> None:
        self.first, self.prompts, self.tokens, self.nbytes = first, 0, 0, 0
        self._dtype = dtype

    def add(self, prompt: Prompt, result: Any, positions: Sequence[int] | None) -> None:
        """Take one prompt's result. Raises CutawayError where it does not fit this layout."""
        number = self.first + self.prompts
        self._take(number, prompt, result, positions)
        self.prompts, self.tokens = self.prompts + 1, self.tokens + len(prompt.ids)

    def write(self, path: Path) -> None:
        """Write the file."""
        raise NotImplementedError

    def _take(self, number: int, prompt: Prompt, result: Any, positions: Sequence[int] | None) -> None:
        raise NotImplementedError

    def _value(self, number: int, address: str, value: Any) -> np.ndarray:
        """A value as it is written; an own copy where it would keep something larger alive."""
        array = np.asarray(value)
        if self._dtype is not None and array.dtype.kind == "f" and array.dtype != self._dtype:
            with np.errstate(over="ignore"):
                cast = array.astype(self._dtype)
            lost = np.isinf(cast) & np.isfinite(array)
            if lost.any():
                raise CutawayError(
                    f"Prompt {number}: {address} holds {array[lost][0]:.6g}, which {self._dtype} cannot; "
                    "choose dtype='float32'."
                )
            array = cast
        if array.dtype.name not in _NAMES:
            raise CutawayError(f"Prompt {number}: {address} is {array.dtype}; a sweep writes numbers.")
        array = np.ascontiguousarray(array)
        held = array.base
        return array.copy() if held is not None and getattr(held, "nbytes", array.nbytes + 1) > array.nbytes else array


class ByPrompt(Shard):
    def __init__(self, first: int, dtype: str | None) -> None:
        super().__init__(first, dtype)
        self._tensors: dict[str, np.ndarray] = {}

    def _take(self, number: int, prompt: Prompt, result: Any, positions: Sequence[int] | None) -> None:
        values = {"ids": np.array(prompt.ids, dtype=np.int64)}
        for name in result:
            if name == "ids" and not hasattr(result, "points"):
                raise CutawayError("A result cannot be called 'ids': so are the prompt's tokens.")
            values[name] = self._value(number, name, result[name])
        for name, array in values.items():
            self._tensors[f"{number}/{name}"] = array
            self.nbytes += array.nbytes

    def write(self, path: Path) -> None:
        write_tensors(path, {name: [array] for name, array in self._tensors.items()})


class ByRow(Shard):
    def __init__(self, first: int, dtype: str | None) -> None:
        super().__init__(first, dtype)
        self._columns: dict[str, list[np.ndarray]] = {"token_ids": [], "prompt": [], "position": []}

    def _take(self, number: int, prompt: Prompt, result: Any, positions: Sequence[int] | None) -> None:
        ids = np.array(prompt.ids, dtype=np.int64)
        rows = np.arange(len(ids)) if positions is None else rows_asked(positions, len(ids))
        columns = {"token_ids": ids[rows], "prompt": np.full(len(rows), number, np.int64), "position": rows}
        for name in result:
            value, axis = result[name], POINTS[_own(name)].shape.index("T")
            flat = np.moveaxis(value, axis, 0).reshape(len(rows), -1)  # [H, T, d] → [T, H · d]
            columns[name] = self._value(number, name, flat)
        for name, array in columns.items():
            self._columns.setdefault(name, []).append(array)
            self.nbytes += array.nbytes

    def write(self, path: Path) -> None:
        write_tensors(path, self._columns)


class Table(Shard):
    def __init__(self, first: int, dtype: str | None) -> None:
        super().__init__(first, dtype)
        self._rows: list[dict[str, Any]] = []

    def _take(self, number: int, prompt: Prompt, result: Any, positions: Sequence[int] | None) -> None:
        row: dict[str, Any] = {"prompt": number, "tokens": len(prompt.ids)}
        for name in result:
            value = self._value(number, name, result[name])
            if value.size != 1:
                raise CutawayError(
                    f"Prompt {number}: {name} is {list(value.shape)}, and a table holds one number for each prompt; "
                    "reduce it further (positions=[-1] with | norm, or a function), or choose layout='prompts'."
                )
            row[name] = value.reshape(())[()]
        if self._rows and row.keys() != self._rows[0].keys():
            raise CutawayError(f"Prompt {number} has other columns ({', '.join(row)}) than those before it.")
        self._rows.append(row)
        self.nbytes += 64 * len(row)

    def write(self, path: Path) -> None:
        arrow, parquet = _parquet()
        columns = {name: np.array([row[name] for row in self._rows]) for name in self._rows[0]}
        parquet.write_table(arrow.table(columns), path)


def write_tensors(path: Path, tensors: dict[str, list[np.ndarray]]) -> None:
    """A safetensors file; the parts of a tensor stand below one another. Nothing is put together in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT}}
    end = 0
    for name, parts in tensors.items():
        shape = list(parts[0].shape)
        if len(parts) > 1:
            shape[0] = sum(len(part) for part in parts)
        begin, end = end, end + sum(part.nbytes for part in parts)
        header[name] = {"dtype": _NAMES[parts[0].dtype.name], "shape": shape, "data_offsets": [begin, end]}
    told = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    told += b" " * (-len(told) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(told)) + told)
        for parts in tensors.values():
            for part in parts:
                file.write(np.ascontiguousarray(part).data if part.size else b"")


def _own(address: str) -> str:
    """ "layers.3.attn.z" → "attn.z"."""
    return address.split(".", 2)[2] if address.startswith("layers.") else address


def _parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise CutawayError('A table is a Parquet file, which needs pyarrow: pip install "cutaway[data]".') from None
    return pyarrow, pyarrow.parquet
