# SPDX-License-Identifier: Apache-2.0
import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from banyan.pacing import Admission, DeviceLoad, PacedWrites, PageWrite, Verdict, WriteAdmission, WriteBudget

PAGE_BYTES = 100
FREE = DeviceLoad(num_reads=0, num_writes=0)


class Disk:
    """A store that remembers keys, and the paced writes to it."""

    def __init__(self, *, max_backlog_pages=10, admission=Admission.FIRST_SIGHT, budget=None):
        self.keys = set()
        self.writes = PacedWrites(
            admission=WriteAdmission(admission, budget=budget),
            is_stored=self.keys.__contains__,
            max_backlog_bytes=max_backlog_pages * PAGE_BYTES,
            first_write_us=100.0,
        )

    def offer(self, key, parent=None):
        return self.writes.offer(PageWrite(key, parent, PAGE_BYTES), 0)

    def start(self, load=FREE, slack_us=math.inf):
        return [page.key for page in self.writes.start(load, slack_us=slack_us)]

    def finish(self, key, write_us=100.0):
        if write_us is not None:
            self.keys.add(key)
        self.writes.finish(key, write_us=write_us)


def test_offer_when_pages_form_a_chain_then_all_are_queued_and_start_in_order_two_at_a_time():
    disk = Disk()
    assert [disk.offer(*page) for page in (("a", None), ("b", "a"), ("c", "b"))] == [Verdict.QUEUED] * 3
    assert disk.start() == ["a", "b"]
    assert disk.start(DeviceLoad(0, 2)) == []
    disk.finish("a")
    assert disk.start(DeviceLoad(0, 1)) == ["c"]
    assert disk.writes.backlog_bytes == 2 * PAGE_BYTES


def test_offer_when_the_backlog_is_full_then_the_page_and_its_children_are_not_stored_and_counted():
    disk = Disk(max_backlog_pages=1)
    disk.offer("a")
    assert disk.offer("b", "a") is Verdict.BACKLOG_FULL
    assert disk.offer("c", "b") is Verdict.ORPHANED
    assert disk.writes.num_by_verdict == {Verdict.QUEUED: 1, Verdict.BACKLOG_FULL: 1, Verdict.ORPHANED: 1}
    assert disk.start() == ["a"]
    assert disk.offer("b", "a") is Verdict.BACKLOG_FULL, "pages in flight count"
    disk.finish("a")
    assert disk.offer("b", "a") is Verdict.QUEUED


def test_offer_when_a_page_is_stored_or_queued_then_it_is_not_written_again():
    disk = Disk()
    disk.keys.add("old")
    assert disk.offer("old") is Verdict.QUEUED
    disk.offer("a")
    assert disk.offer("a") is Verdict.QUEUED
    assert (disk.writes.num_waiting, disk.writes.num_by_verdict[Verdict.QUEUED]) == (1, 1)
    assert disk.offer("b", "old") is Verdict.QUEUED


def test_offer_when_refused_behind_the_admission_then_the_budget_is_not_spent():
    bucket = WriteBudget(bytes_per_day=1, burst_bytes=10 * PAGE_BYTES, now_ns=0)
    disk = Disk(max_backlog_pages=1, budget=bucket)
    disk.offer("a")
    disk.offer("b", "a")
    disk.offer("c", "nobody")
    assert bucket.available_bytes(0) == 9 * PAGE_BYTES


def test_offer_when_only_second_sights_count_then_a_chain_is_written_the_second_time():
    disk = Disk(admission=Admission.SECOND_SIGHT)
    chain = (("a", None), ("b", "a"))
    assert [disk.offer(*page) for page in chain] == [Verdict.SEEN_ONCE] * 2
    assert [disk.offer(*page) for page in chain] == [Verdict.QUEUED] * 2


def test_start_when_somebody_reads_or_slack_is_short_then_writes_wait():
    disk = Disk()
    disk.offer("a")
    assert disk.start(DeviceLoad(num_reads=1, num_writes=0)) == []
    assert disk.start(slack_us=50.0) == []
    assert disk.start(slack_us=150.0) == ["a"]


def test_start_when_writes_proved_slower_than_thought_then_they_need_more_slack():
    disk = Disk()
    disk.offer("a")
    disk.start()
    disk.finish("a", write_us=1000.0)
    disk.offer("b")
    assert disk.start(slack_us=900.0) == []
    assert disk.start(slack_us=1100.0) == ["b"]


def test_finish_when_a_write_failed_then_waiting_children_fail_and_may_be_offered_again():
    disk = Disk()
    for page in (("a", None), ("x", None), ("b", "a"), ("c", "b"), ("y", "x")):
        disk.offer(*page)
    assert disk.start() == ["a", "x"]
    disk.finish("a", write_us=None)
    disk.finish("x")
    assert (disk.writes.num_failed, disk.writes.num_written) == (3, 1)
    assert disk.start() == ["y"]
    assert disk.offer("a") is Verdict.QUEUED


def test_finish_when_a_page_was_never_started_then_an_error():
    with pytest.raises(KeyError):
        Disk().writes.finish("a", write_us=1.0)


def test_clear_when_writes_are_in_flight_then_only_waiting_pages_are_forgotten():
    disk = Disk()
    for page in (("a", None), ("b", "a"), ("c", "b")):
        disk.offer(*page)
    disk.start()
    disk.writes.clear()
    assert (disk.writes.num_waiting, disk.writes.num_in_flight, disk.writes.num_cleared) == (0, 2, 1)
    disk.finish("a")
    disk.finish("b")
    assert disk.writes.backlog_bytes == 0


class AnyOrder(RuleBasedStateMachine):
    """Offers, starts, ends and flushes in any order: the bounds and the books always hold."""

    def __init__(self):
        super().__init__()
        self.disk = Disk(max_backlog_pages=4)
        self.in_flight = []

    @rule(key=st.integers(0, 20))
    def offer(self, key):
        parent = f"p{key // 2}" if key else None
        self.disk.offer(f"p{key}", parent)

    @rule(num_reads=st.integers(0, 1), slack_us=st.sampled_from([0.0, 150.0, math.inf]))
    def start(self, num_reads, slack_us):
        self.in_flight += self.disk.start(DeviceLoad(num_reads, len(self.in_flight)), slack_us)

    @rule(is_good=st.booleans())
    def finish(self, is_good):
        if self.in_flight:
            self.disk.finish(self.in_flight.pop(0), 100.0 if is_good else None)

    @rule()
    def clear(self):
        self.disk.writes.clear()

    @invariant()
    def bounded_and_accounted_for(self):
        writes = self.disk.writes
        assert len(self.in_flight) == writes.num_in_flight <= 2
        assert writes.backlog_bytes == (writes.num_waiting + writes.num_in_flight) * PAGE_BYTES <= 4 * PAGE_BYTES
        ended = writes.num_written + writes.num_failed + writes.num_cleared
        assert writes.num_by_verdict[Verdict.QUEUED] == ended + writes.num_waiting + writes.num_in_flight


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=60, stateful_step_count=40)
