# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.telemetry import Estimate


def test_estimate_when_few_values_came_then_it_is_their_average():
    estimate = Estimate()
    for value in (1.0, 2.0, 6.0):
        estimate.observe(value)
    assert (estimate.count, estimate.mean) == (3, 3.0)


def test_estimate_when_the_level_changes_then_it_follows_and_its_deviation_tells():
    estimate = Estimate()
    for _ in range(50):
        estimate.observe(10.0)
    assert estimate.deviation == 0.0
    estimate.observe(20.0)
    assert (estimate.mean, estimate.deviation) == (11.25, 1.25)
    for _ in range(50):
        estimate.observe(20.0)
    assert estimate.mean == pytest.approx(20.0, abs=0.02)
    assert estimate.deviation < 0.1
