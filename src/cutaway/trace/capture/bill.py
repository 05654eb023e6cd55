"""What looking costs, known before the run: the shapes and the bytes of what a pass computes and of what is kept."""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from cutaway.engines.layout import BLOCK
from cutaway.errors import CutawayError
from cutaway.points import ROW_BLOCKS, Point, points_of, shape_of
from cutaway.spec import ModelSpec
from cutaway.trace.capture.plan import Plan
from cutaway.trace.capture.recorder import Cut

WHOLE_NUMBERS = ("tokens", "moe.chosen")  # int64, whatever the engine computes in


def activation_bytes(spec: ModelSpec, tokens: int, points: Iterable[Point] | None = None, itemsize: int = 4) -> int:
    """Bytes of these points (every point, where None) stored in full, `itemsize` bytes a number."""
    chosen = points_of(spec) if points is None else points
    return sum(prod(shape_of(point, spec, tokens)) for point in chosen) * itemsize


def activation_shapes(spec: ModelSpec, tokens: int) -> dict[Point, tuple[int, ...]]:
    """Every point with its shape in a pass over `tokens` tokens; T stands in all of them (chapter 13.4)."""
    return {point: shape_of(point, spec, tokens) for point in points_of(spec)}


@dataclass(frozen=True)
class Item:
    """One array that is kept: its address, shape and bytes; `why` names what it is kept for, where not for itself.
    `serving` are the key/value heads that are kept because they serve the query heads that were asked for.

    An array that is kept already under another address (`attn.out` is `attn.raw` where nothing stands between) costs
    nothing: 0 bytes.
    """

    address: str
    shape: tuple[int, ...]
    nbytes: int
    why: str = ""
    serving: tuple[int, ...] = ()


@dataclass(frozen=True)
class Bill:
    """What a run will keep. `flops` are those that looking adds to the run, `flops_to_read` those of working out,
    once each, what is not stored. `free` are the bytes of memory that are free now, None where that is not known.
    `block` are those of the one block of query rows that stands beside it where T × T arrays are looked at.
    """

    items: tuple[Item, ...]
    flops: int
    flops_to_read: int
    free: int | None
    block: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of all that is kept, beyond what the pass itself needs at any time."""
        return sum(item.nbytes for item in self.items)

    def __str__(self) -> str:
        lines = []
        for item in sorted(self.items, key=lambda item: -item.nbytes)[:20]:
            shape = ", ".join(map(str, item.shape))
            told = f"for {item.why}" if item.why else ""
            if item.serving:
                told = f"key/value {_numbered(item.serving)}, which serve the query heads"
            lines.append(f"  {item.address:<34} {'[' + shape + ']':<22} {in_units(item.nbytes):>10}  {told}".rstrip())
        if len(self.items) > 20:
            rest = sum(item.nbytes for item in sorted(self.items, key=lambda item: -item.nbytes)[20:])
            lines.append(f"  and {len(self.items) - 20} smaller ones {in_units(rest):>46}")
        free = "" if self.free is None else f" of {in_units(self.free)} free"
        lines.append(f"kept: {in_units(self.bytes)}{free}, in {len(self.items)} arrays")
        if self.block:
            lines.append(f"beside it {in_units(self.block)} while it runs: {BLOCK} query rows of one layer at a time")
        lines.append(f"work: {self.flops:.3g} FLOPs more in the run, {self.flops_to_read:.3g} to work out what is read")
        return "\n".join(lines)

    def show(self) -> None:
        """Print it."""
        print(self)

    def refuse_over(self, limit: int | None) -> None:
        """Raise CutawayError where more would be kept than `limit` bytes; None allows half of the free memory."""
        allowed = limit if limit is not None else (None if self.free is None else self.free // 2)
        if allowed is None or self.bytes <= allowed:
            return
        largest = sorted(self.items, key=lambda item: -item.nbytes)
        names: dict[str, int] = {}
        for item in largest:  # what is in every layer is dropped in every layer
            part = item.address.split(".", 2)
            name = f"layers.*.{part[2]}" if part[0] == "layers" else item.address
            name = name + (f" (kept for {item.why.split('.', 2)[-1]})" if item.why else "")
            names[name] = names.get(name, 0) + item.nbytes
        biggest = sorted(names.items(), key=lambda pair: -pair[1])[:3]
        told = ", ".join(f"{name}: {in_units(size)}" for name, size in biggest)
        than = "half of the memory that is free" if limit is None else "the limit"
        raise CutawayError(
            f"This capture keeps {in_units(self.bytes)}, more than {than} ({in_units(allowed)}). The largest are "
            f"{told}. Leave some out, reduce them (| top(5), | mean), choose positions= or heads=, "
            "or give spill='a file' to keep them on disk."
        )


def bill(
    plan: Plan, spec: ModelSpec, tokens: int, cut: Cut, dtype: np.dtype, *, past: int = 0, edited: frozenset[Point]
) -> Bill:
    """What a pass over `tokens` tokens after `past` cached ones keeps; `edited` are the points at which edits act."""
    size = np.dtype(dtype).itemsize
    same = _same_arrays(spec)
    taken = plan.taken(spec)
    asked = [*plan.points, *(one.point for one in plan.reduced)]
    sources = {point: plan.sources(spec, point) for point in asked}
    readable = set(plan.points)
    reasons = {source: str(point) for point in asked for source in sources[point] if source not in readable}
    counted: set[Point] = set()
    alike: dict[tuple[str, int, bool], _Kept] = {}  # as most layers are
    items = []
    for point in points_of(spec):
        if point not in plan.kept:
            continue
        kind = (point.name, id(spec.layers[point.layer or 0]), point in cut.whole)
        kept = alike[kind] = alike.get(kind) or _kept_of(point, spec, tokens, past, cut)
        first = point
        while first in same and not kept.cut and first not in edited:
            first = same[first]
        width = 8 if point.name in WHOLE_NUMBERS else size
        nbytes = 0 if first in counted else prod(kept.shape) * width
        if not kept.cut:
            counted.add(first)
        items.append(Item(str(point), kept.shape, nbytes, reasons.get(point, ""), kept.serving))
    flops = 0
    for one in taken:
        whole = _kept_of(one.point, spec, tokens, past, cut).shape
        rows = one.point.info.shape.index("T")
        shape = one.reduction.shape(whole, rows)
        width = 8 if one.reduction.name == "argtop" else size
        items.append(Item(str(one), shape, prod(shape) * width))
        flops += prod(whole)
    flops += sum(_flops_of(point, spec, tokens, past) for point in edited if point.name == "attn.head_out")
    later = [point for point in plan.points if sources[point] != [point]]
    later += [one.point for one in plan.reduced if one not in taken]
    reading = sum(_flops_of(point, spec, tokens, past) for point in later)
    looked_at = [*(p for p in plan.kept if p.name in ROW_BLOCKS), *(one.point for one in taken)]
    shapes = [shape_of(point, spec, tokens) for point in looked_at if point.name in ROW_BLOCKS]
    block = max((heads * min(BLOCK, tokens) * (tokens + past) * size for heads, *_ in shapes), default=0)
    return Bill(tuple(items), flops, reading, free_memory(), block)


def free_memory() -> int | None:
    """Bytes of memory that programs can still have without swapping; None where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as told:
            for line in told:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    if sys.platform == "win32":
        return _free_on_windows()
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def in_units(size: int) -> str:
    """Bytes as people read them."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:,.1f} {unit}"
    return f"{size} bytes"


def _numbered(heads: tuple[int, ...]) -> str:
    return f"head{'s' if len(heads) > 1 else ''} {', '.join(map(str, heads))}"


def _free_on_windows() -> int | None:
    import ctypes

    class Status(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            *((name, ctypes.c_ulonglong) for name in ("total", "free", "pages", "pages_free", "space", "left", "more")),
        )

    status = Status()
    status.length = ctypes.sizeof(Status)
    told = ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined]
    return int(status.free) if told else None


class _Kept(NamedTuple):
    """What is kept of a point: in which shape, whether a part only, and heads as `Item.serving` has them."""

    shape: tuple[int, ...]
    cut: bool
    serving: tuple[int, ...]


def _kept_of(point: Point, spec: ModelSpec, tokens: int, past: int, cut: Cut) -> _Kept:
    shape, symbols = list(shape_of(point, spec, tokens)), point.info.shape
    if symbols[-1] == "S":
        shape[-1] = tokens + past
    heads, rows = cut.heads_of(point, spec), cut.rows_of(point)
    if heads is not None:
        shape[0] = len(heads)
    if rows is not None:
        shape[symbols.index("T")] = len(rows)
    serving = tuple(heads.tolist()) if heads is not None and "H_kv" in symbols else ()
    return _Kept(tuple(shape), heads is not None or rows is not None, serving)


def _same_arrays(spec: ModelSpec) -> dict[Point, Point]:
    """Points at which the pass shows the very array that it showed at an earlier one."""
    same: dict[Point, Point] = {}
    embedded = Point("embed.norm") if spec.embed_norm is not None else None
    if embedded is None and spec.embed_scale == 1.0 and spec.token_types is None and spec.positions is None:
        embedded = Point("embed.tokens")
    if embedded is not None:
        same[Point("embed.out")] = embedded
    for i, layer in enumerate(spec.layers):
        same[Point("resid_pre", i)] = Point("embed.out") if i == 0 else Point("resid_post", i - 1)
        if layer.out_norm is None:
            same[Point("attn.out", i)] = Point("attn.raw", i)
            same[Point("mlp.out", i)] = Point("mlp.raw", i)
    return same


def _flops_of(point: Point, spec: ModelSpec, tokens: int, past: int) -> int:
    """Operations of working out one point from its sources: two for each multiplication with an addition."""
    if point.name == "logits":
        return 2 * tokens * spec.d_model * spec.vocab_size
    attention = spec.layers[point.layer or 0].attention
    if point.name == "attn.head_out":
        return 2 * attention.n_heads * tokens * attention.n_heads * attention.value_width * spec.d_model
    if point.name in ROW_BLOCKS:
        return 2 * attention.n_heads * tokens * (tokens + past) * attention.d_head
    return 0
