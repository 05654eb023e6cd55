"""An edited text that goes on is computed from there on where its edits allow it, and no bit of it is another."""

from collections.abc import Sequence

import numpy as np
import pytest
from following import SPECS, cpu_model, differing, every_spec, overviews, run

from cutaway.errors import CutawayError
from cutaway.model import Model
from cutaway.points import layer_names, points_of
from cutaway.serve.runs import Run
from cutaway.trace.edits import Drop, Edit, Knockout, Mean, Replace, Scale, Without, Zero
from random_models import LLAMA, random_ids

EDITS = {
    "a head off": (Zero("layers.0.attn.z", heads=[1]),),
    "attention off, neurons halved": (Zero("layers.1.attn.out"), Scale("layers.0.mlp.act", factor=0.5, neurons=[2, 3])),
    "a row of the prompt": (Zero("layers.0.resid_post", positions=[2]),),
    "rows that are still to come": (Zero("layers.1.mlp.out", positions="3:"),),
    "without a norm": (Without("mlp.norm", "0"),),
    "without the scale": (Without("scale"),),
}


def edited(model: Model, ids: Sequence[int], edits: Sequence[Edit], former: Run | None = None) -> Run:
    return Run(model, model.prompt(list(ids)), edits, former)


def told_otherwise(found: Run, ids: Sequence[int]) -> list[str]:
    """The points at which an edited run is not, bit for bit, the whole edited pass. What its edits did is the same."""
    whole = found.model.trace(list(ids), points=["*"], edits=found.edits)
    reports, expected = ([(str(one), one.fired) for one in trace.edits] for trace in (found.trace, whole))
    assert reports == expected
    assert np.array_equal(found.trace.last_logits, whole.last_logits)
    points = [point for point in points_of(found.model.spec) if point.name != "tokens"]
    look = found.look(points)
    return [str(at) for at in points if not np.array_equal(look.value(at), whole[at], equal_nan=True)]


@every_spec
@pytest.mark.parametrize("edits", EDITS.values(), ids=EDITS.keys())
def test_an_edited_text_that_grows_keeps_every_bit_of_the_whole_edited_pass(spec, edits):
    model, ids = cpu_model(spec), random_ids(spec, 44).tolist()
    if any(isinstance(edit, Scale) for edit in edits) and "mlp.act" not in layer_names(spec, 0):
        edits = edits[:1]
    for patched in (False, True):
        with overviews() if patched else pytest.MonkeyPatch.context():
            former = None
            for text in (ids[:33], ids[:34], ids[:35], ids[:37]):
                former = edited(model, text, edits, former)
                assert told_otherwise(former, text) == []


def test_an_expert_that_is_off_stays_off(rows):
    spec = SPECS["experts"]
    model, ids = cpu_model(spec), random_ids(spec, 40).tolist()
    off = (Drop("layers.0.moe.scores", experts=[1]), Zero("layers.1.moe.expert_out", experts=[0]))
    after = edited(model, ids[:32], off, edited(model, ids[:31], off, edited(model, ids[:30], off)))
    assert rows.seen == [30, 1, 1]
    assert told_otherwise(after, ids[:32]) == []


def test_a_step_of_an_edited_text_computes_one_row(rows):
    model, ids = cpu_model(LLAMA), random_ids(LLAMA, 60).tolist()
    former = None
    for end in range(30, 60):
        former = edited(model, ids[:end], EDITS["a head off"], former)
    assert rows.seen == [30, *[1] * 29]
    assert told_otherwise(former, ids[:59]) == []


def test_an_edited_text_that_does_not_go_on_from_the_whole_of_the_former_one_is_run_anew(rows):
    model, ids = cpu_model(LLAMA), random_ids(LLAMA, 40).tolist()
    edits = EDITS["rows that are still to come"]
    first = edited(model, ids[:30], edits)
    for text in (ids[:20], [*ids[:29], (ids[29] + 1) % LLAMA.vocab_size, ids[30]], ids[:31]):
        rows.seen.clear()
        assert told_otherwise(edited(model, text, edits, first), text) == []
        assert rows.seen[0] == len(text)
    assert told_otherwise(first, ids[:30]) == []


NOT_BY_ROW = {
    "no mask": (Without("mask"),),
    "a mean over the text": (Mean("layers.0.mlp.out"),),
    "values of the unedited run": (Zero("layers.0.attn.out"), Replace("layers.1.mlp.out")),
    "the last position": (Zero("layers.0.resid_post", positions=[-1]),),
    "all but the last two": (Zero("layers.0.resid_post", positions=":-2"),),
    "an edge of attention": (Knockout("layers.0.attn.masked", edges=[[5, 2]]),),
    "a hidden key": (Drop("layers.*.attn.masked", keys=[2]),),
    "logits": (Scale("logits", factor=0.5),),
}


@pytest.mark.parametrize("edits", NOT_BY_ROW.values(), ids=NOT_BY_ROW.keys())
def test_edits_that_reach_over_rows_run_the_whole_text(rows, edits):
    model, ids = cpu_model(LLAMA), random_ids(LLAMA, 40).tolist()
    former = edited(model, ids[:30], edits)
    rows.seen.clear()
    after = edited(model, ids[:31], edits, former)
    assert 31 in rows.seen and 1 not in rows.seen
    assert told_otherwise(after, ids[:31]) == []


def test_a_run_goes_on_from_one_with_the_very_same_edits_alone(rows):
    model, ids = cpu_model(LLAMA), random_ids(LLAMA, 40).tolist()
    plain = run(model, ids[:30])
    first = edited(model, ids[:31], EDITS["a head off"], plain)
    other = edited(model, ids[:32], EDITS["without a norm"], first)
    after = run(model, ids[:32], other)
    assert rows.seen == [30, 31, 32, 32]
    assert told_otherwise(first, ids[:31]) == told_otherwise(other, ids[:32]) == differing(after, ids[:32]) == []


def test_an_edit_that_acts_nowhere_is_refused_in_a_text_that_goes_on_too():
    model, ids = cpu_model(LLAMA), random_ids(LLAMA, 40).tolist()
    nowhere = (Zero("layers.0.resid_post", positions=[35]),)
    for _ in range(2):
        with pytest.raises(CutawayError, match="35"):
            edited(model, ids[:30], nowhere)
