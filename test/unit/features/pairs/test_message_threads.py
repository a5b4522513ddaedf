# SPDX-License-Identifier: Apache-2.0
"""Servers are told, one of which reads nothing."""

import queue
import threading

import pytest

from banyan.features.pairs import message_threads
from banyan.features.pairs.message_threads import MessageThreads


def test_message_when_another_address_reads_nothing_then_it_is_told_and_those_of_one_address_in_order():
    told, reads, made = queue.Queue(), threading.Event(), MessageThreads()
    made.tell(("silent", 1), lambda: reads.wait(10) and told.put("silent"))
    for number in range(3):
        made.tell(("reads", 1), lambda number=number: told.put(number))
    assert [told.get(timeout=10) for _ in range(3)] == [0, 1, 2]
    reads.set()
    assert told.get(timeout=10) == "silent"


def test_message_when_one_before_it_could_not_be_told_then_it_is(caplog):
    told, made = queue.Queue(), MessageThreads()

    def fail():
        raise OSError("no route")

    made.tell("there", fail)
    made.tell("there", lambda: told.put("next"))
    assert told.get(timeout=10) == "next" and "no route" in caplog.text


def test_message_when_too_many_wait_then_it_is_dropped_and_said(monkeypatch, caplog):
    monkeypatch.setattr(message_threads, "MAX_WAITING", 2)
    told, begun, reads, made = queue.Queue(), threading.Event(), threading.Event(), MessageThreads()
    made.tell("there", lambda: begun.set() or reads.wait(10))
    assert begun.wait(10)
    for number in range(4):
        made.tell("there", lambda number=number: told.put(number))
    reads.set()
    assert [told.get(timeout=10) for _ in range(2)] == [0, 1]
    assert caplog.text.count("one more is not sent") == 2
    with pytest.raises(queue.Empty):
        told.get(timeout=0.1)


def test_messages_when_they_are_for_more_addresses_than_may_have_a_thread_then_all_are_told(monkeypatch):
    monkeypatch.setattr(message_threads, "MAX_ADDRESSES", 2)
    told, made = queue.Queue(), MessageThreads()
    for number in range(5):
        made.tell(number, lambda number=number: told.put(number))
    assert {told.get(timeout=10) for _ in range(5)} == set(range(5)) and len(made._waiting) == 2


def test_message_when_there_is_no_thread_left_then_whoever_tells_does_not_wait_and_it_is_said(monkeypatch, caplog):
    told, made = [], MessageThreads()

    def start(*args, **named):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(message_threads, "start_thread", start)
    made.tell("there", lambda: told.append("waits for half a minute"))
    assert not told and "no thread to tell there" in caplog.text
