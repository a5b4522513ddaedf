# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.pacing import ForwardShape, LayerTimes, SlackTable

TABLE = SlackTable((1, 1000), (0, 1000), ((10.0, 20.0), (1000.0, 2000.0)))
DECODE, PREFILL = ForwardShape(1, 500), ForwardShape(1000, 0)


def expected_us(times, shape):
    """The table's time, corrected, with no deviation taken off."""
    return TABLE.time_us(shape) * times._correction.ratio(shape.extend_tokens)[0]


def test_times_when_nothing_was_observed_then_the_table_speaks():
    times = LayerTimes(TABLE)
    assert expected_us(times, PREFILL) == times.safe_us(PREFILL) == 1000.0


def test_times_when_forwards_are_slower_than_profiled_then_corrected_and_other_classes_keep_their_own():
    times = LayerTimes(TABLE)
    for _ in range(20):
        times.observe(PREFILL, 2000.0)
        times.observe(DECODE, 7.5)
    assert expected_us(times, PREFILL) == pytest.approx(2000.0)
    assert expected_us(times, DECODE) == pytest.approx(7.5)


def test_times_when_forwards_scatter_then_safe_is_below_expected_by_their_deviation():
    times = LayerTimes(TABLE)
    for number in range(400):
        times.observe(PREFILL, 800.0 if number % 2 else 1200.0)
    assert expected_us(times, PREFILL) == pytest.approx(1000.0, rel=0.05)
    assert times.safe_us(PREFILL) == pytest.approx(800.0, rel=0.1)


def test_times_when_a_class_was_never_seen_then_the_nearest_one_corrects_it():
    times = LayerTimes(TABLE)
    times.observe(PREFILL, 3000.0)
    assert expected_us(times, ForwardShape(200, 0)) == pytest.approx(3 * TABLE.time_us(ForwardShape(200, 0)))


def test_times_when_a_process_was_suspended_then_one_forward_counts_for_little():
    times = LayerTimes(TABLE)
    for _ in range(20):
        times.observe(PREFILL, 1000.0)
    times.observe(PREFILL, 60e6)
    assert expected_us(times, PREFILL) < 2000.0
    assert times.safe_us(PREFILL) <= 1000.0


def test_times_when_deviation_exceeds_the_ratio_then_nothing_is_safe():
    times = LayerTimes(TABLE)
    for layer_us in (100.0, 100.0, 8000.0, 100.0, 8000.0):
        times.observe(PREFILL, layer_us)
    assert 0.0 <= times.safe_us(PREFILL) < expected_us(times, PREFILL)
