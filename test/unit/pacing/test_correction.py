# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.pacing.correction import Correction, length_class, nearest, shortest_of_class


def test_correction_when_classes_err_differently_then_each_has_its_ratio():
    correction = Correction()
    for _ in range(5):
        correction.observe(1000, predicted_us=100.0, measured_us=200.0)
        correction.observe(1, predicted_us=10.0, measured_us=5.0)
    assert correction.ratio(1000) == (2.0, 0.0)
    assert correction.ratio(1) == (0.5, 0.0)
    assert correction.ratio(300) == (2.0, 0.0)


def test_correction_when_nothing_or_nonsense_was_seen_then_the_prediction_stands():
    correction = Correction()
    correction.observe(10, predicted_us=0.0, measured_us=5.0)
    correction.observe(10, predicted_us=5.0, measured_us=-1.0)
    assert correction.ratio(10) == (1.0, 0.0)
    correction.observe(10, predicted_us=5.0, measured_us=10.0)
    correction.forget()
    assert correction.ratio(10) == (1.0, 0.0)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 31, 32, 100, 4096, 131_072])
def test_class_when_a_length_is_in_it_then_it_starts_at_most_a_factor_of_four_below(length):
    shortest = shortest_of_class(length_class(length))
    assert shortest <= length < max(2, 4 * shortest)
    assert length_class(shortest) == length_class(length)


def test_nearest_when_two_are_as_near_then_the_shorter():
    assert nearest(4, {2, 6}) == 2
    assert nearest(5, {2, 6}) == 6
