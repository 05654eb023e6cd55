"""The arithmetic that is told of a cell comes to the cell's own number, in every kind of model."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutaway.points import Point, points_of
from cutaway.serve.lineage import consumers_of, formula_of, inputs_of, weights_of
from cutaway.serve.look import Look
from cutaway.serve.runs import Run
from cutaway.serve.terms import number
from cutaway.spec import parameter_shapes
from random_models import LIKE, random_ids, random_model, specs

T = 5


def run_of(spec, seed: int = 0) -> Look:
    model = random_model(spec, seed)
    return Run(model, model.prompt(random_ids(spec, T).tolist())).look()


@given(specs())
def test_every_point_has_a_formula_and_comes_from_points_that_the_model_has(spec):
    there = set(points_of(spec))
    weights = parameter_shapes(spec)
    for point in there:
        assert formula_of(point, spec)
        assert set(inputs_of(point, spec)) <= there
        assert all(name in weights or name.endswith("gain") for name in weights_of(point, spec))
        if point.name != "tokens":
            assert inputs_of(point, spec) or point.name.startswith("embed.")
        for source in inputs_of(point, spec):
            assert point in consumers_of(source, spec)


def a_cell_of_each_point(run, seed):
    """(point, its number, how it came about) of one cell of every point, drawn by `seed`."""
    random = np.random.default_rng(seed)
    for point in points_of(run.trace.spec):
        value = run.value(point)
        at = tuple(int(random.integers(0, size)) for size in value.shape)
        yield point, float(value[at]), run.arithmetic.cell(point, at)


@given(specs(), st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_the_terms_of_a_cell_add_up_to_it(spec, seed):
    run = run_of(spec)
    for point, found, cell in a_cell_of_each_point(run, seed):
        assert cell.value is None if np.isneginf(found) else cell.value == found
        if not cell.terms:
            continue
        total = sum(term.product for term in cell.terms) + cell.rest_sum
        for term in cell.terms:
            assert term.product == pytest.approx(term.left * term.right)
        if not cell.steps and point.name != "mlp.raw":  # a bias or a shared expert is told beside the sum
            assert total == pytest.approx(found, rel=1e-9, abs=1e-9), point


@given(specs(), st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_every_number_but_the_ids_of_tokens_is_explained(spec, seed):
    run = run_of(spec)
    for point, _, cell in a_cell_of_each_point(run, seed):
        if point.name == "tokens":
            continue
        assert cell.terms or cell.steps, point
        if cell.steps and not cell.terms and point.name != "moe.chosen" and cell.value:
            assert number(cell.value) in cell.steps[-1], point


@given(specs(), st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_the_two_rows_of_a_dot_product_come_in_their_own_order_and_multiply_to_it(spec, seed):
    run = run_of(spec)
    for _, _, cell in a_cell_of_each_point(run, seed):
        if not cell.left_row:
            continue
        left, right = np.array(cell.left_row), np.array(cell.right_row)
        total = sum(term.product for term in cell.terms) + cell.rest_sum
        assert left @ right == pytest.approx(total, abs=1e-3 * (np.abs(left * right).sum() + 1e-9))
        assert len(left) == len(cell.terms) + cell.rest_count


@given(specs(), st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_what_one_head_adds_is_worked_out_alone_with_the_same_bits(spec, seed):
    run = run_of(spec, seed)
    point = Point("attn.head_out", spec.n_layers - 1)
    for head, added in enumerate(run.value(point)):
        np.testing.assert_array_equal(run.one_head(point, head), added)


def test_what_an_edit_made_of_a_heads_part_is_what_is_shown(toy):
    from cutaway.serve.edits import edits_of

    point = Point("attn.head_out", 1)
    run = Run(toy, toy.prompt("<BOS> dragon drinks"), edits_of([{"zero": str(point), "heads": [1]}])).look()
    assert run.one_head(point, 0).any() and not run.one_head(point, 1).any()


def test_a_turned_query_tells_its_pair_its_angle_and_both_products():
    run = run_of(LIKE["llama"])
    q = run.value(Point("attn.q", 1))[2, 3]
    cell = run.arithmetic.cell(Point("attn.q_rot", 1), (2, 3, 4))  # 6 coordinates in halves: 1 and 4 are a pair
    assert [term.at for term in cell.terms] == ["column 1", "column 4"]
    assert [term.left for term in cell.terms] == [q[1], q[4]]
    angle = 3 * 10_000 ** (-2 / 6)
    assert [term.right for term in cell.terms] == pytest.approx([np.sin(angle), np.cos(angle)])
    assert number(angle) in cell.steps[0]


def test_a_softmax_tells_its_numerator_and_its_sum(toy):
    run = Run(toy, toy.prompt("<BOS> dragon drinks")).look()
    cell = run.arithmetic.cell(Point("attn.pattern", 1), (1, 2, 1))
    row = run.value(Point("attn.masked", 1))[1, 2]
    total = np.exp(row - row.max()).sum()
    assert f"{np.exp(row[1] - row.max()):.4g}" in cell.steps[-1] and f"{total:.4g}" in cell.steps[-1]


def test_a_masked_weight_is_said_to_be_hidden(toy):
    run = Run(toy, toy.prompt("<BOS> dragon drinks")).look()
    assert run.arithmetic.cell(Point("attn.pattern", 0), (0, 0, 2)).hidden
    assert not run.arithmetic.cell(Point("attn.pattern", 0), (0, 2, 0)).hidden
    assert run.arithmetic.cell(Point("attn.masked", 0), (0, 0, 2)).value is None


def test_a_bias_is_told_beside_the_sum(toy):
    run = Run(toy, toy.prompt("<BOS> dragon drinks")).look()
    cell = run.arithmetic.cell(Point("mlp.up", 0), (2, 3))
    bias = float(toy.parameters.layers[0]["mlp.up"].bias[3])
    total = sum(term.product for term in cell.terms) + cell.rest_sum
    assert total + bias == pytest.approx(cell.value)


def test_a_point_that_an_edit_changed_is_said_to_be_edited(toy):
    from cutaway.serve.edits import edits_of

    edits = edits_of([{"zero": "layers.0.attn.z", "heads": [0]}])
    run = Run(toy, toy.prompt("<BOS> dragon drinks"), edits).look()
    cell = run.arithmetic.cell(Point("attn.z", 0), (0, 2, 1))
    assert cell.edited and cell.value == 0
    assert not run.arithmetic.cell(Point("attn.raw", 0), (2, 1)).edited
