# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.pacing.admission import Admission, WriteAdmission, WriteVerdict
from banyan.pacing.budget import WriteBudget

DAY_NS = 24 * 3600 * 10**9
PAGE_BYTES = 100


def budget(*, bytes_per_day=1000, burst_bytes=300):
    return WriteBudget(bytes_per_day=bytes_per_day, burst_bytes=burst_bytes, now_ns=0)


def test_admission_when_a_page_is_seen_twice_then_it_is_written():
    admission = WriteAdmission(Admission.SECOND_ACCESS, budget=None)
    assert admission.judge("a", PAGE_BYTES, 0) is WriteVerdict.SEEN_ONCE
    assert admission.judge("b", PAGE_BYTES, 0) is WriteVerdict.SEEN_ONCE
    assert admission.judge("a", PAGE_BYTES, 0) is WriteVerdict.QUEUED


def test_admission_when_every_page_is_wanted_then_the_first_access_does():
    assert WriteAdmission(Admission.FIRST_ACCESS, budget=None).judge("a", PAGE_BYTES, 0) is WriteVerdict.QUEUED


def test_admission_when_too_many_keys_are_seen_then_the_oldest_is_new_again(monkeypatch):
    monkeypatch.setattr("banyan.pacing.admission.MAX_REMEMBERED_KEYS", 2)
    admission = WriteAdmission(Admission.SECOND_ACCESS, budget=None)
    for key in "abc":
        admission.judge(key, PAGE_BYTES, 0)
    assert admission.judge("c", PAGE_BYTES, 0) is WriteVerdict.QUEUED
    assert admission.judge("a", PAGE_BYTES, 0) is WriteVerdict.SEEN_ONCE


def test_admission_when_the_budget_is_spent_then_pages_wait_for_the_next_bytes_and_keep_their_access():
    admission = WriteAdmission(Admission.SECOND_ACCESS, budget=budget(burst_bytes=PAGE_BYTES))
    for key in "ab":
        admission.judge(key, PAGE_BYTES, 0)
    assert admission.judge("a", PAGE_BYTES, 0) is WriteVerdict.QUEUED
    assert admission.judge("b", PAGE_BYTES, 0) is WriteVerdict.OVER_BUDGET
    assert admission.judge("b", PAGE_BYTES, DAY_NS // 10) is WriteVerdict.QUEUED


def test_admission_when_an_admitted_page_is_given_back_then_its_bytes_and_its_access_are():
    admission = WriteAdmission(Admission.SECOND_ACCESS, budget=budget(burst_bytes=PAGE_BYTES))
    admission.judge("a", PAGE_BYTES, 0)
    assert admission.judge("a", PAGE_BYTES, 0) is WriteVerdict.QUEUED
    admission.give_back("a", PAGE_BYTES)
    assert admission.judge("a", PAGE_BYTES, 0) is WriteVerdict.QUEUED


def test_budget_when_nothing_is_written_for_days_then_no_more_than_the_burst_is_saved():
    bucket = budget()
    assert not bucket.take(301, 10 * DAY_NS)
    assert bucket.take(300, 10 * DAY_NS)
    assert not bucket.take(1, 10 * DAY_NS)
    assert not bucket.take(251, 10 * DAY_NS + DAY_NS // 4)
    assert bucket.take(250, 10 * DAY_NS + DAY_NS // 4)


@given(st.lists(st.tuples(st.integers(0, DAY_NS // 4), st.integers(1, 400)), max_size=60))
def test_budget_when_takes_come_at_any_time_then_a_day_never_sees_more_than_its_bytes_and_a_burst(steps):
    bucket, now_ns, taken = budget(), 0, []
    for wait_ns, num_bytes in steps:
        now_ns += wait_ns
        if bucket.take(num_bytes, now_ns):
            taken.append((now_ns, num_bytes))
    for start_ns, _ in taken:
        in_a_day = sum(num_bytes for at_ns, num_bytes in taken if start_ns <= at_ns < start_ns + DAY_NS)
        assert in_a_day <= 1000 + 300


@pytest.mark.parametrize("wrong", [{"bytes_per_day": 0}, {"burst_bytes": 0}])
def test_budget_when_it_has_no_bytes_then_refused(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        budget(**wrong)


def test_admission_when_an_admitted_page_was_stored_already_then_nothing_was_spent_on_it():
    admission = WriteAdmission(Admission.FIRST_ACCESS, budget=budget(burst_bytes=PAGE_BYTES))
    assert admission.judge("a", PAGE_BYTES, 0) is WriteVerdict.QUEUED
    admission.unspend(PAGE_BYTES)
    assert admission.judge("b", PAGE_BYTES, 0) is WriteVerdict.QUEUED
