"""Where the rows of a pass are cut, so that a sequence's bits depend on nobody else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutaway import CutawayError
from cutaway.engines.layout import BLOCK, CHUNK, FEW, Layout, Segment, row_blocks
from cutaway.engines.numpy import NumpyEngine
from cutaway.engines.protocol import Linear
from cutaway.engines.weights import Weight

LENGTHS = st.lists(st.integers(1, 700), min_size=1, max_size=4)
SEGMENTS = st.builds(Segment, st.integers(0, 300), st.integers(1, 900), st.integers(0, 900))


@given(SEGMENTS, st.sampled_from((CHUNK, BLOCK)))
def test_the_blocks_of_a_segment_hold_every_row_once_in_order(segment, largest):
    rows = [row for block in row_blocks(segment, largest) for row in range(block.start, block.stop)]
    assert rows == list(range(segment.start, segment.stop))


@given(SEGMENTS, st.sampled_from((CHUNK, BLOCK)))
def test_blocks_are_cut_at_absolute_multiples_of_positions_and_what_is_left_and_few_goes_row_by_row(segment, largest):
    blocks = list(row_blocks(segment, largest))
    for block in blocks:
        position = segment.position + block.start - segment.start
        taken = block.stop - block.start
        if block.size == 0:
            assert taken <= FEW
            assert block is blocks[-1]
        else:
            assert block.size in (largest, BLOCK)
            assert block.offset == position % block.size
            assert block.offset + taken <= block.size  # it never reaches over a multiple
            assert position // block.size == (position + taken - 1) // block.size


@given(st.integers(1, 400), st.integers(1, 3))
def test_a_row_of_a_full_block_is_cut_the_same_however_long_the_sequence_goes_on(length, more):
    def of(total: int) -> set[tuple[int, int, int, int]]:
        return {(b.start, b.stop, b.offset, b.size) for b in row_blocks(Segment(0, total), BLOCK)}

    full = {block for block in of(length) if block[1] - block[0] == BLOCK}
    assert full <= of(length + more * BLOCK)


@given(LENGTHS, st.data())
def test_a_layout_packs_sequences_one_after_another(lengths, data):
    firsts = data.draw(st.lists(st.integers(0, 500), min_size=len(lengths), max_size=len(lengths)))
    layout = Layout.of(lengths, firsts)
    assert layout.rows == sum(lengths)
    assert [segment.start for segment in layout.segments] == [sum(lengths[:i]) for i in range(len(lengths))]
    assert [segment.slot for segment in layout.segments] == list(range(len(lengths)))
    expected = [first + t for first, length in zip(firsts, lengths, strict=True) for t in range(length)]
    assert layout.positions.tolist() == expected
    assert layout.last_rows == [sum(lengths[: i + 1]) - 1 for i in range(len(lengths))]
    assert [segment.end for segment in layout.segments] == [f + n for f, n in zip(firsts, lengths, strict=True)]


def test_positions_count_from_each_sequences_own_start_never_from_the_column():
    assert Layout.of([3, 2]).positions.tolist() == [0, 1, 2, 0, 1]


@given(LENGTHS, st.data())
def test_chosen_rows_alone_are_multiplied_as_they_are_among_all_the_others(lengths, data):
    """`only` cuts the rows that were asked for so that each one's bits do not depend on which others were."""
    engine, random = NumpyEngine("float32"), np.random.default_rng(0)
    layout = Layout.of(lengths)
    x = random.standard_normal((layout.rows, 33)).astype(np.float32)
    linear = Linear(Weight.of(random.standard_normal((40, 33)).astype(np.float32)))
    rows = sorted(data.draw(st.sets(st.integers(0, layout.rows - 1), min_size=1, max_size=40)))
    every = engine.linear(x, linear, layout.only(range(layout.rows)))
    assert np.array_equal(engine.linear(x[rows], linear, layout.only(rows)), every[rows])


@given(LENGTHS, st.data())
def test_the_blocks_of_chosen_rows_hold_each_of_them_once(lengths, data):
    layout = Layout.of(lengths)
    rows = sorted(data.draw(st.sets(st.integers(0, layout.rows - 1), min_size=1, max_size=40)))
    held = [at for block in layout.only(rows).blocks for at in range(block.start, block.stop)]
    assert held == list(range(len(rows)))
    for block in layout.only(rows).blocks:
        assert block.size == 0 or block.offset + block.stop - block.start <= block.size


@pytest.mark.parametrize("rows", [[3, 1], [2, 2], [-1], [0, 5]])
def test_rows_that_do_not_ascend_or_are_not_there_are_refused(rows):
    with pytest.raises(CutawayError, match=r"ascending.*0 to 4"):
        Layout.of([5]).only(rows)
