"""GGUF files are read whole and exactly, quickly, and refused with a sentence when anything is off."""

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from cutaway.checkpoints.gguf import read_gguf
from cutaway.engines.blocks import BLOCKS, GGUF_TYPES
from cutaway.errors import CutawayError

Build = Callable[..., Path]

SCALARS: list[tuple[str, object]] = [
    ("uint8", 255),
    ("int8", -128),
    ("uint16", 65535),
    ("int16", -32768),
    ("uint32", 2**32 - 1),
    ("int32", -(2**31)),
    ("uint64", 2**64 - 1),
    ("int64", -(2**63)),
    ("float32", 0.5),
    ("float64", 1e-300),
    ("bool", True),
    ("string", "Ġthe – 漢字 🙂\n"),
]
ARRAYS: list[tuple[str, list[object]]] = [
    ("strings", ["", "a", "Ġb", "漢"]),
    ("ints", [-1, 0, 2**31 - 1]),
    ("floats", [0.25, -8.0]),
    ("bools", [True, False]),
]


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A file by the gguf package's writer: every type of metadata, and a tensor of every type it can make."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind, value in SCALARS:
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    for name, items in ARRAYS:
        writer.add_array(f"test.{name}", items)
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for kind in (kind for kind in BLOCKS if kind in GGUF_TYPES.values()):
        number = gguf.GGMLQuantizationType[kind]
        block = BLOCKS[kind]
        if kind == "F64":
            stored = rng.normal(size=(3, 5))
        elif kind in ("F32", "F16"):
            stored = rng.normal(size=(3, 5)).astype({"F32": np.float32, "F16": np.float16}[kind])
        elif kind.endswith("_K"):
            stored = rng.integers(0, 100, (3, 2 * block.bytes), dtype=np.uint8)
        else:
            stored = quantize(rng.normal(size=(3, 2 * block.weights)).astype(np.float32), number)
        writer.add_tensor(f"{kind}.weight", stored, raw_dtype=None if kind[0] == "F" else number)
        arrays[f"{kind}.weight"] = stored if kind == "F64" else dequantize(stored, number)
    for name, array in (("bias", rng.normal(size=7)), ("experts", rng.normal(size=(2, 3, 4)))):
        arrays[name] = array.astype(np.float32)
        writer.add_tensor(name, arrays[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, arrays


def test_every_type_of_metadata_is_read(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    file = read_gguf(str(written[0]))
    for name, value in (*SCALARS, *ARRAYS):
        read = file.metadata[f"test.{name}"]
        assert read == value
        assert type(read) is type(value)
    assert file.metadata["general.architecture"] == "llama"
    assert (file.path, file.version, file.file_bytes) == (written[0], 3, written[0].stat().st_size)


def test_every_tensor_is_read_in_its_shape_and_bit_for_bit(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    file = read_gguf(written[0])
    assert list(file.tensors) == list(written[1])
    assert file.unreadable == {}
    for name, array in written[1].items():
        weight = file.tensors[name]
        assert weight.kind == name.removesuffix(".weight") or weight.kind == "F32"
        assert weight.shape == array.shape
        assert weight.dequantise(array.dtype).tobytes() == array.tobytes()


def test_tensors_stay_in_the_mapped_file(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    file = read_gguf(written[0])
    for weight in file.tensors.values():
        assert not weight.rows.flags.owndata
        assert not weight.rows.flags.writeable
    assert np.shares_memory(file.tensors["bias"].dequantise(np.float32), file.tensors["bias"].rows)


# -- files written by hand, to be wrong in one place -----------------------------------------------------------


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(name: str | bytes, sizes: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(item: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", item, count) + items


WORDS = pair("words", 9, array(8, 2, text("a") + text("b")))
ONE_TENSOR = [entry("a", [4, 2], 0, 0)]


def build(
    path: Path,
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    pairs: list[bytes] | None = None,
    entries: list[bytes] | None = None,
    n_pairs: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
    data: bytes = bytes(64),
) -> Path:
    pairs = [WORDS] if pairs is None else pairs
    entries = ONE_TENSOR if entries is None else entries
    counts = struct.pack(
        "<QQ", len(entries) if n_tensors is None else n_tensors, len(pairs) if n_pairs is None else n_pairs
    )
    header = magic + version + counts + b"".join(pairs) + b"".join(entries)
    path.write_bytes(header + bytes(-len(header) % alignment) + data)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_the_file_written_by_hand_is_well_formed(path: Path) -> None:
    file = read_gguf(build(path))
    assert file.metadata == {"words": ["a", "b"]}
    assert file.tensors["a"].shape == (2, 4)


def test_version_2_other_alignments_scalars_and_files_without_tensors_are_read(path: Path) -> None:
    assert read_gguf(build(path, version=struct.pack("<I", 2))).version == 2
    aligned = [pair("general.alignment", 4, struct.pack("<I", 64))]
    entries = [entry("a", [4], 0, 0), entry("b", [4], 0, 64)]
    file = read_gguf(build(path, pairs=aligned, entries=entries, alignment=64, data=bytes(64) + b"\0\0\x80?" * 4))
    assert file.tensors["b"].dequantise(np.float32).tolist() == [1, 1, 1, 1]
    assert read_gguf(build(path, entries=[entry("scalar", [], 0, 0)])).tensors["scalar"].shape == (1,)
    assert read_gguf(build(path, entries=[], data=b"")).tensors == {}


BIG = 2**60
REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "other magic": ({"magic": b"tjgg"}, r"begins with b'tjgg'"),
    "version 1": ({"version": struct.pack("<I", 1)}, "version is 1; versions 2 and 3"),
    "version 4": ({"version": struct.pack("<I", 4)}, "version is 4"),
    "version 0": ({"version": struct.pack("<I", 0)}, "version is 0"),
    "big endian": ({"version": struct.pack(">I", 3)}, "big-endian"),
    "too many tensors": ({"n_tensors": BIG}, f"{BIG} tensors"),
    "padding read as tensors": ({"n_tensors": 3}, "listed twice"),
    "too many entries": ({"n_pairs": BIG}, f"{BIG} metadata entries"),
    "long key": ({"pairs": [struct.pack("<Q", BIG) + b"key"]}, "a length in the header"),
    "long string": ({"pairs": [pair("k", 8, struct.pack("<Q", BIG))]}, "a length in the header"),
    "many strings": ({"pairs": [pair("k", 9, array(8, BIG, b""))]}, f"{BIG} strings in 'k'"),
    "many numbers": ({"pairs": [pair("k", 9, array(0, BIG, b""))]}, f"{BIG} values in 'k'"),
    "long string in array": (
        {"pairs": [pair("k", 9, array(8, 2, text("a") + struct.pack("<Q", BIG)))]},
        "a length in the header",
    ),
    "nested array": ({"pairs": [pair("k", 9, array(9, 1, array(0, 1, b"\0")))]}, "'k' is an array of arrays"),
    "metadata type": ({"pairs": [pair("k", 13, b"\0" * 8)]}, "'k' has the type number 13"),
    "item type": ({"pairs": [pair("k", 9, array(77, 1, b"\0" * 8))]}, "items of 'k' have the type number 77"),
    "a boolean of 2": ({"pairs": [pair("k", 7, b"\2")]}, "is 2, neither 0 nor 1"),
    "key twice": ({"pairs": [WORDS, WORDS]}, "'words' is given twice"),
    "key not UTF-8": ({"pairs": [pair(b"\xff\xfe", 7, b"\0")]}, r"not UTF-8: b'\\xff\\xfe'"),
    "value not UTF-8": ({"pairs": [pair("k", 8, text(b"ab\xc3"))]}, r"not UTF-8: b'ab\\xc3'"),
    "tensor name not UTF-8": ({"entries": [entry(b"\xff", [4], 0, 0)]}, "not UTF-8"),
    "alignment 0": ({"pairs": [pair("general.alignment", 4, bytes(4))]}, "alignment is 0; it has to be a power"),
    "alignment 24": ({"pairs": [pair("general.alignment", 4, struct.pack("<I", 24))]}, "alignment is 24"),
    "alignment in words": ({"pairs": [pair("general.alignment", 8, text("32"))]}, "alignment is '32'"),
    "alignment true": ({"pairs": [pair("general.alignment", 7, b"\1")]}, "alignment is True"),
    "alignment huge": ({"pairs": [pair("general.alignment", 10, struct.pack("<Q", BIG))]}, "cut short"),
    "name twice": ({"entries": [*ONE_TENSOR, entry("a", [4], 0, 32)]}, "'a' is listed twice"),
    "outside": ({"entries": [entry("a", [4], 0, 1 << 20)]}, "cut short: the tensor 'a'"),
    "offset huge": ({"entries": [entry("a", [4], 0, BIG)]}, "cut short: the tensor 'a'"),
    "misaligned": ({"entries": [entry("a", [4], 0, 8)]}, "'a' lies at offset 8, no multiple of 32"),
    "overlapping": ({"entries": [entry("a", [16], 0, 0), entry("b", [4], 0, 32)]}, "'a' and 'b' overlap"),
    "the same bytes": ({"entries": [entry("a", [4], 0, 0), entry("b", [4], 0, 0)]}, "'a' and 'b' overlap"),
    "size 0": ({"entries": [entry("a", [4, 0], 0, 0)]}, "dimension of size 0"),
    "size huge": ({"entries": [entry("a", [2**63, 2**63], 0, 0)]}, "cut short"),
    "five dimensions": ({"entries": [entry("a", [1] * 5, 0, 0)]}, "has 5 dimensions"),
    "a million dimensions": ({"entries": [text("a") + struct.pack("<I", 2**32 - 1)], "data": bytes(99)}, "4294967295"),
    "unknown type": ({"entries": [entry("a", [4], 999, 0)]}, "type number 999.*Q4_K"),
    "half a block": ({"entries": [entry("a", [48], 3, 0)]}, "48 weights, no multiple of the 32 of a Q4_1 block"),
    "part of a model": ({"pairs": [pair("split.count", 2, struct.pack("<H", 3))]}, "one of 3 parts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_malformed_file_is_refused_with_its_path_and_the_reason(path: Path, case: str) -> None:
    change, message = REFUSED[case]
    build(path, **change)  # type: ignore[arg-type]
    with pytest.raises(CutawayError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_a_file_cut_anywhere_is_refused(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    whole = written[0].read_bytes()
    short = written[0].with_name("short.gguf")
    last = len(whole)
    while whole[last - 1] == 0:  # the last tensor's own padding may be missing
        last -= 1
    for length in (*range(1, 200), *range(200, last, 97), last - 1):
        short.write_bytes(whole[:length])
        with pytest.raises(CutawayError, match=r"short\.gguf"):
            read_gguf(short)


@pytest.mark.parametrize(("kind", "number"), [("IQ2_XXS", 16), ("MXFP4", 39), ("TQ1_0", 34), ("I8", 24)])
def test_a_type_that_cannot_be_computed_is_refused_by_name_when_the_tensor_is_used(
    path: Path, kind: str, number: int
) -> None:
    file = read_gguf(build(path, entries=[*ONE_TENSOR, entry("blk.0.ffn_up.weight", [256, 2], number, 32)]))
    assert file.unreadable == {"blk.0.ffn_up.weight": kind}
    assert list(file.tensors) == ["a"]
    for use in (
        lambda: file.tensors["blk.0.ffn_up.weight"],
        lambda: file.tensors.get("blk.0.ffn_up.weight"),
        lambda: "blk.0.ffn_up.weight" in file.tensors,
    ):
        with pytest.raises(CutawayError, match=rf"'blk.0.ffn_up.weight' is stored as {kind}.*Q4_0.*Q6_K"):
            use()


def test_an_absent_tensor_is_refused_with_the_nearest_name(path: Path) -> None:
    file = read_gguf(build(path, entries=[entry("blk.0.attn_q.weight", [4], 0, 0)]))
    assert "blk.0.attn_q.bias" not in file.tensors
    assert file.tensors.get("blk.0.attn_q.bias") is None
    with pytest.raises(CutawayError, match=r"has no tensor 'blk.0.attn_q.weights'; the nearest is 'blk.0.attn_q.weigh"):
        file.tensors["blk.0.attn_q.weights"]


def test_what_is_no_file_or_another_file_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    with pytest.raises(CutawayError, match=r"no file .*other\.gguf"):
        read_gguf(other)
    with pytest.raises(CutawayError, match="is a folder"):
        read_gguf(tmp_path)
    with pytest.raises(CutawayError, match="could not be opened"):
        read_gguf("a\0b")
    with pytest.raises(CutawayError, match="could not be opened"):
        read_gguf(tmp_path / ("x" * 5000))
    for content, message in (
        (b"", r"is empty \(0 bytes\)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "Git LFS.*git lfs pull"),
        (b"\n<!DOCTYPE html><html><body>Not found", "a web page"),
        (b"PK\x03\x04" + bytes(60), "never unpickles"),
        (b"GG", "begins with b'GG'"),
    ):
        other.write_bytes(content)
        with pytest.raises(CutawayError, match=message):
            read_gguf(other)


def test_a_device_is_refused_without_reading_from_it() -> None:
    with pytest.raises(CutawayError, match="not an ordinary file"):
        read_gguf(os.devnull)


def test_long_names_and_control_characters_do_not_fill_the_message(path: Path) -> None:
    build(path, pairs=[pair("\x1b[31m" + "x" * 100_000, 13, b"\0" * 8)])
    with pytest.raises(CutawayError) as caught:
        read_gguf(path)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_whatever_bytes_are_changed_only_a_sentence_comes_out(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    original = build(
        written[0].with_name("seed.gguf"), pairs=[WORDS, pair("x", 9, array(6, 3, bytes(12)))]
    ).read_bytes()
    path = written[0].with_name("mutant.gguf")
    rng = random.Random(5)
    header = len(written[0].read_bytes()) // 4
    refused = 0
    for seed, limit, rounds in ((original, len(original), 3000), (written[0].read_bytes(), header, 1000)):
        for _ in range(rounds):
            mutant = bytearray(seed)
            for _ in range(rng.choice((1, 1, 1, 2, 5))):
                at = rng.randrange(limit)
                if rng.random() < 0.3:
                    mutant[at : at + 8] = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**60, 2**64 - 1)))[
                        : len(seed) - at
                    ]
                else:
                    mutant[at] = rng.choice((0, 1, 8, 9, 127, 128, 255, rng.randrange(256)))
            path.write_bytes(mutant)
            try:
                file = read_gguf(path)
                for weight in file.tensors.values():
                    weight.take([0], np.float64)
            except CutawayError as error:
                refused += 1
                assert str(path) in str(error)
    assert 1000 < refused < 4000  # some changes touch only values
