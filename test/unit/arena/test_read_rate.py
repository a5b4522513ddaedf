# SPDX-License-Identifier: Apache-2.0
import pytest

from banyan.arena.read_rate import ReadRate


def test_rate_when_nothing_was_read_then_it_is_not_known():
    rate = ReadRate()
    assert rate.pages_per_s == 0
    rate.ended(1.0, 0.5, 0)
    assert rate.pages_per_s == 0


def test_rate_when_reads_follow_each_other_then_pauses_do_not_count():
    rate = ReadRate()
    rate.ended(0.0, 2.0, 100)
    rate.ended(60.0, 2.0, 100)
    assert rate.pages_per_s == 50


def test_rate_when_reads_overlap_then_their_time_counts_once():
    rate = ReadRate()
    rate.ended(0.0, 2.0, 50)
    rate.ended(0.0, 2.0, 50)
    rate.ended(1.0, 1.0, 25)
    assert rate.pages_per_s > 25 / 2 * 4


def test_rate_when_the_drive_becomes_slower_then_it_is_seen_after_a_few_reads():
    rate = ReadRate()
    for _ in range(100):
        rate.ended(0.0, 0.0, 0)
    for number in range(20):
        rate.ended(10.0 * number, 0.01, 100)
    for number in range(20, 30):
        rate.ended(10.0 * number, 10.0, 100)
    assert rate.pages_per_s == pytest.approx(10, abs=6)


def test_rate_when_it_is_very_slow_then_it_is_known():
    rate = ReadRate()
    rate.ended(0.0, 100.0, 1)
    assert rate.pages_per_s == 1
