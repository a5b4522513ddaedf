# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st

from banyan.pacing.admission import Admission, WriteAdmission, WriteVerdict
from banyan.pacing.allowance import Allowance

DAY_S = 24 * 3600
PAGE_BYTES = 100


def budget(*, burst_bytes=300):
    return Allowance(per_s=1000 / DAY_S, burst=burst_bytes, now_s=0.0)


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
    assert admission.judge("b", PAGE_BYTES, DAY_S * 10**8 + 10**6) is WriteVerdict.QUEUED


def test_admission_when_an_admitted_page_is_given_back_then_its_bytes_and_its_access_are():
    admission = WriteAdmission(Admission.SECOND_ACCESS, budget=budget(burst_bytes=PAGE_BYTES))
    admission.judge("a", PAGE_BYTES, 0)
    assert admission.judge("a", PAGE_BYTES, 0) is WriteVerdict.QUEUED
    admission.give_back("a", PAGE_BYTES)
    assert admission.judge("a", PAGE_BYTES, 0) is WriteVerdict.QUEUED


def test_budget_when_nothing_is_written_for_days_then_no_more_than_the_burst_is_saved():
    bucket = budget()
    assert not bucket.take(301, 10 * DAY_S)
    assert bucket.take(300, 10 * DAY_S)
    assert not bucket.take(1, 10 * DAY_S)
    assert not bucket.take(251, 10.25 * DAY_S)
    assert bucket.take(249.9, 10.25 * DAY_S)


@given(st.lists(st.tuples(st.integers(0, DAY_S // 4), st.integers(1, 400)), max_size=60))
def test_budget_when_takes_come_at_any_time_then_a_day_never_sees_more_than_its_bytes_and_a_burst(steps):
    bucket, now_s, taken = budget(), 0, []
    for wait_s, num_bytes in steps:
        now_s += wait_s
        if bucket.take(num_bytes, now_s):
            taken.append((now_s, num_bytes))
    for start_s, _ in taken:
        in_a_day = sum(num_bytes for at_s, num_bytes in taken if start_s <= at_s < start_s + DAY_S)
        assert in_a_day <= 1000 + 300 + 1e-6


def test_admission_when_an_admitted_page_was_stored_already_then_nothing_was_spent_on_it():
    admission = WriteAdmission(Admission.FIRST_ACCESS, budget=budget(burst_bytes=PAGE_BYTES))
    assert admission.judge("a", PAGE_BYTES, 0) is WriteVerdict.QUEUED
    admission.unspend(PAGE_BYTES)
    assert admission.judge("b", PAGE_BYTES, 0) is WriteVerdict.QUEUED
