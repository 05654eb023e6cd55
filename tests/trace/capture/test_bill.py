"""A capture takes the memory that its bill says, and one over the limit is refused before the run."""

import tracemalloc

import pytest

from cutaway import CutawayError
from cutaway.engines import make_engine
from cutaway.engines.numpy import NumpyEngine
from cutaway.spec.catalog import llama_like
from cutaway.trace.capture.bill import free_memory
from cutaway.trace.edits import Scale, Zero
from random_models import LIKE, LLAMA, random_ids, random_model


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("positions", [None, [2, 5]])
@pytest.mark.parametrize("heads", [None, [1]])
def test_the_bill_lists_every_array_with_the_shape_that_is_then_kept(like, positions, heads):
    spec = LIKE[like]
    model, ids = random_model(spec), random_ids(spec, 20)
    points = ["*", "layers.*.attn.pattern | top(3)", "layers.0.resid_post | mean"]
    bill = model.plan(ids, points, positions, heads=heads)
    kept = model.trace(ids, points, positions, heads=heads)._stored.kept
    shapes = {str(at): (v[0] if isinstance(v, dict) else v).shape for at, v in kept.items()}
    assert {item.address: item.shape for item in bill.items} == shapes


WIDE = llama_like(
    "wide", vocab_size=50, d_model=64, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=96, d_head=16, tied_head=False
)


def peak(model, ids, points):
    """The most that NumPy holds at once while a pass is captured."""
    tracemalloc.start()
    model.trace(ids, points)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return most


CAPTURES = {
    "all streams": (["layers.*.resid_post"], {}),
    "one stream twice": (["layers.*.resid_pre", "layers.*.resid_post"], {}),
    "all patterns": (["layers.*.attn.pattern"], {}),
    "summary": (None, {}),
    "everything": (["*"], {}),
    "some heads": (["layers.*.attn.z", "layers.*.attn.q"], {"heads": [1]}),
    "some rows": (["layers.*.mlp.act", "layers.*.attn.pattern", "layers.*.attn.z"], {"positions": list(range(160))}),
    "top of patterns": (["layers.*.attn.pattern | top(40)", "layers.*.attn.q"], {}),
    "stored patterns": (["layers.*.attn.pattern"], {"edits": [Scale("layers.*.attn.scores", 0.5)]}),
}


@pytest.mark.parametrize("engine", ["numpy", "cpu"])
@pytest.mark.parametrize("capture", CAPTURES)
def test_a_capture_takes_the_memory_of_its_bill(capture, engine):
    """Within a tenth, over what the same pass holds when nobody looks."""
    points, asked = CAPTURES[capture]
    model, ids = random_model(WIDE, engine=make_engine(engine, "float32"), dtype="float32"), random_ids(WIDE, 320)
    model.trace(ids, points=[])  # what is made once is there
    bill = model.plan(ids, points, **asked)

    def held(points, **asked):
        tracemalloc.start()
        trace = model.trace(ids, points, **asked)
        now = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert trace is not None
        return now

    edits = {"edits": asked["edits"]} if "edits" in asked else {}
    found = held(points, **asked) - held([], **edits)
    assert found == pytest.approx(bill.bytes, rel=0.1)


def test_looking_at_more_costs_no_more_at_the_peak_than_the_bill_says():
    model, ids = random_model(WIDE, engine=NumpyEngine("float32"), dtype="float32"), random_ids(WIDE, 320)
    points = ["layers.*.resid_post", "layers.*.mlp.act", "layers.*.attn.z"]
    model.trace(ids, points=[])

    assert peak(model, ids, points) - peak(model, ids, []) <= 1.1 * model.plan(ids, points).bytes


def test_the_bill_tells_what_an_array_is_kept_for_and_what_reading_costs():
    bill = random_model(LLAMA).plan(random_ids(LLAMA, 10), ["layers.0.attn.pattern", "logits"])
    assert [(item.address, item.why) for item in bill.items] == [
        ("layers.0.attn.q_rot", "layers.0.attn.pattern"),
        ("layers.0.attn.k_rot", "layers.0.attn.pattern"),
        ("final.norm", "logits"),
    ]
    assert bill.bytes == 8 * (4 * 10 * 6 + 2 * 10 * 6 + 10 * 12)
    assert bill.flops == 0
    assert bill.flops_to_read == 2 * 4 * 10 * 10 * 6 + 2 * 10 * 12 * 23
    edited = random_model(LLAMA).plan(random_ids(LLAMA, 10), [], edits=[Zero("layers.0.attn.head_out")])
    assert edited.flops == 2 * 4 * 10 * (4 * 6) * 12


def test_the_bill_is_printed_with_its_largest_arrays_first(capsys):
    random_model(LLAMA).plan(random_ids(LLAMA, 10), ["layers.*.attn.pattern | top(4)", "logits"]).show()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["layers.0.attn.pattern", "|", "top(4)", "[4,", "10,", "4]", "1.3", "kB"]
    assert lines[2].split() == ["final.norm", "[10,", "12]", "960", "bytes", "for", "logits"]
    assert lines[-3].startswith("kept: 3.5 kB") and lines[-3].endswith("in 3 arrays")
    assert lines[-2].startswith("beside it 3.2 kB while it runs")


def test_planning_runs_nothing():
    class Refusing(NumpyEngine):
        def embed(self, weight, ids):
            raise AssertionError("a pass began")

    model = random_model(LLAMA, engine=Refusing("float64"))
    assert model.plan([1, 2, 3], edits=[Zero("layers.0.attn.z")]).bytes > 0
    with pytest.raises(CutawayError, match="the closest are"):
        model.plan([1, 2, 3], ["layers.0.attn.patern"])


def test_a_capture_over_the_limit_is_refused_before_the_run_and_says_what_to_drop():
    class Refusing(NumpyEngine):
        def embed(self, weight, ids):
            raise AssertionError("a pass began")

    model, ids = random_model(LLAMA, engine=Refusing("float64")), random_ids(LLAMA, 50)
    with pytest.raises(
        CutawayError, match=r"keeps 48\.0 kB, more than the limit \(20\.0 kB\).*layers\.\*\.mlp\.act: 16\.0 kB.*spill="
    ):
        model.trace(ids, points=["layers.*.mlp.act", "layers.*.mlp.up", "layers.*.mlp.gate"], limit=20_000)


def test_without_a_limit_half_of_the_free_memory_is_allowed(monkeypatch):
    monkeypatch.setattr("cutaway.trace.capture.bill.free_memory", lambda: 10_000)
    model, ids = random_model(LLAMA), random_ids(LLAMA, 50)
    with pytest.raises(CutawayError, match=r"more than half of the memory that is free \(5\.0 kB\)"):
        model.trace(ids)
    model.trace(ids, points=["layers.0.resid_post | mean"])
    model.trace(ids, limit=10**9)


def test_the_free_memory_of_this_machine_is_known():
    free = free_memory()
    assert free is not None and 1 << 20 < free < 1 << 50


@pytest.mark.parametrize("reduction", ["top(5)", "top(40)", "pool(64)", "mean"])
@pytest.mark.parametrize("engine", ["numpy", "cpu"])
def test_a_reduced_pattern_never_stands_whole_in_memory(reduction, engine):
    """At the peak: what the bill says and, of the pattern's 1,200 rows, a few blocks of 64 of one layer at a time."""
    model = random_model(WIDE, engine=make_engine(engine, "float32"), dtype="float32")
    ids, points = random_ids(WIDE, 1200), [f"layers.*.attn.pattern | {reduction}"]
    model.trace(ids, points)  # scratch of the engine's own is there

    heads = WIDE.layers[0].attention.n_heads
    bill = model.plan(ids, points)
    assert bill.block == heads * 64 * 1200 * 4
    assert 3 * bill.block < heads * 1200 * 1200 * 4 / 6  # of the whole pattern of one layer
    assert peak(model, ids, points) - peak(model, ids, []) <= 1.1 * bill.bytes + 3 * bill.block
    assert "beside it 1.2 MB while it runs: 64 query rows" in str(bill)
