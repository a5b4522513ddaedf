# SPDX-License-Identifier: Apache-2.0
"""A rank's end of its NIXL process: it can be ended at any time, and nobody waits for its start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from banyan.transport.nixl import process
from banyan.transport.nixl.messages import OVER, landed
from banyan.transport.nixl.process import Channel, Declined, Kept, NixlProcess, StillWriting


class Sleeper(NixlProcess):
    """A process that does nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_condemned = False
        self._control, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.popen = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])


@pytest.fixture
def sleeper():
    one = Sleeper()
    yield one
    one.popen.kill()
    one.popen.wait()


@pytest.fixture
def channel(sleeper):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield Channel(sleeper, ours), theirs


def eventually(condition) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_pull_when_its_process_says_that_it_is_over_then_the_process_lives_on(channel, sleeper) -> None:
    one, theirs = channel
    theirs.send(landed(2))
    theirs.send(OVER)
    assert one.num_landed() == 2
    one.end()
    assert sleeper.is_alive


@pytest.mark.parametrize(
    "said", [[], [landed(1)], [b"nonsense"], [b""]], ids=["nothing", "a layer", "foreign", "empty"]
)
def test_pull_when_its_process_does_not_say_that_it_is_over_then_it_is_dead(channel, sleeper, said) -> None:
    one, theirs = channel
    for payload in said:
        theirs.send(payload)
    one.end()
    assert not sleeper.is_alive


def test_pull_when_its_channel_ends_without_a_word_then_the_process_is_dead(channel, sleeper) -> None:
    one, theirs = channel
    theirs.close()
    with pytest.raises(ConnectionError):
        one.num_landed()
    one.end()
    assert not sleeper.is_alive


def test_pull_when_nothing_is_said_then_nobody_is_kept_waiting(channel, monkeypatch) -> None:
    one, _ = channel
    began_s = time.monotonic()
    assert one.num_landed() is None
    assert time.monotonic() - began_s < 10 * process.LOOK_S + 2.5


def test_process_when_it_does_not_die_then_that_is_told_once_it_has(sleeper, monkeypatch) -> None:
    monkeypatch.setattr(process, "DEATH_S", 0.05)
    monkeypatch.setattr(sleeper.popen, "kill", lambda: None)
    with pytest.raises(StillWriting) as still:
        sleeper.kill()
    told = threading.Event()
    still.value.when_over(told.set)
    time.sleep(0.1)
    assert not told.is_set()
    os.kill(sleeper.popen.pid, 9)
    assert told.wait(10)


def test_process_when_it_does_not_die_then_nobody_has_it_again_or_waits_for_it(made, monkeypatch, caplog) -> None:
    monkeypatch.setattr(process, "DEATH_S", 0.05)
    made.may.set()
    kept = Kept(made, what="a test")
    eventually(kept.get)
    (one,) = made.all
    with monkeypatch.context() as patched:
        patched.setattr(one.popen, "kill", lambda: None)
        with pytest.raises(StillWriting) as still:
            one.kill()
        still.value.when_over(lambda: None)
        eventually(one.popen._waitpid_lock.locked)
        assert not one.is_alive and kept.get() is not one
    with pytest.raises(OSError):
        one.carry(b"", b"", b"", [1])
    assert f"NIXL process {one.popen.pid} does not end" in caplog.text


def carries_until_it_fails(sleeper) -> threading.Thread:
    """A sleeper hears nothing: what it could keep of it is soon full."""

    def carry() -> None:
        with suppress(OSError):
            while True:
                sleeper.carry(b"", bytes(1 << 15), b"", [1])

    thread = threading.Thread(target=carry, daemon=True)
    thread.start()
    return thread


def test_carry_when_the_process_hears_nothing_then_that_is_an_error_and_nobody_waits_for_good(sleeper, monkeypatch):
    monkeypatch.setattr(process, "SEND_S", 0.05)
    thread = carries_until_it_fails(sleeper)
    thread.join(10)
    assert not thread.is_alive()


def test_process_when_it_is_killed_then_who_sends_to_it_waits_no_longer(sleeper, monkeypatch) -> None:
    monkeypatch.setattr(process, "SEND_S", 600.0)
    thread = carries_until_it_fails(sleeper)
    thread.join(0.2)
    killing = threading.Thread(target=sleeper.kill, daemon=True)
    killing.start()
    for one in (thread, killing):
        one.join(10)
        assert not one.is_alive()


def test_memory_when_another_lies_at_its_place_by_now_then_it_is_not_mapped(sleeper) -> None:
    fd = os.memfd_create("test")
    with pytest.raises(OSError, match="another memory"):
        sleeper.map(f"/proc/self/fd/{fd}", (1, 2), 4096, is_writable=False)
    os.close(fd)


def test_carry_when_the_process_has_gone_then_it_is_an_error_and_not_a_signal(sleeper) -> None:
    sleeper.theirs.close()
    with pytest.raises(OSError):
        sleeper.carry(b"", b"", b"", [1])


class Made:
    def __init__(self) -> None:
        self.all: list[Any] = []
        self.may = threading.Event()
        self.error: Exception | None = None
        self.num_asked = 0

    def __call__(self) -> NixlProcess:
        self.num_asked += 1
        self.may.wait(10)
        if self.error is not None:
            raise self.error
        self.all.append(Sleeper())
        return self.all[-1]


@pytest.fixture
def made(monkeypatch):
    monkeypatch.setattr(process, "AGAIN_S", 0.0)
    one = Made()
    yield one
    for each in one.all:
        each.popen.kill()
        each.popen.wait()


def test_kept_when_it_is_starting_then_there_is_none_and_nobody_waits(made) -> None:
    kept = Kept(made, what="a test")
    assert kept.get() is None and kept.get() is None
    made.may.set()
    eventually(kept.get)
    assert len(made.all) == 1 and kept.num_started == 1


def test_kept_when_it_dies_or_will_not_do_then_there_is_another(made) -> None:
    made.may.set()
    kept = Kept(made, what="a test")
    eventually(kept.get)
    made.all[0].kill()
    eventually(lambda: kept.get() is not None)
    kept.renew()
    assert not made.all[1].is_alive
    eventually(lambda: kept.get() is not None)
    assert len(made.all) == 3


def test_kept_when_it_dies_at_once_again_and_again_then_it_is_started_seldom(made, monkeypatch) -> None:
    monkeypatch.setattr(process, "AGAIN_S", 60.0)
    made.may.set()
    kept = Kept(made, what="a test")
    eventually(kept.get)
    made.all[0].kill()
    time.sleep(0.05)
    assert kept.get() is None and kept.get() is None
    assert len(made.all) == 1


def test_kept_when_it_does_not_start_then_a_line_says_why(made, caplog) -> None:
    made.error = Declined("NIXL has no plugin NONE")
    made.may.set()
    kept = Kept(made, what="borrowing by NIXL")
    eventually(lambda: "no plugin NONE" in caplog.text)
    assert "borrowing by NIXL" in caplog.text and kept.num_started == 0


def test_kept_when_no_start_succeeds_then_it_is_tried_less_and_less(made, monkeypatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(process, "AGAIN_S", 5.0)
    made.error = Declined("NIXL has no plugin NONE")
    made.may.set()
    kept = Kept(made, what="a test")
    for _ in range(100):
        eventually(lambda: not kept._is_starting)
        now_s += 1
        kept.get()
    assert made.num_asked == 4, "at once, and after 10, 20 and 40 s"


def test_kept_when_a_start_has_a_fault_of_its_own_then_there_is_another(made) -> None:
    made.error = ValueError("a fault")
    made.may.set()
    kept = Kept(made, what="a test")
    time.sleep(0.05)
    made.error = None
    eventually(kept.get)


def test_kept_when_it_is_closed_while_it_starts_then_the_process_ends(made) -> None:
    kept = Kept(made, what="a test")
    kept.close()
    made.may.set()
    eventually(lambda: made.all and not made.all[0].is_alive)
    assert kept.get() is None
