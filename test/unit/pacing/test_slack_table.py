# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.pacing import ForwardShape, SlackTable

TABLE = SlackTable((16, 64, 256), (0, 1000), ((10.0, 20.0), (40.0, 80.0), (160.0, 400.0)))


@pytest.mark.parametrize(
    ("shape", "expected_us"),
    [
        (ForwardShape(16, 0), 10.0),
        (ForwardShape(64, 1000), 80.0),
        (ForwardShape(40, 0), 25.0),
        (ForwardShape(40, 500), 37.5),
        (ForwardShape(1, 0), 10.0),
        (ForwardShape(512, 1000), 800.0),
        (ForwardShape(256, 2000), 640.0),
        (ForwardShape(0, 5000), 0.0),
    ],
    ids=["cell", "far cell", "between rows", "between both", "below", "more new", "longer prefix", "nothing"],
)
def test_time_when_looked_up_then_bilinear_inside_and_cautious_outside(shape, expected_us):
    assert TABLE.time_us(shape) == pytest.approx(expected_us)


def test_time_when_a_shorter_row_rises_faster_then_the_extension_still_never_falls():
    table = SlackTable((16, 64), (0, 100), ((10.0, 50.0), (49.0, 51.0)))
    assert table.time_us(ForwardShape(64, 200)) >= table.time_us(ForwardShape(16, 200)) == 90.0


axis = st.lists(st.integers(0, 5000), min_size=1, max_size=5, unique=True).map(sorted)


@st.composite
def measured(draw):
    rows, columns = draw(axis), draw(axis)
    times = st.lists(st.floats(0.5, 1e6), min_size=len(columns), max_size=len(columns))
    return rows, columns, draw(st.lists(times, min_size=len(rows), max_size=len(rows)))


tokens = st.integers(1, 20_000)


@given(measured(), tokens, tokens, st.integers(0, 5000), st.integers(0, 5000))
def test_fit_when_times_are_any_noise_then_the_table_is_monotone_everywhere(grid, extend, prefix, more, longer):
    table = SlackTable.fit(*grid)
    short = table.time_us(ForwardShape(extend, prefix))
    assert 0 < short <= table.time_us(ForwardShape(extend + more, prefix + longer)) * (1 + 1e-9)


@given(measured())
def test_fit_when_measured_times_are_monotone_then_they_are_kept(grid):
    rows, columns, times = grid
    table = SlackTable.fit(rows, columns, times)
    again = SlackTable.fit(rows, columns, table.layer_us)
    assert again == table


def test_fit_when_one_cell_is_noise_then_the_two_that_disagree_meet_midway():
    assert SlackTable.fit((1, 2), (0, 1), ((10.0, 30.0), (20.0, 26.0))).layer_us == ((10.0, 28.0), (20.0, 28.0))


@pytest.mark.parametrize(
    ("extend", "prefix", "times"),
    [
        ((), (0,), ()),
        ((2, 1), (0,), ((1.0,), (2.0,))),
        ((1,), (0, 1), ((1.0,),)),
        ((1,), (0,), ((0.0,),)),
        ((1, 2), (0,), ((2.0,), (1.0,))),
    ],
    ids=["no axis", "axis falls", "cell missing", "zero", "times fall"],
)
def test_table_when_it_is_none_then_refused(extend, prefix, times):
    with pytest.raises(ValueError):
        SlackTable(extend, prefix, times)


def test_shape_when_requests_are_batched_then_the_pairs_of_queries_and_keys_are_kept():
    one = ForwardShape.of_batch([(100, 400)])
    assert (one.extend_tokens, one.prefix_tokens) == (100, 400)
    batch = ForwardShape.of_batch([(100, 0), (100, 1000)])
    assert batch.extend_tokens == 200
    num_pairs = 100 * 50 + 100 * 1050
    assert batch.extend_tokens * (batch.prefix_tokens + batch.extend_tokens // 2) == pytest.approx(num_pairs, rel=0.01)
    assert ForwardShape.of_batch([]) == ForwardShape(0, 0)
