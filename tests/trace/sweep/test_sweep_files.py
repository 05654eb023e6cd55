"""A sweep on disk: killed at any time it goes on to the same bytes; anything else in its folder is refused."""

import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import cutaway
import random_models
from cutaway import CutawayError
from cutaway.engines.numpy import NumpyEngine
from cutaway.engines.weights import Weight
from cutaway.spec.catalog import llama_like
from cutaway.trace.edits import Function, Zero
from cutaway.trace.sweep import layout as sweep_layout
from cutaway.trace.sweep.folder import SweepFolder
from random_models import LLAMA, POST, random_ids, random_model

POINTS = ["layers.*.resid_post", "layers.0.attn.pattern", "layers.1.mlp.out | mean"]
PROMPTS = [random_ids(LLAMA, 3 + seed % 17, seed) for seed in range(60)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_folder_reads_like_a_list_of_what_each_prompt_gave(tmp_path):
    model = random_model(LLAMA)
    folder = model.sweep(iter(PROMPTS), POINTS, to=tmp_path / "new" / "swept", shard_tokens=100)
    assert len(folder) == 60 and folder.complete and len(folder.files) > 4
    for prompt, found in zip(PROMPTS, folder, strict=True):
        alone = model.trace(prompt, POINTS)
        assert set(found) == {*alone.points, "ids"}
        assert np.array_equal(found.pop("ids"), prompt)
        for point, value in found.items():
            assert value.dtype == alone[point].dtype and np.array_equal(value, alone[point])
    opened = cutaway.open_sweep(folder.path)
    assert len(opened) == 60 and np.array_equal(opened[-1]["ids"], PROMPTS[-1])
    with pytest.raises(IndexError):
        folder[60]
    assert contents(folder.path).keys() == {"index.json", *(file.name for file in folder.files)}


SWEEP = """
import sys
sys.path[:0] = {path!r}
from test_sweep_files import *
def slowly():
    for prompt in PROMPTS:
        yield prompt
        print(flush=True)
random_model(LLAMA).sweep(slowly(), POINTS, to=sys.argv[1], shard_tokens=60, tokens_per_pass=30, **{settings})
"""


@pytest.mark.parametrize("settings", [{}, {"layout": "rows", "dtype": "float16"}])
def test_a_killed_sweep_goes_on_to_the_same_bytes(tmp_path, settings):
    points = POINTS if not settings else POINTS[:1]
    asked = {"shard_tokens": 60, "tokens_per_pass": 30, **settings}
    whole = random_model(LLAMA).sweep(PROMPTS, points, to=tmp_path / "whole", **asked).path
    code = SWEEP.format(path=sys.path, settings=settings).replace("POINTS, to", f"{points!r}, to")
    for taken in (20, 25):  # prompts that were taken when it dies: first in the middle, then further on
        command = [sys.executable, "-c", code, str(tmp_path / "killed")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent) as process:
            assert process.stdout is not None
            for _ in range(taken):
                assert process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        half = SweepFolder(tmp_path / "killed")
        assert not half.complete and len(half) < 60
        (tmp_path / "killed" / ".shard-00001.safetensors.0123.part").write_bytes(b"half a shard")
    assert len(half) > 0
    done = {file: file.stat().st_mtime_ns for file in half.files}
    resumed = random_model(LLAMA).sweep(PROMPTS, points, to=tmp_path / "killed", **asked)
    assert contents(resumed.path) == contents(whole)
    assert {file: file.stat().st_mtime_ns for file in done} == done  # nothing was done twice


def test_a_sweep_ended_at_any_prompt_goes_on_to_the_same_bytes(tmp_path):
    asked = {"shard_tokens": 60, "tokens_per_pass": 30}
    whole = random_model(LLAMA).sweep(PROMPTS, POINTS, to=tmp_path / "whole", **asked).path

    def ending(after):
        yield from PROMPTS[:after]
        raise KeyboardInterrupt

    for after in (1, 2, 17, 40, 59):
        with pytest.raises(KeyboardInterrupt):
            random_model(LLAMA).sweep(ending(after), POINTS, to=tmp_path / "ended", **asked)
    assert contents(random_model(LLAMA).sweep(PROMPTS, POINTS, to=tmp_path / "ended", **asked).path) == contents(whole)


def test_a_finished_sweep_is_found_and_not_run_again(tmp_path):
    model = random_model(LLAMA)
    first = model.sweep(PROMPTS, POINTS, to=tmp_path / "swept")
    before = {path: path.stat().st_mtime_ns for path in first.path.iterdir()}
    assert len(model.sweep(PROMPTS, POINTS, to=tmp_path / "swept")) == 60
    assert {path: path.stat().st_mtime_ns for path in first.path.iterdir()} == before


@pytest.mark.parametrize(
    ("prompts", "points", "settings", "said"),
    [
        (PROMPTS, POINTS[:1], {}, r"other settings \(points\)"),
        (PROMPTS, POINTS, {"edits": [Zero("layers.0.attn.z")]}, r"other settings \(edits\)"),
        (PROMPTS, POINTS, {"positions": [0], "heads": [1]}, r"other settings \(positions, heads\)"),
        (PROMPTS, POINTS, {"dtype": "float32"}, r"other settings \(values\)"),
        (PROMPTS, POINTS, {"reduce": lambda trace: {"a": 1}}, r"other settings \(reduce\)"),
        ([PROMPTS[1], *PROMPTS[1:]], POINTS, {}, "Prompts 0 to .* are not those that .* was made of"),
        ([*PROMPTS[:-1], [1]], POINTS, {}, "are not those that"),
        (PROMPTS[:50], POINTS, {}, "There are only 50"),
        ([*PROMPTS, [1]], POINTS, {}, "was finished with 60 prompts, and there are more now"),
    ],
)
def test_a_folder_of_another_sweep_is_refused_and_left_alone(tmp_path, prompts, points, settings, said):
    model = random_model(LLAMA)
    folder = model.sweep(PROMPTS, POINTS, to=tmp_path / "swept", shard_tokens=100).path
    before = contents(folder)
    with pytest.raises(CutawayError, match=said):
        model.sweep(prompts, points, to=folder, shard_tokens=100, **settings)
    assert {name: data for name, data in contents(folder).items() if name != ".lock"} == before


def test_another_model_is_noticed_by_what_it_computes(tmp_path):
    random_model(LLAMA).sweep(PROMPTS[:3], POINTS, to=tmp_path / "swept")
    with pytest.raises(CutawayError, match=r"other settings \(weights\)"):
        random_model(LLAMA, seed=1).sweep(PROMPTS[:3], POINTS, to=tmp_path / "swept")
    with pytest.raises(CutawayError, match=r"other settings \(weights, dtype\)"):
        random_model(LLAMA, engine=NumpyEngine("float32")).sweep(PROMPTS[:3], POINTS, to=tmp_path / "swept")


def test_a_folder_with_other_files_a_lost_shard_and_a_broken_index_are_refused(tmp_path):
    model = random_model(LLAMA)
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(CutawayError, match=r"holds other files \(thesis.txt\) and no sweep"):
        model.sweep(PROMPTS, POINTS, to=tmp_path)
    assert contents(tmp_path) == {"thesis.txt": b"precious"}
    folder = model.sweep(PROMPTS, POINTS, to=tmp_path / "swept", shard_tokens=100)
    folder.files[1].write_bytes(folder.files[1].read_bytes()[:-1])
    with pytest.raises(CutawayError, match="is missing or cut off"):
        model.sweep(PROMPTS, POINTS, to=folder.path, shard_tokens=100)
    (folder.path / "index.json").write_text("{}")
    with pytest.raises(CutawayError, match="is no index of a sweep"):
        model.sweep(PROMPTS, POINTS, to=folder.path, shard_tokens=100)
    with pytest.raises(CutawayError, match="There is no sweep in"):
        SweepFolder(tmp_path / "nowhere")


def test_two_processes_do_not_sweep_into_one_folder(tmp_path):
    def meanwhile():
        yield PROMPTS[0]
        with pytest.raises(CutawayError, match="Another process is sweeping into"):
            random_model(LLAMA).sweep(PROMPTS, POINTS, to=tmp_path / "swept")
        yield from PROMPTS[1:]

    assert len(random_model(LLAMA).sweep(meanwhile(), POINTS, to=tmp_path / "swept")) == 60


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"edits": [Function("layers.0.mlp.out", function=lambda values, place: values)]}, "must know its edits again"),
        ({"reduce": print}, "can tell plain functions only"),
        ({"layout": "columns"}, "There is no layout 'columns'; it may be prompts, rows, table"),
        ({"dtype": "int8"}, "float16, float32 or float64, not 'int8'"),
        ({"shard_tokens": 0}, "shard_tokens is 0"),
        ({"layout": "rows", "points": ["layers.0.attn.pattern"]}, r"\[H, T, S\], which is no row of numbers"),
        ({"layout": "rows", "points": ["layers.0.mlp.out | mean"]}, "Rows are of whole values"),
        ({"layout": "table", "points": ["layers.0.mlp.out | mean"]}, r"is \[12\], and a table holds one number"),
        ({"dtype": "float16", "edits": [{"scale": "layers.0.mlp.out", "factor": 1e7}]}, "which float16 cannot"),
    ],
)
def test_what_has_no_place_in_the_files_is_refused_before_or_without_a_shard(tmp_path, settings, said):
    points = settings.pop("points", ["layers.*.resid_post"]) if "points" in settings else ["layers.*.resid_post"]
    with pytest.raises(CutawayError, match=said):
        random_model(LLAMA).sweep(PROMPTS, points, to=tmp_path / "swept", **settings)
    assert not list(tmp_path.rglob("shard-*")) and not list(tmp_path.rglob("*.part"))


def test_functions_are_known_again_by_what_they_do(tmp_path):
    model = random_model(LLAMA)

    def gap_of(a, b):
        return lambda trace: {"gap": trace.last_logits[a] - trace.last_logits[b]}

    model.sweep(PROMPTS, [], reduce=gap_of(1, 2), to=tmp_path / "swept")
    folder = model.sweep(PROMPTS, [], reduce=gap_of(1, 2), to=tmp_path / "swept")
    logits = model.trace(PROMPTS[7], []).last_logits
    assert folder[7]["gap"] == logits[1] - logits[2]
    with pytest.raises(CutawayError, match=r"other settings \(reduce\)"):
        model.sweep(PROMPTS, [], reduce=gap_of(1, 3), to=tmp_path / "swept")


@pytest.mark.parametrize("positions", [None, [-1, 0]])
def test_rows_are_one_matrix_a_point_with_its_tokens_beside_it(tmp_path, positions):
    model, points = random_model(LLAMA), ["layers.*.resid_post", "layers.1.attn.z"]
    folder = model.sweep(
        PROMPTS, points, to=tmp_path / "rows", layout="rows", dtype="float32", positions=positions, shard_tokens=100
    )
    shards = [load_file(file) for file in folder.files]
    whole = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
    count = sum(map(len, PROMPTS)) if positions is None else 2 * len(PROMPTS)
    assert whole["layers.1.resid_post"].shape == (count, 12) and whole["layers.1.attn.z"].shape == (count, 4 * 6)
    assert whole["layers.1.resid_post"].dtype == np.float32
    start = 0
    for number, prompt in enumerate(PROMPTS):
        rows = np.arange(len(prompt)) if positions is None else np.array([len(prompt) - 1, 0])
        here, start = slice(start, start + len(rows)), start + len(rows)
        trace = model.trace(prompt, points)
        assert (whole["prompt"][here] == number).all()
        assert np.array_equal(whole["token_ids"][here], prompt[rows])
        assert np.array_equal(whole["position"][here], rows)
        assert np.array_equal(whole["layers.1.resid_post"][here], trace["layers.1.resid_post"][rows].astype("f4"))
        z = trace["layers.1.attn.z"].swapaxes(0, 1).reshape(len(prompt), -1)  # as o_proj reads it: heads side by side
        assert np.array_equal(whole["layers.1.attn.z"][here], z[rows].astype("f4"))
    with pytest.raises(CutawayError, match="laid out as rows: read its `files`"):
        folder[0]


def test_numbers_go_to_a_parquet_table(tmp_path):
    from pyarrow import parquet

    model = random_model(LLAMA)
    asked = {"reduce": "norm", "positions": [-1], "layout": "table", "shard_tokens": 100}
    folder = model.sweep(PROMPTS, ["layers.*.resid_post"], to=tmp_path / "table", **asked)
    tables = [parquet.read_table(file).to_pydict() for file in folder.files]
    assert len(tables) > 1
    found = [value for table in tables for value in table["layers.1.resid_post | norm"]]
    expected = [
        np.linalg.norm(model.trace(prompt, ["layers.1.resid_post"])["layers.1.resid_post"][-1]) for prompt in PROMPTS
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert [number for table in tables for number in table["prompt"]] == list(range(60))
    assert [number for table in tables for number in table["tokens"]] == list(map(len, PROMPTS))


def test_a_table_without_pyarrow_is_refused_with_the_line_that_installs_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CutawayError, match=r'pip install "cutaway\[data\]"'):
        random_model(LLAMA).sweep(PROMPTS, POINTS, to=tmp_path / "swept", layout="table")
    assert not list(tmp_path.iterdir())


def test_memory_does_not_grow_with_the_number_of_prompts_on_their_way_to_disk(tmp_path):
    spec = llama_like("wide", vocab_size=50, d_model=64, n_layers=2, n_heads=2, n_kv_heads=2, d_ff=64)
    model = random_model(spec, engine=NumpyEngine("float32"), dtype="float32")

    def peak(count):
        prompts = (random_ids(spec, 20, i) for i in range(count))
        tracemalloc.start()
        model.sweep(prompts, ["layers.*"], to=tmp_path / f"of{count}", tokens_per_pass=100, shard_tokens=200)
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    peak(10)
    few, many = peak(30), peak(100)
    assert many < 1.3 * few, (few, many)


def test_a_refused_sweep_leaves_the_folder_to_the_corrected_one(tmp_path):
    model, to = random_model(LLAMA), tmp_path / "swept"
    for prompts, points, layout in (
        (PROMPTS, ["layers.1.resid_post"], "table"),
        ([*PROMPTS[:3], []], POINTS, "prompts"),
    ):
        with pytest.raises(CutawayError):
            model.sweep(prompts, points, to=to, layout=layout)
        assert not to.exists()
    assert model.sweep(PROMPTS[:3], POINTS, to=to).complete


def test_a_full_disk_is_told_and_leaves_no_half_file(tmp_path, monkeypatch):
    def full(path, tensors):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sweep_layout, "write_tensors", full)
    with pytest.raises(CutawayError, match=r"could not be written to .*: No space left on device"):
        random_model(LLAMA).sweep(PROMPTS, POINTS, to=tmp_path / "swept")
    assert [path.name for path in (tmp_path / "swept").iterdir() if path.name != ".lock"] == ["index.json"]
    monkeypatch.undo()
    assert random_model(LLAMA).sweep(PROMPTS, POINTS, to=tmp_path / "swept").complete


def test_vectors_and_types_are_part_of_what_a_sweep_is_known_by(tmp_path):
    model = random_model(replace(POST, token_types=2))
    vectors = np.random.default_rng(2).standard_normal((3, POST.d_model)).astype(np.float32)
    prompts, types = [[1, 2], vectors, [3]], [[0, 1], [1, 1, 0], None]

    def swept(prompts, types):
        return model.sweep(prompts, ["embed.out"], types=types, to=tmp_path / "swept")

    folder = swept(prompts, types)
    before = contents(folder.path)
    assert np.array_equal(folder[1]["ids"], [-1, -1, -1])
    for index, (prompt, kinds) in enumerate(zip(prompts, types, strict=True)):
        assert np.array_equal(folder[index]["embed.out"], model.trace(prompt, types=kinds)["embed.out"])
    swept([np.array([1, 2]), vectors.astype(np.float64), (3,)], [np.array([0, 1]), (1, 1, 0), None])  # the same
    assert contents(folder.path) == before
    other = vectors.copy()
    other[2, 0] = np.nextafter(other[2, 0], 9)
    for changed in (
        (prompts, [[0, 0], [1, 1, 0], None]),
        (prompts, [[0, 1], None, None]),
        ([[1, 2], other, [3]], types),
        ([[1, 2], vectors.reshape(3, -1)[::-1], [3]], types),
        (prompts, [[0, 1], ["a", "b", "c"], None]),
        (prompts, [[0, 1], [[1], [1, 0]], None]),
        ([[1, 2], vectors, [3.0]], types),
        ([[1, 2], vectors, [[3], [4, 5]]], types),
    ):
        with pytest.raises(CutawayError, match="are not those that"):
            swept(*changed)
    assert contents(folder.path) == before


def test_a_model_with_other_types_is_known_from_the_one_that_a_sweep_was_begun_with(tmp_path, monkeypatch):
    spec = replace(POST, token_types=2)
    random_model(spec).sweep([[1, 2]], ["embed.out"], to=tmp_path / "swept")
    made = random_models.random_weights

    def changed(spec, seed=0, dtype="float64"):
        weights = made(spec, seed, dtype)
        [table] = [name for name in weights if name.startswith("embed_types") or name.startswith("embed.types")]
        rows = weights[table].dequantise(np.float64).copy()
        rows[1] += 1  # only this row, which no prompt here uses
        return {**weights, table: Weight.of(rows)}

    monkeypatch.setattr(random_models, "random_weights", changed)
    with pytest.raises(CutawayError, match=r"other settings \(weights\)"):
        random_model(spec).sweep([[1, 2]], ["embed.out"], to=tmp_path / "swept")
