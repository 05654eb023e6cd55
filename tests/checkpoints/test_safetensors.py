"""safetensors files, single and sharded, are mapped as they are and refused with a sentence when anything is off."""

import json
import os
import random
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import save_file

from cutaway.checkpoints.safetensors import INDEX_NAME, find_weights, read_safetensors, read_sharded
from cutaway.errors import CutawayError

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
OTHERS = {
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def save(path: Path, seed: int = 0, names: str = "") -> dict[str, torch.Tensor]:
    """A file by the safetensors package: every dtype, and shapes of none to four dimensions."""
    torch.manual_seed(seed)
    tensors = {f"{names}{kind}.weight": torch.randn(3, 5).to(dtype) for kind, dtype in FLOATS.items()}
    for shape in ((), (1,), (7,), (2, 3, 4), (2, 1, 2, 3), (0, 4), (4, 0)):
        tensors[f"{names}shape{list(shape)}"] = torch.randn(shape)
    tensors |= {f"{names}other.{kind}": torch.ones(5).to(dtype) for kind, dtype in OTHERS.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return tensors


def test_every_weight_is_read_in_its_shape_and_bit_for_bit(path: Path) -> None:
    tensors = save(path)
    file = read_safetensors(str(path))
    assert set(file.tensors) == {name for name in tensors if not name.startswith("other")}
    assert file.metadata == {"format": "pt"}
    assert file.file_bytes == path.stat().st_size
    assert file.paths == (path,)
    for name, weight in file.tensors.items():
        expected = tensors[name]
        assert weight.shape == (tuple(expected.shape) or (1,))
        exact = weight.dequantise(np.float64)
        assert exact.tobytes() == expected.to(torch.float64).numpy().tobytes()
    assert {name.removesuffix(".weight"): file.tensors[name].kind for name in tensors if ".weight" in name} == {
        kind: kind for kind in FLOATS
    }


def test_tensors_stay_in_the_mapped_file(path: Path) -> None:
    save(path)
    for weight in read_safetensors(path).tensors.values():
        assert not weight.rows.flags.owndata
        assert not weight.rows.flags.writeable


def test_other_dtypes_can_be_ignored_and_are_refused_by_name_when_used(path: Path) -> None:
    save(path)
    file = read_safetensors(path)
    assert file.others == {f"other.{kind}": kind for kind in OTHERS}
    for kind in OTHERS:
        with pytest.raises(CutawayError, match=f"'other.{kind}' is stored as {kind}.*F32.*BF16"):
            file.tensors[f"other.{kind}"]
        with pytest.raises(CutawayError, match=kind):
            file.tensors.get(f"other.{kind}")
    assert file.tensors.get("absent") is None
    with pytest.raises(CutawayError, match=r"has no tensor 'F32.weights'; the nearest is 'F32.weight'"):
        file.tensors["F32.weights"]


# -- files written by hand, to be wrong in one place -----------------------------------------------------------

F32 = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def raw(path: Path, header: bytes, data: bytes = bytes(16), length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def described(path: Path, tensors: object, data: bytes = bytes(16)) -> Path:
    return raw(path, json.dumps(tensors).encode(), data)


def test_the_file_written_by_hand_is_well_formed(path: Path) -> None:
    assert read_safetensors(described(path, {"a": F32})).tensors["a"].shape == (2, 2)
    assert read_safetensors(described(path, {"__metadata__": None, "a": F32})).metadata == {}
    assert read_safetensors(described(path, {}, b"")).tensors == {}
    newer = {"dtype": "F4", "shape": [8, 4], "data_offsets": [0, 16]}
    assert read_safetensors(described(path, {"a": newer})).others == {"a": "F4"}


def changed(**fields: object) -> dict[str, object]:
    return {"a": {**F32, **fields}}


DESCRIBED: dict[str, tuple[object, str]] = {
    "no object": ([1, 2], "it holds a list"),
    "tensor is no object": ({"a": 3}, "'a' is described by 3"),
    "field missing": ({"a": {"dtype": "F32", "shape": [4]}}, "dtype, shape and data_offsets are needed"),
    "field too many": (changed(stride=[1]), "dtype, shape and data_offsets are needed"),
    "dtype a number": (changed(dtype=5), "has the dtype 5"),
    "shape a number": (changed(shape=4), "has the shape 4"),
    "negative size": (changed(shape=[-2, -2]), r"has the shape \[-2, -2\]"),
    "size a float": (changed(shape=[2.0, 2]), r"has the shape \[2.0, 2\]"),
    "size a boolean": (changed(shape=[True, 4]), r"has the shape \[True, 4\]"),
    "shape too large": (changed(shape=[2**62, 2**62]), "larger than any file"),
    "empty but huge": (changed(shape=[2**62, 2**62, 0], data_offsets=[0, 0]), "larger than any file"),
    "a hundred dimensions": (changed(shape=[1] * 100), "up to 32 whole numbers"),
    "one offset": (changed(data_offsets=[0]), r"has the offsets \[0\]"),
    "three offsets": (changed(data_offsets=[0, 8, 16]), "a begin and an end"),
    "negative offset": (changed(data_offsets=[-16, 0]), r"has the offsets \[-16, 0\]"),
    "offsets swapped": (changed(data_offsets=[16, 0]), r"has the offsets \[16, 0\]"),
    "beyond the end": (changed(shape=[8], data_offsets=[0, 32]), "cut short: the tensor 'a' takes the bytes 0 to 32"),
    "far beyond the end": (changed(data_offsets=[0, 10**4000]), "cut short"),
    "wrong size": (changed(shape=[3]), r"F32 of shape \[3\], takes 12 bytes, but its offsets \[0, 16\] span 16"),
    "wrong size of a buffer": (changed(dtype="I64"), r"I64 of shape \[2, 2\], takes 32 bytes"),
    "overlap": ({"a": F32, "b": {**F32, "shape": [2], "data_offsets": [8, 16]}}, "'b' overlaps 'a'"),
    "gap at the start": (changed(shape=[2], data_offsets=[8, 16]), "'a' leaves 8 bytes unused after the header"),
    "gap at the end": (changed(shape=[2], data_offsets=[0, 8]), "8 bytes follow the last tensor"),
    "metadata a list": ({"__metadata__": ["x"], "a": F32}, r"__metadata__ is \['x'\]"),
    "metadata empty text": ({"__metadata__": "", "a": F32}, "__metadata__ is ''"),
    "metadata of numbers": ({"__metadata__": {"x": 1}, "a": F32}, "texts by name"),
}


@pytest.mark.parametrize("case", DESCRIBED)
def test_a_wrong_description_is_refused_with_the_path_and_the_reason(path: Path, case: str) -> None:
    tensors, message = DESCRIBED[case]
    with pytest.raises(CutawayError, match=message) as caught:
        read_safetensors(described(path, tensors))
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"", "where its JSON should be"),
        (b"{'a': 1}", "where its JSON should be stands"),
        (b'{"a": ', "where its JSON should be"),
        (b"\xff\xfe{}", "where its JSON should be"),
        (b'{"a": {"dtype": "F32", "dtype": "F16"}}', "'dtype' is given twice"),
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "where its JSON should be"),
        (b'{"\\ud800": 3}', r"'\\ud800' is described by 3"),
        (b'{"\\u001b[31m": 3}', r"'\\x1b\[31m' is described by 3"),
        (b"NaN", "it is NaN, which is no finite number"),
    ],
)
def test_a_header_that_is_no_json_object_is_refused(path: Path, header: bytes, message: str) -> None:
    with pytest.raises(CutawayError, match=message):
        read_safetensors(raw(path, header))


def test_a_header_longer_than_the_file_is_refused(path: Path) -> None:
    for length in (19, 2**31, 2**60, 2**64 - 1):
        with pytest.raises(CutawayError, match=f"its header should be {length} bytes long"):
            read_safetensors(raw(path, b"{}", length=length))


def test_a_file_cut_anywhere_is_refused(path: Path) -> None:
    save(path)
    whole = path.read_bytes()
    for length in (*range(1, len(whole), 13), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CutawayError, match=r"model\.safetensors"):
            read_safetensors(path)


def test_what_is_no_file_or_another_file_is_named(path: Path) -> None:
    with pytest.raises(CutawayError, match=r"There is no file .*model\.safetensors"):
        read_safetensors(path)
    with pytest.raises(CutawayError, match="is a folder"):
        read_safetensors(path.parent)
    with pytest.raises(CutawayError, match="not an ordinary file"):
        read_safetensors(os.devnull)
    for content, message in (
        (b"", r"is empty \(0 bytes\)"),
        (b"{}", "has 2 bytes, fewer than the 8"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n", "Git LFS.*git lfs pull"),
        (b"<html><body>Not found</body>", "a web page"),
        (b"PK\x03\x04" + bytes(60), "never unpickles"),
        (b"GGUF\3\0\0\0" + bytes(60), "begins with b'GGUF"),
    ):
        path.write_bytes(content)
        with pytest.raises(CutawayError, match=message):
            read_safetensors(path)


def test_whatever_bytes_are_changed_only_a_sentence_comes_out(path: Path) -> None:
    """And nothing is accepted that the format's own reader refuses."""
    save(path)
    seed = path.read_bytes()
    header = 8 + struct.unpack("<Q", seed[:8])[0]
    rng = random.Random(5)
    refused = compared = 0
    for _ in range(2500):
        mutant = bytearray(seed)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            at = rng.randrange(8) if rng.random() < 0.1 else rng.randrange(header)
            mutant[at] = rng.choice((*b'0129{}[]",:-.eE\\ nt', 0, 255, rng.randrange(256)))
        path.write_bytes(mutant)
        try:
            file = read_safetensors(path)
        except CutawayError as error:
            refused += 1
            assert str(path) in str(error)
            continue
        for weight in file.tensors.values():
            assert weight.dequantise(np.float64).shape == weight.shape
        if file.others.keys() == {f"other.{kind}" for kind in OTHERS} and set(file.others.values()) == set(OTHERS):
            compared += 1
            with safetensors.safe_open(path, "pt") as theirs:
                assert set(theirs.keys()) == {*file.tensors, *file.others}
    assert compared > 100
    assert 1000 < refused < 2500  # changes within a name or the metadata's text do no harm


# -- several files, and folders --------------------------------------------------------------------------------

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def shard(folder: Path) -> dict[str, torch.Tensor]:
    first, second = save(folder / ONE, 1, "first."), save(folder / TWO, 2, "second.")
    index(folder, {name: ONE for name in first} | {name: TWO for name in second})
    return first | second


def index(folder: Path, weight_map: object) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def test_a_sharded_model_reads_as_one(tmp_path: Path) -> None:
    tensors = shard(tmp_path)
    for file in (read_sharded(str(tmp_path), tmp_path / INDEX_NAME), find_weights(str(tmp_path))):
        assert {*file.tensors, *file.others} == set(tensors)
        assert file.paths == (tmp_path / ONE, tmp_path / TWO)
        assert file.file_bytes == sum(path.stat().st_size for path in file.paths)
        for name, weight in file.tensors.items():
            assert weight.dequantise(np.float64).tobytes() == tensors[name].to(torch.float64).numpy().tobytes()
        with pytest.raises(CutawayError, match=r"'second\.other\.I64' is stored as I64"):
            file.tensors["second.other.I64"]


def test_files_linked_into_the_folder_as_the_hub_cache_does_are_read(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    folder.mkdir()
    blobs.mkdir()
    shard(blobs)
    for name in (ONE, TWO, INDEX_NAME):
        (folder / name).symlink_to(blobs / name)
    assert len(find_weights(folder).paths) == 2


def test_missing_shards_are_listed(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / TWO).unlink()
    with pytest.raises(CutawayError, match=f"1 of the 2 files .* are missing from .*: {TWO}"):
        find_weights(tmp_path)
    (tmp_path / ONE).unlink()
    with pytest.raises(CutawayError, match=f"2 of the 2 .*{ONE}, {TWO}"):
        find_weights(tmp_path)


def test_a_tensor_listed_but_absent_or_elsewhere_is_named(tmp_path: Path) -> None:
    tensors = shard(tmp_path)
    right = {name: ONE if name.startswith("first") else TWO for name in tensors}
    index(tmp_path, {**right, "lm_head.weight": TWO})
    with pytest.raises(CutawayError, match=f"'lm_head.weight' in {TWO}, but no file has it"):
        find_weights(tmp_path)
    index(tmp_path, {**right, "first.F32.weight": TWO})
    with pytest.raises(CutawayError, match=f"'first.F32.weight' in {TWO}, but it is in {ONE}"):
        find_weights(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    tensors = save(tmp_path / ONE)
    save(tmp_path / TWO)
    index(tmp_path, {name: ONE if "F32" in name else TWO for name in tensors})
    with pytest.raises(CutawayError, match=f"is in two files of .*, {ONE} and {TWO}"):
        find_weights(tmp_path)


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/x", "..\\x", "C:\\x", "C:x", "\\\\host\\x", "", "a\0b", 7, None, ["x"]]
)
def test_an_index_may_not_point_out_of_its_folder(tmp_path: Path, name: object) -> None:
    index(tmp_path, {"a": name})
    with pytest.raises(CutawayError, match=r"'a' in .*; a file in the same folder is needed"):
        find_weights(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("{", "where its JSON should be"),
        ("[]", "it holds a list"),
        ("{}", "no weight_map"),
        ('{"weight_map": []}', "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "'a' is given twice"),
        ("version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
        ("<!doctype html>", "a web page"),
        ('{"weight_map": {"a": "' + "x" * 5000 + '"}}', "are missing"),
        ('{"weight_map": {"a": "\\ud800"}}', "are missing"),
        ('{"weight_map": {"a": "."}}', "is a folder"),
    ],
)
def test_a_malformed_index_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / INDEX_NAME).write_text(content)
    with pytest.raises(CutawayError, match=message) as caught:
        find_weights(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_single_file_is_preferred_and_any_lone_name_will_do(tmp_path: Path) -> None:
    save(tmp_path / "weights.safetensors")
    assert find_weights(tmp_path).paths == (tmp_path / "weights.safetensors",)
    shard(tmp_path)
    save(tmp_path / "model.safetensors")
    assert find_weights(tmp_path).paths == (tmp_path / "model.safetensors",)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "holds no weights; model.safetensors or model.safetensors.index.json"),
        (["config.json", "tokenizer.json"], "holds no weights"),
        (
            ["pytorch_model.bin"],
            r"only as pytorch_model\.bin.*can run any code.*never does.*model\.safetensors is needed",
        ),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"], "only as pytorch_model-00001"),
        (["model.pt"], "never does"),
        (["model.ckpt"], "never does"),
        (["consolidated.00.pth"], "never does"),
        (["weights.pkl"], "never does"),
        (["tf_model.h5"], "another framework"),
        (["flax_model.msgpack"], "another framework"),
        (["model-q4.gguf"], r"model-q4\.gguf; give the path of that file"),
        (["adapter_model.safetensors"], "holds an adapter"),
        ([ONE, TWO], "several safetensors files .*Fetch the index"),
        ([f"{n}.bin" for n in range(9)], r"0\.bin, 1\.bin, 2\.bin, 3\.bin, 4\.bin and 4 more"),
    ],
)
def test_a_folder_without_weights_says_what_is_there_and_what_is_needed(
    tmp_path: Path, names: list[str], message: str
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CutawayError, match=message) as caught:
        find_weights(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CutawayError, match=r"There is no folder .*nowhere"):
        find_weights(tmp_path / "nowhere")
