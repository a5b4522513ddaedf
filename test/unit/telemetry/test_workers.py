# SPDX-License-Identifier: Apache-2.0
"""Threads for calls that may hang hold up nobody who closes them."""

from __future__ import annotations

import threading
import time

import pytest

from banyan.telemetry import workers as workers_module
from banyan.telemetry.workers import Workers


def until(condition):
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_workers_when_one_hangs_then_who_closes_is_not_held_up_and_what_waits_does_not_begin():
    workers, goes_on, begun = Workers(1, name="banyan-test", feature="a test"), threading.Event(), []
    workers.submit(lambda: begun.append(1) or goes_on.wait(5))
    until(lambda: begun)
    workers.submit(lambda: begun.append(2))
    workers.close(0.05)
    assert all(thread.daemon for thread in workers._threads), "Python waits for others in the end"
    goes_on.set()
    workers._threads[0].join(5)
    assert begun == [1] and not workers._threads[0].is_alive()


def test_workers_when_there_is_no_second_thread_to_be_had_then_the_first_does_all(monkeypatch):
    left, started = [1], workers_module.start_thread

    def start(*args, **named):
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        return started(*args, **named)

    monkeypatch.setattr(workers_module, "start_thread", start)
    workers, done = Workers(2, name="banyan-test", feature="a test"), []
    for number in range(3):
        workers.submit(lambda number=number: done.append(number))
    until(lambda: len(done) == 3)
    workers.close(5.0)
    with pytest.raises(RuntimeError):
        Workers(2, name="banyan-test", feature="a test").submit(list)
