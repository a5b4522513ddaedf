# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.telemetry import Copies, MeanCopies
from banyan.telemetry.mean_copies import HOUR_S, NUM_HOURS

TWICE, ONCE = Copies(10, 10, 5.0), Copies(20, 0, 20.0)


def shares(mean):
    copies = mean.over_day()
    return copies.duplicate_share, copies.distinct_share


def test_mean_when_few_pages_were_asked_for_since_the_look_before_then_the_last_look_counts_little():
    mean = MeanCopies()
    mean.looked(TWICE, 900, 5.0)
    mean.looked(ONCE, 100, 10.0)
    assert shares(mean) == pytest.approx((0.9, 0.55))


def test_mean_when_the_pool_held_nothing_then_that_look_says_nothing():
    mean = MeanCopies()
    mean.looked(Copies(0, 0, 0.0), 900, 5.0)
    assert shares(mean) == (0.0, 1.0)
    mean.looked(TWICE, 1, 10.0)
    assert shares(mean) == (1.0, 0.5)


def test_mean_when_a_day_has_passed_then_an_hour_counts_no_more():
    mean = MeanCopies()
    mean.looked(TWICE, 100, 0.0)
    mean.looked(ONCE, 100, (NUM_HOURS - 1) * HOUR_S)
    assert shares(mean) == pytest.approx((0.5, 0.75))
    mean.looked(ONCE, 100, NUM_HOURS * HOUR_S)
    assert shares(mean) == (0.0, 1.0)
