# SPDX-License-Identifier: Apache-2.0
"""Threads that end by a fault are named, counted, and their users let go."""

from __future__ import annotations

import ast
import threading
from collections import Counter
from pathlib import Path

import pytest

from banyan import faults
from banyan.telemetry import num_ended, one_thread, start_thread, threads

PACKAGE = Path(threads.__file__).parents[1]
WITHOUT = {"lab", "cli"}
"""What measures, and commands that end with their threads."""


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(faults, "_counts", Counter())


def fail():
    raise ZeroDivisionError("of all things")


class Panic(BaseException):
    """As native code raises one."""


def test_thread_when_it_ends_by_a_fault_then_the_log_names_it_once_and_every_end_is_counted_and_told(caplog):
    told, before = [], num_ended()

    def panic():
        raise Panic

    for work in (fail, panic):
        start_thread(work, name="banyan-x", feature="doing x", ended=lambda: told.append(1)).join()
    (line,) = [record for record in caplog.records if "banyan-x" in record.getMessage()]
    assert "doing x" in line.getMessage() and "of all things" in caplog.text
    assert num_ended() - before == 2 and told == [1, 1]


def test_thread_when_it_ends_by_itself_then_nothing_is_said(caplog):
    before = num_ended()
    thread = start_thread(lambda: None, name="banyan-x", feature="x", ended=fail)
    thread.join()
    assert thread.daemon and num_ended() == before and not caplog.records


def test_thread_when_its_end_cannot_be_told_then_the_log_says_so(caplog):
    start_thread(fail, name="banyan-x", feature="x", ended=fail).join()
    assert "could not be told" in caplog.text


def test_work_when_the_system_has_no_thread_left_then_the_one_that_is_there_does_it(monkeypatch):
    def fails(thread):
        raise RuntimeError("can't start new thread")

    executor = one_thread("banyan-x")
    monkeypatch.setattr(threading.Thread, "start", fails)
    assert [executor.submit(str, number).result() for number in range(2)] == ["0", "1"]


def test_threads_when_the_package_is_read_then_all_that_serve_are_started_here():
    wild = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in WITHOUT and path != Path(threads.__file__)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("threading.Thread", "Thread")
    ]
    assert wild == []
