# SPDX-License-Identifier: Apache-2.0
"""A thread of a store that ends by a fault lets go of whoever waits for it."""

from __future__ import annotations

import time
from array import array
from types import SimpleNamespace

import pytest

from banyan import _native
from banyan.features.stores import asked_values
from banyan.features.stores.asked_values import AskedValues
from banyan.features.stores.watch import Watch
from banyan.features.stores.writes import FAILED, Waiting, Writes
from banyan.telemetry import num_ended

PAGE_BYTES = 4096


def until(condition):
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def fail(*args, **named):
    raise ZeroDivisionError


@pytest.fixture
def memory():
    return _native.SharedBytes.create(4 * PAGE_BYTES, "banyan-test")


def feed_of(memory):
    return _native.Feed(memory, array("q", [0]), PAGE_BYTES, 1)


def test_watch_when_its_thread_ends_by_a_fault_then_reads_are_late_and_no_other_begins(memory, monkeypatch):
    watch, before = Watch(60.0), num_ended()
    running, later = feed_of(memory), feed_of(memory)
    reads = [running.read(), later.read()]
    assert watch.asked(running, 1) and not watch.asked(later, 1) and watch.asked(later, 2)
    assert watch.begins(running) and not watch.begins(running) and watch.num_reads == 2
    monkeypatch.setattr(watch, "_look", fail)
    watch.moves(running)
    with watch._changed:
        watch._changed.notify()
    watch._thread.join(5)
    assert num_ended() == before + 1 and watch.is_stalled and reads[0].is_late
    assert reads[1].is_late and not watch.asked(feed_of(memory), 9)
    running.end()
    watch.close()
    assert reads[1].has_ended and not watch.begins(later), "its turn does not come any more"


def test_writes_when_their_thread_ends_by_a_fault_then_all_that_wait_have_failed_and_nobody_waits(memory, monkeypatch):
    done, before = [], num_ended()
    value_format = SimpleNamespace(page_bytes=PAGE_BYTES, value_bytes=PAGE_BYTES)
    writes = Writes(
        SimpleNamespace(), value_format, SimpleNamespace(num_headers=4), backlog_bytes=1 << 20, num_reads=int,
        done=lambda pages: done.extend((page.key, outcome) for page, outcome in pages), lost=lambda error: None,
    )  # fmt: skip
    monkeypatch.setattr(writes, "_num_allowed", fail)
    pages = [Waiting(key, key, b"", memory, 0, 0) for key in ("a", "b")]
    assert writes.put(pages) == ["queued"] * 2
    writes._thread.join(5)
    assert num_ended() == before + 1
    assert done == [("a", FAILED), ("b", FAILED)] and writes.num_waiting == 0
    assert writes.flush(5.0) == 0 and writes.put(pages) == ["full"] * 2
    writes.close(5.0)


def test_question_when_answering_it_fails_then_it_is_over_all_the_same():
    values = SimpleNamespace(present=lambda names: [True] * len(names))
    known, before = SimpleNamespace(add=fail), num_ended()
    asked = AskedValues(values, known, failed=lambda error: None)
    number = asked.ask(["a"], b"")
    answers = []
    until(lambda: answers.extend(asked.answers()) or answers)
    asked.close(5.0)
    assert answers == [(number, None)] and num_ended() == before + 1


def test_question_when_it_was_answered_long_before_somebody_looks_then_the_next_is_asked(monkeypatch):
    """A step of the scheduler may take longer than the store's patience."""
    now_s = [0.0]
    monkeypatch.setattr(asked_values, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(asked_values, "MAX_QUESTIONS", 2)
    values = SimpleNamespace(present=lambda names: [False] * len(names))
    presence = SimpleNamespace(add=lambda keys, namespace: None, num_leading=lambda keys, namespace: 0)
    asked = AskedValues(values, presence, failed=fail)
    first = asked.ask(["a"], b"")
    until(lambda: len(asked._over) == 1)
    now_s[0] += 2 * asked_values.SLOW_S
    second = asked.ask(["b"], b"")
    assert second is not None
    until(lambda: len(asked._over) == 2)
    assert asked.ask(["c"], b"") is None, "nobody looks at so many answers"
    assert asked.answers() == [(first, None), (second, None)]
    asked.close(5.0)
