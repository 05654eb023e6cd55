"""A sweep on disk: shards and an index, in constant memory, that goes on after a kill where it was.

A shard is written under another name and then renamed; then the index, which says how far all is done. So after a
kill every shard that the index tells is whole, and the next run begins behind them. Where shards end depends on
nothing but the prompts and the settings: the files are the same bytes, however often the run was ended in between.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from cutaway.errors import CutawayError
from cutaway.forward.transformer import transformer
from cutaway.spec.plain import spec_to_json
from cutaway.trace.capture.plan import listed
from cutaway.trace.edits.edit import Edit
from cutaway.trace.running import Machine
from cutaway.trace.sweep.folder import INDEX, Index, ShardTold, SweepFolder, read_index
from cutaway.trace.sweep.layout import Layout
from cutaway.trace.sweep.packed_pass import Packed
from cutaway.trace.sweep.packing import Sweep
from cutaway.trace.sweep.prompts import new_digest, prompt_digest

SHARD_BYTES = 256_000_000  # a shard's values stand in memory until it is written
_PROBED = 16  # ids of the pass by which a model is recognised


def write_sweep(sweep: Sweep, folder: Path, layout: Layout, shard_tokens: int) -> SweepFolder:
    """Run `sweep` into `folder`, or on from where it was ended. Raises CutawayError for a folder of anything else."""
    settings = _settings(sweep, layout, shard_tokens)
    first = next(sweep.prompts.peek(), None)
    if first is None:
        raise CutawayError("There are no prompts to sweep over.")
    _checked(sweep, layout, first)
    made = not os.path.exists(folder)
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except ValueError as error:
            raise CutawayError(f"No folder can have the name {str(folder)!r}: {error}.") from None
        with _alone_in(folder):
            new = not (folder / INDEX).exists()
            index = _begun(folder, settings)
            try:
                _verify_done(sweep, index, folder)
                if not index.complete:
                    _write(sweep, folder, layout, index, shard_tokens)
            except CutawayError:
                if new and not index.shards:  # refused before anything was done: the corrected sweep may go here
                    (folder / INDEX).unlink(missing_ok=True)
                raise
    except CutawayError:
        if made and os.path.isdir(folder) and not any(folder.iterdir()):
            folder.rmdir()
        raise
    except OSError as error:
        raise CutawayError(f"The sweep could not be written to {folder}: {error.strerror or error}.") from None
    return SweepFolder(folder)


def _write(sweep: Sweep, folder: Path, layout: Layout, index: Index, shard_tokens: int) -> None:
    done = index.prompts
    shard = layout.shard(done)
    digest = new_digest()
    for raw, prompt, result in sweep.results(done):
        shard.add(prompt, result, sweep.asked.positions)
        prompt_digest(digest, raw)
        del result
        if shard.tokens >= shard_tokens or shard.nbytes >= SHARD_BYTES:
            _finish_shard(folder, layout, index, shard, digest)
            shard, digest = layout.shard(index.prompts), new_digest()
    if shard.prompts:
        _finish_shard(folder, layout, index, shard, digest)
    index.complete = True
    _write_index(folder, index)


def _finish_shard(folder: Path, layout: Layout, index: Index, shard: Any, digest: Any) -> None:
    name = f"shard-{len(index.shards):05d}{layout.suffix}"
    _appears(folder / name, shard.write)
    size = (folder / name).stat().st_size
    index.shards.append(ShardTold(name, shard.first, shard.prompts, shard.tokens, size, digest.hexdigest()))
    _write_index(folder, index)


def _write_index(folder: Path, index: Index) -> None:
    text = json.dumps(index.to_json(), indent=1, ensure_ascii=False) + "\n"

    def write(path: Path) -> None:
        path.write_text(text, encoding="utf-8", newline="\n")

    _appears(folder / INDEX, write)


def _appears(path: Path, write: Callable[[Path], Any]) -> None:
    """The file that `write` makes stands under its name once it is whole and on the disk."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        write(part)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _begun(folder: Path, settings: dict[str, Any]) -> Index:
    """The index of this sweep in `folder`, a new one where the folder is empty. What a kill left over goes away."""
    for left in chain(folder.glob(".shard-*.part"), folder.glob(f".{INDEX}.*.part")):
        left.unlink(missing_ok=True)
    if not (folder / INDEX).exists():
        others = sorted(path.name for path in folder.iterdir() if path.name != _LOCK)
        if others:
            raise CutawayError(
                f"{folder} holds other files ({', '.join(others[:3])}) and no sweep; give an empty or a new folder."
            )
        index = Index(settings, [])
        _write_index(folder, index)
        return index
    index = read_index(folder)
    if index.settings == settings:
        return index
    differing = [name for name in {**settings, **index.settings} if settings.get(name) != index.settings.get(name)]
    raise CutawayError(
        f"{folder} holds a sweep with other settings ({', '.join(differing)}); give another folder, or the settings "
        "it was begun with."
    )


def _verify_done(sweep: Sweep, index: Index, folder: Path) -> None:
    """Take the prompts that are done already, and refuse where they are not those of the shards."""
    for shard in index.shards:
        file = folder / shard.file
        if not file.is_file() or file.stat().st_size != shard.size:
            raise CutawayError(f"{file} is missing or cut off; delete {folder} and sweep again.")
        digest, taken = new_digest(), 0
        for prompt in sweep.prompts.take(shard.prompts):
            prompt_digest(digest, prompt)
            taken += 1
        if digest.hexdigest() != shard.digest:
            last = shard.first + shard.prompts - 1
            short = f" There are only {shard.first + taken}." if taken < shard.prompts else ""
            raise CutawayError(
                f"Prompts {shard.first} to {last} are not those that {file} was made of.{short} Give the same prompts, "
                "or another folder."
            )
    if index.complete and next(sweep.prompts.peek(), None) is not None:
        raise CutawayError(
            f"The sweep in {folder} was finished with {index.prompts} prompts, and there are more now; give another "
            "folder."
        )


def _checked(sweep: Sweep, layout: Layout, first: Any) -> None:
    """Refuse, before anything is written, what cannot be run or has no place in this layout."""
    packed = Packed(sweep.machine, sweep.asked)
    try:
        prompt = sweep.told(first)
        packed.bytes(prompt)
    except CutawayError as error:
        raise CutawayError(f"Prompt 0: {error}") from None
    layout.check(packed.plan(prompt), sweep.reduce is not None)


def _settings(sweep: Sweep, layout: Layout, shard_tokens: int) -> dict[str, Any]:
    """All that the files depend on, besides the prompts, as plain data."""
    asked, machine = sweep.asked, sweep.machine
    points = None if asked.points is None else [_address(point) for point in listed(asked.points)]
    told = {
        "model": machine.spec.name,
        "weights": _recognised(machine),
        "engine": machine.engine.name,
        "dtype": machine.engine.dtype.name,
        "points": points,
        "positions": None if asked.positions is None else [int(position) for position in asked.positions],
        "heads": None if asked.heads is None else [int(head) for head in asked.heads],
        "edits": [{**_plain_edit(edit), "key": edit.key} for edit in asked.edits],
        "reduce": None if sweep.reduce is None else _function_told(sweep.reduce),
        "layout": layout.name,
        "values": layout.dtype,
        "shard_tokens": shard_tokens,
    }
    return json.loads(json.dumps(told))


def _address(point: Any) -> str:
    return _function_told(point) if callable(point) else str(point)


def _plain_edit(edit: Edit) -> dict[str, Any]:
    try:
        return edit.to_json()
    except CutawayError as error:
        raise CutawayError(
            f"A sweep to a folder must know its edits again after a kill, and cannot know {edit}. {error}"
        ) from None


def _recognised(machine: Machine) -> str:
    """A digest of what the model is and of what it computes: of its spec, and of one short pass, bit for bit."""
    spec = machine.spec
    ids = np.array([(7 * i * i + 3 * i) % spec.vocab_size for i in range(min(_PROBED, spec.n_max or _PROBED))])
    types = None if spec.token_types is None else np.arange(len(ids)) % spec.token_types
    ran = transformer(machine.engine, spec, machine.parameters, [ids], types=types)
    digest = hashlib.sha256(json.dumps(spec_to_json(spec)).encode())
    for value in (ran.final, ran.logits):
        if value is not None:
            digest.update(np.ascontiguousarray(machine.engine.numpy(value)).tobytes())
    return digest.hexdigest()[:32]


def _function_told(function: Any) -> str:
    """A function by its code and what it closes over, so that another is not taken for it after a kill."""
    code = getattr(function, "__code__", None)
    if code is None:
        raise CutawayError(
            f"A sweep to a folder must know {function!r} again after a kill, and can tell plain functions only; "
            "write it as one with def or lambda."
        )
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    parts = [_code_told(code), _value_told(function.__defaults__), _value_told(function.__kwdefaults__)]
    parts += [_value_told(value) for value in held]
    return f"{function.__qualname__} {hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"


def _code_told(code: Any) -> list[Any]:
    consts = [_code_told(const) if hasattr(const, "co_code") else repr(const) for const in code.co_consts]
    return [code.co_code.hex(), code.co_names, code.co_varnames, consts]


def _value_told(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
    if value is None or isinstance(value, int | float | str | bytes | np.number):
        return repr(value)
    if isinstance(value, list | tuple):
        return repr([_value_told(one) for one in value])
    if isinstance(value, dict):
        return repr([(repr(name), _value_told(one)) for name, one in value.items()])
    if getattr(value, "__code__", None) is not None:
        return _function_told(value)
    raise CutawayError(
        f"The function that is swept with holds a {type(value).__name__}, which cannot be known again after a kill; "
        "let it hold numbers, texts, arrays or functions."
    )


_LOCK = ".lock"


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keep a second process out of the folder while this one writes; the system frees it when a process dies."""
    try:
        import fcntl
    except ImportError:  # Windows: there a file that is open cannot be replaced, which tells the second process
        yield
        return
    path = folder / _LOCK
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CutawayError(
                f"Another process is sweeping into {folder}; wait for it, or give another folder."
            ) from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
